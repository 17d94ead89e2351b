r"""Heads on the target's last hidden state, each for a token further ahead (Medusa, Cai et al., arXiv 2401.10774).  Lossless.

    h_t ──► target's head ──► x_{t+1}, which the round has just emitted
     ├────► head 0 ─────────► x_{t+2}, the first drafted token
     └────► head i ─────────► x_{t+2+i}, whatever the tokens before it are

h_t is the state of the row where the last round stopped: the last committed token itself has not been run.  Costs K
products [D, D] and one with the vocabulary a round, no cache and no pass.  A head does not see its parent, so a node of
depth j and rank r is the r-th candidate of head j - 1 below any parent.  Verified with `target_match`, a static tree of
point children keeps the target's law at any temperature; the paper's own "typical" acceptance is lossy.

`recipe` is Medusa-1: the target is frozen.  Medusa-2 (`train.joint.medusa_2`) also tunes the target, and then keeps the
tuned model's law.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import trees
from specjax.drafters import files, objectives
from specjax.drafters.base import LoadedDrafter, card
from specjax.drafters.blockwise import each, first_heads, head_drafter, parallel_loss
from specjax.drafters.recipe import Recipe
from specjax.drafters.siblings import SIBLINGS, Siblings, find_siblings
from specjax.drafters.vocabulary import draft_size, drawing_within, seen_by
from specjax.types import Array, Draft, Drafter, LanguageModel

Paths = tuple[tuple[int, ...], ...]

TREE_63: Paths = tuple(
    tuple(map(int, path))
    for path in """
    0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 0000 011 006
    030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070
    """.split()
)
"""The authors' tree for Vicuna-7B (mc_sim_7b_63), a word a path; `trees.best_first` makes one for measured rates."""


@functools.cache  # the same drafter for the same arguments: a rebuilt closure would recompile
def medusa(target: LanguageModel, *, paths: Paths, siblings: Siblings = SIBLINGS["point"]) -> Drafter:
    """A tree of the given rank paths, as deep as the longest; its children are drawn at the request's temperature.

    State: [B, D] the hidden state at the row where the last round stopped; zeros before anything has run (a prompt of one
    token): its draft is legal, and worth nothing.

    Raises:
      ValueError: paths that are no tree, or that skip a rank which `siblings` draw.
    """
    tree = static_tree(paths, siblings, draft_size(target, target.vocabulary))
    depth = int(tree.depths.max())

    def propose(noise, params, state, sequences):
        logits = head_logits(target, params.target, first_heads(params.drafter, depth), state)

        def look(level, path):  # point children are the same at every node of a level, drawn ones are drawn for each
            nodes = 1 if siblings.kind == "point" else path.shape[1]
            return jnp.repeat(logits[:, level - 1 : level], nodes, 1)

        return grow(tree, siblings, sequences.sampling.temperature, noise, look), state

    propose = drawing_within(target, target.vocabulary, propose)
    return head_drafter(target, propose, num_nodes=len(paths), depth=depth, children=siblings.kind)


def chain_paths(num_draft: int) -> Paths:
    """The paths of a chain.

    >>> chain_paths(2)
    ((0,), (0, 0))
    """
    return tuple((0,) * depth for depth in range(1, num_draft + 1))


def choose_tree(tree: str | None, listed, num_draft: int) -> Paths:
    """Rank paths of `num_draft` levels: "chain", those of a JSON file, or the ones listed if `tree` is None.

    Deeper paths are left out, and where there are too few levels a chain goes on below the best path.
    """
    if tree == "chain":
        return chain_paths(num_draft)
    listed = listed if tree is None else trees.read_paths(Path(tree))
    short = tuple(tuple(map(int, path)) for path in listed if len(path) <= num_draft)
    return short + tuple(path for path in chain_paths(num_draft) if path not in short)


def static_tree(paths: Paths, siblings: Siblings, vocab_size: int | None = None) -> trees.Paths:
    """The tree of `paths`; ValueError where its children could not have been drawn as `siblings` draw them from V tokens."""
    tree, families = trees.from_paths(paths), {}
    highest = int(tree.ranks.max(initial=0))
    if vocab_size is not None and highest >= vocab_size:
        raise ValueError(f"the tree has a candidate of rank {highest}, the vocabulary {vocab_size} tokens: leave it out")
    for path in paths:
        families.setdefault(path[:-1], []).append(path[-1])
    for parent, ranks in families.items():
        level = [len(ranks) for other, ranks in families.items() if len(other) == len(parent)]
        want = max(level) if siblings.kind == "sampled_then_top" else len(ranks)
        if siblings.kind != "point" and sorted(ranks) != list(range(want)):
            raise ValueError(f"ranks {sorted(ranks)} below {parent} != 0..{want - 1}: children {siblings.kind} skip no rank")
    return tree


def grow(tree: trees.Paths, siblings: Siblings, temperature: Array, noise: Callable, look: Callable) -> Draft:
    """A static tree, level by level; below what is absent everything is absent.

    Args:
      tree: which candidates become nodes.
      siblings: how candidates are drawn.
      temperature: [B] of the requests.
      noise: the drafter's.
      look: (depth, path [B, W, depth - 1]) -> logits [B, W or 1, V] of what follows the W parents, given the drafted tokens
        on the way to each and itself; 1 where it is the same for all.
    """
    tokens, laws, alive = jnp.zeros((temperature.shape[0], 0), jnp.int32), [], jnp.ones((temperature.shape[0], 1), bool)
    for depth in range(1, int(tree.depths.max()) + 1):
        nodes = np.flatnonzero(tree.depths == depth)
        parents, place = np.unique(tree.parents[nodes], return_inverse=True)
        logits = look(depth, tokens[:, lines(tree, parents, depth - 1)])
        rank, place = tree.ranks[nodes], place if logits.shape[1] > 1 else np.zeros_like(place)
        new, law, exists = siblings.draw(logits, temperature, noise, depth, int(rank.max()) + 1)
        tokens = jnp.concatenate([tokens, new[:, place, rank]], 1)
        alive = jnp.concatenate([alive, exists[:, place, rank] & alive[:, tree.parents[nodes] + 1]], 1)
        laws.append(law if law is None else law[:, place, rank])
    placed = jnp.where(alive[:, 1:], jnp.asarray(tree.parents)[None], -2)
    return Draft(tokens, placed, jax.tree.map(lambda *x: jnp.concatenate(x, 1), *laws))


def lines(tree: trees.Paths, nodes: np.ndarray, depth: int) -> np.ndarray:
    """The nodes on the way to each of `nodes`, itself the last: [W, depth]."""
    line: list[np.ndarray] = []
    for _ in range(depth):
        line, nodes = [nodes, *line], tree.parents[nodes]
    return np.stack(line, 1) if line else np.zeros((len(nodes), 0), np.int32)


# Heads: {"kernel": [K, L, D, D], "bias": [K, L, D]}, and {"head": [K, D, V]} where they do not share the target's ([K, D, n]
# of a draft vocabulary).


def head_init(target: LanguageModel, target_params, *, num_draft: int, layers: int, own_head: bool) -> dict[str, Array]:
    """Heads that give the target's own logits: W = 0 and, unlike in the published code, b = 0, so that no key is needed."""
    shape = (num_draft, layers, target.width)
    params = {"kernel": jnp.zeros((*shape, target.width)), "bias": jnp.zeros(shape)}
    return {**params, "head": copied_head(target, target_params, num_draft)} if own_head else params


def copied_head(target: LanguageModel, target_params, num_draft: int) -> Array:
    """The target's vocabulary head as a matrix, once for each head: [K, D, V]."""
    head = target.unembed(target_params, jnp.eye(target.width))
    return jnp.broadcast_to(head[None], (num_draft, *head.shape))


def head_logits(target: LanguageModel, target_params, heads: dict[str, Array], hidden: Array) -> Array:
    """hidden [R, D] -> logits [R, K, V] of K heads: y = x + SiLU(W x + b) for each block, then the vocabulary."""
    x = jnp.broadcast_to(hidden[:, None], (hidden.shape[0], heads["kernel"].shape[0], hidden.shape[1]))
    return to_vocabulary(target, target_params, heads, residual(x, heads["kernel"], heads["bias"]))


def residual(x: Array, kernel: Array, bias: Array) -> Array:
    """x [R, K, D] through the blocks kernel [K, L, D, D], bias [K, L, D]."""
    for layer in range(kernel.shape[1]):
        x = x + jax.nn.silu(each(x, kernel[:, layer]) + bias[None, :, layer].astype(jnp.float32))
    return x


def to_vocabulary(target: LanguageModel, target_params, heads, x: Array) -> Array:
    """x [R, K, D] -> logits [R, K, V] by the heads' own matrices, or by the target's where they have none."""
    return each(x, heads["head"]) if "head" in heads else target.unembed(target_params, x)


def recipe(
    target: LanguageModel, *, num_draft: int, layers: int = 1, own_head: bool = False, paths: Paths | None = None,
    objective: objectives.Objective = objectives.hard, decay: float = 0.8,
) -> Recipe:  # fmt: skip
    """Medusa-1: sum_i decay^i CE of head i against the token i after the next, i = 1..K; the target is frozen.

    Args:
      target: the model to draft for.
      num_draft: K.
      layers: residual blocks of a head.
      own_head: whether each head learns a vocabulary matrix of its own, from a copy of the target's.
      paths: the tree that tau is measured with; a chain unless given.
      objective: one of `objectives`.
      decay: the weight of a head relative to the one before.
    """
    loss = parallel_loss(target, head_logits, objective=objective, shares=[decay**i for i in range(1, num_draft + 1)])
    init = lambda key, params: head_init(target, params, num_draft=num_draft, layers=layers, own_head=own_head)
    return Recipe(init, loss, medusa(target, paths=paths or chain_paths(num_draft)))


def load(
    lm, *, num_draft: int, weights: str | None = None, tree: str | None = None, children: str = "point"
) -> LoadedDrafter:  # fmt: skip
    """Draft for `lm` with heads that `files.save` wrote, or with published ones; the first `num_draft` of them are used.

    Args:
      lm: the target.
      num_draft: K, the depth of the tree.
      weights: a directory of either kind, or the published medusa_lm_head.safetensors or .pt itself.
      tree: "chain", or a JSON file for `trees.read_paths`; otherwise what config.json lists as "tree", or a chain; for
        published heads the authors' 63.
      children: how they are drawn, a key of `siblings.SIBLINGS`.

    Raises:
      ValueError: no weights, weights that do not fit, or a tree that cannot be.
    """
    published, drawn = published_file(files.given(weights, "medusa")), find_siblings(children)
    saved: dict[str, Any] = {"tree": TREE_63}
    target = lm.model
    if published is not None:
        heads = read_published(published, target)
    else:
        saved = files.read_config(weights, "medusa", target)
        target = seen_by(target, saved.get("vocabulary"))
        heads = files.read_params(weights, functools.partial(like, target, lm.params))
    files.check_depth(num_draft, len(heads["kernel"]))
    params, paths = first_heads(heads, num_draft), choose_tree(tree, saved.get("tree", ()), num_draft)
    drafter = medusa(target, paths=paths, siblings=drawn)
    note = f"{num_draft} heads, {len(paths)} nodes, children {children}"
    return LoadedDrafter(drafter, params, card("medusa", params, note), "rejection" if drafter.chain else drawn.rule)


def like(target: LanguageModel, target_params, shapes):
    """Shapes of saved heads: as many heads and blocks as there are in the file."""
    count, layers = (*shapes.get("kernel", ()), 0, 0)[:2]
    init = functools.partial(head_init, target, num_draft=count, layers=layers, own_head="head" in shapes)
    return jax.eval_shape(init, target_params)


def published_file(path: Path) -> Path | None:
    """medusa_lm_head.safetensors or .pt at `path` or in it, None where there is none."""
    inside = [path, *(path / f"medusa_lm_head.{ending}" for ending in ("safetensors", "pt"))]
    return next((file for file in inside if file.is_file()), None)


def read_published(path: Path, target: LanguageModel) -> dict[str, Array]:
    """Heads in the authors' names: {i}.{l}.linear.weight [D, D] and .bias, then {i}.{L}.weight [V, D].

    Heads and blocks are counted from the tensors, for published configs say 2 where there are 5.
    """
    tensors = {re.sub(r"^medusa_head\.", "", name): x for name, x in files.read_tensors(path).items()}
    found = [tuple(map(int, m.groups())) for name in tensors if (m := re.fullmatch(r"(\d+)\.(\d+)\.linear\.weight", name))]
    count, layers = (max((index[i] for index in found), default=-1) + 1 for i in (0, 1))
    block = [[f"{i}.{j}.linear" for j in range(layers)] for i in range(count)]
    names = {f"{b}.{part}": (target.width,) * n for bs in block for b in bs for part, n in (("weight", 2), ("bias", 1))}
    names |= {f"{i}.{layers}.weight": (target.vocab_size, target.width) for i in range(count)}
    files.check_tensors(path, names, tensors)
    return {
        "kernel": jnp.stack([jnp.stack([jnp.asarray(tensors[f"{b}.weight"]).T for b in bs]) for bs in block]),
        "bias": jnp.stack([jnp.stack([jnp.asarray(tensors[f"{b}.bias"]) for b in bs]) for bs in block]),
        "head": jnp.stack([jnp.asarray(tensors[f"{i}.{layers}.weight"]).T for i in range(count)]),
    }

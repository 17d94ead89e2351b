r"""Heads that see the tokens drafted before theirs (Hydra, Ankner et al., arXiv 2402.05109).  Lossless.

    h_t, x_{t+1} ─────────────────► head 0 ──► x_{t+2}, the first drafted token
    h_t, x_{t+1}, .., x_{t+i+1} ──► head i ──► x_{t+2+i}

h_t is the target's last hidden state at the row where the last round stopped, and x_{t+1} the token which it emitted; the
others come from the path to the node.  A head is a perceptron over [h_t; E(x_{t+1}); ..; E(x_{t+i+1})], E the target's
embedding.  A tree is drafted level by level, each node's children from its own path: K steps a round, without a cache, each
2 products [(i+2) D, D] and one with the vocabulary a parent.  Its draws have a true q, so any exact rule fits at any
temperature.  Left out: the decoder layer of Hydra++ before the heads.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.cache import take
from specjax.drafters import files, objectives
from specjax.drafters.base import LoadedDrafter, card
from specjax.drafters.blockwise import head_drafter
from specjax.drafters.medusa import Paths, chain_paths, choose_tree, copied_head, grow, residual, static_tree, to_vocabulary
from specjax.drafters.recipe import Batch, Recipe, labels
from specjax.drafters.siblings import SIBLINGS, Siblings, find_siblings
from specjax.models.layers import matmul
from specjax.types import Array, Drafter, LanguageModel


@functools.cache  # the same drafter for the same arguments: a rebuilt closure would recompile
def hydra(target: LanguageModel, *, paths: Paths, siblings: Siblings = SIBLINGS["without_replacement"]) -> Drafter:
    """A tree of the given rank paths, as deep as the longest; its children are drawn at the request's temperature.

    State: [B, D] the hidden state at the row where the last round stopped; zeros before anything has run (a prompt of one
    token), which leaves a draft to the embeddings alone.

    Raises:
      ValueError: paths that are no tree, or that skip a rank which `siblings` draw.
    """
    tree = static_tree(paths, siblings)

    def propose(noise, params, state, sequences):
        last = take(sequences.tokens, sequences.length[:, None] - 1)

        def look(depth, path):
            b, w, _ = path.shape
            tokens = jnp.concatenate([jnp.broadcast_to(last[:, None], (b, w, 1)), path], -1).reshape(b * w, depth)
            logits = head_logits(target, params.target, params.drafter, depth - 1, jnp.repeat(state, w, 0), tokens)
            return logits.reshape(b, w, -1)

        return grow(tree, siblings, sequences.sampling.temperature, noise, look), state

    return head_drafter(target, propose, num_nodes=len(paths), depth=int(tree.depths.max()), children=siblings.kind)


# Heads: {"scale": [], "head_0": {"through": [2D, D], "gate": [2D, D], "gate_bias": [D]}, "head_1": {.. [3D, D] ..}, ..}; beside
# them {"kernel": [L-1, D, D], "bias": [L-1, D]} where a head has L > 1 blocks, and {"head": [D, V]} where it has its own.


def head_init(
    target: LanguageModel, target_params, *, num_draft: int, layers: int, own_head: bool
) -> dict[str, Any]:  # fmt: skip
    """Heads that give the target's own logits: the identity on h_t, and nothing else."""
    d = target.width
    every = target.embed(target_params, jnp.arange(target.vocab_size))
    # Embeddings are small beside a normed state (.07 against 1, say).  To lift them by a factor changes no head's reach,
    # for its matrices could do the same, but it spares an optimizer with steps of one size a long way.
    scale = jax.lax.rsqrt(jnp.square(every).mean() + 1e-12)
    deeper = {"kernel": jnp.zeros((layers - 1, d, d)), "bias": jnp.zeros((layers - 1, d))} if layers > 1 else {}
    own = {"head": copied_head(target, target_params, 1)[0]} if own_head else {}

    def one(i: int) -> dict[str, Array]:
        through = jnp.eye((i + 2) * d, d)
        return {"through": through, "gate": jnp.zeros_like(through), "gate_bias": jnp.zeros(d), **deeper, **own}

    return {"scale": scale, **{f"head_{i}": one(i) for i in range(num_draft)}}


def head_logits(target: LanguageModel, target_params, heads, i: int, hidden: Array, tokens: Array) -> Array:
    """hidden [R, D], tokens [R, i + 1] that follow it -> logits [R, V]: y = A u + SiLU(B u + b), u = [h; E(x); ..]."""
    head = heads[f"head_{i}"]
    embedded = target.embed(target_params, tokens) * heads["scale"]
    u = jnp.concatenate([hidden, embedded.reshape(len(tokens), -1)], -1)
    y = matmul(u, head["through"]) + jax.nn.silu(matmul(u, head["gate"]) + head["gate_bias"][None].astype(jnp.float32))
    y = y[:, None]
    if "kernel" in head:
        y = residual(y, head["kernel"][None], head["bias"][None])
    return to_vocabulary(target, target_params, {"head": head["head"][None]} if "head" in head else {}, y)[:, 0]


def recipe(
    target: LanguageModel, *, num_draft: int, layers: int = 1, own_head: bool = False, paths: Paths | None = None,
    objective: objectives.Objective = objectives.hard, decay: float = 0.8,
) -> Recipe:  # fmt: skip
    """sum_i decay^i CE of head i against the token i after the next, i = 1..K, given the true tokens before it.

    The target is frozen.  With `objectives.soft` a head learns the target's law in the place of the token (the paper's
    "teacher" loss).

    Args:
      target: the model to draft for.
      num_draft: K.
      layers: L, blocks of a head.
      own_head: whether each head learns a vocabulary matrix of its own, from a copy of the target's.
      paths: the tree that tau is measured with; a chain unless given.
      objective: one of `objectives`.
      decay: the weight of a head relative to the one before.
    """

    def loss(trainable, target_params, batch: Batch, key):
        unembed, hidden, scored = functools.partial(target.unembed, target_params), batch.output.hidden, []
        for i in range(num_draft):
            given = jnp.stack([objectives.ahead(batch.tokens, j) for j in range(1, i + 2)], -1)
            logits_of = lambda x, i=i: head_logits(target, target_params, trainable, i, *x)
            same = objectives.ahead(hidden, i + 1)
            scored.append(objectives.score(logits_of, (hidden, given), same, labels(batch, i + 2), unembed, objective))
        return objectives.pool(scored, [decay**i for i in range(1, num_draft + 1)])

    init = lambda key, params: head_init(target, params, num_draft=num_draft, layers=layers, own_head=own_head)
    return Recipe(init, loss, hydra(target, paths=paths or chain_paths(num_draft)))


def load(
    lm, *, num_draft: int, weights: str | None = None, tree: str | None = None, children: str = "without_replacement"
) -> LoadedDrafter:  # fmt: skip
    """Draft for `lm` with heads that `files.save` wrote to the directory `weights`; the first `num_draft` are used.

    Args:
      lm: the target.
      num_draft: K, the depth of the tree.
      weights: the directory.
      tree: "chain", or a JSON file for `trees.read_paths`; otherwise what config.json lists as "tree", or a chain.
      children: how they are drawn, a key of `siblings.SIBLINGS`.

    Raises:
      ValueError: no weights, weights that do not fit, or a tree that cannot be.
    """
    listed, drawn = files.read_config(weights, "hydra").get("tree", ()), find_siblings(children)
    heads = files.read_params(weights, functools.partial(like, lm))
    files.check_depth(num_draft, len(heads) - 1)
    params = {"scale": heads["scale"], **{f"head_{i}": heads[f"head_{i}"] for i in range(num_draft)}}
    paths = choose_tree(tree, listed, num_draft)
    drafter = hydra(lm.model, paths=paths, siblings=drawn)
    note = f"{num_draft} heads, {len(paths)} nodes, children {children}"
    return LoadedDrafter(drafter, params, card("hydra", params, note), "rejection" if drafter.chain else drawn.rule)


def like(lm, shapes):
    """Shapes of saved heads: as many heads and blocks as there are in the file."""
    count = sum(name.endswith("/through") for name in shapes)
    layers = shapes.get("head_0/kernel", (0,))[0] + 1
    init = functools.partial(head_init, lm.model, num_draft=count, layers=layers, own_head="head_0/head" in shapes)
    return jax.eval_shape(init, lm.params)

r"""Draft trees grown by a module that is fed with its own output, level by level, in fixed shapes.

A level is run in one pass: its nodes stand at one position and see the text's entries and their own ancestors, never each
other.  `static` gives every node of a level the children that a list of paths names; `dynamic` is EAGLE-2's growth (Li et
al., arXiv 2406.16858): the children of the `width` best nodes of each level, and of all candidates the best `num_nodes`.
What the drafter thinks of a path is its law at temperature 1, whatever the request's: point children may be chosen by
anything, and `target_match` keeps the target's law.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import trees
from specjax.cache import take
from specjax.drafters.eagle.head import EagleConfig, embed, step
from specjax.drafters.medusa import Paths, grow
from specjax.drafters.siblings import Siblings
from specjax.models.layers import visible
from specjax.types import Array, Draft, KVCache, LanguageModel, Params

TREE_25: Paths = tuple(
    tuple(map(int, path))
    for path in "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001".split()
)
"""The authors' static tree for EAGLE-1 (mc_sim_7b_63), a word a path: levels of 4, 8, 8, 3 and 2."""


class Level(NamedTuple):
    """W nodes of a tree that were run last, of P that were run so far."""

    cache: KVCache  # `length` is that of the text; the P entries lie behind it
    recycled: Array  # [B, W, D]
    normed: Array  # [B, W, D]
    seen: Array  # [B, W, P] which of them lie on the way to each node, itself included


def root(cache: KVCache, recycled: Array, normed: Array) -> Level:
    """The level of the last committed token, from what the module gave there, [B, D]."""
    return Level(cache, recycled[:, None], normed[:, None], jnp.zeros((len(recycled), 1, 0), bool))


def below(
    target: LanguageModel, config: EagleConfig, params: Params, level: Level, tokens: Array, parents: Array, depth: int
) -> Level:  # fmt: skip
    """Run nodes of one depth, tokens [B, W], on what the module gave at their parents: [B, W] places in the level above."""
    cache, (b, w), known = level.cache, tokens.shape, level.seen.shape[2]
    itself = jnp.broadcast_to(jnp.eye(w, dtype=bool)[None], (b, w, w))
    seen = jnp.concatenate([take(level.seen, parents), itself], 2)
    positions = jnp.broadcast_to(cache.length[:, None] + depth - 1, (b, w))
    at = cache.length + known
    slots = visible(at, positions, cache.k[0].shape[-1], seen)
    inputs = embed(target, config, params, tokens), take(level.recycled, parents)
    given, k, v = step(config, params.drafter, *inputs, cache.k, cache.v, at, positions, slots)
    return Level(KVCache(k, v, cache.length), *given, seen)


def static(
    tree: trees.Paths, siblings: Siblings, temperature: Array, noise: Callable, read: Callable, run: Callable, level: Any
) -> tuple[Draft, Any]:  # fmt: skip
    """A static tree whose inner nodes are run, each level once, and the last level.

    Args:
      tree: which candidates become nodes.
      siblings: how candidates are drawn.
      temperature: [B] of the requests.
      noise: the drafter's.
      read: (level) -> logits [B, W, V] of what follows its W nodes.
      run: (level, tokens [B, W], parents [B, W], depth) -> the level of these nodes, `depth` below the last committed token;
        parents are places in the level before.
      level: the one of the last committed token alone.
    """
    parents = runs(tree)

    def look(depth: int, path: Array) -> Array:
        nonlocal level  # `grow` asks for one depth after the other
        if depth > 1:
            tokens = path[..., -1]
            level = run(level, tokens, jnp.broadcast_to(jnp.asarray(parents[depth - 1])[None], tokens.shape), depth - 1)
        return read(level)

    return grow(tree, siblings, temperature, noise, look), level


def runs(tree: trees.Paths) -> list[np.ndarray]:
    """For each depth from 0, the places that the parents of its inner nodes have among the inner nodes one depth above.

    >>> [x.tolist() for x in runs(trees.from_paths([(0,), (1,), (1, 0), (1, 1), (1, 1, 0)]))]
    [[0], [0], [0]]
    """
    found, above = [np.zeros(1, np.int32)], np.full(1, -1)
    for depth in range(2, int(tree.depths.max()) + 1):
        inner = np.unique(tree.parents[tree.depths == depth])
        found.append(np.searchsorted(above, tree.parents[inner]).astype(np.int32))
        above = inner
    return found


def num_run(tree: trees.Paths) -> int:
    """Nodes that a static tree runs: those with children."""
    return sum(len(x) for x in runs(tree)[1:])


def dynamic(
    read: Callable, run: Callable, level: Any, *, batch: int, depth: int, width: int, num_nodes: int
) -> tuple[tuple[Array, Array, Array], Any]:  # fmt: skip
    """EAGLE-2's tree as (tokens, parents, scores), each [B, N], and the last level.  `read`, `run` and `level` as in `static`.

    A score is the log-probability of the path to a node.  Nodes are absent (parent -2) where there are not as many: a law
    without mass, or one that is none.
    """
    pool = trees.Candidates(*(jnp.zeros((batch, 0), t) for t in (jnp.int32, jnp.float32, jnp.int32)))
    scores, place = jnp.zeros((batch, 1)), jnp.full((batch, 1), -1, jnp.int32)
    for below in range(1, depth + 1):
        tokens, reached = jax.vmap(lambda s, q: trees.grow(s, q, width))(scores, law(read(level)))
        tokens, reached = (x.reshape(batch, -1) for x in (tokens, reached))
        first = pool.tokens.shape[1]
        new = trees.Candidates(tokens, reached, jnp.repeat(place, width, 1))
        pool = jax.tree.map(lambda *x: jnp.concatenate(x, 1), pool, new)
        if below < depth:
            kept = jax.vmap(lambda s: trees.beam(s, width))(reached)
            scores, place = take(reached, kept), first + kept.astype(jnp.int32)
            level = run(level, take(tokens, kept), kept // width, below)
    tokens, parents, scores = jax.vmap(lambda *x: trees.rerank(trees.Candidates(*x), num_nodes))(*pool)
    return (tokens, jnp.where(scores > -jnp.inf, parents, -2), scores), level


def confidence(parents: Array, scores: Array) -> Array:
    """Probability of each node [B, N] given its parent, from the log-probabilities of paths; 0 where there is no node.

    What EAGLE-2 takes for the chance of acceptance (arXiv 2406.16858, section 3.2).
    """
    above = jnp.where(parents >= 0, jnp.take_along_axis(scores, jnp.maximum(parents, 0), 1), 0)
    return jnp.where(parents >= -1, jnp.exp(scores - above), 0)


def law(logits: Array) -> Array:
    """Log-probabilities [B, W, n]; all -inf where logits hold NaN or nothing but -inf."""
    sound = jnp.isfinite(logits.max(-1, keepdims=True))
    return jnp.where(sound, jax.nn.log_softmax(jnp.where(sound, logits, 0), -1), -jnp.inf)


def check_dynamic(*, depth: int, width: int, num_nodes: int, vocab_size: int) -> None:
    """ValueError for a tree that cannot be."""
    if not 1 <= width <= vocab_size:
        raise ValueError(f"top_k {width} does not lie in 1 to {vocab_size}, the tokens that the drafter proposes")
    pool = width + (depth - 1) * width**2
    if not depth <= num_nodes <= pool:
        raise ValueError(f"nodes {num_nodes} do not lie in {depth} to {pool}: {depth} levels of top {width} give no more")

"""Draft trees: topology from parents, static or traced by one code path, and builders.  For ONE sequence; vmap outside.

A draft of N nodes is verified as a block of N + 1 rows: row 0 is the last committed token, row i + 1 is node i.  Parents
stand before children and every beginning of a list of nodes is a tree by itself, so that a scheduler may cut it anywhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.json_text import read_json
from specjax.types import Array


def chain(num_draft: int) -> np.ndarray:
    """Parents of a chain.

    >>> chain(3)
    array([-1,  0,  1], dtype=int32)
    """
    return np.arange(-1, num_draft - 1, dtype=np.int32)


def ancestors(parents: Array) -> Array:
    """Parents [N] -> [N+1, N+1] bool: row i sees row j (itself included).  An absent node sees itself and row 0 only."""
    n = parents.shape[0]
    up = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.maximum(parents + 1, 0)])
    seen = jnp.eye(n + 1, dtype=bool)
    for _ in range(n.bit_length()):  # after i doublings a row sees 2 ** i generations
        seen, up = seen | seen[up], up[up]
    return seen.at[:, 0].set(True)


def links(parents: Array) -> tuple[Array, Array]:
    """First child of each block row [N+1] and next sibling of each node [N]; N where there is none."""
    n = parents.shape[0]
    node = jnp.arange(n, dtype=jnp.int32)
    child = parents[None] == jnp.arange(-1, n, dtype=jnp.int32)[:, None]
    sibling = (parents[None] == parents[:, None]) & (node[None] > node[:, None])
    return jnp.where(child, node[None], n).min(-1, initial=n), jnp.where(sibling, node[None], n).min(-1, initial=n)


def path_to(row: Array, seen: Array, depth: int) -> Array:
    """Block rows [depth+1] from row 0 down to `row`, given ancestors `seen`; zeros past its depth."""
    level = seen.sum(-1, dtype=jnp.int32) - 1
    return (
        jnp.zeros(depth + 1, jnp.int32)
        .at[jnp.where(seen[row], level, depth + 1)]
        .set(jnp.arange(level.shape[0], dtype=jnp.int32), mode="drop")
    )


def older(parents: Array) -> Array:
    """[N, N] bool: j is a sibling of i that stands before it."""
    node = jnp.arange(parents.shape[0], dtype=jnp.int32)
    return (parents[None] == parents[:, None]) & (node[None] < node[:, None])


def twins(tokens: Array, parents: Array) -> Array:
    """[N] bool: an earlier sibling carries the same token."""
    return (older(parents) & (tokens[None] == tokens[:, None])).any(-1)


def merge(tokens: Array, parents: Array) -> Array:
    """Parents [N] of the merged tree: a twin's children move to its first copy, so that a path stands once (SpecInfer).

    The twin itself stays, as an attempt of its own without children: two draws of one token are two draws.
    """
    node = jnp.arange(parents.shape[0], dtype=jnp.int32)

    def place(i, carry):
        merged, first = carry
        parent = jnp.where(parents[i] >= 0, first[parents[i]], parents[i])
        same = (merged == parent) & (tokens == tokens[i]) & (node < i) & (parent >= -1)
        return merged.at[i].set(parent), first.at[i].set(jnp.where(same.any(), same.argmax(), i).astype(jnp.int32))

    return jax.lax.fori_loop(0, parents.shape[0], place, (jnp.full_like(parents, -2), node))[0]


def k_ary(branching: Sequence[int]) -> np.ndarray:
    """Parents of the tree in which every node of level i has branching[i] children (SpecInfer's expansion), level by level."""
    if not branching or min(branching) < 1:
        raise ValueError(f"branching {tuple(branching)}: need at least one level of at least one child")
    parents, level = [], [-1]
    for width in branching:
        children = [parent for parent in level for _ in range(width)]
        level = list(range(len(parents), len(parents) + len(children)))
        parents += children
    return np.asarray(parents, np.int32)


class Paths(NamedTuple):
    """A static tree given by ranks: node i is the ranks[i]-th candidate below its parent."""

    parents: np.ndarray  # [N]
    ranks: np.ndarray  # [N] 0 = the most probable candidate
    depths: np.ndarray  # [N] from 1


def from_paths(paths: Sequence[Sequence[int]]) -> Paths:
    """Medusa's choices: each path a tuple of ranks.  Nodes come out by depth, then in the order of their ranks.

    Raises:
      ValueError: a path that is empty, doubled, not of whole numbers from 0, or whose beginning is not in the list.
    """
    for path in paths:
        if not isinstance(path, list | tuple) or not path or not all(map(_is_rank, path)):
            raise ValueError(f"path {path!r} is not a list of ranks: use whole numbers from 0, at least one")
    ordered = sorted((tuple(p) for p in paths), key=lambda p: (len(p), p))
    index = {path: i for i, path in enumerate(ordered)}
    if len(index) != len(ordered):
        raise ValueError(f"{len(ordered) - len(index)} paths are listed twice: list each once")
    for path in ordered:
        if len(path) > 1 and path[:-1] not in index:
            raise ValueError(f"path {list(path)} hangs in the air: list {list(path[:-1])} too")
    parents = [index.get(path[:-1], -1) for path in ordered]
    return Paths(*(np.asarray(x, np.int32) for x in (parents, [p[-1] for p in ordered], [len(p) for p in ordered])))


def _is_rank(x) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool) and bool(0 <= x < 1 << 31)


def _are_names(x) -> bool:
    return isinstance(x, list) and all(isinstance(name, int | str) for name in x)


def read_paths(path: str | Path) -> list[tuple[int, ...]]:
    """Paths from JSON: a list of rank paths, {"tree_choices": [...]}, or children lists {"0": [1, 2], ...} (root 0).

    Raises:
      ValueError: anything else.
    """
    data = read_json(Path(path), "write rank paths, tree_choices or children lists")
    if isinstance(data, dict):
        data = data.get("tree_choices", data.get("tree_adj", data))
    if isinstance(data, list) and all(isinstance(p, list) for p in data):
        from_paths(data)
        return [tuple(p) for p in data]
    if not isinstance(data, dict) or not all(map(_are_names, data.values())):
        raise ValueError(f"{path} holds no draft tree: need rank paths, tree_choices or children lists")
    found, level, met = [], [("0", ())], {"0"}
    for name, prefix in level:  # grows while it is read
        for rank, child in enumerate(map(str, data.get(name, []))):
            if child in met:
                raise ValueError(f"{path} is no tree: node {child} has two parents, or is its own ancestor")
            met.add(child)
            found.append((*prefix, rank))
            level.append((child, found[-1]))
    lost = sorted(set(data) - met)
    if lost:
        raise ValueError(f"{path} is no tree: nothing leads from node 0 to node {lost[0]}")
    return found


def best_first(acceptance: np.ndarray, num_nodes: int) -> list[tuple[int, ...]]:
    """The `num_nodes` paths of largest product of acceptance[depth, rank] (OPT-Tree, arXiv 2406.17276, with static rates).

    acceptance [K, R] is the probability that the candidate of that rank is right, given that its parent is.  Maximises the
    expected number of accepted tokens of a tree of this size; fewer paths where [K, R] has no more.

    Raises:
      ValueError: rates that are none, or a row that grows with the rank.
    """
    rates = _rates(acceptance, 2)
    if (np.diff(rates, axis=1) > 0).any():
        raise ValueError("acceptance grows with the rank: give rates that fall from the first candidate on")
    chosen: list[tuple[int, ...]] = []
    # minus the path's product, the path, minus the product above it
    heap: list[tuple[float, tuple[int, ...], float]] = [(-rates[0, 0], (0,), -1.0)]
    while heap and len(chosen) < num_nodes:
        value, path, above = heapq.heappop(heap)
        chosen.append(path)
        depth, rank = len(path) - 1, path[-1]
        if rank + 1 < rates.shape[1]:
            heapq.heappush(heap, (above * rates[depth, rank + 1], (*path[:-1], rank + 1), above))
        if depth + 1 < rates.shape[0]:
            heapq.heappush(heap, (value * rates[depth + 1, 0], (*path, 0), value))
    return chosen


def _rates(acceptance: np.ndarray, axes: int) -> np.ndarray:
    """Acceptance probabilities, checked."""
    rates = np.asarray(acceptance, float)
    if rates.ndim != axes or not rates.size or not ((rates >= 0) & (rates <= 1)).all():
        raise ValueError(f"acceptance of shape {rates.shape} is no table of probabilities: give {axes} axes, each in [0, 1]")
    return rates


def sequoia(acceptance: np.ndarray, num_nodes: int, max_depth: int) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Sequoia's dynamic programme (arXiv 2402.12374): the best tree when the k-th sibling is accepted with acceptance[k].

    Returns the paths of the best tree of `num_nodes` nodes (or as many as depth and rates allow), and the expected tokens of
    the best tree of each size [num_nodes + 1], the bonus counted; with a cost per size, `best_size` picks one.  Time
    O(num_nodes^2 R max_depth).

    Raises:
      ValueError: rates that are none, or a negative size.
    """
    rates = _rates(acceptance, 1)
    if min(num_nodes, max_depth) < 0:
        raise ValueError(f"num_nodes={num_nodes}, max_depth={max_depth}: give sizes from 0")
    value = np.full((max_depth + 1, num_nodes + 1), 1.0)  # [d, n]: a subtree of n nodes below a node, at most d levels
    split = np.zeros((max_depth + 1, len(rates) + 1, num_nodes + 1), int)  # nodes given to the k-th child, itself counted
    for d in range(1, max_depth + 1):
        rest = np.zeros(num_nodes + 1)  # best value of children k.. from n nodes, the last one first
        for k in reversed(range(len(rates))):
            best = np.zeros(num_nodes + 1)
            for n in range(1, num_nodes + 1):
                gains = [rates[k] * value[d - 1, m - 1] + rest[n - m] for m in range(1, n + 1)]
                split[d, k, n] = 1 + int(np.argmax(gains))
                best[n] = max(gains)
            rest = best
        value[d] = 1 + rest
    return _unfold(split, max_depth, num_nodes, ()), value[max_depth]


def _unfold(split: np.ndarray, depth: int, nodes: int, prefix: tuple[int, ...]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for rank in range(split.shape[1] - 1):
        if nodes == 0 or depth == 0:
            break
        size = split[depth, rank, nodes]
        child = (*prefix, rank)
        paths += [child, *_unfold(split, depth - 1, size - 1, child)]
        nodes -= size
    return paths


def best_size(expected: np.ndarray, seconds: np.ndarray) -> int:
    """The tree size with most expected tokens a second: expected [N+1] tokens, seconds [N+1] a round of each size costs."""
    return int(np.argmax(np.asarray(expected) / np.asarray(seconds)))


class Candidates(NamedTuple):
    """A pool of nodes that a dynamic tree has grown so far, for ONE sequence."""

    tokens: Array  # [P]
    scores: Array  # [P] log-probability of the whole path
    parents: Array  # [P] index within the pool, -1 for the last committed token


def grow(scores: Array, log_q: Array, width: int) -> tuple[Array, Array]:
    """One level of EAGLE-2's growth (arXiv 2406.16858): the best `width` continuations of each of the beam's nodes.

    scores [W] of the beam, log_q [W, V] of their children -> tokens [W, width] and path scores [W, width].
    """
    best, tokens = jax.lax.top_k(log_q, width)
    return tokens.astype(jnp.int32), scores[:, None] + best


def beam(scores: Array, width: int) -> Array:
    """Which of a level's candidates [W * width] are expanded further: indices [width], best path first."""
    return jax.lax.top_k(scores, width)[1]


def rerank(pool: Candidates, num_nodes: int) -> tuple[Array, Array, Array]:
    """EAGLE-2's re-ranking: the `num_nodes` best of the whole pool as (tokens, parents, scores), each [num_nodes].

    A child never scores above its parent and stands after it, so with ties going to the lower index the choice is a tree.
    """
    keep = jnp.sort(jax.lax.top_k(pool.scores, num_nodes)[1])
    place = jnp.full(pool.scores.shape[0] + 1, -2, jnp.int32).at[keep].set(jnp.arange(num_nodes, dtype=jnp.int32))
    parents = jnp.where(pool.parents[keep] < 0, -1, place[pool.parents[keep]])
    return pool.tokens[keep], parents, pool.scores[keep]

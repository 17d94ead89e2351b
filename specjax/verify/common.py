"""Pieces that rules share.  Everything here is for ONE sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.sampling import one_hot_log
from specjax.types import Array, Draft, Plan


def normalised(weights: Array, fallback: Array) -> Array:
    """weights [..., V] / their sum; `fallback` where nothing is left (a rejection that had probability ~0) or NaN is."""
    total = weights.sum(-1, keepdims=True)
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), fallback)


def residual(p: Array, q: Array) -> Array:
    """norm(max(p - q, 0)), Leviathan et al. 2023 (arXiv 2211.17192), p where that is empty.

    >>> print(residual(jnp.array([0.5, 0.25, 0.25]), jnp.array([0.75, 0.25, 0.0])))
    [0. 0. 1.]
    """
    return normalised(jnp.maximum(p - q, 0), p)


def ratio(p: Array, q: Array) -> Array:
    """min(1, p / q), and 0 where q is 0 or NaN: such a token was never drawn from q.

    >>> print(ratio(jnp.array([0.25, 0.5, 0.5]), jnp.array([0.5, 0.25, 0.0])))
    [0.5 1.  0. ]
    """
    return jnp.where(q > 0, jnp.minimum(1, p / jnp.where(q > 0, q, 1)), 0).astype(p.dtype)


def at_tokens(law: Array, rows: Array, tokens: Array) -> Array:
    """Probabilities of `tokens` [N] in `rows` [N] of a log law [*, V]."""
    return jnp.exp(law[rows, tokens])


def draft_law(draft: Draft, node: Array, like: Array) -> Array:
    """q [V] of one node: what it was drawn from, or the point mass of a deterministic proposal."""
    log_q = one_hot_log(draft.tokens[node], like) if draft.log_q is None else draft.log_q[node].astype(like.dtype)
    return jnp.exp(log_q)


def parent_rows(draft: Draft) -> Array:
    """Block row [N] of each node's parent (row 0 for an absent node)."""
    return jnp.maximum(draft.parents, -1) + 1


def siblings_together(draft: Draft) -> tuple[Array, Array]:
    """Nodes in an order [N] with siblings side by side, as they were drawn, after their parents; and [N] bool: a first one.

    A rule that takes them in this order needs one residual [V] at a time, not one for every row.  Absent nodes come last.
    """
    rows = jnp.where(draft.parents >= -1, draft.parents, draft.parents.shape[0])
    order = jnp.argsort(rows, stable=True).astype(jnp.int32)
    return order, jnp.append(True, jnp.diff(rows[order]) > 0)


def past_children(draft: Draft, row: Array, start: Any, refuse: Callable) -> Any:
    """`start`, carried by refuse(carry, node) past each child of `row`."""
    first, sibling = trees.links(draft.parents)
    n = draft.tokens.shape[0]
    return jax.lax.while_loop(lambda c: c[1] < n, lambda c: (refuse(c[0], c[1]), sibling[c[1]]), (start, first[row]))[0]


def top_down(draft: Draft, accept: Array, correction: Callable) -> Plan:
    """Decision list of every root-to-leaf rule: yes leads to the first child, no to the next sibling."""
    n = draft.tokens.shape[0]
    first, sibling = trees.links(draft.parents)
    here = draft.parents >= -1
    if_accept = jnp.where(first[1:] < n, first[1:], n + 1 + jnp.arange(n, dtype=jnp.int32))
    if_reject = jnp.where(sibling < n, sibling, n + parent_rows(draft))
    start = jnp.where(first[0] < n, first[0], n)  # an absent node 0 passes the walk on to where it begins
    return Plan(jnp.where(here, accept, 0), if_accept, jnp.where(here, if_reject, start), correction)

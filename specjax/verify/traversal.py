"""Traversal verification (arXiv 2505.12398, own reconstruction): leaves first, a path is kept whole.  Lossless, any tree.

Depth-first: alpha(child) = min(1, alpha(v) r_v(x)/q(x)); a leaf is accepted, with its whole path, with probability
alpha(leaf).  A refused leaf leaves at its parent w = max(alpha r - q, 0), Z = sum w: alpha <- Z/(Z + 1 - alpha),
r <- w/Z; the next sibling is tried, and a node without children left is a leaf itself.  On a chain it is `block`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.types import CHILDREN, Array, Draft, Plan, Rule
from specjax.verify.common import draft_law, normalised, parent_rows, ratio


class Tour(NamedTuple):
    """A depth-first walk over the nodes that exist."""

    event: Array  # [2N] node i = enter node i, N + i = leave it refused, 2N = nothing
    order: Array  # [N] place of each node among the refusals (N for absent ones)
    count: Array  # [] nodes that exist


def plan(draft: Draft, log_p: Array) -> Plan:
    """Draft of one tree, log_p [N+1, V] -> Plan: a list of the nodes in the order in which they are tested as leaves."""
    n = draft.tokens.shape[0]
    node = jnp.arange(n, dtype=jnp.int32)
    walked, rows = tour(draft), parent_rows(draft)
    lawful = jnp.isfinite(log_p.max(-1))  # a row without a law has all its mass on an error, which q never draws

    def step(carry, event):
        alpha, left = carry
        i = jnp.where(event < 2 * n, event % n, 0)
        row, parent = i + 1, rows[i]
        r, x = left[parent], draft.tokens[i]
        q = draft_law(draft, i, r)
        child = jnp.where(lawful[parent], ratio(alpha[parent] * r[x], q[x]), 0)
        weight = jnp.maximum(alpha[parent] * r - q, 0)
        z = jnp.where(lawful[parent], weight.sum(), alpha[parent])
        rest = z + 1 - alpha[parent]
        after = jnp.where(rest > 0, z / jnp.where(rest > 0, rest, 1), 1)
        enters, leaves = event < n, (event >= n) & (event < 2 * n)
        alpha = jnp.where(enters, alpha.at[row].set(child), jnp.where(leaves, alpha.at[parent].set(after), alpha))
        new = jnp.where(leaves, normalised(weight, r), r)
        return (alpha, jax.lax.dynamic_update_index_in_dim(left, new, parent, 0)), None

    (alpha, left), _ = jax.lax.scan(step, (jnp.ones(n + 1, log_p.dtype), jnp.exp(log_p)), walked.event)
    accept = jnp.zeros(n, log_p.dtype).at[walked.order].set(alpha[1:], mode="drop")
    stop = jnp.zeros(n, jnp.int32).at[walked.order].set(n + 1 + node, mode="drop")
    return Plan(accept, stop, jnp.where(node + 1 < walked.count, node + 1, n), lambda row: jnp.log(left[row]))


def tour(draft: Draft) -> Tour:
    """When a depth-first walk enters and leaves each node: siblings in their order, a node left after its children."""
    n = draft.tokens.shape[0]
    node = jnp.arange(n, dtype=jnp.int32)
    here = draft.parents >= -1
    below = trees.ancestors(draft.parents)[1:, 1:]  # [i, j]: j lies on i's path
    size = (below & here[:, None]).sum(0, dtype=jnp.int32)
    before = 1 + jnp.where(trees.older(draft.parents), size[None], 0).sum(-1, dtype=jnp.int32)
    depth = below.sum(-1, dtype=jnp.int32)
    first = jnp.where(below, before[None], 0).sum(-1, dtype=jnp.int32) - 1  # place in the order of entering
    enter = jnp.where(here, 2 * first - depth + 1, 2 * n)
    leave = jnp.where(here, enter + 2 * size - 1, 2 * n)
    event = jnp.full(2 * n, 2 * n, jnp.int32).at[enter].set(node, mode="drop").at[leave].set(n + node, mode="drop")
    return Tour(event, jnp.where(here, first + size - depth, n), here.sum(dtype=jnp.int32))


traversal = Rule(plan, accepts=CHILDREN, top_down=False)

"""Traversal verification (arXiv 2505.12398, own reconstruction): leaves first, a path is kept whole.  Lossless, any tree.

Depth-first: alpha(child) = min(1, alpha(v) r_v(x)/q(x)); a leaf is accepted, with its whole path, with probability
alpha(leaf).  A refused leaf leaves at its parent w = max(alpha r - q, 0), Z = sum w: alpha <- Z/(Z + 1 - alpha),
r <- w/Z; the next sibling is tried, and a node without children left is a leaf itself.  On a chain it is `block`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.types import CHILDREN, Array, Draft, Plan, Rule
from specjax.verify.common import draft_law, normalised, parent_rows, past_children, ratio, siblings_together


def plan(draft: Draft, log_p: Array) -> Plan:
    """Draft of one tree, log_p [N+1, V] -> Plan: a list of the nodes in the order in which they are tested as leaves.

    What happens below a child does not touch its parent's r and alpha, so numbers are computed parents first, with one
    residual [V] at a time; only the list is leaves first.
    """
    n = draft.tokens.shape[0]
    node, rows = jnp.arange(n, dtype=jnp.int32), parent_rows(draft)
    here = draft.parents >= -1
    lawful = jnp.isfinite(log_p.max(-1))  # a row without a law has all its mass on an error, which q never draws

    def refuse(carry, i):
        alpha, r = carry
        weight = jnp.maximum(alpha * r - draft_law(draft, i, r), 0)
        z = jnp.where(lawful[rows[i]], weight.sum(), alpha)
        rest = z + 1 - alpha
        return jnp.where(rest > 0, z / jnp.where(rest > 0, rest, 1), 1), normalised(weight, r)

    def enter(carry, step):
        alpha, left = carry
        i, is_first = step
        r, x = jnp.where(is_first, jnp.exp(log_p[rows[i]]), left), draft.tokens[i]
        child = jnp.where(lawful[rows[i]], ratio(alpha[rows[i]] * r[x], draft_law(draft, i, r)[x]), 0)
        after, left = refuse((alpha[rows[i]], r), i)
        changed = alpha.at[i + 1].set(child).at[rows[i]].set(after)
        return (jnp.where(here[i], changed, alpha), left), child

    start = (jnp.ones(n + 1, log_p.dtype), jnp.zeros_like(log_p[0]))
    order, is_first = siblings_together(draft)
    (alpha, _), child = jax.lax.scan(enter, start, (order, is_first))
    entered = jnp.ones(n + 1, log_p.dtype).at[order + 1].set(child)  # alpha before any child was refused
    place = leaves_first(draft)
    accept = jnp.zeros(n, log_p.dtype).at[place].set(alpha[1:], mode="drop")
    stop = jnp.zeros(n, jnp.int32).at[place].set(n + 1 + node, mode="drop")

    def correction(row):
        return jnp.log(past_children(draft, row, (entered[row], jnp.exp(log_p[row])), refuse)[1])

    return Plan(accept, stop, jnp.where(node + 1 < here.sum(dtype=jnp.int32), node + 1, n), correction)


def leaves_first(draft: Draft) -> Array:
    """Place [N] of each node when a depth-first walk leaves it: siblings in their order, a node after its children.

    N for absent nodes.
    """
    n = draft.tokens.shape[0]
    here = draft.parents >= -1
    below = trees.ancestors(draft.parents)[1:, 1:]  # [i, j]: j lies on i's path
    size = (below & here[:, None]).sum(0, dtype=jnp.int32)
    before = 1 + jnp.where(trees.older(draft.parents), size[None], 0).sum(-1, dtype=jnp.int32)
    depth = below.sum(-1, dtype=jnp.int32)
    first = jnp.where(below, before[None], 0).sum(-1, dtype=jnp.int32) - 1  # place in the order of entering
    return jnp.where(here, first + size - depth, n)


traversal = Rule(plan, accepts=CHILDREN, top_down=False)

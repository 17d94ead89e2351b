"""Recursive rejection over siblings, root to leaf.  Lossless, any tree.

SpecInfer's multi-step rejection (arXiv 2305.09781) with i.i.d. children, every draw its own attempt; RSD and Sequoia
(arXiv 2402.14160, 2402.12374) with children drawn without replacement, verified in the order they were drawn.  One rule
for both: attempt i accepts x with min(1, r(x)/q_i(x)) and else leaves r <- norm(max(r - q_i, 0)); that q_i is the law the
node was really drawn from, given its earlier siblings, is all that tells them apart.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.types import CHILDREN, Array, Draft, Plan, Rule
from specjax.verify import target_match
from specjax.verify.common import draft_law, parent_rows, past_children, ratio, residual, siblings_together, top_down


def plan(draft: Draft, log_p: Array) -> Plan:
    """Draft of one tree, log_p [N+1, V] -> Plan.  One residual [V] at a time: O(N V) time, O(V) memory."""
    if draft.log_q is None:
        return target_match.plan(draft, log_p)
    rows = parent_rows(draft)
    order, is_first = siblings_together(draft)

    def refuse(r, node):
        return residual(r, draft_law(draft, node, r))

    def attempt(left, step):
        node, is_first = step
        r, x = jnp.where(is_first, jnp.exp(log_p[rows[node]]), left), draft.tokens[node]
        return refuse(r, node), ratio(r[x], draft_law(draft, node, r)[x])

    accept = jax.lax.scan(attempt, jnp.zeros_like(log_p[0]), (order, is_first))[1]
    in_place = jnp.zeros_like(accept).at[order].set(accept)
    return top_down(draft, in_place, lambda row: jnp.log(past_children(draft, row, jnp.exp(log_p[row]), refuse)))


recursive = Rule(plan, accepts=CHILDREN)

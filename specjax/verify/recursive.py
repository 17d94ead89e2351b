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
from specjax.verify.common import draft_law, parent_rows, ratio, residual, top_down


def plan(draft: Draft, log_p: Array) -> Plan:
    """Draft of one tree, log_p [N+1, V] -> Plan.  Carries one residual a row: O(N V) time and memory."""
    if draft.log_q is None:
        return target_match.plan(draft, log_p)
    rows = parent_rows(draft)

    def attempt(left, node):
        row = rows[node]
        r, x = left[row], draft.tokens[node]
        q = draft_law(draft, node, r)
        after = jnp.where(draft.parents[node] >= -1, residual(r, q), r)
        return jax.lax.dynamic_update_index_in_dim(left, after, row, 0), ratio(r[x], q[x])

    nodes = jnp.arange(draft.tokens.shape[0], dtype=jnp.int32)
    left, accept = jax.lax.scan(attempt, jnp.exp(log_p), nodes)
    return top_down(draft, accept, lambda row: jnp.log(left[row]))


recursive = Rule(plan, accepts=CHILDREN)

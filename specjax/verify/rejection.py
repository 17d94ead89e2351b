"""Token-by-token rejection (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).  Lossless, chains.

Accept x with probability min(1, p(x)/q(x)), stop at the first refusal and emit from norm(max(p - q, 0)); a bonus token
from p when all are kept.  With a point mass q this accepts with p(x) and removes x from the residual.
"""

from __future__ import annotations

import jax.numpy as jnp

from specjax.types import CHILDREN, Array, Draft, Plan, Rule
from specjax.verify.common import at_tokens, draft_law, ratio, residual, top_down


def plan(draft: Draft, log_p: Array) -> Plan:
    """Draft of one chain, log_p [N+1, V] -> Plan."""
    n = draft.tokens.shape[0]
    node = jnp.arange(n, dtype=jnp.int32)
    drafted = (draft.parents >= -1).sum(dtype=jnp.int32)
    p_x = at_tokens(log_p, node, draft.tokens)
    accept = p_x if draft.log_q is None else ratio(p_x, at_tokens(draft.log_q.astype(log_p.dtype), node, draft.tokens))

    def correction(row):
        p = jnp.exp(log_p[row])
        after_refusal = residual(p, draft_law(draft, jnp.minimum(row, n - 1), p))
        return jnp.log(jnp.where(row < drafted, after_refusal, p))

    return top_down(draft, accept, correction)


rejection = Rule(plan, accepts=CHILDREN, chain=True)

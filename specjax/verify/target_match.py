"""Sample the target, walk the draft: y ~ p at each row, go down if a child carries y, always emit y.  Lossless, any tree.

q is not needed at all: exact for any proposal that was made without looking at y.  On a deterministic tree no lossless
rule accepts more (the sum of path probabilities); on sampled drafts it accepts sum(p q), less than `rejection`.
"""

from __future__ import annotations

import jax.numpy as jnp

from specjax import trees
from specjax.types import CHILDREN, Array, Draft, Plan, Rule
from specjax.verify.common import at_tokens, normalised, parent_rows, ratio, top_down


def plan(draft: Draft, log_p: Array) -> Plan:
    """Draft of one tree, log_p [N+1, V] -> Plan.  A twin of an earlier sibling is never reached."""
    p_x = at_tokens(log_p, parent_rows(draft), draft.tokens)
    p_x = jnp.where(trees.twins(draft.tokens, draft.parents), 0, p_x)
    left = 1 - jnp.where(trees.older(draft.parents), p_x[None], 0).sum(-1)  # mass that no earlier sibling has taken

    def correction(row):
        p = jnp.exp(log_p[row])
        child = jnp.zeros(p.shape, bool).at[draft.tokens].max(draft.parents + 1 == row)
        return jnp.log(normalised(jnp.where(child, 0, p), p))

    return top_down(draft, ratio(p_x, jnp.maximum(left, 0)), correction)


target_match = Rule(plan, accepts=CHILDREN)

"""Typical acceptance (Medusa, arXiv 2401.10774).  LOSSY, any tree: output is not distributed as the target's.

A token is kept when p(x) > min(epsilon, delta exp(-H(p))); of the paths whose tokens are all kept the longest wins, on a
tie the more probable; then one token is drawn from p.  At temperature 0 it keeps what greedy decoding would.
"""

from __future__ import annotations

import jax.numpy as jnp

from specjax import trees
from specjax.types import CHILDREN, Array, Draft, Plan, Rule
from specjax.verify.common import at_tokens, parent_rows


def typical_rule(*, epsilon: float = 0.09, delta: float = 0.3) -> Rule:
    """The rule at thresholds `epsilon` (absolute) and `delta` (relative to the entropy); Medusa's defaults."""

    def plan(draft: Draft, log_p: Array) -> Plan:
        n = draft.tokens.shape[0]
        node = jnp.arange(n, dtype=jnp.int32)
        rows, here = parent_rows(draft), draft.parents >= -1
        p = jnp.exp(log_p)
        entropy = -jnp.where(p > 0, p * log_p, 0).sum(-1)
        kept = here & (at_tokens(log_p, rows, draft.tokens) > jnp.minimum(epsilon, delta * jnp.exp(-entropy))[rows])
        path = trees.ancestors(draft.parents)[1:, 1:]
        whole = here & jnp.where(path, kept[None], True).all(-1)
        log_path = jnp.where(path & whole[:, None], log_p[rows, draft.tokens][None], 0).sum(-1)
        best_first = jnp.lexsort((-log_path, -path.sum(-1), ~whole))
        accept = whole[best_first].astype(log_p.dtype)
        return Plan(
            accept, (n + 1 + best_first).astype(jnp.int32), jnp.where(node == n - 1, n, node + 1), lambda row: log_p[row]
        )

    return Rule(plan, accepts=CHILDREN, top_down=False, lossless=False)


typical = typical_rule()

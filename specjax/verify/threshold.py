"""Threshold acceptance (SGLang's `speculative_accept_threshold_single`).  LOSSY, any tree.

As `target_match`, but a drafted token of probability `single` or more is kept without a coin.  With `single` above 1 it
is `target_match`.
"""

from __future__ import annotations

import jax.numpy as jnp

from specjax.types import CHILDREN, Array, Draft, Plan, Rule
from specjax.verify import target_match
from specjax.verify.common import at_tokens, parent_rows


def threshold_rule(*, single: float = 0.3) -> Rule:
    """The rule that keeps every drafted token with p(x) >= `single`."""

    def plan(draft: Draft, log_p: Array) -> Plan:
        exact = target_match.plan(draft, log_p)
        likely = at_tokens(log_p, parent_rows(draft), draft.tokens) >= single
        return exact._replace(accept=jnp.where(likely & (draft.parents >= -1), 1, exact.accept))

    return Rule(plan, accepts=CHILDREN, lossless=False)


threshold = threshold_rule()

"""Coupled decoding (common random numbers; Daliri et al., arXiv 2408.07978).  Lossless, any tree.

y = argmax(log p + g) with g the request's own noise at that position; the walk goes on while a child equals y, and y is
always emitted.  Drafters draw with the same g.  The tokens depend on the seed alone: not on the drafter, the batch or the
schedule, so speculative and plain decoding agree token for token at any temperature.
"""

from __future__ import annotations

from specjax.types import CHILDREN, Rule
from specjax.verify import target_match

coupled = Rule(target_match.plan, accepts=CHILDREN, coupled=True)

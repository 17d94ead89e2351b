"""One sampled child and the top K-1 of the rest (Hu et al., arXiv 2502.18779): optimal for such drafts.  Lossless, any tree.

The order is the whole rule: the sampled child is tested first, against q with the deterministic ones removed; what is left
of p then falls on the deterministic ones by itself.  Acceptance is p(H) + sum outside H of min(p, q_r).  Testing the
deterministic ones first would be lossless too and lose up to .13 of acceptance.
"""

from __future__ import annotations

from specjax.types import Rule
from specjax.verify import recursive

greedy_multi_draft = Rule(recursive.plan, accepts=("point", "sampled_then_top"))

"""Verification rules: one file a rule, each a pure `plan`; `draw.py` holds the only coins."""

from specjax.types import Rule
from specjax.verify.block import block
from specjax.verify.coupled import coupled
from specjax.verify.greedy_multi_draft import greedy_multi_draft
from specjax.verify.k_seq import k_seq
from specjax.verify.recursive import recursive
from specjax.verify.rejection import rejection
from specjax.verify.target_match import target_match
from specjax.verify.threshold import threshold
from specjax.verify.traversal import traversal
from specjax.verify.typical import typical

RULES: dict[str, Rule] = {
    "rejection": rejection,
    "coupled": coupled,
    "target_match": target_match,
    "block": block,
    "recursive": recursive,
    "traversal": traversal,
    "k_seq": k_seq,
    "greedy_multi_draft": greedy_multi_draft,
    "typical": typical,
    "threshold": threshold,
}

"""Verification rules: one file a rule, each a pure `plan`; `draw.py` holds the only coins."""

from specjax.types import Rule
from specjax.verify.block import block
from specjax.verify.coupled import coupled
from specjax.verify.rejection import rejection
from specjax.verify.target_match import target_match

RULES: dict[str, Rule] = {
    "rejection": rejection,
    "coupled": coupled,
    "target_match": target_match,
    "block": block,
}

"""What a rung of the ladder says: one result, with what it could have seen."""

from __future__ import annotations

from typing import NamedTuple

PASS, FAIL, INCONCLUSIVE, SKIPPED = "pass", "fail", "inconclusive", "not applicable"


class Test(NamedTuple):
    """A statistical test that was made, before it is judged."""

    __test__ = False  # not one of pytest's

    statistic: float
    p_value: float | None  # P(a statistic at least so large) under the null; None for an exact comparison or an e-value
    samples: int
    effect: float  # the smallest effect that this sample finds with probability .99 at the false-alarm rate asked
    unit: str  # of the effect, such as "TV of a token", "mean acceptance"
    e_value: float | None = None  # of a bet against the null, which any stopping time leaves valid


class Finding(NamedTuple):
    """The verdict of one rung on one subject."""

    rung: str
    status: str  # PASS, FAIL, INCONCLUSIVE (too few samples to see what it should) or SKIPPED
    looked_at: str  # one line: what was compared with what
    saw: str  # one line: what came out, or why the rung does not apply
    false_alarm: float  # P(fail | lossless); 0 for exact comparisons
    test: Test | None = None

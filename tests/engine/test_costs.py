"""Costs of rounds from timings whose truth is known; `test_plan.py` times an engine."""

import pytest

from specjax.engine import costs
from specjax.latency.calibrate import predict, predict_draft

COUNTS = (None, 1, 2, 4)


def test_drafting_and_verifying_are_told_apart():
    """Rounds of .5 + .1 a token + .001 a cached token of each request, and drafting of .3 + .05 a request."""
    verify = lambda tokens, b, c: 0.5 + 0.1 * tokens + 0.001 * b * c
    draft = lambda b: 0.3 + 0.05 * b
    timed = {}
    for b in (1, 2, 4, 8):
        for c in (10, 100):
            for which, n in enumerate(COUNTS):
                timed[which, b, c] = verify(b, b, c) if n is None else verify(b * (n + 1), b, c) + draft(b)
    passes, drafts = costs.parts(timed, COUNTS, 4)
    for b, width, c in ((1, 1, 10), (3, 1, 50), (4, 5, 100), (8, 5, 10)):
        assert predict(passes, width, b, c) == pytest.approx(verify(b * width, b, c), rel=1e-3)
    for b in (1, 3, 8):
        assert predict_draft(drafts, 4, b, 0) == pytest.approx(draft(b), rel=1e-2)

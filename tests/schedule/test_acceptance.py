"""Acceptance of earlier rounds as the confidence of the next."""

import numpy as np
import pytest

from specjax.schedule.acceptance import expected, forgotten, learnt, nothing_yet


def test_it_finds_the_truth_position_by_position():
    """Tokens accepted with .9, .6, .2, those before them having been; one slot has never been reached past the first."""
    rng, history = np.random.default_rng(0), nothing_yet(2, 3)
    for _ in range(400):
        kept = np.cumprod(rng.random((2, 4, 3)) < [0.9, 0.6, 0.2], -1).sum(-1)
        history = learnt(history, np.minimum(kept, [[3], [1]]), np.broadcast_to([[3], [1]], (2, 4)), fade=1.0, pool_fade=1.0)
    assert expected(history)[0] == pytest.approx([0.9, 0.6, 0.2], abs=0.03)
    assert expected(history)[1] == pytest.approx([0.9, 0.6, 0.2], abs=0.03), "what it does not know is the pool's"


def test_everything_at_first_and_rounds_without_drafts_say_nothing():
    history = nothing_yet(2, 2)
    assert (expected(history) == 1).all()
    same = learnt(history, np.zeros((2, 3), int), np.zeros((2, 3), int))
    assert (expected(same) == 1).all()


def test_it_forgets():
    """What was is outweighed by what is; a slot that changes hands is the pool's mean again."""
    history = nothing_yet(1, 1)
    for accepted in (1, 0):
        for _ in range(60):
            history = learnt(history, np.full((1, 1), accepted), np.ones((1, 1), int))
    assert expected(history)[0, 0] < 0.15 and history.pool_kept[0] / history.pool_reached[0] > 0.3
    assert expected(forgotten(history, [0]))[0, 0] == pytest.approx((history.pool_kept[0] + 1) / (history.pool_reached[0] + 1))

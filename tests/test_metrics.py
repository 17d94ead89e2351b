"""Counts of rounds -> statistics, worked by hand, and against files of published runs."""

import json
from pathlib import Path

import numpy as np
import pytest

from specjax import metrics
from specjax.types import RoundInfo

LOG = RoundInfo(drafted=[3, 3, 0, 2, 3, 0], accepted=[3, 0, 0, 1, 2, 0], emitted=[4, 1, 1, 2, 3, 0])


def test_statistics_by_hand():
    s = metrics.statistics(metrics.cut(LOG, 11), 3)
    assert (s.num_spec_steps, s.num_draft_tokens, s.num_accepted_draft_tokens, s.num_spec_tokens, s.num_emitted_tokens) == (
        5,
        11,
        6,
        3,
        11,
    )
    assert s.mean_acceptance_length == 1 + 6 / 5 and s.tokens_per_step == 11 / 5 and s.draft_acceptance_rate == 6 / 11
    assert s.acceptance_histogram == (2, 1, 1, 1)
    assert s.acceptance_histogram_by_draft_length == ((1, 0, 0, 0), (0, 0, 0, 0), (0, 1, 0, 0), (1, 0, 1, 1))
    assert s.per_position_acceptance_rate == (3 / 5, 2 / 5, 1 / 5)


@pytest.mark.parametrize(
    ("kept", "drafted", "accepted", "emitted"),
    [
        (11, [3, 3, 0, 2, 3], [3, 0, 0, 1, 2], [4, 1, 1, 2, 3]),
        (10, [3, 3, 0, 2, 3], [3, 0, 0, 1, 2], [4, 1, 1, 2, 2]),  # only the bonus is cut
        (9, [3, 3, 0, 2, 3], [3, 0, 0, 1, 1], [4, 1, 1, 2, 1]),
        (8, [3, 3, 0, 2], [3, 0, 0, 1], [4, 1, 1, 2]),
        (4, [3], [3], [4]),
        (3, [3], [3], [3]),
        (1, [3], [1], [1]),
        (0, [], [], []),
    ],
)
def test_cut(kept, drafted, accepted, emitted):
    got = metrics.cut(LOG, kept)
    assert [x.tolist() for x in got[:3]] == [drafted, accepted, emitted]
    assert got.emitted.sum() == kept


def test_M01_an_end_inside_a_round():
    """[d1, d2, EOS, d4, d5, bonus]: tokens_per_step is 3, not 6; tau counts accepted drafts and is named otherwise."""
    s = metrics.statistics(RoundInfo([5], [3], [3]), 5)
    assert s.tokens_per_step == 3 and s.mean_acceptance_length == 4 and s.acceptance_histogram == (0, 0, 0, 1, 0, 0)


def test_nothing_at_all():
    s = metrics.statistics(metrics.cut(RoundInfo([0], [0], [0]), 0), 2)
    assert s.num_spec_steps == 0 and s.mean_acceptance_length == 0 and s.per_position_acceptance_rate == (0, 0)
    assert metrics.statistics([], 2) == s


def test_pooling_adds_counts_not_rates():
    """A mean of ratios is another number than the ratio of sums."""
    one, two = metrics.cut(LOG, 11), RoundInfo([3], [0], [1])
    pooled = metrics.statistics([one, two], 3)
    assert pooled.mean_acceptance_length == 1 + 6 / 6 and pooled.acceptance_histogram == (3, 1, 1, 1)
    assert pooled.mean_acceptance_length != (1 + 6 / 5 + 1) / 2
    each = [metrics.statistics(r, 3) for r in (one, two)]
    assert metrics.merge(each) == pooled
    with pytest.raises(ValueError, match="of one K"):
        metrics.merge([each[0], metrics.statistics(two, 4)])
    with pytest.raises(ValueError):
        metrics.merge([])


def test_a_tree_counts_its_nodes_but_accepts_along_a_path():
    s = metrics.statistics(RoundInfo([7, 7], [2, 0], [3, 1]), 3)
    assert s.num_draft_tokens == 14 and s.draft_acceptance_rate == 2 / 14 and s.per_position_acceptance_rate == (0.5, 0.5, 0.0)
    assert len(s.acceptance_histogram_by_draft_length) == 8


ANSWERS = Path(__file__).parents[2] / "shared" / "data" / "stats" / "medusa_vicuna7b_mtbench_answers.jsonl"


@pytest.mark.skipif(not ANSWERS.exists(), reason="the published run lies in ../shared, which is not here")
def test_M03_tau_of_a_published_run():
    """160 turns, 43754 tokens; `idxs` there is a 0-based loop index, so rounds = idx + 1: 2.565, not 2.589.

    Rounds are spread evenly over a turn's tokens (the file has no more); tokens per step is a ratio of sums.
    """
    turns = []
    for line in ANSWERS.read_text().splitlines():
        choice = json.loads(line)["choices"][0]
        turns += list(zip(choice["new_tokens"], choice["idxs"], strict=True))
    logs = []
    for tokens, idx in turns:
        emitted = np.full(idx + 1, tokens // (idx + 1))
        emitted[: tokens % (idx + 1)] += 1
        logs.append(RoundInfo(np.full(idx + 1, 5), emitted - 1, emitted))
    s = metrics.statistics(logs, 5)
    assert len(turns) == 160 and s.num_emitted_tokens == 43754 and s.num_spec_steps == 17058
    assert round(s.tokens_per_step, 3) == 2.565 == round(s.mean_acceptance_length, 3)
    assert round(43754 / 16898, 3) == 2.589
    assert round(float(np.mean([metrics.statistics(log, 5).tokens_per_step for log in logs])), 3) == 2.567

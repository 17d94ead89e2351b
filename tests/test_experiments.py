"""What experiments make of their measurements, on numbers whose answer is known; the measuring is theirs to run."""

import importlib
from pathlib import Path

import numpy as np
import pytest

from specjax import bench, zoo
from specjax.metrics import statistics
from specjax.schedule.confidence import outcomes
from specjax.types import RoundInfo

ROOT = Path(__file__).parents[1]


@pytest.fixture
def experiment(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "experiments")
    return importlib.import_module


def test_predicted_speedups_are_held_to_the_measured_ones(experiment):
    """Of three points one is 20 % off, and K = 2 was thought best where K = 1 is; the other batch should not speculate."""
    made = experiment("predicted_speedup")
    point = lambda batch, k, predicted, measured: made.Point(
        "medusa", batch, k, 1.5, predicted, bench.Interval(measured, 0.9 * measured, 1.1 * measured), 1.0, 2.0
    )
    text = made.markdown([point(1, 1, 1.1, 1.2), point(1, 2, 1.2, 1.0), point(8, 1, 0.8, 0.8)])
    assert "| medusa | 1 | 2 | 1.50 | 1.00 + 2.00 | 1.20 | 1.00 [0.90, 1.10] | +20% |" in text
    assert "median 8.3%, worst 20.0%; 67% of points within 15 %" in text
    assert "| medusa | 1 | 2 | 1 | 20.0% |" in text and "| medusa | 8 | 0 | 0 | 0.0% |" in text


def test_speed_is_that_of_full_slots(experiment):
    """Batches of two rows, of which one ended early: seconds a round by the longer one, tau over the rounds of both."""
    made = experiment("predicted_speedup")
    row = lambda accepted, steps: bench.Completion("", [], "length", [], made_up(accepted, steps))
    sample = lambda seconds, *rows: bench.Sample([row(*r) for r in rows], 0.0, seconds)
    plain, fast = [sample(10.0, (0, 10), (0, 10))], [sample(8.0, (6, 4), (2, 8))]
    assert made.full_slots(plain, fast).mean == pytest.approx((1 + 8 / 12) * 1.0 / 1.0)


def made_up(accepted, steps):
    """Statistics with so many accepted tokens in so many rounds."""
    each = np.full(steps, accepted // steps)
    each[: accepted % steps] += 1
    return statistics(RoundInfo(np.full(steps, 2), each, each + 1), 2)


def test_lenses_read_cards(experiment):
    made = experiment("three_lenses")
    assert made.training("testbed", "ngram") == {"trained": "-", "seen": "-", "hours": "-"}
    found = made.training("testbed", "mtp")
    assert found["trained"] == "467,904" and found["hours"] in (zoo.path("testbed/mtp") / "card.md").read_text()
    cache = lambda capacity: {"k": np.zeros((2, 3, capacity), np.float16), "state": np.zeros(7)}
    assert made.slot_bytes(cache) == 12


def test_calibration_is_scored_by_position(experiment):
    """Ten rounds of two tokens of which the first was always accepted, and given one half."""
    made = experiment("confidence_calibration")
    seen = outcomes(np.array([2] * 5 + [1] * 5), np.full(10, 2), 2)
    text = made.markdown({"as given": np.full((10, 2), 0.5)}, seen)
    assert "| | prefix accepted | 1.00 | 0.50 |" in text and "| as given | ECE | 0.500 | 0.250 |" in text


def test_tau_over_tokens_counts_on_through_the_runs_of_a_card(experiment):
    """Steps of a later run begin at 0; tokens are those of all runs; a line through points of a line is that line."""
    made = experiment("tau_over_tokens")
    table = "| step | tokens | held-out loss | tau, greedy | tau at temperature 1 |\n| --- | --- | --- | --- | --- |\n"
    later = f"Judged on text, in decoding 24 prompts.\n\n{table}| 0 | 0 | 3 | 2 | 1.5 |\n| 4 | 1,024 | 2 | 3 | 2 |\n"
    first = f"Judged on text, in decoding 12 prompts.\n\n{table}| 8 | 1,024 | 3 | 2 | 1.5 |\n"
    (few, begun), (many, after) = made.runs(f"# eagle3\n\n{later}\nBefore that:\n\n{first}")
    assert (few, many) == (12, 24) and begun.tolist() == [[1024, 2, 1.5]] and after.tolist() == [[1024, 2, 1.5], [2048, 3, 2]]
    assert made.line(after, 1) == pytest.approx((-8, 1, 0), abs=1e-9)

"""Planted faults: one a family is found here, the whole matrix is `slow` and committed as tests/golden/mutant_matrix.md."""

from pathlib import Path

import jax
import pytest

from specjax.lossless.faults.mutants import FAMILIES, LADDER, MUTANTS, SUBJECTS, how, matrix, planted, sound
from specjax.lossless.finding import FAIL, PASS
from specjax.lossless.lab import Lab, settings
from specjax.lossless.ladder import RUNGS

GOLDEN = Path(__file__).parents[1] / "golden" / "mutant_matrix.md"

SAMPLE = {
    "u <= ratio": "boundary coins",
    "one coin a round": "boundary coins",
    "double acceptance": "exact law",
    "block, unscaled residual": "exact law",
    "siblings against p": "exact law",
    "bonus of the row before": "exact law",
    "p / (q + 1e-9)": "exact law",
    "argmax draft, softmax q": "acceptance",
    "no top-p on verified rows": "support",
    "penalties without drafts": "joint law",
    "coins = emitted token": "random streams",
    "draft noise by position": "random streams",
    "original q for siblings": "acceptance",
    "path not compacted": "greedy equality",
    "tokens after the end": "endings",
    "a limit that peeks": "bets on tokens",
    "bias of TV .02": "most probable token",
}
"""A few of every family, with one rung that finds each."""


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_of_mutants_is_found(name):
    finding = RUNGS[SAMPLE[name]](Lab(planted(name), how(name)))
    assert finding.status == FAIL, finding


def test_the_sample_has_every_family():
    assert {MUTANTS[name].family for name in SAMPLE} == set(FAMILIES) and set(SAMPLE.values()) <= set(RUNGS)


def rows(text):
    """(mutant, cheapest rung) of each line of a matrix."""
    cells = [[c.strip() for c in line.replace("\\|", "/").strip("|").split("|")] for line in text.splitlines()[2:]]
    return {c[0]: c[4] for c in cells}


def test_the_committed_matrix_has_every_mutant_and_no_survivor():
    found = rows(GOLDEN.read_text())
    assert list(found) == [name.replace("|", "/") for name in MUTANTS] and len(MUTANTS) >= 30
    assert set(found.values()) <= set(LADDER), "a fault that no rung finds is a hole in the ladder"


def test_planting_touches_nothing_but_the_subject():
    """Once its context is left, the library is what it was; sound subjects beside it stay sound."""
    from specjax import decode, keys, sampling
    from specjax.drafters import small
    from specjax.verify import draw

    modules = (decode, keys, sampling, draw, small)
    before = [dict(vars(m)) for m in modules]
    for name in MUTANTS:
        subject = planted(name)
        assert subject != sound(MUTANTS[name].subject), name
        with subject.plant():
            pass
    assert [dict(vars(m)) for m in modules] == before
    name = "no top-p on verified rows"
    planted_first = RUNGS["support"](Lab(planted(name), how(name)))
    assert planted_first.status == FAIL and RUNGS["support"](Lab(sound("warped"), how(name))).status == PASS


def test_every_subject_has_a_mutant():
    assert {m.subject for m in MUTANTS.values()} == set(SUBJECTS)
    assert all(m.story and m.name == name for name, m in MUTANTS.items())


@pytest.mark.slow
def test_every_mutant_is_found():
    """And by the rung that the committed matrix names as the cheapest."""
    golden = rows(GOLDEN.read_text())
    for index, name in enumerate(MUTANTS):
        (row,) = matrix([name])
        assert row.found_by[:1] == (golden[name.replace("|", "/")],), name
        if index % 8 == 7:
            jax.clear_caches()  # many compiled loops in one process exhaust memory maps


@pytest.mark.slow
@pytest.mark.parametrize("name", SUBJECTS)
def test_sound_subjects_pass_everything_that_finds_mutants(name):
    lab = Lab(sound(name), settings(sound(name), quick=True, seed=0))
    assert not [f for f in (RUNGS[rung](lab) for rung in RUNGS) if f.status == FAIL]

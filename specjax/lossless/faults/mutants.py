"""Testing the tests: planted faults, most of which somebody has shipped, and which rung finds each.

A fault that no rung finds is a hole in the ladder.  `matrix` runs the rungs on every mutant; its result is committed as
tests/golden/mutant_matrix.md (made by experiments/mutant_matrix.py).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from specjax.lossless.built_in import built_in
from specjax.lossless.faults import engine, laws, rules
from specjax.lossless.faults.planting import Mutant
from specjax.lossless.finding import FAIL, Finding
from specjax.lossless.lab import Lab, Settings, settings
from specjax.lossless.ladder import CONTROLS, RUNGS
from specjax.lossless.subject import Subject
from specjax.sampling import SamplingParams

MUTANTS: dict[str, Mutant] = {m.name: m for m in (*rules.MUTANTS, *laws.MUTANTS, *engine.MUTANTS)}

FAMILIES = tuple(dict.fromkeys(m.family for m in MUTANTS.values()))

SUBJECTS: dict[str, Callable[[], Subject]] = {
    "chain": lambda: built_in("small"),
    "block": lambda: built_in("small", "block"),
    "ngram": lambda: built_in("ngram"),
    "warped": lambda: built_in("small", sampling=SamplingParams(temperature=0.7, top_p=0.8, presence_penalty=0.8)),
    "tree": lambda: built_in("specinfer"),
    "iid tree": lambda: built_in("specinfer", children="iid"),
    "iid match": lambda: built_in("specinfer", "target_match", children="iid"),
    "tiny": lambda: built_in("small", target="tiny"),
    "tiny tree": lambda: built_in("specinfer", target="tiny"),
}
"""What faults are planted in: small enough for seconds a rung, rich enough that no fault hides."""


@functools.cache
def sound(name: str) -> Subject:
    """One of SUBJECTS; the same object every time, for what it compiles is kept."""
    return SUBJECTS[name]()


def planted(name: str) -> Subject:
    """The subject of a mutant with its fault in it."""
    mutant = MUTANTS[name]
    return mutant.plant(sound(mutant.subject))


class Row(NamedTuple):
    """One line of the matrix."""

    mutant: Mutant
    found_by: tuple[str, ...]  # rungs that fail, cheapest first
    samples: int | None  # tokens or sequences that the cheapest one looked at; None for an exact one


SIZES: tuple[bool, ...] = (True, False)
"""Quick reports first; what these do not see has to be seen by a full one."""

LADDER = tuple(sorted((name for name in RUNGS if name not in CONTROLS), key="cached state".__eq__))
"""Rungs as mutants meet them: the cached state last, for it compiles most."""


def how(name: str, *, quick: bool = True) -> Settings:
    """Sizes of a mutant's trial: those of a report on its subject."""
    return settings(sound(MUTANTS[name].subject), quick=quick, seed=0)


def found_by(name: str, *, quick: bool) -> Iterator[Finding]:
    """The findings that fail on a mutant, the cheapest rung first."""
    lab = Lab(planted(name), how(name, quick=quick))
    return (f for f in (RUNGS[rung](lab) for rung in LADDER) if f.status == FAIL)


def matrix(names: Sequence[str] = (), *, enough: int = 1) -> Iterator[Row]:
    """Which rungs find which mutant, a mutant after the other; the first `enough` rungs that do."""
    for name in names or MUTANTS:
        trials = (tuple(itertools.islice(found_by(name, quick=quick), enough)) for quick in SIZES)
        failed = next((trial for trial in trials if trial), ())
        test = failed[0].test if failed else None
        yield Row(MUTANTS[name], tuple(f.rung for f in failed), None if test is None else test.samples)

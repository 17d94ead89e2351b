"""What rungs share: how much to test, the sample that several of them read, and how a test becomes a finding."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax

from specjax.lossless.evidence import Evidence, gather, onlooker
from specjax.lossless.finding import FAIL, INCONCLUSIVE, PASS, SKIPPED, Finding, Test
from specjax.lossless.subject import Sample, Subject, sample, without_drafts

FALSE_ALARM = 1e-3
"""P(any rung of a report fails | lossless), split evenly beforehand over the statistical ones."""

STATISTICAL = 9
"""Statistical rungs of a ladder, the null control included."""

LARGE = 3_000_000
"""Parameters above which a target is called large and sampled sparingly."""


class Settings(NamedTuple):
    """How much is tested."""

    rows: int  # requests
    new: int  # tokens of each, at most
    batch: int  # requests decoded together
    wanted: float  # the bias per token (TV) that the directional tests have to be able to see
    few: int  # requests in the exact comparisons with plain decoding
    short: int  # tokens of each of these, at most
    pairs: int  # requests of either sort in the two-sample test
    seed: int = 0
    alpha: float = FALSE_ALARM / STATISTICAL  # of one test


def is_large(subject: Subject) -> bool:
    """Whether a target's tokens are dear."""
    return sum(x.size for x in jax.tree.leaves(subject.params.target)) > LARGE


def settings(subject: Subject, *, quick: bool, seed: int) -> Settings:
    """Sizes by the cost of a token: a table's are free, 12,000 of a real model see a bias of TV .02."""
    if is_large(subject):
        rows, new, batch = (48, 64, 24) if quick else (288, 64, 32)
        return Settings(rows, new, batch, 0.05 if quick else 0.02, 8, 16 if quick else 48, min(rows, 128), seed)
    rows = 4096 if quick else 32_768
    return Settings(rows, 8, min(rows, 8192), 0.05 if quick else 0.02, 64, 16, 512, seed)


class Lab:
    """A subject on the bench.  What is costly is made once, when a rung first asks for it."""

    def __init__(self, subject: Subject, how: Settings):
        self.subject, self.how = subject, how

    @functools.cached_property
    def taken(self) -> Sample:
        """The sample of the subject, with what the onlooker noted."""
        h = self.how
        probe = onlooker(self.subject.names.rule)
        return sample(self.subject, key=self.key(1), rows=h.rows, new=h.new, batch=h.batch, probe=probe)

    @functools.cached_property
    def evidence(self) -> Evidence:
        """Every token of it under its own independent row."""
        return gather(self.subject, self.taken)

    @functools.cached_property
    def plain(self) -> Sample:
        """Plain decoding of as many requests as the two-sample test reads, with other keys."""
        h = self.how
        return sample(without_drafts(self.subject), key=self.key(2), rows=h.pairs, new=h.new, batch=min(h.batch, h.pairs))

    def key(self, purpose: int) -> jax.Array:
        """A key of its own for each purpose."""
        return jax.random.split(jax.random.key(self.how.seed), 8)[purpose]


def judge(rung: str, looked_at: str, test: Test, how: Settings, saw: str = "", wanted: float | None = None) -> Finding:
    """PASS, FAIL, or INCONCLUSIVE where the test could not have seen an effect of `wanted`."""
    p = test.p_value
    failed = (p is not None and p < how.alpha) or (test.e_value is not None and test.e_value >= 1 / how.alpha)
    blind = wanted is not None and not test.effect <= wanted
    status = FAIL if failed else INCONCLUSIVE if blind else PASS
    number = f"e = {test.e_value:.3g}" if test.e_value is not None else f"p = {p:.2g}"
    end = f"; it would have to see {wanted:g}" if blind and not failed else ""
    words = f"{saw + ', ' if saw else ''}{number}; {test.samples} samples see {test.unit} {test.effect:.2g}{end}"
    return Finding(rung, status, looked_at, words, how.alpha, test)


def exactly(rung: str, looked_at: str, faults: list[str], saw: str, seen: bool = True) -> Finding:
    """The finding of an exact comparison: it fails with the first fault, and is inconclusive where nothing was `seen`."""
    status = FAIL if faults else PASS if seen else INCONCLUSIVE
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return Finding(rung, status, looked_at, faults[0] + more if faults else saw, 0.0)


def skipped(rung: str, looked_at: str, reason: str) -> Finding:
    """The rung does not apply."""
    return Finding(rung, SKIPPED, looked_at, reason, 0.0)

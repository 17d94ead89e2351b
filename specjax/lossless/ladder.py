"""The ladder: rungs in the order of their cost, the exact ones first.

    exact law, boundary coins, random streams         the rule and its coins: no sample at all
    greedy and coupled equality, batch mates, endings, cached state        token for token against plain decoding
    joint law, bets, support, distributions, directions, acceptance        one sample, one set of independent rows
    two samples; null control, teeth control          against plain decoding; plain against plain; a planted bias is found

Sizes and seeds are fixed beforehand, so that a report can be made again.  The chance that any rung of it fails on a lossless
subject is at most `lab.FALSE_ALARM`, split evenly over the statistical rungs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from specjax.lossless.bias import bias
from specjax.lossless.finding import FAIL, INCONCLUSIVE, PASS, SKIPPED, Finding
from specjax.lossless.lab import Lab, is_large, judge, settings, skipped
from specjax.lossless.rungs import sampled
from specjax.lossless.rungs.coins import coins
from specjax.lossless.rungs.endings import endings
from specjax.lossless.rungs.exact import exact
from specjax.lossless.rungs.greedy import PERMUTATIONS, coupled, greedy, two_samples
from specjax.lossless.rungs.state import state
from specjax.lossless.rungs.streams import batch_mates, streams
from specjax.lossless.statistics import two_sample
from specjax.lossless.subject import Subject, without_drafts


def null_control(lab: Lab) -> Finding:
    """Plain decoding against plain decoding: the two-sample test must have nothing to say."""
    name, looked = "null control", "two halves of a sample of plain decoding: nothing may be found"
    if lab.subject.sampling.temperature == 0:
        return skipped(name, looked, sampled.GREEDY)
    count, prompts = len(lab.plain.start) // 2, len(lab.subject.prompts)
    count -= count % prompts
    if count == 0:
        return skipped(name, looked, f"{len(lab.plain.start)} requests do not hold each of {prompts} prompts twice")
    halves = [[lab.plain.new(i + half * count) for i in range(count)] for half in (0, 1)]
    strata = [i % prompts for i in range(count)] * 2
    test = two_sample(*halves, seed=lab.how.seed, permutations=PERMUTATIONS, alpha=lab.how.alpha, strata=strata)
    return judge(name, looked, test, lab.how)


def teeth_control(lab: Lab) -> Finding:
    """The subject with a bias of the size wanted, which must be found; of a large target its plain decoding, which is cheap."""
    tv, large = lab.how.wanted, is_large(lab.subject)
    what = "plain decoding of the target" if large else "the same subject"
    name, looked = "teeth control", f"{what} with a planted bias of TV {tv:g} per token: it has to be found"
    if lab.subject.sampling.temperature == 0:
        return skipped(name, looked, sampled.GREEDY)
    planted = Lab(bias(without_drafts(lab.subject) if large else lab.subject, tv), lab.how._replace(seed=lab.how.seed + 1))
    found = sampled.top(planted)
    status = PASS if found.status == FAIL else INCONCLUSIVE
    return Finding(name, status, looked, f"{found.rung}: {found.saw}", 0.0, found.test)


RUNGS: dict[str, Callable[[Lab], Finding]] = {
    "exact law": exact,
    "boundary coins": coins,
    "random streams": streams,
    "greedy equality": greedy,
    "coupled equality": coupled,
    "batch mates": batch_mates,
    "endings": endings,
    "cached state": state,
    "joint law": sampled.joint,
    "bets on tokens": sampled.any_time,
    "support": sampled.support,
    "distribution, likely first": sampled.distribution,
    "distribution, drafted first": sampled.distribution_witness,
    "most probable token": sampled.top,
    "drafted token": sampled.drafted,
    "acceptance": sampled.acceptance,
    "two samples": two_samples,
    "null control": null_control,
    "teeth control": teeth_control,
}
"""Every rung by the name that its finding has."""

CONTROLS = ("null control", "teeth control")
"""Rungs that say something about the tests, not about the subject."""

Progress = Callable[[int, int, str], None]  # (done, total, what comes next)


def climb(
    subject: Subject, *, quick: bool, seed: int = 0, progress: Progress | None = None, done: Collection[str] = ()
) -> Iterator[Finding]:
    """Findings of every rung in order, those that do not apply included.

    Args:
      subject: what is tested.
      quick: minutes instead of up to half an hour: a bias of TV .05 per token has to be seen, else .02.
      seed: of everything that is drawn.
      progress: called before each rung.
      done: names of rungs whose findings are known already; they are left out.
    """
    lab = Lab(subject, settings(subject, quick=quick, seed=seed))
    for index, (name, rung) in enumerate(RUNGS.items()):
        if name in done:
            continue
        if progress is not None:
            progress(index, len(RUNGS), name)
        yield rung(lab)


def worst(statuses: Collection[str]) -> str:
    """What a whole report says: the first of fail, inconclusive, pass that any rung says."""
    return next((s for s in (FAIL, INCONCLUSIVE, PASS) if s in statuses), SKIPPED)

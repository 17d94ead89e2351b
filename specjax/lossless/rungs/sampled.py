"""Rungs on a sample of tokens and their independent rows: any model, any drafter, any rule.

Each token y with its row p gives a variable of known mean whatever the context: 1[y = top] - p(top); 1[y = w] - p(w) with w
the token that the draft pushes towards; F(y-) + v p(y), uniform, in two orders.  Speculative bugs push along w or away from
it, and from or towards the top, so these two directions see them with the fewest tokens.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from specjax.lossless.evidence import has_closed_form
from specjax.lossless.finding import Finding
from specjax.lossless.lab import Lab, exactly, judge, skipped
from specjax.lossless.statistics import bets, e_test, g_test, martingale_test, uniform_test
from specjax.lossless.subject import laws

MOST_CELLS = 5_000
"""Cells of a joint law, summed over prompts, that are enumerated."""

SAMPLES_A_CELL = 6

TAIL = 1e-6
"""Least probability of a class of tokens: below it a float's rounding would decide a bet."""


def is_greedy(lab: Lab) -> bool:
    """At temperature 0 every law is one-hot: equality with plain decoding says everything."""
    return lab.subject.sampling.temperature == 0


GREEDY = "temperature 0: every law is one-hot, see equality with plain decoding"


def joint(lab: Lab) -> Finding:
    """The joint law of the first tokens against the target's, every continuation enumerated."""
    name, subject = "joint law", lab.subject
    looked = "counts of the first tokens, jointly, against the target's law of them"
    if is_greedy(lab):
        return skipped(name, looked, GREEDY)
    length = min(subject.drafter.depth + 1, lab.how.new)
    size, prompts = subject.target.vocab_size, len(subject.prompts)
    cells = min(MOST_CELLS, lab.how.rows // SAMPLES_A_CELL)
    length = min(length, int(math.log(max(1, cells / prompts)) / math.log(size)))
    if length < 2:
        return skipped(
            name, looked, f"the joint of two of {size} tokens has too many cells for {lab.how.rows} samples; see the rows"
        )
    if subject.eos:
        return skipped(name, looked, "rows may end early; see the rows")
    tokens, start = lab.taken.tokens, lab.taken.start
    law = np.stack([joint_law(lab, prompt, length) for prompt in subject.prompts])
    counts, weight = np.zeros_like(law), np.zeros(prompts)
    for row in range(len(tokens)):
        first = tokens[row, start[row] : start[row] + length]
        counts[(row % prompts, *first)] += 1
        weight[row % prompts] += 1
    law = law * (weight / weight.sum()).reshape((-1,) + (1,) * length)
    test = g_test(counts, law, alpha=lab.how.alpha)
    return judge(
        name, f"the first {length} tokens, jointly: G-test on {law.size} cells against the target's law", test, lab.how
    )


def joint_law(lab: Lab, prompt: tuple[int, ...], length: int) -> np.ndarray:
    """The target's law [V] * length of what follows a prompt, by teacher-forced passes over all continuations."""
    size = lab.subject.target.vocab_size
    every = np.asarray(list(itertools.product(range(size), repeat=length)), np.int32)
    tokens = np.concatenate([np.tile(np.asarray(prompt, np.int32), (len(every), 1)), every], 1)
    log_p = laws(lab.subject, tokens, np.full(len(every), len(prompt), np.int32), length)
    chosen = np.take_along_axis(log_p.astype(np.float64), every[..., None], 2)[..., 0]
    return np.exp(chosen.sum(1)).reshape((size,) * length)


def any_time(lab: Lab) -> Finding:
    """Bets on every token against its row; valid however often one looks."""
    name, looked = "bets on tokens", "every emitted token against its row, by rank: bets, valid whenever one stops"
    if is_greedy(lab):
        return skipped(name, looked, GREEDY)
    e = lab.evidence
    ranks = np.maximum(e.ranks.astype(np.float64), TAIL)
    return judge(name, looked, e_test(bets(e.rank, ranks / ranks.sum(1, keepdims=True)), alpha=lab.how.alpha), lab.how)


def support(lab: Lab) -> Finding:
    """No token of probability 0, however seldom; a float's width of slack at a cut."""
    name, looked = "support", "emitted tokens that their own row gives probability 0"
    if is_greedy(lab):
        return skipped(name, looked, GREEDY)
    e, n = lab.evidence, len(lab.evidence.y)
    outside = int((e.p <= 0).sum())
    allowed = n // 10_000  # the two passes differ by rounding, and so may what lies exactly at a cut
    faults = [f"{outside} of {n} tokens have probability 0 in their own row"] if outside > allowed else []
    return exactly(name, looked, faults, f"{outside} of {n} tokens ({allowed} allowed: rounding at a cut)", n > 0)


def distribution(lab: Lab) -> Finding:
    """Randomised distribution function, likely tokens first."""
    return _uniform(lab, "distribution, likely first", "F(y-) + v p(y) of every token, likely ones first: uniform?", False)


def distribution_witness(lab: Lab) -> Finding:
    """Randomised distribution function, the drafted token first."""
    looked = "F(y-) + v p(y) of every token, the one that the draft pushes towards first: uniform?"
    return _uniform(lab, "distribution, drafted first", looked, True)


def _uniform(lab: Lab, name: str, looked: str, drafted_first: bool) -> Finding:
    if is_greedy(lab):
        return skipped(name, looked, GREEDY)
    e = lab.evidence
    noise = np.random.default_rng([lab.how.seed, int(drafted_first)]).random(len(e.y))
    before = e.above.astype(np.float64)
    if drafted_first:
        there = e.witness >= 0
        if not there.any():
            return skipped(name, looked, "nothing was drafted")
        is_witness = there & (e.y == e.witness)
        shifted = np.where(is_witness, 0, before + np.where(e.witness_before, 0, e.witness_p))
        before = np.where(there, shifted, before)
    u = np.clip(before + noise * e.p, 0, 1)
    return judge(name, looked, uniform_test(u, alpha=lab.how.alpha), lab.how)


def top(lab: Lab) -> Finding:
    """Is the most probable token emitted as often as it should be?"""
    name, looked = "most probable token", "1[y = top] - p(top), summed over every emitted token"
    if is_greedy(lab):
        return skipped(name, looked, GREEDY)
    e = lab.evidence
    return _direction(lab, name, looked, e.is_top, e.top_p.astype(np.float64))


def drafted(lab: Lab) -> Finding:
    """Is the token that the draft pushes towards emitted as often as it should be?"""
    name, looked = "drafted token", "1[y = w] - p(w), with w the token on which the draft's law exceeds the target's most"
    if is_greedy(lab):
        return skipped(name, looked, GREEDY)
    e = lab.evidence
    there = e.witness >= 0
    if not there.any():
        return skipped(name, looked, "nothing was drafted")
    hit, p = (e.y == e.witness)[there], e.witness_p[there].astype(np.float64)
    return _direction(lab, name, looked, hit, p, float(there.mean()))


def _direction(lab: Lab, name: str, looked: str, hit: np.ndarray, p: np.ndarray, share: float = 1.0) -> Finding:
    """The test of 1[hit] - p over a `share` of all tokens; a bias of x on these is one of x * share per token."""
    p = np.clip(p, 0, 1)
    test = martingale_test(hit - p, p * (1 - p), alpha=lab.how.alpha, unit="TV of a token")
    test = test._replace(effect=test.effect * share)
    return judge(name, looked, test, lab.how, f"mean {np.mean(hit - p):+.4f}", lab.how.wanted)


def acceptance(lab: Lab) -> Finding:
    """Are drafts kept exactly as often as theory says?"""
    name, looked = "acceptance", "kept - P(kept), at every node that a round came to"
    if lab.subject.drafter.num_nodes == 0:
        return skipped(name, looked, "nothing is drafted")
    if not has_closed_form(lab.subject):
        return skipped(name, looked, f"no closed form is known at one node of {lab.subject.names.rule}")
    watch = lab.taken.info.probed
    came = watch.tested
    test = martingale_test(watch.surplus[came], watch.variance[came], alpha=lab.how.alpha, unit="accepted per token")
    tokens = max(1, int((lab.taken.length - lab.taken.start).sum()))
    test = test._replace(effect=test.effect * came.sum() / tokens)  # of a node -> of an emitted token
    mean = float(watch.surplus[came].mean()) if came.any() else 0.0
    return judge(name, looked, test, lab.how, f"mean {mean:+.4f}", lab.how.wanted)

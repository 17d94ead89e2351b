"""What rounds of an engine cost on the machine at hand, all that it does beside the passes included, as a `CostTable`.

    plain(b)       rounds of b requests without drafts                   -> verify(b tokens), continued past the last
    drafted(b, 1)  with one drafted token of each verified, 2 b tokens   -> draft(b) = drafted(b, 1) - verify(2 b)
    drafted(b, n)  with n of each, b (n + 1) tokens                      -> verify(b (n + 1)) = drafted(b, n) - draft(b)

Fits are those of `latency.calibrate`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from specjax.engine.engine import Engine
from specjax.engine.plan import Plan, Rows
from specjax.latency.calibrate import DraftFit, PassFit, Timing, fit_draft, fit_pass, measure, predict, table_of
from specjax.latency.cost_table import CostTable
from specjax.sampling import SamplingParams

FLOOR = 1e-7
"""Seconds that drafting takes at least: what is measured as less is noise."""


class Told:
    """A planner that says what it is told: `count` drafted tokens of every request, or None for rounds without drafts."""

    def __init__(self, count: int | None = None, *, keep_up: bool = False) -> None:
        self.count, self.keep_up = count, keep_up

    def admit(self, slots: Sequence[int], rows: Rows) -> np.ndarray:
        """Drafters read prompts where they will be asked for drafts, or keep up."""
        return np.full(len(slots), self.count is not None or self.keep_up)

    def plan(self, rows: Rows) -> Plan:
        return Plan(None if self.count is None else np.where(rows.active, self.count, 0).astype(np.int32), self.keep_up)

    def learn(self, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Nothing is learnt."""


def measured_costs(
    engine: Engine, told: Told, *, slots: int, num_draft: int, stride: int, capacity: int,
    sampling: SamplingParams = SamplingParams(), sweeps: int = 3, steps: int = 6,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CostTable:  # fmt: skip
    """Time rounds of an engine that has no other requests, and fit them.

    Args:
      engine: built with the planner `told`, of a drafter of `num_draft` tokens, `slots` and `stride`.
      told: its planner.
      slots: the most requests that are timed; powers of two below are timed too.
      num_draft: K.
      stride: rounds of a step.
      capacity: S of the engine; requests are timed with 8 tokens of prompt, and with half of this or what fits.
      sampling: of the requests that are timed.
      sweeps: how often all is timed; medians are kept.
      steps: of each, of which the mean is taken: a request waits for slow steps too, and a machine that others use has many.
      progress: called with (done, total).

    Raises:
      ValueError: the rounds that are timed do not fit into the capacity.
    """
    new = (steps + 1) * stride * (num_draft + 1) + 1
    contexts = 8, min(capacity // 2, capacity - new - num_draft - 1)
    if contexts[1] <= contexts[0]:
        raise ValueError(
            f"capacity={capacity}: timing rounds takes {new + num_draft + 10} or more, give that or a smaller stride"
        )
    counts = (None, *sorted({1, (num_draft + 1) // 2, num_draft}))
    batches = sorted({*(1 << i for i in range(slots.bit_length()) if 1 << i <= slots), slots})

    def of_a_round(which: int, batch: int, context: int) -> float:
        told.count = counts[which]
        return step_seconds(engine, batch, context, sampling, steps, new) / stride

    timed = {
        t[:3]: t.seconds for t in measure(of_a_round, range(len(counts)), batches, contexts, sweeps=sweeps, progress=progress)
    }
    verify, draft = parts(timed, counts, num_draft)
    context = int(np.mean(contexts))
    return table_of(verify, draft, num_draft=num_draft, most_requests=slots, context=context)


def reading_seconds(
    engine: Engine, *, chunk: int, num_draft: int, stride: int, sampling: SamplingParams = SamplingParams(), repeats: int = 9
) -> float:  # fmt: skip
    """Median seconds that a step of one request takes longer while another is let in and `chunk` tokens of its prompt are read.

    The engine is that of `measured_costs`; whether drafters read too, and draft for the first, is its planner's to say.

    Raises:
      ValueError: two chunks do not fit into the capacity.
    """
    submit, extra = functools.partial(engine.submit, eos_ids=(), sampling=sampling), []
    coming = lambda: (submit([1] * (2 * chunk), max_new_tokens=1), engine.step())
    for _ in range(repeats):
        submit([1] * 2, max_new_tokens=3 * stride * (num_draft + 1) + 1)
        engine.step()
        alone = seconds(engine.step)
        extra.append(seconds(coming) - alone)
        engine.drain()
    return max(float(np.median(extra)), FLOOR)


def parts(timed: dict[tuple[int, int, int], float], counts: Sequence[int | None], num_draft: int) -> tuple[PassFit, DraftFit]:
    """The two fits of rounds {(which of `counts`, batch, context): seconds}; the first is plain, the second verifies 1."""
    plain = [Timing(1, b, c, s) for (which, b, c), s in timed.items() if which == 0]
    alone = fit_pass(plain)
    drafting = {(b, c): max(s - predict(alone, 2, b, c), FLOOR) for (which, b, c), s in timed.items() if which == 1}
    passes = list(plain)
    for (which, b, c), s in timed.items():
        count = counts[which]
        if count is not None and count > 1:
            passes.append(Timing(count + 1, b, c, max(s - drafting[b, c], timed[0, b, c])))
    return fit_pass(passes), fit_draft([Timing(num_draft, b, c, s) for (b, c), s in drafting.items()])


def step_seconds(engine: Engine, batch: int, context: int, sampling: SamplingParams, steps: int, new: int) -> float:
    """Mean seconds of a step of `batch` requests, each of `context` tokens of prompt and `new` or fewer to come."""
    held = [
        engine.submit([1 + i] * context, max_new_tokens=new, sampling=sampling, eos_ids=(), key=jax.random.key(i))
        for i in range(batch)
    ]
    engine.read()
    while engine.load.waiting or engine.load.filling:
        engine.read()
    engine.step()
    taken = seconds(lambda: [engine.step() for _ in range(steps)])
    for request in held:
        engine.cancel(request)
    return taken / steps


def seconds(call: Callable[[], object]) -> float:
    """That a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin

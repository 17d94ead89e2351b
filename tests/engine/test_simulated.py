"""The simulator is the engine on a clock: where passes take what a table says, and reading a chunk what it says.

Every draft is accepted, so that nothing is left to chance: each request's first and last token come when they are said to.
"""

import helpers as h
import jax
import numpy as np
import pytest

import specjax
from specjax.engine import Engine
from specjax.engine import slots as device
from specjax.engine.replay import Asked, replay, summary
from specjax.latency.cost_table import cost_table, draft_seconds, pass_seconds
from specjax.sampling import SamplingParams
from specjax.schedule import policies
from specjax.schedule.simulate import Reading, Server, Trace, Workload, simulate
from specjax.types import Params
from specjax.verify import RULES

LM = h.text_lm(h.successor_table({25: 0}, 32))  # a, b, .., z, a
K, SLOTS, COUNT = 3, 3, 30
COSTS = cost_table([1, 2, 4, 16], [1.0, 1.1, 1.4, 3.0], requests=[1, 3], draft=[0.3, 0.5], dtype=np.float64)
READING = Reading(chunk=8, passes=2, seconds=0.7)


class Clock:
    """Seconds that pass when told."""

    now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def on_costs(monkeypatch, clock):
    """From now on every pass of an engine takes its time."""
    rounds, fill = device.rounds, device.fill

    def timed_fill(*args, **settings):
        clock.now += READING.seconds
        return fill(*args, **settings)

    def timed_rounds(*args, build, unused):
        state, brought = rounds(*args, build=build, unused=unused)
        for drafted, _, emitted in device.stretch(brought, build).counts.transpose(2, 1, 0):
            live = np.asarray((emitted > 0).sum())
            if live:
                clock.now += float(pass_seconds(COSTS, live + drafted.sum(), np.asarray(0)))
                clock.now += float(draft_seconds(COSTS, live)) if build.drafter.num_nodes else 0.0
        return state, brought

    monkeypatch.setattr(device, "fill", timed_fill)
    monkeypatch.setattr(device, "rounds", timed_rounds)


@pytest.mark.parametrize(
    ("method", "stride"), [("plain", 4), ("small", 1), *[pytest.param("small", n, marks=pytest.mark.slow) for n in (2, 4)]]
)
def test_the_simulator_says_when_tokens_come(monkeypatch, method, stride):
    settings = dict(model=LM) if method == "small" else {}
    loaded, clock = specjax.load_drafter(method, LM, num_draft=K, **settings), Clock()
    engine = Engine(
        Params(LM.params, loaded.params), target=LM.model, drafter=loaded.drafter, rule=RULES["rejection"], slots=SLOTS,
        capacity=96, chunk=READING.chunk, fills=READING.passes, stride=stride, clock=clock,
    )  # fmt: skip
    on_costs(monkeypatch, clock)
    rng = np.random.default_rng(0)
    arrivals, prompts, new = np.cumsum(rng.exponential(6.0, COUNT)), rng.integers(1, 31, COUNT), rng.integers(1, 26, COUNT)
    asked = [
        Asked(float(at), dict(prompt=[3] * int(p), max_new_tokens=int(n), sampling=SamplingParams(), key=jax.random.key(0)))
        for at, p, n in zip(arrivals, prompts, new, strict=True)
    ]
    served = replay(engine, asked, clock=clock, sleep=clock.sleep)
    policy = policies.fixed(K) if method == "small" else policies.plain()
    trace = Trace(np.full((1, K), 0.5), np.asarray([K]))
    server = Server(COSTS, SLOTS, stride=stride, reading=READING)
    made = simulate(Workload(arrivals, prompts, new), trace, server, policy)
    times = [one.request.result.times for one in served]
    assert made.rounds.waiting.max() > 0 and (made.rounds.requests == 0).any(), "some wait, and some rounds only read"
    np.testing.assert_allclose(made.first, [t.tokens[0] for t in times], atol=1e-9)
    np.testing.assert_allclose(made.finish, [t.ended for t in times], atol=1e-9)
    gaps = made.inter_token
    assert np.nanpercentile(gaps, 50) == pytest.approx(summary(served).inter_token["p50"], rel=1e-9)
    assert np.nanmax(gaps) > 1.3 * np.nanmin(gaps)

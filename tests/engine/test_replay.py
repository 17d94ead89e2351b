"""Arrivals on a clock that passes when told: who comes when, and what the numbers count."""

import helpers as h
import jax
import numpy as np
import pytest

import specjax
from specjax.engine import Engine
from specjax.engine.replay import Asked, percentiles, replay, summary
from specjax.types import Params
from specjax.verify import RULES

NEXT = h.successor_table({25: 0}, 32)  # a, b, .., z, a


class Clock:
    """A second a step; sleeping moves it on."""

    def __init__(self):
        self.now, self.slept = 100.0, []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def engine_of(clock, **settings):
    lm = h.text_lm(NEXT)
    loaded = specjax.load_drafter("plain", lm)
    settings = {"slots": 1, "capacity": 32, "chunk": 8, "tokenizer": lm.tokenizer, **settings}
    engine = Engine(
        Params(lm.params, loaded.params), target=lm.model, drafter=loaded.drafter, rule=RULES["rejection"], clock=clock,
        **settings,
    )  # fmt: skip
    real = engine.step

    def step():
        going = real()
        clock.now += bool(going)
        return going

    engine.step = step
    return engine


def test_who_comes_when_and_what_is_counted():
    """One slot, one may wait: b waits for a, the queue is full for c, d makes no sense, e is cancelled, f comes late."""
    clock, seen = Clock(), []
    of = lambda at, prompt, new, **more: Asked(at, dict(prompt=prompt, max_new_tokens=new), **more)
    asked = [
        of(30.0, "f", 3), of(0.0, "a", 3), of(0.5, "b", 4), of(0.6, "c", 2), of(9.0, "", 2),
        of(10.0, "e", 20, cancel_after=2.5),
    ]  # fmt: skip
    served = replay(engine_of(clock, max_waiting=1), asked, clock=clock, sleep=clock.sleep, progress=lambda *x: seen.append(x))
    f, a, b, c, d, e = served
    assert [s.request and s.request.result.text for s in served] == ["ghi", "bcd", "cdef", None, None, "fgh"]
    assert [s.arrived for s in served] == [130.0, 100.0, 100.5, 100.6, 109.0, 110.0]
    assert c.refused and "1 requests are waiting" in c.error and not d.refused and "empty" in d.error
    total = summary(served)
    assert total[:6] == (3, 1, 0, 1, 1, 13) and total.tau == 1
    assert total.seconds == 32.0 and total.tokens_per_second == pytest.approx(13 / 32)
    assert total.time_to_first["p50"] == 0.0 and total.time_to_first["p99"] == pytest.approx(2.5, rel=0.05)
    assert set(total.inter_token.values()) == {1.0} and total.user_speed["p50"] == 1.0
    assert seen[-1] == (4, 6) and len(clock.slept) >= 2 and sum(clock.slept) > 15


def test_nobody_came():
    clock = Clock()
    total = summary(replay(engine_of(clock), [Asked(0.0, dict(prompt=""))], clock=clock, sleep=clock.sleep))
    assert total.invalid == 1 and total.tokens == 0 and np.isnan(total.tau) and np.isnan(total.inter_token["p50"])
    assert percentiles(np.arange(101.0)) == {"p50": 50, "p90": 90, "p99": 99}


def test_a_late_step_counts_as_waiting():
    """A request that comes while a step runs has waited from then on, not from when the engine looked."""
    clock = Clock()
    asked = [
        Asked(0.0, dict(prompt="a", max_new_tokens=6)),
        Asked(0.25, dict(prompt="k", max_new_tokens=2, key=jax.random.key(0))),
    ]
    served = replay(engine_of(clock, slots=2), asked, clock=clock, sleep=clock.sleep)
    assert served[1].request.result.times.tokens[0] - served[1].arrived == 0.75

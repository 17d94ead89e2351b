"""Requests with arrival times, played to an engine as time passes, and what became of them in numbers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.engine.engine import Engine
from specjax.engine.request import CANCELLED, QueueFull, Request

PERCENTILES = (50, 90, 99)


class Asked(NamedTuple):
    """A request that will come."""

    at: float  # seconds from the start
    request: Mapping[str, Any]  # what `Engine.submit` is given
    cancel_after: float | None = None  # seconds from then


class Served(NamedTuple):
    """What became of it."""

    arrived: float  # on the engine's clock: when it came, though the engine was busy with a step
    request: Request | None  # None where it was not let in
    error: str = ""  # why not
    refused: bool = False  # because the queue was full; else it made no sense


class Summary(NamedTuple):
    """Numbers of a replay; percentiles are over requests that ended by themselves, NaN where there are none."""

    finished: int
    cancelled: int
    failed: int  # the target gave no law for them
    invalid: int
    refused: int
    tokens: int  # of all, the cancelled ones too
    seconds: float  # from the first arrival to the last end
    tokens_per_second: float
    tau: float  # tokens per request and round
    time_to_first: dict[str, float]  # seconds from arrival, "p50": ..
    inter_token: dict[str, float]  # seconds, a request's mean
    user_speed: dict[str, float]  # tokens a second of a request, from its first token on


def replay(
    engine: Engine, asked: Sequence[Asked], *, clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep, progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Served]:  # fmt: skip
    """Submit and cancel as `clock` says, which is the engine's too, until all have ended; results are in the order given."""
    order = sorted(range(len(asked)), key=lambda i: asked[i].at)
    served: list[Served] = [Served(0.0, None)] * len(asked)
    cancels: list[tuple[float, Request]] = []
    begin, come, ended = clock(), 0, -1
    while True:
        now = clock() - begin
        while come < len(order) and asked[order[come]].at <= now:
            one = asked[order[come]]
            served[order[come]] = submitted(engine, one, begin + one.at)
            request = served[order[come]].request
            if request is not None and one.cancel_after is not None:
                cancels.append((one.at + one.cancel_after, request))
            come += 1
        for due, request in [c for c in cancels if c[0] <= now]:
            engine.cancel(request)
            cancels.remove((due, request))
        going = engine.step()
        if ended != (ended := sum(engine.ended.values())):
            progress(ended, len(asked))
        if not going:
            if come == len(order):
                return served
            sleep(max(0.0, asked[order[come]].at - (clock() - begin)))


def submitted(engine: Engine, one: Asked, arrived: float) -> Served:
    """One request, or why it was not let in."""
    try:
        return Served(arrived, engine.submit(**one.request))
    except (ValueError, QueueFull) as error:
        return Served(arrived, None, str(error), isinstance(error, QueueFull))


def summary(served: Sequence[Served]) -> Summary:
    """Counts, throughput and percentiles of what `replay` returned."""
    held = [(s.arrived, s.request, s.request.result) for s in served if s.request is not None and s.request.result is not None]
    reasons = Counter(result.finish_reason for _, _, result in held)
    whole = [(arrived, r.times) for arrived, _, r in held if r.finish_reason not in (CANCELLED, "error") and r.times.tokens]
    gaps = np.asarray([t.between_tokens() for _, t in whole if (t.between_tokens() or 0) > 0])
    tokens = sum(len(r.tokens) for _, _, r in held)
    seconds = max((r.times.ended for _, _, r in held), default=0.0) - min((s.arrived for s in served), default=0.0)
    rounds = sum(r.stats.num_spec_steps for _, _, r in held)
    return Summary(
        finished=len(held) - reasons[CANCELLED] - reasons["error"],
        cancelled=reasons[CANCELLED],
        failed=reasons["error"],
        invalid=sum(s.request is None and not s.refused for s in served),
        refused=sum(s.refused for s in served),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds > 0 else float("nan"),
        tau=tokens / rounds if rounds else float("nan"),
        time_to_first=percentiles(np.asarray([t.tokens[0] - arrived for arrived, t in whole])),
        inter_token=percentiles(gaps),
        user_speed=percentiles(1 / gaps),
    )


def percentiles(values: np.ndarray) -> dict[str, float]:
    """By name.

    >>> percentiles(np.arange(101.0))
    {'p50': 50.0, 'p90': 90.0, 'p99': 99.0}
    """
    return {f"p{p}": float(np.percentile(values, p)) if len(values) else float("nan") for p in PERCENTILES}

"""A server simulated: requests arrive, wait, are read, and decode round by round at the cost that a table names.

Each replica runs stretches of rounds back to back.  Before one, requests come in, prompts are read on, and the policy is
asked; a round lasts as long as its tokens, its drafter and its caches take, and gives every request its accepted tokens and
one more, which are seen at the end of the stretch.  What would have been accepted comes from a trace of measured rounds: each
request walks through it from a place of its own, so that easy and hard stretches stay together.  NumPy, one round a few
milliseconds at 4,096 requests; seconds are simulated, nothing waits.

Left out: that a shorter verification makes the next draft start elsewhere, memory that runs out, and the network.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

from specjax.latency.cost_table import CostTable, draft_seconds, pass_seconds
from specjax.schedule.policies import Lengths, Policy, View


class Trace(NamedTuple):
    """Rounds of a drafter, those of one request after the other, every draft verified whole."""

    confidence: np.ndarray  # [R, K]
    accepted: np.ndarray  # [R] tokens of the draft that were accepted


class Workload(NamedTuple):
    """Requests, by time of arrival."""

    arrival: np.ndarray  # [n] seconds, ascending
    prompt: np.ndarray  # [n] tokens, at least 1
    output: np.ndarray  # [n] tokens, at least 1


class Reading(NamedTuple):
    """Prompts in passes of their own, as `engine.Engine` reads them; who is read to the end decodes at once."""

    chunk: int  # tokens of one prompt that a pass takes
    passes: int  # between two stretches, each for another request
    seconds: float  # of a pass, full or not


class Server(NamedTuple):
    """What serves."""

    table: CostTable
    slots: int  # requests a replica decodes at once; more wait
    replicas: int = 1
    prefill_chunk: int = (
        512  # tokens of prompts in the pass of a stretch's first round; those requests decode from the next one
    )
    lag: int = 2  # rounds ago that the confidences a policy knows beforehand come from
    stride: int = 1  # rounds of a stretch
    reading: Reading | None = None  # in place of `prefill_chunk`


class Rounds(NamedTuple):
    """Every round that ran, by replica and in order [N]."""

    start: np.ndarray
    seconds: np.ndarray  # with the reading before it
    requests: np.ndarray  # that were decoding
    verified: np.ndarray  # drafted tokens in the target's pass
    accepted: np.ndarray
    emitted: np.ndarray
    read: np.ndarray  # tokens of prompts
    waiting: np.ndarray  # requests that found no slot


class Report(NamedTuple):
    """What came of it."""

    arrival: np.ndarray  # [n] seconds
    first: np.ndarray  # [n] when the first token was seen
    finish: np.ndarray  # [n]
    tokens: np.ndarray  # [n] emitted
    rounds: Rounds
    num_replicas: int

    @property
    def throughput(self) -> float:
        """Tokens a second, from the first arrival to the last token."""
        return float(self.tokens.sum() / (self.finish.max() - self.arrival.min()))

    @property
    def steady_throughput(self) -> float:
        """Tokens a second of a replica under a backlog; NaN without.

        Counted are rounds in which requests wait, from the one on by which as many have ended as first found a slot: until
        then caches are shorter than they will be.  Several times as many requests as slots make it exact.
        """
        turned = np.sort(self.finish)[min(int(self.rounds.requests.max()) * self.num_replicas, len(self.finish)) - 1]
        on = (self.rounds.waiting > 0) & (self.rounds.start >= turned)
        return float(self.rounds.emitted[on].sum() / self.rounds.seconds[on].sum()) if on.any() else float("nan")

    @property
    def inter_token(self) -> np.ndarray:
        """[n] (finish - first) / (tokens - 1) seconds, vLLM's time per output token; NaN for an output of one stretch.

        What an engine calls `Times.between_tokens`.  The tokens of a stretch are seen together at its end.
        """
        spent = self.finish - self.first
        return np.where(spent > 0, spent / np.maximum(self.tokens - 1, 1), np.nan)

    @property
    def user_speed(self) -> np.ndarray:
        """[n] tokens a second of a request, from its first token on: 1 / inter_token."""
        return 1 / self.inter_token

    @property
    def time_to_first(self) -> np.ndarray:
        """[n] seconds from arrival to the first token."""
        return self.first - self.arrival

    @property
    def tau(self) -> float:
        """Tokens per request and round."""
        return float(self.rounds.emitted.sum() / max(self.rounds.requests.sum(), 1))


def simulate(workload: Workload, trace: Trace, server: Server, policy: Policy, *, seed: int = 0) -> Report:
    """Run until the last request is through.

    Raises:
      ValueError: arrivals that do not ascend, empty prompts or outputs, a server without slots or replicas.
    """
    _check(workload, trace, server)
    first, finish = (np.full(len(workload.arrival), np.nan) for _ in range(2))
    rng = np.random.default_rng(seed)
    places = rng.integers(0, len(trace.accepted), len(workload.arrival))
    replicas = [_Replica(workload, trace, server, policy, places, first, finish) for _ in range(server.replicas)]
    events: list[tuple[float, int]] = []  # (when it is ready, replica)
    for request, now in enumerate(workload.arrival):
        _run(replicas, events, float(now))
        chosen = min(range(server.replicas), key=lambda i: replicas[i].load)
        replicas[chosen].waiting.append(request)
        if replicas[chosen].idle:
            replicas[chosen].idle = False
            heapq.heappush(events, (float(now), chosen))
    _run(replicas, events, np.inf)
    log = [row for replica in replicas for row in replica.log]
    rounds = Rounds(*(np.asarray(x) for x in zip(*log, strict=True)))
    return Report(workload.arrival, first, finish, workload.output, rounds, server.replicas)


def poisson(rng: np.random.Generator, count: int, rate: float, *, prompt: float, output: float) -> Workload:
    """`count` requests at `rate` a second; lengths are exponential around their means, at least 1."""
    arrival = np.cumsum(rng.exponential(1 / rate, count))
    return Workload(arrival, *(np.ceil(rng.exponential(mean, count)).astype(int) for mean in (prompt, output)))


def backlog(rng: np.random.Generator, count: int, *, prompt: float, output: float) -> Workload:
    """`count` requests that are all there at once: a server with n slots then decodes n at a time."""
    return poisson(rng, count, np.inf, prompt=prompt, output=output)


def made_up_trace(
    rng: np.random.Generator, acceptance: Sequence[float], *, rounds: int = 8192, stretch: int = 64, spread: float = 1.0
) -> Trace:
    """A trace whose confidences are right, around the conditional `acceptance` [K]: for trying things out.

    Every `stretch` rounds a request ends; `spread` is how much requests differ, and rounds half as much, in logits.
    """
    hard = np.repeat(rng.normal(0, spread, -(-rounds // stretch)), stretch)[:rounds, None]
    logit = special.logit(np.asarray(acceptance))[None] + hard + rng.normal(0, spread / 2, (rounds, len(acceptance)))
    confidence = special.expit(logit)
    return Trace(confidence, np.cumprod(rng.random(confidence.shape) < confidence, 1).sum(1))


class _Replica:
    """One model and its slots; requests are named by their index in the workload."""

    def __init__(self, workload: Workload, trace: Trace, server: Server, policy: Policy, places, first, finish):
        self.workload, self.trace, self.server, self.policy = workload, trace, server, policy
        self.first, self.finish = first, finish  # of all requests, shared by the replicas
        self.waiting: deque[int] = deque()
        self.idle, self.log, self.quiet = True, [], 0
        self.place = places.copy()  # where each request stands in the trace
        self.unread = workload.prompt - 1  # as in `decode.prefill`: the last token goes into the first round
        self.left, self.context = workload.output.copy(), np.zeros(len(self.unread), int)
        self.running = np.zeros(0, int)
        self.history: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=server.lag)  # requests, sorted, and confidences

    @property
    def load(self) -> int:
        """Requests that are here."""
        return len(self.running) + len(self.waiting)

    def stretch(self, now: float) -> float:
        """Rounds from `now` until requests come and go again; the end of the last."""
        while self.waiting and len(self.running) < self.server.slots:
            self.running = np.append(self.running, self.waiting.popleft())
        readers, read = self._read()
        ready = self.running[self.unread[self.running] == 0]
        ready = ready if self.server.reading else ready[~np.isin(ready, readers)]
        lengths = self._ask(ready, read)
        end = self._round(now, ready, lengths, readers, read)
        for _ in range(self.server.stride - 1):
            going = ready[self.left[ready] > 0]
            end = self._round(end, going, lengths, readers[:0], 0) if len(going) else end
        self.first[ready[np.isnan(self.first[ready])]] = end
        self.finish[ready[self.left[ready] == 0]] = end
        return end

    def _read(self) -> tuple[np.ndarray, int]:
        """Read prompts in the order in which they came: (requests that were read of, tokens)."""
        want, alone = self.running[self.unread[self.running] > 0], self.server.reading
        if alone is None:
            before = np.cumsum(self.unread[want]) - self.unread[want]
            count = np.clip(self.server.prefill_chunk - before, 0, self.unread[want])
        else:
            count = np.where(np.arange(len(want)) < alone.passes, np.minimum(self.unread[want], alone.chunk), 0)
        self.unread[want] -= count
        self.context[want] += count
        return want[count > 0], int(count.sum())

    def _ask(self, ready: np.ndarray, read: int) -> Lengths | None:
        """What the policy says of the next stretch."""
        if not len(ready):
            return None
        earlier = np.full((len(ready), self.trace.confidence.shape[1]), np.nan)
        if len(self.history) == self.server.lag:
            requests, confidence = self.history[0]
            seen = np.searchsorted(requests, ready).clip(0, len(requests) - 1)
            hit = requests[seen] == ready
            earlier[hit] = confidence[seen[hit]]
        slots, unread = self.context[self.running].sum(), int(self.unread[self.running].sum())
        view = View(self.server.table, earlier, slots, self.quiet, read // self.server.stride, unread)
        lengths = self.policy(view)
        self.quiet = self.quiet + 1 if lengths is None else 0
        return lengths

    def _round(self, now: float, rows: np.ndarray, lengths: Lengths | None, readers: np.ndarray, read: int) -> float:
        """One round from `now` for the requests `rows`, with what was read before it; its end."""
        table, alone, slots = self.server.table, self.server.reading, self.context[self.running].sum()
        drafted = self.trace.confidence[self.place[rows] % len(self.trace.accepted)]
        count = np.zeros(len(rows), int) if lengths is None else lengths(drafted.astype(table.verify.dtype))
        tokens = np.asarray(len(rows) + count.sum() + (0 if alone else read))
        seconds = float(pass_seconds(table, tokens, slots)) if tokens else 0.0
        seconds += len(readers) * alone.seconds if alone else 0.0
        if lengths is not None:
            seconds += float(draft_seconds(table, np.asarray(len(rows))))
            order = np.argsort(rows)
            self.history.append((rows[order], drafted[order]))
        self.log.append((now, seconds, len(rows), *self._emit(rows, count), read, len(self.waiting)))
        return now + seconds

    def _emit(self, rows: np.ndarray, verified: np.ndarray) -> tuple[int, int, int]:
        """Hand out what a round gives: (verified, accepted, emitted) tokens."""
        accepted = np.minimum(self.trace.accepted[self.place[rows] % len(self.trace.accepted)], verified)
        emitted = np.minimum(accepted + 1, self.left[rows])
        self.left[rows] -= emitted
        self.context[rows] += emitted
        self.place[rows] += 1
        return int(verified.sum()), int(np.minimum(accepted, emitted).sum()), int(emitted.sum())


def _run(replicas: list[_Replica], events: list[tuple[float, int]], until: float) -> None:
    """Stretches that start before `until`; a replica without requests falls idle."""
    while events and events[0][0] < until:
        now, i = heapq.heappop(events)
        replica = replicas[i]
        replica.running = replica.running[replica.left[replica.running] > 0]
        if replica.load == 0:
            replica.idle = True
        else:
            heapq.heappush(events, (replica.stretch(now), i))


def _check(workload: Workload, trace: Trace, server: Server) -> None:
    if (np.diff(workload.arrival) < 0).any() or min(workload.prompt.min(), workload.output.min()) < 1:
        raise ValueError("a workload's arrivals ascend, and prompts and outputs have 1 token or more: sort it, drop empty ones")
    least = (server.slots, server.replicas, server.prefill_chunk, server.lag, server.stride, *(server.reading or ())[:2])
    if min(least) < 1 or not len(trace.accepted):
        raise ValueError(f"{server[1:]} and a trace of {len(trace.accepted)} rounds: a server has 1 or more of each")

"""The engine: a queue, slots, and steps in which requests come, are filled, decode, and go.

A step costs a jitted call for each request that is admitted or filled, one for the rounds, and one copy to the host.
"""

from __future__ import annotations

import functools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import sharding
from specjax.engine import slots as device
from specjax.engine.ask import ask
from specjax.engine.drafting import Drafting
from specjax.engine.plan import Planner
from specjax.engine.request import CANCELLED, Load, QueueFull, Request
from specjax.sampling import SamplingParams
from specjax.schedule.limits import Schedule, told
from specjax.text import Prompt, Tokenizer
from specjax.types import FINISH_REASONS, RUNNING, STOP, Array, Drafter, LanguageModel, Params, Rule


class Engine:
    """Continuous batching: requests enter and leave fixed slots between rounds of one batch.

    A request's tokens are those it would have had alone: exactly under a coupled rule and at temperature 0, in law
    otherwise.  One thread drives it: `submit`, `cancel`, `step` and `stream` are called one at a time.
    """

    def __init__(
        self, params: Params, *, target: LanguageModel, drafter: Drafter, rule: Rule, tokenizer: Tokenizer | None = None,
        slots: int = 8, capacity: int = 1024, chunk: int = 64, fills: int = 4, stride: int = 1, max_waiting: int = 1024,
        max_eos: int = 8, max_bias: int = 32, limit: Callable | None = None, schedule: Any = (),
        widths: Sequence[int] | None = None, packs: Sequence[int] = (), planner: Planner | None = None,
        key: Array | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Allocate, and compile everything that will ever run.

        Args:
          params: of target and drafter; where they lie on a mesh (`sharding`), so do the slots.
          target: the model whose law is kept.
          drafter: what proposes.
          rule: what verifies.
          tokenizer: for text in and out, and stop strings; without it prompts are token ids.
          slots: B, requests that decode at once.
          capacity: S, cache slots of each: prompt, new tokens, and a draft.
          chunk: prompt tokens of one request that run between two stretches of rounds, so that those who wait for them wait
            no longer.
          fills: requests of which a chunk runs there, one after the other.
          stride: rounds between two looks of the host.  Requests that ended, and new ones, wait for its end.
          max_waiting: requests that may wait for a slot; more are refused.
          max_eos: ids that may end a request.
          max_bias: tokens whose logits a request may bias.
          limit: verify lengths, as `decode.round` takes them.
          schedule: what `limit` reads.
          widths: verified blocks shorter than a draft, each compiled: a round costs by the narrowest that holds what it
            verifies.  The drafter's own unless given; where there are none, a `limit` and no `packs`: powers of two.
          packs: numbers of tokens, each compiled: a round costs by the smallest that holds what all requests verify.
            Slots that are free then cost next to nothing, and requests may differ in length.
          planner: how much each stretch of rounds verifies, in place of `limit` and `schedule`, and whose drafters work at all.
          key: folds into the key of each request that brings none; `jax.random.key(0)` unless given.
          clock: seconds.

        Raises:
          ValueError: parts that do not fit together, or sizes that make no sense.
        """
        if planner is not None:
            if limit is not None or not drafter.chain:
                raise ValueError("a planner gives lengths of chains, in place of a limit: leave out one, and draft a chain")
            limit, schedule = told, Schedule(lengths=np.zeros(slots, np.int32))
        if fills < 1:
            raise ValueError(f"fills={fills}: read at least 1 prompt at a time")
        drafter = drafter if widths is None else drafter._replace(widths=tuple(widths))
        build = device.Build(target, drafter, rule, slots, capacity, chunk, stride, max_eos, max_bias, limit, tuple(packs))
        self._build = device.checked(build)
        self._drafting = Drafting(self._build, planner)
        self._fills, self._read = fills, 0  # tokens of prompts that the last `read` took
        self._params, self._tokenizer, self._clock = params, tokenizer, clock
        self._settled = functools.partial(sharding.settled, mesh=sharding.mesh_of(params))  # after each program, for the next
        self._key = jax.random.key(0) if key is None else key
        self._max_waiting, self._submitted = max_waiting, 0
        self._waiting: deque[Request] = deque()
        self._slots: list[Request | None] = [None] * slots
        self.ended: Counter[str] = Counter()  # requests by finish reason
        first = self._ask([0], 1, SamplingParams(), (), self._key)
        programs = dict(fills=self._drafting.fills, runs=self._drafting.runs)
        self._state = device.warmed_up(params, first, schedule, settled=self._settled, **programs)

    def submit(
        self, prompt: Prompt, *, max_new_tokens: int = 128, sampling: SamplingParams = SamplingParams(),
        stop: Sequence[str] = (), eos_ids: Sequence[int] | None = None, key: Array | None = None,
    ) -> Request:  # fmt: skip
        """Put a request at the end of the queue.

        Args:
          prompt: a string (continued as it stands), a chat (a list of {"role", "content"}) or token ids.
          max_new_tokens: the most tokens it may add; the target's context may end it before.
          sampling: its parameters.
          stop: strings that end its text; the text ends before the first of them.
          eos_ids: tokens that end it; the tokenizer's unless given.
          key: its own key: the same request with the same key gives the same tokens.

        Raises:
          ValueError: bad input, in one line; nothing else notices.
          QueueFull: too many are waiting.
        """
        if len(self._waiting) >= self._max_waiting:
            raise QueueFull(
                f"{len(self._waiting)} requests are waiting, which is the most: try again later, or raise max_waiting"
            )
        if stop and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this engine was built without one")
        stream = None if self._tokenizer is None else self._tokenizer.stream(stop=stop)
        if eos_ids is None:
            eos_ids = () if self._tokenizer is None else self._tokenizer.eos_ids
        key = device.request_key(self._key, np.int32(self._submitted)) if key is None else key
        asked = self._ask(prompt, max_new_tokens, sampling, eos_ids, key)
        request = Request(
            self._submitted,
            asked,
            lean=all(getattr(sampling, field) is None for field in device.UNUSED),
            chunk=self._build.chunk,
            stream=stream,
            now=self._clock(),
        )
        self._submitted += 1
        self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> bool:
        """End a request wherever it is, with what it has; its slot is free at once.  False if it had ended already.

        Raises:
          ValueError: a request of another engine.
        """
        if request.result is not None:
            return False
        if request in self._waiting:
            self._waiting.remove(request)
        elif request in self._slots:
            self._slots[self._slots.index(request)] = None
        else:
            raise ValueError(f"request {request.id} is not in this engine: cancel it where it was submitted")
        self._end(request, CANCELLED)
        return True

    def step(self) -> bool:
        """Let requests in, read on in the prompts of some, then run a stretch of rounds.  False when all have ended."""
        self.read()
        self._decode()
        return bool(self._waiting) or any(self._slots)

    def read(self) -> None:
        """The first half of a step: let requests in, and run a chunk of some prompts."""
        self._admit()
        self._read = self._fill()

    def drain(self) -> None:
        """Step until all have ended."""
        while self.step():
            pass

    def stream(self, request: Request) -> Iterator[str]:
        """Yield pieces of a request's text, stepping when there is no new one; together they are `result.text`.

        Others move on with it, and may be streamed in turns.  Who stops listening has not cancelled.
        """
        while True:
            piece = request.unread()
            if piece:
                yield piece
            elif request.result is not None:
                return
            elif not (request in self._waiting or request in self._slots):
                raise ValueError(f"request {request.id} is not in this engine: stream it where it was submitted")
            else:
                self.step()

    @property
    def load(self) -> Load:
        """How many requests are where, now."""
        held = [request for request in self._slots if request is not None]
        filling = sum(request.left > 0 for request in held)
        return Load(len(self._waiting), filling, len(held) - filling, len(self._slots) - len(held))

    def reschedule(self, schedule: Any) -> None:
        """Other numbers for `limit` to read, from the next round on.

        Raises:
          ValueError: of another structure or shape than those that the engine was built with.
        """
        shapes = [jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), s) for s in (self._state.schedule, schedule)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"schedule of shapes {shapes[1]}: this engine was built with {shapes[0]}")
        self._state = self._settled(self._state._replace(schedule=device.copied(schedule)))

    def _ask(self, prompt, max_new_tokens, sampling, eos_ids, key):
        return ask(
            prompt, max_new_tokens=max_new_tokens, params=sampling, eos_ids=eos_ids, key=key, build=self._build,
            tokenizer=self._tokenizer,
        )  # fmt: skip

    def _admit(self) -> None:
        """First come, first served."""
        free = [slot for slot, request in enumerate(self._slots) if request is None][: len(self._waiting)]
        for slot in free:
            new = self._waiting.popleft()
            state = device.admit(self._params, self._state, np.int32(slot), new.ask, build=self._build)
            self._state = self._settled(state)
            self._slots[slot] = new
            new.admitted(self._clock())
        self._drafting.admit(free, self._slots)

    def _fill(self) -> int:
        """A chunk of each of the prompts that came first; tokens of them all."""
        filling = [(request.id, slot, request) for slot, request in enumerate(self._slots) if request and request.left]
        read = 0
        for _, slot, request in sorted(filling)[: self._fills]:
            state = device.fill(self._params, self._state, np.int32(slot), build=self._drafting.fill(slot))
            self._state = self._settled(state)
            read += request.read()
        return read

    def _decode(self) -> None:
        """A stretch of rounds for those whose prompt is in, and what it brought them."""
        running = [(slot, request) for slot, request in enumerate(self._slots) if request and not request.left]
        if not running:
            return
        active = np.zeros(len(self._slots), bool)
        active[[slot for slot, _ in running]] = True
        build, lengths = self._drafting.rounds(self._slots, self._read)
        if lengths is not None:
            self._state = self._settled(self._state._replace(schedule=Schedule(lengths=jnp.asarray(lengths))))
        unused = device.UNUSED if all(request.lean for _, request in running) else ()
        state, brought = device.rounds(self._params, self._state, active, build=build, unused=unused)
        self._state = self._settled(state)
        out, now = device.stretch(brought, build), self._clock()
        self._drafting.learn(out)
        for slot, request in running:
            counts = out.counts[slot]
            stopped = request.take(out.tokens[slot, : counts[2].sum()].tolist(), counts, now)
            status = STOP if stopped else int(out.status[slot])
            if status != RUNNING:
                self._slots[slot] = None
                self._end(request, FINISH_REASONS[status])

    def _end(self, request: Request, reason: str) -> None:
        result = request.end(reason, self._build.drafter.depth, self._clock())
        self.ended[result.finish_reason] += 1

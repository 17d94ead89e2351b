"""A request on the host: its text, stop strings, counts and times.  The device knows tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specjax.engine.slots import Ask
from specjax.metrics import Statistics, cut, statistics
from specjax.text import StreamStep, TextStream
from specjax.types import FINISH_REASONS, STOP, RoundInfo

CANCELLED = "cancelled"


class QueueFull(RuntimeError):
    """As many requests are waiting as the engine will hold; later there may be room."""


class Load(NamedTuple):
    """How many requests are where."""

    waiting: int
    filling: int
    running: int
    free: int  # slots


class Times(NamedTuple):
    """Seconds on the engine's clock.  Tokens of one stretch of rounds arrive together and share a time."""

    submitted: float
    admitted: float | None  # into a slot
    tokens: tuple[float, ...]  # [n] one a token
    ended: float

    def to_first_token(self) -> float | None:
        """Seconds from submission to the first token; None if there was none."""
        return self.tokens[0] - self.submitted if self.tokens else None

    def between_tokens(self) -> float | None:
        """Mean seconds from one token to the next; None for fewer than two."""
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1) if len(self.tokens) > 1 else None


class Result(NamedTuple):
    """What a request became.  Special tokens, such as an end of sequence, are in `tokens` and not in `text`."""

    text: str
    tokens: list[int]
    finish_reason: str  # "eos", "stop", "length", "cancelled", or "error": the target's logits held NaN or inf
    prompt_tokens: list[int]
    stats: Statistics
    times: Times


class Request:
    """What `Engine.submit` returns.  Read it at any time; its engine writes to it.

    Attributes:
      id: its number in the engine, in order of submission.
      ask: what the device is given.
      lean: of the sampling parameters it uses the temperature alone.
      left: tokens of the prompt that are still to be read; the last one is read with the first round.
      tokens: new tokens so far.
      text: what may be shown so far.
      result: None until it has ended.
    """

    def __init__(self, number: int, ask: Ask, *, lean: bool, chunk: int, stream: TextStream | None, now: float) -> None:
        self.id, self.ask, self.lean, self.left = number, ask, lean, int(ask.length) - 1
        self.tokens: list[int] = []
        self.text = ""
        self.result: Result | None = None
        self._chunk, self._stream, self._shown = chunk, stream, 0
        self._rounds: list[np.ndarray] = [np.zeros((3, 0), np.int32)]  # drafted, accepted, emitted
        self._submitted, self._admitted = now, None
        self._times: list[float] = []

    def read(self) -> int:
        """A pass of prefill has been made: tokens that it took."""
        count = min(self._chunk, self.left)
        self.left -= count
        return count

    def admitted(self, now: float) -> None:
        """It has a slot."""
        self._admitted = now

    def take(self, new: Sequence[int], rounds: np.ndarray, now: float) -> bool:
        """Take in tokens and the counts [3, r] of their rounds; whether a stop string ended the text."""
        self._rounds.append(rounds)
        self.tokens += new
        self._times += [now] * len(new)
        return self._stream is not None and self._heard(self._stream.push(new))

    def end(self, reason: str, num_draft: int, now: float) -> Result:
        """No more tokens come.  The rest of the text may still complete a stop string."""
        if self._stream is not None and reason != CANCELLED and self._heard(self._stream.flush()):
            reason = FINISH_REASONS[STOP]
        kept, prompt = len(self.tokens), self.ask.tokens[: self.ask.length].tolist()
        stats = statistics(cut(RoundInfo(*np.concatenate(self._rounds, 1)), kept), num_draft)
        times = Times(self._submitted, self._admitted, tuple(self._times[:kept]), now)
        self.result = Result(self.text, self.tokens, reason, prompt, stats, times)
        return self.result

    def unread(self) -> str:
        """Text that came since the last call; never the beginning of a stop string."""
        piece, self._shown = self.text[self._shown :], len(self.text)
        return piece

    def _heard(self, step: StreamStep) -> bool:
        self.text += step.text
        if step.stop is not None:
            del self.tokens[step.num_tokens :]
        return step.stop is not None

"""The flags of `specjax engine`."""

from __future__ import annotations

import dataclasses

from specjax.flags.parts import Drafting, Numbers, Output, Prompts, Sampling, Target


@dataclasses.dataclass(frozen=True)
class Slots:
    """How the engine is built."""

    slots: int = 8
    """Requests that decode at once; more wait."""
    capacity: int = 512
    """Tokens that a request may have, its prompt and a draft included."""
    chunk: int = 64
    """Tokens of a prompt that are read at once."""
    stride: int = 1
    """Rounds between two looks of the host: more throughput, and later looks."""
    packs: Numbers = ()
    """Numbers of tokens for which passes are compiled besides, so that rounds of few requests cost less."""
    max_waiting: int = 1024
    """Requests that may wait; more are refused."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """Serve requests as they arrive, many at once; then say how long each waited and what throughput was."""

    requests: str | None = None
    """A .jsonl file, a request a line: prompt; and id, arrival and cancel_after in seconds, seed, or a name of a flag below."""
    poisson: float | None = None
    """Make requests of prompts instead, this many a second; prompts, sampling and seed are those of the flags below."""
    count: int = 64
    """So many of them, prompts taken in turn."""
    save_requests: str | None = None
    """Write what was made to this file, for --requests."""
    method: str = "plain"
    """How tokens are drafted; plain is without drafts."""
    num_draft: int = 4
    """K, tokens drafted along one path."""
    policy: str = "fixed"
    """How much of drafts is verified: fixed (all), threshold, or by costs that are measured first: early_stop, fixed_budget."""
    threshold: float = 0.5
    """Of the policy of that name: the least acceptance that is expected."""
    build: Slots = Slots()
    target: Target = Target()
    asked: Prompts = Prompts()
    drafting: Drafting = Drafting()
    sampling: Sampling = Sampling()
    output: Output = Output()

"""The flags of `specjax latency` and `specjax serve-sim`: what is predicted, of which model on which chip."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro

from specjax.flags.parts import Names, Numbers, Output, Reals

Model = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]


@dataclasses.dataclass(frozen=True)
class Chip:
    """What the model runs on."""

    hardware: str = "h100"
    """a100, h100, h200, b200, tpu-v4, tpu-v5e, tpu-v5p, tpu-v6e, tpu-v7, or here: this machine, measured in a second."""
    parallel: int = 1
    """Chips that share the model (tensor parallelism)."""
    weight_bytes: float = 2.0
    """Of each weight: 2 is bfloat16."""
    kv_bytes: float = 2.0
    """Of each number in a cache."""
    overhead_us: float = 0.0
    """Microseconds that every pass takes besides."""


@dataclasses.dataclass(frozen=True)
class Drafts:
    """What is drafted, and how good it is."""

    drafter: str = "eagle3"
    """How tokens are drafted: a trained method by name, ngram, or the config.json of a smaller model."""
    acceptance: Reals = (0.8,)
    """The chance that a drafted token is accepted, those before it having been; several are those of position 1, 2, ..."""
    num_draft: int = 8
    """K, the most tokens that are drafted."""


@dataclasses.dataclass(frozen=True)
class Latency:
    """Say beforehand when speculation pays: which K at which batch, by the roofline of some hardware."""

    config: Model
    """A name, a Hugging Face directory, its config.json alone, a .gguf file, or a hub id; no weights are read."""
    batch: Numbers = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """Requests decoded together."""
    context: int = 1024
    """Tokens in each request's cache."""
    drafts: Drafts = Drafts()
    chip: Chip = Chip()
    output: Output = Output()


@dataclasses.dataclass(frozen=True)
class ServeSim:
    """Simulate a server under load: throughput against each user's speed, by how verify lengths are chosen."""

    config: Model
    """As for `latency`."""
    concurrency: Numbers = (1, 4, 16, 64, 256, 1024)
    """Requests decoded at once; five times as many wait, and rates are those while no slot is empty."""
    policies: Names = ("plain", "fixed", "threshold", "early_stop", "fixed_budget")
    """How many drafted tokens are verified."""
    threshold: float = 0.5
    """Of the policy of that name: the least confidence."""
    replicas: int = 1
    """Copies of the model, among which requests are spread."""
    prompt: int = 256
    """Tokens of a prompt, on average."""
    generated: int = 256
    """Tokens of an answer, on average."""
    trace: str | None = None
    """An .npz file of measured rounds, confidence [R, K] and accepted [R]; made up from --acceptance if not given."""
    seed: int = 0
    """Of arrivals, lengths and what is accepted."""
    drafts: Drafts = Drafts()
    chip: Chip = Chip()
    output: Output = Output()

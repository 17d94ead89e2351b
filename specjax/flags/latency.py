"""The flags of `specjax latency`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro

from specjax.flags.parts import Numbers, Output, Reals


@dataclasses.dataclass(frozen=True)
class Latency:
    """Say beforehand when speculation pays: which K at which batch, by the roofline of some hardware."""

    config: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A name, a Hugging Face directory, its config.json alone, a .gguf file, or a hub id; no weights are read."""
    hardware: str = "h100"
    """a100, h100, h200, b200, tpu-v4, tpu-v5e, tpu-v5p, tpu-v6e, tpu-v7, or here: this machine, measured in a second."""
    parallel: int = 1
    """Chips that share the model (tensor parallelism)."""
    weight_bytes: float = 2.0
    """Of each weight: 2 is bfloat16."""
    kv_bytes: float = 2.0
    """Of each number in a cache."""
    drafter: str = "eagle3"
    """How tokens are drafted: a trained method by name, ngram, or the config.json of a smaller model."""
    acceptance: Reals = (0.8,)
    """The chance that a drafted token is accepted, those before it having been; several are those of position 1, 2, ..."""
    num_draft: int = 8
    """K is tried from 0, which is plain decoding, to this."""
    batch: Numbers = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """Requests decoded together."""
    context: int = 1024
    """Tokens in each request's cache."""
    overhead_us: float = 0.0
    """Microseconds that every pass takes besides."""
    output: Output = Output()

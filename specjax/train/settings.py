"""The numbers of a training run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import optax


class Settings(NamedTuple):
    """Numbers of one run.  Steps count updates of the parameters."""

    steps: int
    peak: float = 1e-3  # highest learning rate
    warmup: int = 100  # steps up to it, linearly
    floor: float = 0.1  # last learning rate, as a share of the peak
    weight_decay: float = 0.1  # of matrices; vectors, biases among them, have none
    clip: float = 1.0  # largest norm of a gradient
    accumulate: int = 1  # batches an update: the same as one batch of all their rows
    seed: int = 0
    evaluate_every: int = 200  # steps
    log_every: int = 10  # steps
    save_seconds: float = 300.0
    keep: int = 2  # checkpoints
    compute: str = "float32"  # dtype that matrices are multiplied in, or "bfloat16"; what is trained stays float32


MATTERS = ("steps", "peak", "warmup", "floor", "weight_decay", "clip", "accumulate", "seed", "compute")
"""The settings that trained parameters depend on."""


def check(s: Settings) -> None:
    """ValueError for settings that make no run."""
    least = {"steps": 1, "warmup": 0, "accumulate": 1, "seed": 0, "evaluate_every": 1, "log_every": 1, "keep": 1}
    for name, lowest in least.items():
        if getattr(s, name) < lowest:
            raise ValueError(f"{name} {getattr(s, name)} < {lowest}: ask for at least {lowest}")
    if not (math.isfinite(s.peak) and s.peak > 0 and s.clip > 0 and 0 <= s.floor <= 1 and 0 <= s.weight_decay < math.inf):
        said = f"peak {s.peak}, clip {s.clip}, floor {s.floor}, weight_decay {s.weight_decay}"
        raise ValueError(f"{said}: ask for a finite peak and a clip above 0, a floor within 0 to 1, a weight decay from 0")
    check_compute(s.compute)


def check_compute(dtype: str) -> None:
    """ValueError for a dtype that products are not computed in."""
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"compute {dtype!r} is not supported: train in float32 or bfloat16")


def rates(s: Settings) -> Callable:
    """Learning rate by step: linear up to the peak at step `warmup`, cosine down to the floor at step `steps`."""
    return optax.warmup_cosine_decay_schedule(0.0, s.peak, min(s.warmup, s.steps - 1), s.steps, s.floor * s.peak)

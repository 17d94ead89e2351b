"""Metrics of a training run, on disk and to whoever watches."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from specjax import distributed
from specjax.train.packing import Batches
from specjax.train.settings import Settings, rates
from specjax.types import Array


class Report(NamedTuple):
    """What a progress callback gets."""

    step: int
    steps: int
    metrics: dict[str, float]
    seconds_left: float  # NaN before anything was timed


class Journal:
    """Metrics of a run on disk and to its progress callback; losses stay on the device until a report is due."""

    def __init__(self, directory: Path, settings: Settings, batches: Batches, first: int, progress: Callable):
        directory.mkdir(parents=True, exist_ok=True)
        self.path, self.settings, self.batches, self.progress = directory / "metrics.jsonl", settings, batches, progress
        self.first, self.pending, self.rows = first, [], 0
        self.last = time.monotonic()
        self.clock: list[tuple[float, int]] = []  # (seconds, step) of the last reports; the first step, which compiles, is over
        lines = self.path.read_text("utf-8").splitlines() if self.path.exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= first and first]
        if distributed.first():
            self.path.write_text("".join(line + "\n" for line in kept), "utf-8")

    def take(self, step: int, metrics: dict[str, Array], tokens: int) -> None:
        self.pending.append((step, metrics))
        self.rows = tokens
        if not self.clock:
            jax.block_until_ready(metrics)
            self.clock.append((time.monotonic(), step + 1))

    def flush(self) -> dict[str, float]:
        """Means since the last report, weighted by labels; FloatingPointError at the first loss that is not finite."""
        values = [{name: float(x) for name, x in metrics.items()} for _, metrics in self.pending]
        for (step, _), found in zip(self.pending, values, strict=True):
            if not math.isfinite(found["loss"]) or not math.isfinite(found["gradient_norm"]):
                what = f"loss {found['loss']}, gradient norm {found['gradient_norm']}"
                rows = self.batches.name(step * self.settings.accumulate)
                raise FloatingPointError(f"step {step}: {what}, on {rows}: lower the peak rate, or look at these rows")
        self.pending = []
        weights = np.asarray([found["weight"] for found in values])
        means = {name: float(weights @ [v[name] for v in values]) / max(weights.sum(), 1) for name in values[0]}
        return {**means, "weight": float(weights.mean()), "empty": int((weights == 0).sum())}

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Append one line and report it."""
        left, now = math.nan, time.monotonic()
        facts: dict[str, float] = {"step": step, "tokens": step * self.rows, "seconds": now - self.last, **metrics}
        self.last = now
        if self.clock and step > self.clock[-1][1]:
            self.clock = [*self.clock[-20:], (now, step)]
            begun, first = self.clock[0]
            each = (now - begun) / (step - first)
            left = each * (self.settings.steps - step)
            facts |= {"rate": float(rates(self.settings)(step - 1)), "tokens_per_second": self.rows / each}
        if distributed.first():
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(facts) + "\n")
        self.progress(Report(step, self.settings.steps, facts, left))

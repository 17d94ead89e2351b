"""The training loop: AdamW with warm-up and cosine, clipping, accumulation; resumable bit for bit.

A step depends on (parameters, optimizer state, step number) alone: its rows and its key follow from the number.  So a run
that was killed and goes on from its last checkpoint ends with the very parameters of one that never stopped.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from specjax import checkpoint, distributed, sharding
from specjax.drafters.precision import is_matrix
from specjax.drafters.recipe import Batch, Recipe, with_output
from specjax.train.packing import Batches
from specjax.types import Array, LanguageModel


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


class Train(NamedTuple):
    """What a checkpoint holds."""

    params: Any
    optimizer: Any
    step: Array  # int32: updates done


class Report(NamedTuple):
    """What a progress callback gets."""

    step: int
    steps: int
    metrics: dict[str, float]
    seconds_left: float  # NaN before anything was timed


Evaluate = Callable[[Any, Any], dict[str, float]]  # (trainable, target params) -> metrics by name


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


def adamw(s: Settings) -> optax.GradientTransformation:
    """The optimizer of a run."""
    update = optax.adamw(rates(s), b1=0.9, b2=0.95, weight_decay=s.weight_decay, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(s.clip), update)


def matrices(params: Any) -> Any:
    """Which leaves are matrices, as `precision.is_matrix` tells them."""
    name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    return jax.tree_util.tree_map_with_path(lambda path, x: is_matrix(name(path), x), params)


def lowered(params: Any, dtype: str) -> Any:
    """Parameters whose float32 matrices are of `dtype`, in which products are then computed; gradients pass through.

    Raises:
      ValueError: a dtype that is neither float32 nor bfloat16.
    """
    check_compute(dtype)
    lower = lambda x, matrix: x.astype(dtype) if matrix and x.dtype == jnp.float32 else x
    return jax.tree.map(lower, params, matrices(params))


def train_step(
    state: Train, target_params, parts: Batch, key: Array, *, recipe: Recipe, target: LanguageModel | None, optimizer,
    compute: str = "float32",
) -> tuple[Train, dict[str, Array]]:  # fmt: skip
    """One update from parts [A, B, T]: each weighs by its labels, so that how rows are split changes nothing.

    An update without labels, or with a loss or gradient that is not finite, leaves parameters and optimizer as they were.
    """
    frozen = lowered(target_params, compute)

    def loss_of(params, part, key):
        return recipe.loss(lowered(params, compute), frozen, part, key)

    def one(total, part_and_key):
        part, key = part_and_key
        part = with_output(part, target, frozen, recipe.features)
        (loss, metrics), gradient = jax.value_and_grad(loss_of, has_aux=True)(state.params, part, key)
        weight = metrics["weight"]
        return jax.tree.map(lambda t, g: t + weight * g, total, gradient), {**metrics, "loss": loss}

    zeros = jax.tree.map(jnp.zeros_like, state.params)
    total, each = jax.lax.scan(one, zeros, (parts, jax.random.split(key, parts.tokens.shape[0])))
    weight = each["weight"].sum()
    gradient = jax.tree.map(lambda g: g / jnp.maximum(weight, 1), total)
    metrics = {name: (x * each["weight"]).sum() / jnp.maximum(weight, 1) for name, x in each.items()}
    metrics |= {"weight": weight, "gradient_norm": optax.tree.norm(gradient)}
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of its integer count
        updates, after = optimizer.update(gradient, state.optimizer, state.params)
    usable = (weight > 0) & jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["gradient_norm"])
    params, after = jax.tree.map(
        lambda new, old: jnp.where(usable, new, old),
        (optax.apply_updates(state.params, updates), after),
        (state.params, state.optimizer),
    )
    return Train(params, after, state.step + 1), metrics


def begin(recipe: Recipe, target_params, settings: Settings, directory: Path, mesh: Mesh | None = None) -> Train:
    """The state of the newest checkpoint, or of step 0; on a mesh, whatever the checkpoint was written on."""
    optimizer = adamw(settings)

    def fresh(key, target_params):
        params = recipe.init(key, sharding.whole(target_params))
        return Train(params, optimizer.init(params), jnp.zeros((), jnp.int32))

    key = jax.random.key(settings.seed)
    like = jax.eval_shape(fresh, key, target_params)
    places = None if mesh is None else sharding.placement(like, mesh, rules=sharding.TRAINED).shardings
    if checkpoint.steps(directory / "checkpoints"):
        return checkpoint.restore(directory / "checkpoints", like if places is None else sharding.abstract(like, places))
    return jax.jit(fresh, out_shardings=places)(key, target_params)


def fit(
    recipe: Recipe,
    batches: Batches,
    settings: Settings,
    directory: str | Path,
    *,
    target: LanguageModel | None = None,
    target_params: Any = (),
    evaluate: Sequence[Evaluate] = (),
    progress: Callable[[Report], None] = lambda report: None,
    mesh: Mesh | None = None,
) -> Any:
    """Train to the end, from the newest checkpoint in `directory` if there is one; the trained parameters.

    Args:
      recipe: what is trained.
      batches: rows by step; update n uses those of steps n * accumulate and on.
      settings: numbers.
      directory: for checkpoints/ and metrics.jsonl, one line a report; lines past a restored step are taken out.
      target: the frozen target that the recipe learns from; None when a target itself is trained.
      target_params: its parameters.
      evaluate: run at the first step, every `evaluate_every` steps and at the end.
      progress: called with each report.
      mesh: devices that rows, parameters and optimizer are spread over; `target_params` lie there already.

    Raises:
      FloatingPointError: a loss or gradient is not finite; names the step and its rows.
      ValueError: settings that make no run, or the checkpoint is of another recipe.
    """
    check(settings)
    directory = Path(directory)
    state = begin(recipe, target_params, settings, directory, mesh)
    journal = Journal(directory, settings, batches, int(state.step), progress)
    step_of = functools.partial(train_step, recipe=recipe, target=target, optimizer=adamw(settings), compute=settings.compute)
    places = None if mesh is None else (jax.tree.map(lambda x: x.sharding, state), None)
    update = jax.jit(step_of, donate_argnames="state", out_shardings=places)
    key, saved = jax.random.key(settings.seed + 1), time.monotonic()
    if not journal.first:
        journal.write(0, evaluated(evaluate, state.params, target_params))
    for step in range(journal.first, settings.steps):
        numbers = range(step * settings.accumulate, (step + 1) * settings.accumulate)
        parts = jax.tree.map(lambda *x: jnp.stack(x), *(batches.at(n) for n in numbers))
        parts = parts if mesh is None else sharding.fed(parts, mesh)
        state, metrics = update(state, target_params, parts, jax.random.fold_in(key, step))
        journal.take(step, metrics, parts.tokens.size)
        last, due = step + 1 == settings.steps, (step + 1) % settings.evaluate_every == 0
        late = distributed.agreed(time.monotonic() - saved > settings.save_seconds)
        if last or due or late or (step + 1) % settings.log_every == 0:
            found = journal.flush()  # before anything is saved: a loss that is not finite ends the run here
            journal.write(step + 1, found | (evaluated(evaluate, state.params, target_params) if last or due else {}))
        if last or late:
            checkpoint.save(directory / "checkpoints", step + 1, state, keep=settings.keep)
            saved = time.monotonic()
    return state.params


def evaluated(evaluate: Sequence[Evaluate], params, target_params) -> dict[str, float]:
    """All evaluations as one dictionary."""
    return {name: float(x) for one in evaluate for name, x in one(params, target_params).items()}


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

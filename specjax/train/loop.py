"""The training loop: AdamW with warm-up and cosine, clipping, accumulation; resumable bit for bit.

A step depends on (parameters, optimizer state, step number) alone: its rows and its key follow from the number.  So a run
that was killed and goes on from its last checkpoint ends with the very parameters of one that never stopped.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from specjax import checkpoint, distributed, sharding
from specjax.drafters.precision import lowered, matrices
from specjax.drafters.recipe import Batch, Recipe, with_output
from specjax.train.journal import Journal, Report
from specjax.train.packing import Batches
from specjax.train.settings import Settings, check, check_compute, rates
from specjax.types import Array, LanguageModel


class Train(NamedTuple):
    """What a checkpoint holds."""

    params: Any
    optimizer: Any
    step: Array  # int32: updates done


Evaluate = Callable[[Any, Any], dict[str, float]]  # (trainable, target params) -> metrics by name


def adamw(s: Settings) -> optax.GradientTransformation:
    """The optimizer of a run."""
    update = optax.adamw(rates(s), b1=0.9, b2=0.95, weight_decay=s.weight_decay, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(s.clip), update)


def train_step(
    state: Train, target_params, parts: Batch, key: Array, *, recipe: Recipe, target: LanguageModel | None, optimizer,
    compute: str = "float32",
) -> tuple[Train, dict[str, Array]]:  # fmt: skip
    """One update from parts [A, B, T]: each weighs by its labels, so that how rows are split changes nothing.

    An update without labels, or with a loss or gradient that is not finite, leaves parameters and optimizer as they were.
    """
    check_compute(compute)
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

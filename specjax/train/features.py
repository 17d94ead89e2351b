"""The frozen target's states on disk, computed once, for training that passes over its rows many times.

Without this file a training step runs the target itself, which costs time and no disk; with it, disk and no time.  The
bytes are known beforehand: rows * length * width * (1 + features) * size of the type (740 GB for 68,000 conversations at
a width of 4096 is what a peer's users met with unannounced).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters.recipe import Batch, forward
from specjax.train.packing import Batches
from specjax.types import LanguageModel, Output


def estimate(batches: Batches, length: int, width: int, features: int, dtype: Any = np.float16) -> int:
    """Bytes that `cached` will write."""
    return batches.count * length * width * (1 + features) * np.dtype(dtype).itemsize


def cached(
    directory: str | Path,
    batches: Batches,
    target: LanguageModel,
    params: Any,
    *,
    features: tuple[int, ...] = (),
    dtype: Any = np.float16,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Batches:
    """The same batches with `output` read from memory-mapped files, which are made, or finished, in `directory`.

    Args:
      directory: of hidden.npy [rows, T, D] and features.npy [rows, T, M, D].
      batches: of rows of one length.
      target: the frozen model.
      params: its parameters; a directory must not be reused for others.
      features: layers to keep beside the last hidden states.
      dtype: on disk; batches are float32.
      progress: (batches done, batches).

    Raises:
      OSError: the disk has no room for them.
      ValueError: a state is too large for `dtype`, or the directory is of another shape.
    """
    directory, first = Path(directory), batches.at(0)
    directory.mkdir(parents=True, exist_ok=True)
    size, length = first.tokens.shape
    shapes = {"hidden": (batches.count, length, target.width), "features": (batches.count, length, len(features), target.width)}
    plan = {"shapes": {k: list(v) for k, v in shapes.items()}, "layers": list(features), "dtype": np.dtype(dtype).name}
    arrays, done = _open(directory, plan, shapes, dtype, estimate(batches, length, target.width, len(features), dtype))
    run = jax.jit(lambda params, batch: forward(target, params, batch, features))
    total = -(-batches.count // size)
    for step in range(done, total):
        found = run(params, batches.at(step))
        for name, array in arrays.items():
            values = np.asarray(getattr(found, name))
            if np.abs(values).max(initial=0) > np.finfo(dtype).max:
                raise ValueError(f"{name} reach {np.abs(values).max():.3g}, too large for {np.dtype(dtype).name}: use float32")
            array[batches.rows(step)] = values
        _note(directory, {**plan, "done": step + 1}, arrays)
        progress(step + 1, total)

    def at(step: int) -> Batch:
        rows = batches.rows(step)
        hidden, tapped = (jnp.asarray(arrays[name][rows], jnp.float32) for name in ("hidden", "features"))
        return batches.at(step)._replace(output=Output(jnp.zeros((*hidden.shape[:2], 0)), hidden, tapped))

    return batches._replace(at=at)


def _open(directory: Path, plan: dict, shapes: dict, dtype: Any, needed: int) -> tuple[dict[str, np.ndarray], int]:
    """The files, and how many batches they hold already."""
    note = directory / "features.json"
    found = json.loads(note.read_text("utf-8")) if note.exists() else {}
    done = found.pop("done", 0)
    if found and found != plan:
        raise ValueError(f"{directory} holds features of another shape ({found}): choose an empty directory")
    _, _, free = shutil.disk_usage(directory)
    if not found and needed > free:
        raise OSError(f"features need {needed / 1e9:.2f} GB in {directory}, which has {free / 1e9:.2f}: train without a cache")
    mode = "r+" if found else "w+"
    names = {name: shape for name, shape in shapes.items()}
    return {k: np.lib.format.open_memmap(directory / f"{k}.npy", mode, dtype, shape) for k, shape in names.items()}, done


def _note(directory: Path, facts: dict, arrays: dict[str, Any]) -> None:
    for array in arrays.values():
        array.flush()
    scratch = directory / ".features.json"
    scratch.write_text(json.dumps(facts), "utf-8")
    scratch.replace(directory / "features.json")

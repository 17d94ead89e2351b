"""The frozen target's states on disk, computed once, for training that passes over its rows many times.

Without this file a training step runs the target itself, which costs time and no disk; with it, disk and no time.  The
bytes are known beforehand: rows * length * width * (1 + features) * size of the type (740 GB for 68,000 conversations at
a width of 4096 is what a peer's users met with unannounced).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters.recipe import Batch, forward
from specjax.train.corpus import planned, write_json
from specjax.train.digests import fingerprint
from specjax.train.packing import Batches
from specjax.types import LanguageModel, Output

NOTE = "features.json"


def estimate(batches: Batches, length: int, width: int, features: int, dtype: Any = np.float16) -> int:
    """Bytes that `cached` will write."""
    return batches.count * length * width * (1 + features) * np.dtype(dtype).itemsize


def cached(
    directory: str | Path,
    batches: Batches,
    target: LanguageModel,
    params: Any,
    *,
    config: Any = None,
    features: tuple[int, ...] = (),
    dtype: Any = np.float16,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Batches:
    """The same batches with `output` read from memory-mapped files, which are made, or finished, in `directory`.

    Rows are filled in the order of their table, whatever order and size of batches training asks for, so that a later run
    with another seed or batch reads and finishes the same files.  Files that hold more layers than are asked for serve too.

    Args:
      directory: of hidden.npy [rows, T, D] and features.npy [rows, T, M, D].
      batches: of rows of one length.
      target: the frozen model.
      params: its parameters.
      config: what these do not say of the model, such as its rotary base.
      features: layers to keep beside the last hidden states.
      dtype: on disk; batches are float32.
      progress: (rows done, rows).

    Raises:
      OSError: the disk has no room for them.
      ValueError: a state is too large for `dtype`, rows differ in length, or the directory was begun for other rows, another
        target, or other layers.
    """
    if batches.take is None:
        raise ValueError("rows of several lengths have no table that states could be kept by: train without a cache")
    directory, (size, length) = Path(directory), batches.at(0).tokens.shape
    layers = kept_layers(directory, features)
    shapes = {"hidden": (batches.count, length, target.width), "features": (batches.count, length, len(layers), target.width)}
    plan = {"shapes": shapes, "layers": layers, "dtype": np.dtype(dtype).name, "rows": rows_digest(batches)}
    plan["target"] = fingerprint(params, config)
    arrays, done = _open(directory, plan, shapes, dtype, estimate(batches, length, target.width, len(layers), dtype))
    run = jax.jit(lambda params, batch: forward(target, params, batch, layers))
    for first in range(done, batches.count, size):
        rows = chunk(batches, first, size)
        found = run(params, batches.take(rows))
        for name, array in arrays.items():
            values = np.asarray(getattr(found, name))
            if not np.abs(values).max(initial=0) <= np.finfo(dtype).max:
                raise ValueError(f"{name} reach {np.abs(values).max():.3g}, too large for {np.dtype(dtype).name}: use float32")
            array[rows] = values
            array.flush()
        done = min(first + size, batches.count)
        write_json(directory / NOTE, {**plan, "done": done})
        progress(done, batches.count)

    def at(step: int) -> Batch:
        rows = batches.rows(step)
        hidden = jnp.asarray(arrays["hidden"][rows], jnp.float32)
        tapped = jnp.asarray(arrays["features"][rows][:, :, [layers.index(i) for i in features]], jnp.float32)
        return batches.at(step)._replace(output=Output(jnp.zeros((*hidden.shape[:2], 0)), hidden, tapped))

    return batches._replace(at=at, take=None)


def kept_layers(directory: Path, features: tuple[int, ...]) -> tuple[int, ...]:
    """The layers that a directory was begun for, where those asked for are among them; else those asked for."""
    note = directory / NOTE
    begun = tuple(json.loads(note.read_text("utf-8")).get("layers", ())) if note.exists() else ()
    return begun if {*features} <= {*begun} else features


def chunk(batches: Batches, first: int, size: int) -> list[int]:
    """The `size` rows from `first` on; past the end the last one again, so that all chunks have one shape."""
    return np.minimum(np.arange(first, first + size), batches.count - 1).tolist()


def rows_digest(batches: Batches, size: int = 64) -> str:
    """sha256 of what states depend on: tokens and borders of all rows, in the order of their table."""
    found = hashlib.sha256(str(batches.count).encode())
    for first in range(0, batches.count, size):
        part = batches.take(chunk(batches, first, size))  # pyright: ignore[reportOptionalCall] - `cached` has looked
        for rows in (part.tokens, part.segments):
            found.update(np.asarray(rows)[: batches.count - first].tobytes())
    return found.hexdigest()


def _open(directory: Path, plan: dict, shapes: dict, dtype: Any, needed: int) -> tuple[dict[str, np.memmap], int]:
    """The files, and how many rows they hold already."""
    note, done = directory / NOTE, 0
    begun = planned(note, plan, beside=("done",))
    directory.mkdir(parents=True, exist_ok=True)
    if begun:
        done = json.loads(note.read_text("utf-8"))["done"]
    elif needed > (free := shutil.disk_usage(directory)[2]):
        raise OSError(f"features need {needed / 1e9:.2f} GB in {directory}, which has {free / 1e9:.2f}: train without a cache")
    mode = "r+" if begun else "w+"
    return {k: np.lib.format.open_memmap(directory / f"{k}.npy", mode, dtype, shape) for k, shape in shapes.items()}, done

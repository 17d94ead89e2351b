"""Numbers that a drafter's matrices are kept in: a float in memory, a float or 8 bits on disk.

A matrix in 8 bits is int8 under its name, and "<name>.scale", a float32 for each output channel (for each head too, where
heads are stacked).  Vectors, stacked ones among them, stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SCALE = ".scale"
"""What follows a matrix's name in that of its scales; a path has no dot in it."""


def as_dtype(tensors: Mapping[str, np.ndarray], dtype: np.dtype) -> dict[str, np.ndarray]:
    """Tensors whose matrices are of `dtype`; of int8, each with its scales."""
    if dtype == jnp.int8:
        # biases in 8 bits would save nothing, and heads would share a scale
        whole = {name for name, x in tensors.items() if not is_matrix(name, x)}
        small = {name: quantized(name, x) for name, x in tensors.items() if name not in whole}
        scales = {f"{name}{SCALE}": scale for name, (_, scale) in small.items()}
        return {**{name: tensors[name] for name in whole}, **{name: q for name, (q, _) in small.items()}, **scales}
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"matrices cannot be kept as {dtype}: choose float32, bfloat16, float16 or int8")
    exact = {name: x.astype(np.float32) for name, x in tensors.items() if is_matrix(name, x)}
    large = [name for name, x in exact.items() if not np.abs(x).max(initial=0) <= float(jnp.finfo(dtype).max)]
    if large:
        raise ValueError(f"{large[0]} holds NaN or what {dtype} cannot: look at it, or choose float32")
    return {name: exact[name].astype(dtype) if name in exact else x for name, x in tensors.items()}


def is_matrix(name: str, x: Any) -> bool:
    """Whether a leaf by this name is a matrix, or several; stacked biases, which are vectors, are told by their names."""
    return x.ndim > 1 and not name.endswith("bias")


def matrices(params: Any) -> Any:
    """Which leaves of a tree are matrices."""
    name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    return jax.tree_util.tree_map_with_path(lambda path, x: is_matrix(name(path), x), params)


def lowered(params: Any, dtype: Any) -> Any:
    """Parameters whose float32 matrices are of `dtype`, in which products are then computed; gradients pass through."""
    lower = lambda x, matrix: x.astype(dtype) if matrix and x.dtype == jnp.float32 else x
    return jax.tree.map(lower, params, matrices(params))


def converted(params: Any, dtype: Any) -> Any:
    """Parameters whose matrices, in whatever floats they came, are of `dtype`."""
    convert = lambda x, matrix: x.astype(dtype) if matrix and jnp.issubdtype(x.dtype, jnp.floating) else x
    return jax.tree.map(convert, params, matrices(params))


def dtype_of(params: Any) -> Any:
    """The dtype of a model's largest tensor."""
    return max(jax.tree.leaves(params), key=lambda x: x.size).dtype


def quantized(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x [..., in, out] as int8 and scales float32 [..., out]: their product is off by half a step, scale / 2, at most."""
    x = x.astype(np.float32)
    largest = np.abs(x).max(-2, initial=0.0)
    if not np.isfinite(largest).all():
        raise ValueError(f"{name} holds NaN or inf, which 8 bits cannot: look at it, or choose float32")
    scale = largest / np.float32(127)
    return np.rint(x / np.where(scale > 0, scale, 1)[..., None, :]).astype(np.int8), scale


def restored(source: str | Path, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors as they were before `as_dtype`: int8 times its scales, in float32; the others as they are.

    Raises:
      ValueError: int8 without its scales, scales without int8, or scales that do not fit.
    """
    small = {name: x for name, x in tensors.items() if x.dtype == np.int8}
    scales = {name.removesuffix(SCALE): x for name, x in tensors.items() if name.endswith(SCALE)}
    shape = lambda x: x.shape[:-2] + x.shape[-1:]
    fits = lambda name, s: s.dtype == np.float32 and small[name].ndim > 1 and s.shape == shape(small[name])
    groups = {
        "of int8 without scales": sorted(small.keys() - scales.keys()),
        "with scales and not of int8": sorted(scales.keys() - small.keys()),
        "with scales of another shape or dtype": sorted(n for n in small.keys() & scales.keys() if not fits(n, scales[n])),
        "with scales that are not finite": sorted(n for n, s in scales.items() if not np.isfinite(s).all()),
    }
    faults = [f"{len(names)} {what}: {', '.join(names[:8])}" for what, names in groups.items() if names]
    if faults:
        raise ValueError(f"{source}: tensors do not fit: {'; '.join(faults)}: save the drafter again")
    whole = {name: x.astype(np.float32) * scales[name][..., None, :] for name, x in small.items()}
    return {name: whole.get(name, x) for name, x in tensors.items() if not name.endswith(SCALE)}

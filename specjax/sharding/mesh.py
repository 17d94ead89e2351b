"""A mesh of devices from a text, and what of an array its axes can cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "model")
ROWS = ("data", "fsdp")
"""The axes that rows of a batch are spread over."""

PRESETS = {
    "h100x8": "model=8",
    "v5e-4": "model=4",
    "v5e-8": "model=8",
    "v5e-16": "data=2,model=8",
    "v5p-8": "model=4",  # counted in cores, two of which are one device
    "v5p-16": "model=8",
    "v6e-4": "model=4",
    "v6e-8": "model=8",
    "v6e-16": "data=2,model=8",
}
"""Meshes by the name of a machine or slice: heads over the chips with the fastest links, at most 8, rows over the rest."""

Cut = str | tuple[str, ...] | None
"""What cuts one axis of an array: a mesh axis, several of them, or nothing."""


def parse_sizes(text: str) -> dict[str, int]:
    """The size of every axis from "data=2,model=4", where one that is not named is 1, or from a key of PRESETS.

    Raises:
      ValueError: an axis that does not exist, or a size that is no number from 1.
    """
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    for part in PRESETS.get(text, text).split(","):
        name, equals, size = part.strip().partition("=")
        if name not in AXES:
            known = f"{', '.join(AXES)}, or one of {', '.join(PRESETS)}"
            raise ValueError(f"mesh {text!r}: no axis {name!r}: write data=2,model=4 with the axes {known}")
        if not (equals and size.isascii() and size.isdecimal() and int(size) > 0):
            raise ValueError(f"mesh {text!r}: {name} has the size {size!r}: write a whole number from 1, as in {name}=2")
        sizes[name] = int(size)
    return sizes


def parse_mesh(text: str, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of all AXES from a text as `parse_sizes` takes it.

    Args:
      text: sizes by axis.
      devices: those to use, all of them; jax.devices() unless given.

    Raises:
      ValueError: what `parse_sizes` refuses, or another number of devices.
    """
    devices, sizes = jax.devices() if devices is None else list(devices), parse_sizes(text)
    count = math.prod(sizes.values())
    if count != len(devices):
        kind = f"{len(devices)} {devices[0].platform} device{'s' * (len(devices) > 1)}"
        raise ValueError(f"mesh {text!r} is of {count} devices, and there are {kind}: choose sizes whose product is that")
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def as_mesh(mesh: str | Mesh | None) -> Mesh | None:
    """A mesh of all AXES, all of them Auto: the one a text names, or one with some of them, in any order.

    Raises:
      ValueError: what `parse_mesh` refuses, or an axis with another name.
    """
    if isinstance(mesh, str):
        return parse_mesh(mesh)
    if mesh is None:
        return None
    names = mesh.axis_names
    if unknown := set(names) - set(AXES):
        raise ValueError(f"mesh {dict(mesh.shape)}: no axis {min(unknown)!r}: use some of {', '.join(AXES)}")
    devices = mesh.devices.transpose([names.index(axis) for axis in AXES if axis in names])
    found = Mesh(devices.reshape([mesh.shape.get(axis, 1) for axis in AXES]), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return mesh if found == mesh else found


def mesh_of(params: Any) -> Mesh | None:
    """The mesh that parameters were placed on; None where they were not."""
    leaves = [x.sharding for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    return next((s.mesh for s in leaves if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh)), None)


def fitted(axes: Sequence[Cut], shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """A spec of `axes`, the first ones of an array's, without those that do not divide its lengths."""
    return PartitionSpec(*(a if n % size_of(mesh, a) == 0 else None for a, n in zip(axes, shape, strict=False)))


def size_of(mesh: Mesh, axis: Cut) -> int:
    """Devices along an axis, or along several; 1 along none."""
    return math.prod(mesh.shape[a] for a in ((axis,) if isinstance(axis, str) else axis or ()))

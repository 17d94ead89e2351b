"""Checkpoints of any tree of arrays, by orbax: whole or not there, the newest few kept, restored where they are wanted.

A directory holds one folder a step, named by its number.  Arrays come back bit for bit, with the shardings of the tree
they are restored into; a tree of another structure is an error that lists the paths.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from specjax import distributed


def save(directory: str | Path, step: int, tree: Any, *, keep: int = 2) -> None:
    """Write `tree` as the checkpoint of `step` and delete all but the newest `keep`; an unfinished one never counts."""
    directory = Path(directory).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    goal = directory / str(step)
    if goal.exists():
        _remove(goal)
    ocp.save(str(goal), tree)
    for old in steps(directory)[:-keep]:
        _remove(directory / str(old))


def _remove(goal: Path) -> None:
    """Delete a checkpoint, which one of several hosts does."""
    if distributed.first():
        shutil.rmtree(goal)
    distributed.together(f"removed {goal.name}")


def steps(directory: str | Path) -> list[int]:
    """Steps that have a checkpoint, in order."""
    folders = Path(directory).iterdir() if Path(directory).is_dir() else ()
    return sorted(int(folder.name) for folder in folders if folder.name.isdecimal())


def restore(directory: str | Path, like: Any, *, step: int | None = None) -> Any:
    """The tree saved at `step`, or at the newest.

    Args:
      directory: as for `save`.
      like: a tree of arrays or ShapeDtypeStructs of the same structure; their shardings are where the arrays go.
      step: which; None is the newest.

    Raises:
      FileNotFoundError: there is none.
      ValueError: the saved tree has other paths, shapes or dtypes than `like`.
    """
    found = steps(directory)
    if not found or step not in (None, *found):
        raise FileNotFoundError(f"{directory}: no checkpoint{'' if step is None else f' of step {step}'} (found: {found})")
    path = Path(directory).absolute() / str(found[-1] if step is None else step)
    abstract = jax.tree.map(_placed, like)
    _compare(path, ocp.metadata(str(path)).metadata, abstract)
    return ocp.load(str(path), abstract)


def _placed(x: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(x, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _compare(path: Path, saved: Any, wanted: Any) -> None:
    """ValueError that lists the paths at which two trees differ."""
    have, want = (
        {_name(keys): (tuple(x.shape), str(x.dtype)) for keys, x in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (saved, wanted)
    )
    missing, unused = sorted(want.keys() - have.keys()), sorted(have.keys() - want.keys())
    other = [f"{k} is {have[k]} but should be {want[k]}" for k in sorted(have.keys() & want.keys()) if have[k] != want[k]]
    faults = {"missing": missing, "not used": unused, "of another shape": other}
    said = [f"{len(names)} {what}: {', '.join(names[:8])}" for what, names in faults.items() if names]
    if said:
        raise ValueError(f"{path} holds another tree: {'; '.join(said)}")


def _name(keys: tuple) -> str:
    """A path as orbax writes it, where the fields of named tuples are keys like any others."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in keys)

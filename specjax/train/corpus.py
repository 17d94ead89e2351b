"""Token arrays on disk: written shard by shard, read through the memory map.

A corpus directory holds tokens.npy [n] (uint16 where every id fits, else uint32), starts.npy [documents + 1], mask.npy [n]
where only some tokens are to be predicted, and provenance.json: what it was made of, by which command, and the counts.

`build` is resumable: items are numbered, a shard is a pure function of its range of items, and it appears on disk in one
step.  A kill loses at most the unfinished shard and doubles nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FILES = ("tokens.npy", "starts.npy", "provenance.json")


class Corpus(NamedTuple):
    """Documents as one long array of token ids."""

    tokens: np.ndarray  # [n] uint16 or uint32
    starts: np.ndarray  # [documents + 1] int64: document i is tokens[starts[i] : starts[i + 1]]
    mask: np.ndarray | None  # [n] bool: tokens to predict; None = all
    provenance: dict[str, Any]

    @property
    def documents(self) -> int:
        return len(self.starts) - 1


class Document(NamedTuple):
    """One item that became tokens."""

    tokens: Sequence[int]
    mask: Sequence[bool] | None = None  # tokens to predict; None = all


class Skipped(NamedTuple):
    """One item that did not, and why ("empty", "too long", ...).  `error` tells a failure from a choice."""

    reason: str
    error: bool = False


Item = Document | Skipped
Progress = Callable[[int, int], None]  # (items done, items)


def build(
    directory: str | Path,
    count: int,
    make: Callable[[range], Sequence[Item]],
    *,
    provenance: Mapping[str, Any],
    shard: int = 64,
    progress: Progress = lambda done, total: None,
) -> Corpus:
    """Make items 0 .. count - 1 into a corpus; go on where an earlier call with the same provenance was stopped.

    Args:
      directory: where it lies; made if need be.
      count: items.
      make: (range of item numbers) -> one Document or Skipped each; must depend on the numbers alone.
      provenance: what a reader must know to make it again; JSON.
      shard: items a shard, the most that a kill can lose.
      progress: called after each shard.

    Raises:
      ValueError: the directory holds a corpus, or shards, of another provenance; or nothing became tokens.
    """
    directory = Path(directory)
    shards, plan = directory / "shards", {**provenance, "items": count, "shard": shard}
    if planned(directory / "plan.json", plan) and all((directory / name).is_file() for name in FILES):
        return read(directory)
    shards.mkdir(parents=True, exist_ok=True)
    write_json(directory / "plan.json", plan)
    for first in range(0, count, shard):
        goal, items = shards / f"{first:09d}.npz", range(first, min(first + shard, count))
        if not goal.exists():
            arrays: Any = _packed(make(items), len(items))
            _replace(goal, lambda file, arrays=arrays: np.savez(file, **arrays))
        progress(items.stop, count)
    parts = sorted(shards.glob("*.npz"))
    _merge(directory, parts, plan)
    for path in parts:
        path.unlink()
    return read(directory)


def so_far(directory: str | Path, goal: str | Path) -> Corpus:
    """What a corpus that is still being built holds already, as a finished one in `goal`; the building may go on.

    Raises:
      FileNotFoundError: nothing is being built there.
      ValueError: `goal` holds another corpus.
    """
    directory, goal = Path(directory), Path(goal)
    parts = sorted((directory / "shards").glob("*.npz"))
    if not parts:
        raise FileNotFoundError(f"{directory}: no shard of an unfinished corpus: build one, or read it if it is finished")
    plan = json.loads((directory / "plan.json").read_text("utf-8"))
    plan["items"] = min(plan["items"], len(parts) * plan["shard"])
    planned(goal / "plan.json", plan)
    goal.mkdir(parents=True, exist_ok=True)
    write_json(goal / "plan.json", plan)
    _merge(goal, parts, plan)
    return read(goal)


def read(directory: str | Path) -> Corpus:
    """A finished corpus, memory-mapped.  FileNotFoundError, one line, where there is none or it was never finished."""
    directory = Path(directory)
    lacking = [name for name in FILES if not (directory / name).is_file()]
    if lacking:
        raise FileNotFoundError(f"{directory}: no finished corpus ({', '.join(lacking)} missing): build it, or go on building")
    mask = directory / "mask.npy"
    return Corpus(
        np.load(directory / "tokens.npy", mmap_mode="r"),
        np.load(directory / "starts.npy"),
        np.load(mask, mmap_mode="r") if mask.exists() else None,
        json.loads((directory / "provenance.json").read_text("utf-8")),
    )


def planned(path: Path, plan: Mapping[str, Any], beside: Sequence[str] = ()) -> bool:
    """Whether work on this very plan has begun, ValueError if on another; the keys `beside` in the file are none of it."""
    if not path.exists():
        return False
    found, plan = json.loads(path.read_text("utf-8")), json.loads(json.dumps(plan))
    other = sorted(key for key in {*found, *plan} - {*beside} if found.get(key) != plan.get(key))
    if other:
        raise ValueError(f"{path.parent} was begun with another {', '.join(other)}: choose an empty directory, or delete it")
    return True


def keep_to(directory: Path, facts: Mapping[str, Any]) -> None:
    """Note in plan.json what is done in a directory; ValueError where it is something else."""
    if not planned(directory / "plan.json", facts):
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / "plan.json", facts)


def _packed(items: Sequence[Item], count: int) -> dict[str, np.ndarray]:
    """A shard: flat tokens and mask, lengths, and why items were left out."""
    if len(items) != count:
        raise ValueError(f"{len(items)} results for {count} items: make must give one each")
    kept = [item for item in items if isinstance(item, Document)]
    left = [item for item in items if isinstance(item, Skipped)]
    masks = [np.ones(len(d.tokens), bool) if d.mask is None else np.asarray(d.mask, bool) for d in kept]
    odd = [(len(d.tokens), len(m)) for d, m in zip(kept, masks, strict=True) if len(d.tokens) != len(m)]
    if odd:
        raise ValueError(f"a document of {odd[0][0]} tokens has a mask of {odd[0][1]}")
    return {
        "tokens": np.concatenate([np.zeros(0, np.uint32), *(np.asarray(d.tokens, np.uint32) for d in kept)]),
        "mask": np.concatenate([np.zeros(0, bool), *masks]),
        "lengths": np.asarray([len(d.tokens) for d in kept], np.int64),
        "skipped": np.asarray([item.reason for item in left if not item.error], np.str_),
        "errors": np.asarray([item.reason for item in left if item.error], np.str_),
    }


def _merge(directory: Path, shards: Sequence[Path], plan: dict) -> None:
    """The shards as one corpus."""
    parts = [dict(np.load(path)) for path in shards]
    lengths = np.concatenate([part["lengths"] for part in parts])
    if not lengths.sum():
        raise ValueError(f"{directory}: not one of {plan['items']} items became tokens: look at the counts of its shards")
    tokens, mask = (np.concatenate([part[name] for part in parts]) for name in ("tokens", "mask"))
    small = np.uint16 if tokens.max() < 1 << 16 else np.uint32
    _replace(directory / "tokens.npy", lambda file: np.save(file, tokens.astype(small)))
    _replace(directory / "starts.npy", lambda file: np.save(file, np.concatenate([[0], np.cumsum(lengths)])))
    if not mask.all():
        _replace(directory / "mask.npy", lambda file: np.save(file, mask))
    why = {name: np.concatenate([part[name] for part in parts]) for name in ("skipped", "errors")}
    reasons = {name: {str(r): int((x == r).sum()) for r in np.unique(x)} for name, x in why.items()}
    facts = {"success": len(lengths), **{name: len(x) for name, x in why.items()}, "reasons": reasons}
    facts |= {"tokens": len(tokens), "to_predict": int(mask.sum())}
    write_json(directory / "provenance.json", {**plan, "counts": facts})


def write_json(goal: Path, facts: Mapping[str, Any]) -> None:
    """Write a JSON file so that it is either whole or not there."""
    _replace(goal, lambda file: file.write(json.dumps(facts, indent=1).encode() + b"\n"))


def _replace(goal: Path, write: Callable[[Any], Any]) -> None:
    """Write a file so that it is either whole or not there."""
    scratch = goal.with_name(f".{goal.name}.{os.getpid()}")
    try:
        with scratch.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, goal)
    finally:
        scratch.unlink(missing_ok=True)

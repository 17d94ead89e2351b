"""What the command line writes: text on stdout, messages, tables and bars on stderr, JSON at the very end."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
from tqdm import tqdm


def write(text: str) -> None:
    """Generated text, as it comes."""
    sys.stdout.write(text)
    sys.stdout.flush()


def silent(text: str) -> None:
    """For generated text when stdout is kept for JSON."""


def say(line: str) -> None:
    """Anything else."""
    tqdm.write(line, file=sys.stderr)  # above a bar, if there is one
    sys.stderr.flush()


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equal length, the heading first, as aligned text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("─" * n for n in widths), *lines[1:]])


def word(value: bool | None) -> str:
    """A truth in a table; None is what was not promised."""
    return "-" if value is None else "yes" if value else "NO"


@contextlib.contextmanager
def progress_bar(unit: str) -> Iterator[Callable[..., None]]:
    """A function (done, total, label="") that moves a bar, which appears with the first report; "B" counts bytes."""
    bars: list[tqdm] = []

    def report(done: int, total: int, label: str = "") -> None:
        if not bars:
            bars.append(tqdm(total=total, initial=done, unit=unit, unit_scale=unit == "B", leave=False, file=sys.stderr))
        bars[0].set_description_str(label)
        bars[0].update(done - bars[0].n)

    try:
        yield report
    finally:
        for bar in bars:
            bar.close()


def check_goal(path: str | None) -> None:
    """Raise ValueError now if `--json path` could not be written later."""
    if path is None or path == "-":
        return
    folder = Path(path).expanduser().absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(path).expanduser().is_dir():
        raise ValueError(f"--json {path} cannot be written: name a file in a directory that exists and is yours")


def write_json(path: str, value: dict) -> None:
    """One object to stdout (-), or to a file that appears whole or not at all."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if path == "-":
        return write(text)
    goal = Path(path).expanduser().absolute()
    descriptor, scratch = tempfile.mkstemp(prefix=goal.name, dir=goal.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(scratch, goal)
    except BaseException:
        os.unlink(scratch)
        raise


def environment() -> dict:
    """Where a result was made."""
    device, packages = jax.devices()[0], ("jax", "jaxlib", "flax", "specjax")
    versions = {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}
    facts = {"kind": device.device_kind, "platform": device.platform, "count": jax.device_count(), "cores": os.cpu_count()}
    return {"versions": versions, "device": facts}


def keep_compiled(directory: Path) -> None:
    """Turn on JAX's persistent compilation cache, for this process: the second run of a command starts at once."""
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

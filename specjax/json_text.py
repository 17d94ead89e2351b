"""JSON from strangers: what it says, or one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def parsed(text: str, name: object, advice: str) -> Any:
    """What JSON says.

    Args:
      text: the JSON.
      name: what an error calls it.
      advice: what to do; an error ends with it.

    Raises:
      ValueError: it is none, is nested too deep, or holds a number too long to read.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is broken JSON ({error}): {advice}") from None


def as_object(value: Any, name: object, advice: str) -> dict[str, Any]:
    """What was read, where it is an object; ValueError for anything else."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} holds a JSON {type(value).__name__}, not an object: {advice}")
    return value


def read_json(path: Path, advice: str) -> Any:
    """The same of a file; ValueError for one that is not UTF-8 too, FileNotFoundError where there is none."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is broken JSON ({error}): {advice}") from None
    return parsed(text, path, advice)

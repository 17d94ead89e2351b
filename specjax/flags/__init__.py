"""The flags of the command `specjax`: a typed dataclass a subcommand, and `parse`, which turns arguments into one of them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterator, Sequence
from typing import Any, get_type_hints

import tyro

from specjax.flags.engine import Engine, Slots
from specjax.flags.latency import Chip, Drafts, Latency, ServeSim
from specjax.flags.parts import Drafting, Names, Numbers, Output, Prompts, Sampling, Switch, Target
from specjax.flags.train import Corpus, Drafter, Testbed, Train
from specjax.names import guess

__all__ = ["Bench", "Chip", "Corpus", "Demo", "Drafter", "Drafting", "Drafts", "Engine", "Generate", "Latency", "Lossless",
           "Methods", "Output", "Prompts", "ServeSim", "Slots", "Target", "Testbed", "flags", "parse", "settings"]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Demo:
    """Stream answers with n-gram drafts, then show what they gain over plain decoding."""

    target: Target = Target()
    num_draft: int = 4
    """K, tokens drafted in a round."""
    max_new_tokens: int = 64
    """The most tokens an answer may have."""
    output: Output = Output()


@dataclasses.dataclass(frozen=True)
class Methods:
    """List methods and rules; with --model, what each method adds to that target."""

    model: str | None = None
    """A target to count extra parameters for, named as for `generate`."""
    draft_model: Names = ()
    """The small model of method small, or the models of specinfer."""
    output: Output = Output()


@dataclasses.dataclass(frozen=True)
class Generate:
    """Answer prompts."""

    prompt: tyro.conf.Positional[tuple[str, ...]] = ()
    """Prompts, one an argument; or give --prompts FILE."""
    method: str = "ngram"
    """How tokens are drafted; plain is without drafts."""
    num_draft: int | None = None
    """K, tokens drafted along one path; 4 if not given."""
    target: Target = Target()
    asked: Prompts = Prompts()
    drafting: Drafting = Drafting()
    sampling: Sampling = Sampling()
    output: Output = Output()


@dataclasses.dataclass(frozen=True)
class Bench:
    """Measure methods side by side with plain decoding."""

    prompt: tyro.conf.Positional[tuple[str, ...]] = ()
    """Prompts, one an argument; without any and without --prompts, those of the demo."""
    methods: Names = ("ngram",)
    """Methods to compare; plain is always there."""
    num_draft: Numbers = (4,)
    """Values of K; each method runs with each."""
    batch_size: int = 1
    """Prompts decoded together."""
    ceiling: Switch = False
    """Decode once more and hold acceptance against what no lossless rule could exceed; slow."""
    target: Target = Target()
    asked: Prompts = Prompts()
    drafting: Drafting = Drafting()
    sampling: Sampling = Sampling()
    output: Output = Output()


@dataclasses.dataclass(frozen=True)
class HotSampling(Sampling):
    """The law of a token; a test of distributions needs one."""

    temperature: float = 1.0
    """0 is greedy: then tokens are compared, not laws."""


@dataclasses.dataclass(frozen=True)
class Lossless:
    """Test that a drafter and a rule keep the target's distribution, and write the report."""

    target: str = "table"
    """table (known law), tiny (a transformer of two layers), or a model named as for `generate`."""
    method: str = "small"
    """How tokens are drafted."""
    num_draft: int = 3
    """K, tokens drafted along one path."""
    quick: Switch = False
    """Minutes in place of up to half an hour: a bias of TV .05 per token has to be seen, else .02."""
    out: str = "lossless-report"
    """The directory of report.html, report.md, report.json; an interrupted report there goes on."""
    seed: int = 0
    """Of everything that is drawn.  There is no rerun until green: say which seed a report has."""
    plant_bias: float = 0.0
    """Spoil the output by this total variation per token, to see the report fail."""
    weights_dtype: str = "float32"
    """Numbers the weights are kept in, those of a drafter loaded beside the target too: float32 or bfloat16."""
    prompts: str | None = None
    """A file of prompts as for `bench`; those of the demo if not given."""
    limit: int = 8
    """Ask at most so many prompts of the file."""
    drafting: Drafting = Drafting()
    sampling: HotSampling = HotSampling()
    output: Output = Output()


COMMANDS: dict[str, type] = {
    "demo": Demo,
    "methods": Methods,
    "generate": Generate,
    "bench": Bench,
    "lossless": Lossless,
    "latency": Latency,
    "serve-sim": ServeSim,
    "engine": Engine,
    "train testbed": Testbed,
    "train corpus": Corpus,
    "train drafter": Drafter,
}
POSITIONAL = ("prompt", "recipe", "config")


def parse(arguments: Sequence[str]) -> Any:
    """Arguments -> one of COMMANDS.

    Raises:
      ValueError: what is wrong with them, in one line that names the nearest subcommand or flag.
      SystemExit: 0, after help was printed.
    """
    check_words(arguments)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            command, rest = tyro.cli(
                Demo | Methods | Generate | Bench | Lossless | Latency | ServeSim | Engine | Train,
                prog="specjax",
                description="Speculative decoding of language models: faster, with the model's own law.",
                args=list(arguments),
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
                return_unknown_args=True,
            )
    except SystemExit as end:
        if not end.code:
            raise
        raise ValueError(f"{_one_line(said.getvalue())}: see specjax --help") from None
    command = command.what if isinstance(command, Train) else command
    if rest:
        words = next(words for words, kind in COMMANDS.items() if kind is type(command))
        name = rest[0].split("=")[0]
        near = guess(name, flags(type(command))) or f"see specjax {words} --help"
        raise ValueError(f"specjax {words} has no {name!r}: {near.strip()}")
    return command


def check_words(arguments: Sequence[str]) -> None:
    """ValueError where the first words are those of no command."""
    said: list[str] = []
    for word in arguments[:2]:
        known = sorted({words.split()[len(said)] for words in COMMANDS if words.split()[: len(said)] == said != words.split()})
        if not known or word.startswith("-"):
            return
        said.append(word)
        if word not in known:
            raise ValueError(f"no command {' '.join(said)!r}: {guess(word, known)}there are: {', '.join(known)}")


def flags(command: type) -> Iterator[str]:
    """Every flag of a subcommand."""
    hints = get_type_hints(command)
    for field in dataclasses.fields(command):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from flags(hints[field.name])
        elif field.name not in POSITIONAL:
            yield "--" + field.name.replace("_", "-")


def settings(command: Any) -> dict[str, Any]:
    """Every flag's value, by its name."""
    values = {field.name: getattr(command, field.name) for field in dataclasses.fields(command)}
    parts = [settings(value) if dataclasses.is_dataclass(value) else {name: value} for name, value in values.items()]
    return {name: value for part in parts for name, value in part.items()}


def _one_line(box: str) -> str:
    """The message of tyro's box, up to its first ruler."""
    lines = [line.strip("│ ") for line in box.splitlines()[1:]]
    end = next((i for i, line in enumerate(lines) if line.startswith(("─", "╰"))), len(lines))
    return " ".join(lines[:end]).rstrip(".!")

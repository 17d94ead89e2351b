"""The flags of the command `specjax`: a typed dataclass a subcommand, and `parse`, which turns arguments into one of them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, get_type_hints

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from specjax.names import guess
from specjax.sampling import SamplingParams


def _comma_list(kind: type, metavar: str) -> PrimitiveConstructorSpec:
    """A flag with one value that holds several, such as `--methods ngram,early_exit`."""

    def read(values: list[str]) -> tuple:
        try:
            return tuple(kind(x.strip()) for x in values[0].split(","))
        except ValueError:
            raise ValueError(f"{values[0]!r} is not {metavar}") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda x: isinstance(x, tuple),
        str_from_instance=lambda x: [",".join(map(str, x))],
    )


Names = Annotated[tuple[str, ...], _comma_list(str, "NAME[,NAME...]")]
Numbers = Annotated[tuple[int, ...], _comma_list(int, "INT[,INT...]")]
Repeated = tyro.conf.UseAppendAction[tuple[str, ...]]
Switch = tyro.conf.FlagCreatePairsOff[bool]
EITHER = tyro.conf.create_mutex_group(required=False)


@dataclasses.dataclass(frozen=True)
class Target:
    """The model whose law is kept."""

    model: str = "smollm2-135m"
    """A name, a Hugging Face directory, a .gguf file, or a hub id org/name."""
    weights_dtype: str = "float32"
    """Numbers the weights are stored in: float32 or bfloat16."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The law of a token, in the order in which its parts are applied."""

    repetition_penalty: float | None = None
    """Above 1 discourages every token of prompt and output."""
    frequency_penalty: float | None = None
    """Taken from a token's logit for each time it stands in the output."""
    presence_penalty: float | None = None
    """Taken once from the logit of each token of the output."""
    temperature: float = 0.0
    """0 is greedy: then the seed changes nothing."""
    top_k: int | None = None
    """Keep the k most probable tokens."""
    top_p: float | None = None
    """Keep the smallest set of tokens of this probability, in (0, 1]."""
    min_p: float | None = None
    """Keep tokens of at least this share of the largest probability."""

    def params(self) -> SamplingParams:
        """The same as the library takes it."""
        return SamplingParams(**dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class Prompts:
    """What is asked: words on the command line or a file."""

    prompts: str | None = None
    """A .jsonl(.gz) file of Spec-Bench, MT-Bench, HumanEval or GSM8K rows (first turns), or a .txt file with one prompt."""
    categories: Names = ()
    """Ask rows of these categories only."""
    limit: int | None = None
    """Ask at most so many prompts, taken from every category in turn."""
    chat: Annotated[Switch, EITHER] = False
    """Ask through the chat template, which is what happens unless the model has none."""
    raw: Annotated[Switch, EITHER] = False
    """Continue the text as it stands."""
    max_new_tokens: int = 128
    """The most tokens an answer may have."""
    stop: Repeated = ()
    """An answer ends before this text."""
    seed: int = 0
    """Of all randomness; each prompt has its own by its place among those asked."""


@dataclasses.dataclass(frozen=True)
class Drafting:
    """How tokens are proposed and verified."""

    rule: str | None = None
    """How drafts are verified; each method has a usual one (see `specjax methods`)."""
    draft_model: Names = ()
    """The small model of method small, named like --model; for specinfer, one or several with commas between them."""
    exit_layers: int | None = None
    """Layers of the target that method early_exit drafts with; a quarter of them if not given."""
    option: Repeated = ()
    """NAME=VALUE of the method's own options, see `specjax methods`; may be repeated."""


@dataclasses.dataclass(frozen=True)
class Output:
    """Where results go."""

    json: str | None = None
    """Write one JSON object to this file at the end; - is stdout."""


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
    """Numbers the weights are stored in: float32 or bfloat16."""
    prompts: str | None = None
    """A file of prompts as for `bench`; those of the demo if not given."""
    limit: int = 8
    """Ask at most so many prompts of the file."""
    drafting: Drafting = Drafting()
    sampling: HotSampling = HotSampling()
    output: Output = Output()


COMMANDS = {"demo": Demo, "methods": Methods, "generate": Generate, "bench": Bench, "lossless": Lossless}


def parse(arguments: Sequence[str]) -> Any:
    """Arguments -> one of COMMANDS.

    Raises:
      ValueError: what is wrong with them, in one line that names the nearest subcommand or flag.
      SystemExit: 0, after help was printed.
    """
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        raise ValueError(f"no command {arguments[0]!r}: {guess(arguments[0], list(COMMANDS))}there are: {', '.join(COMMANDS)}")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            command, rest = tyro.cli(
                Demo | Methods | Generate | Bench | Lossless,
                prog="specjax",
                description="Speculative decoding of language models: faster, with the model's own law.",
                args=list(arguments),
                config=(tyro.conf.OmitArgPrefixes,),
                return_unknown_args=True,
            )
    except SystemExit as end:
        if not end.code:
            raise
        raise ValueError(f"{_one_line(said.getvalue())}: see specjax --help") from None
    if rest:
        name = rest[0].split("=")[0]
        near = guess(name, flags(type(command))) or f"see specjax {arguments[0]} --help"
        raise ValueError(f"specjax {arguments[0]} has no {name!r}: {near.strip()}")
    return command


def flags(command: type) -> Iterator[str]:
    """Every flag of a subcommand."""
    hints = get_type_hints(command)
    for field in dataclasses.fields(command):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from flags(hints[field.name])
        elif field.name != "prompt":  # a positional argument
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

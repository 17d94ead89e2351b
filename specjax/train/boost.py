"""Boost-tuning (SpecInfer, Miao et al., arXiv 2305.09781, section 3.2): small models that make up for one another.

    model 0 learns from every document ──► those that it says as the target does are left out
    model 1 learns from the rest       ──► and so on: each learns what none before it has learnt

A document counts as said where the model's best token, given the text before it, is the next token wherever the mask has one to
predict.  For answers that the target gave at temperature 0 that is the same as to generate greedily and compare: as long as
all tokens were right, the text before the next is what the model itself would have written.  For text from anywhere else,
a higher temperature or a book, it is agreement with that text, which is seldom whole: settle for a share of it.

`specinfer` merges the trees of the trained models.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters import small
from specjax.drafters.objectives import chunked, correct
from specjax.drafters.recipe import Batch, Recipe, forward, labels
from specjax.train.corpus import Corpus, keep_to, write_json
from specjax.train.digests import digest, fingerprint
from specjax.train.journal import Report
from specjax.train.loop import Evaluate, fit
from specjax.train.packing import batches, fill, pack
from specjax.train.settings import MATTERS, Settings
from specjax.types import LanguageModel


class Boosted(NamedTuple):
    """The trained models."""

    params: tuple[Any, ...]  # of each, in the order in which `specinfer` takes them
    learnt_from: tuple[int, ...]  # documents that each was trained on
    left: int  # documents that none of them says


def boost(
    models: Sequence[LanguageModel],
    text: Corpus,
    settings: Settings,
    directory: str | Path,
    *,
    target: LanguageModel,
    target_params: Any,
    length: int,
    batch: int,
    share: float = 1.0,
    recipe: Callable[[LanguageModel, LanguageModel], Recipe] = lambda target, model: small.recipe(target, model, num_draft=4),
    judges: Callable[[Recipe], Sequence[Evaluate]] = lambda recipe: (),
    progress: Callable[[int, Report], None] = lambda model, report: None,
) -> Boosted:
    """Train `models` one after the other, each on the documents that none before it says; call again to go on.

    Args:
      models: small ones of the target's vocabulary.
      text: answers with a mask; of text without one, stretches of `length` tokens stand for documents.
      settings: of each model's run; the seed of model i is `seed + i`.
      directory: plan.json; model i has model_i/ in it, as `fit` leaves it, and left.json: what is left for those after it.
      target: the frozen target, from which they are distilled.
      target_params: its parameters.
      length: tokens of a row.
      batch: rows of an update.
      share: how much of a document has to be right, 1.0 being all.
      recipe: (target, model) -> how it is trained.
      judges: (recipe) -> what `fit` evaluates it by.
      progress: (number of the model, its report).

    Raises:
      ValueError: no document is left for a model, or the directory was begun with other text, settings, length, batch or
        share, or for another target.
    """
    text = text if text.mask is not None else stretches(text, length)
    facts = {"length": length, "batch": batch, "share": share, "settings": {name: getattr(settings, name) for name in MATTERS}}
    keep_to(Path(directory), {**facts, "text": digest(text), "target": fingerprint(target_params)})
    kept, params, learnt_from = np.arange(text.documents), [], []
    for i, model in enumerate(models):
        if not len(kept):
            raise ValueError(
                f"0 documents are left for model {i}: {i} models say all {text.documents}: train fewer, or on more"
            )
        own, part = Path(directory) / f"model_{i}", select(text, kept)
        numbers, how = settings._replace(seed=settings.seed + i), recipe(target, model)
        rows = batches(part, length=length, batch=batch, seed=numbers.seed)
        report = functools.partial(progress, i)
        both: dict[str, Any] = dict(target=target, target_params=target_params)
        params.append(fit(how, rows, numbers, own, **both, evaluate=judges(how), progress=report))
        learnt_from.append(len(kept))
        if not (own / "left.json").exists():
            right, asked = agreement(model, params[-1], part, length=length, batch=batch)
            write_json(own / "left.json", {"left": kept[~said(right, asked, share)].tolist()})
        kept = np.asarray(json.loads((own / "left.json").read_text("utf-8"))["left"], np.int64)
    return Boosted(tuple(params), tuple(learnt_from), len(kept))


def agreement(model: LanguageModel, params, text: Corpus, *, length: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens to predict of each document that are the model's best, and all of them: both [documents].

    They are seen as in training: a document longer than `length` in pieces, each by itself.
    """

    @jax.jit
    def look(params, rows: Batch):
        goal, weights = labels(rows)
        best = lambda x: correct(model.unembed(params, x[0]), x[1])
        return chunked(best, (forward(model, params, rows).hidden, goal)) * weights, weights

    table, right, asked = pack(text.starts, length), *np.zeros((2, text.documents), np.int64)
    before = np.zeros(int(text.starts[0]), np.int64)  # of a part of a corpus, tokens that are none of it
    owners = np.concatenate([before, np.repeat(np.arange(text.documents), np.diff(text.starts))])
    owners = text._replace(tokens=owners)  # documents in place of tokens
    for first in range(0, len(table), batch):
        part = [*table[first : first + batch], *[[]] * batch][:batch]  # of one shape, the last with empty rows
        rows = Batch(*(jnp.asarray(np.stack(x)) for x in zip(*(fill(text, row, length) for row in part), strict=True)))
        whose = np.stack([fill(owners, row, length)[0] for row in part])
        for count, values in zip((right, asked), look(params, rows), strict=True):
            np.add.at(count, whose, np.asarray(values, np.int64))
    return right, asked


def said(right: np.ndarray, asked: np.ndarray, share: float) -> np.ndarray:
    """Which documents a model says: [documents] bool.  One that asks for nothing teaches nothing either, and is said.

    >>> said(np.array([3, 2, 0]), np.array([3, 3, 0]), 1.0).tolist()
    [True, False, True]
    """
    return (asked == 0) | (right / np.maximum(asked, 1) >= share)


def select(text: Corpus, numbers: np.ndarray) -> Corpus:
    """The documents `numbers` of a corpus, in memory."""
    spans = [slice(int(text.starts[n]), int(text.starts[n + 1])) for n in numbers.tolist()]
    gather = lambda x: np.concatenate([x[span] for span in spans])
    starts = np.concatenate([[0], np.cumsum([span.stop - span.start for span in spans])])
    return Corpus(gather(text.tokens), starts, None if text.mask is None else gather(text.mask), text.provenance)


def stretches(text: Corpus, length: int) -> Corpus:
    """The same tokens, every document cut into documents of `length` tokens, the last of each shorter.

    >>> stretches(Corpus(np.arange(8), np.array([0, 5, 8]), None, {}), 3).starts.tolist()
    [0, 3, 5, 8]
    """
    cuts = [range(begin, end, length) for begin, end in zip(text.starts[:-1].tolist(), text.starts[1:].tolist(), strict=True)]
    return text._replace(starts=np.asarray([at for cut in cuts for at in cut] + [int(text.starts[-1])], np.int64))

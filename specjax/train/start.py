"""Training that begins from a saved drafter in place of a recipe's own first parameters: more tokens, or another corpus.

The optimizer begins anew, with its warm-up: what a saved drafter leaves behind is its weights.  Its draft vocabulary goes with
it, for a mapping of ids belongs to the weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.drafters import files
from specjax.drafters.recipe import Recipe
from specjax.drafters.small import shared_ids
from specjax.drafters.vocabulary import Ids
from specjax.models.load import LM, load
from specjax.train import recipes
from specjax.train.digests import of_file
from specjax.train.work import Work

FREE = ("num_draft", "target", "vocab_size", "width")
"""Facts that may differ, and two that old files lack: shapes, and what config.json is read by, hold these."""


class Start(NamedTuple):
    """Where a run begins."""

    directory: Path
    digest: str  # sha256 of the file of weights
    vocabulary: Ids | None  # the draft vocabulary of the weights; None: all of the target's tokens
    num_draft: int | None  # K that they were trained for; None: it is not said, as of a model


def find(lm: LM, work: Work) -> Start | None:
    """The saved drafter that a run begins from; None: there is none.

    Raises:
      ValueError: it is another method's, for a target of another size or of other options, or a draft vocabulary was asked for
        beside it.
      FileNotFoundError: nothing was saved there.
    """
    if work.start is None:
        return None
    entry, directory = recipes.find(work.recipe), Path(work.start)
    if work.draft_vocabulary is not None:
        raise ValueError(f"draft_vocabulary {work.draft_vocabulary} beside start {directory}: that one's is kept, leave it out")
    if entry.save is recipes.save_pair:
        raise ValueError(f"{work.recipe} tunes its target too: begin it without {directory}, a drafter alone")
    if entry.save is recipes.save_model:
        return Start(directory, weights_digest(directory / "model.safetensors", work.recipe), None, None)
    said = files.read_config(directory, entry.method, lm.model)
    told = json.loads(json.dumps(recipes.facts(work.recipe, lm, num_draft=work.num_draft, options=work.options)))
    for name in {**told, "tree": None}.keys() - {*FREE}:
        if said.get(name) != told.get(name):
            differ = f"config.json says {name} {said.get(name)}, and what would be trained has {told.get(name)}"
            raise ValueError(f"{directory}: {differ}: give the options it was trained with")
    ids = said.get("vocabulary")
    digest = weights_digest(directory / files.WEIGHTS, work.recipe)
    return Start(directory, digest, None if ids is None else tuple(ids), said.get("num_draft"))


def begun_from(recipe: Recipe, start: Start, lm: LM, work: Work) -> Recipe:
    """The recipe with the saved parameters, in float32, as its first ones.

    Raises:
      ValueError: tensors that are missing, left over or of another shape, or a model of another architecture or tokenizer.
    """
    like = jax.eval_shape(recipe.init, jax.random.key(0), lm.params)
    if recipes.find(work.recipe).save is recipes.save_model:
        params = read_model(start, lm, work)
    else:
        try:
            params = files.read_params(start.directory, lambda shapes: like)
        except ValueError as error:
            apart = start.num_draft != work.num_draft
            raise ValueError(f"{error}; num_draft {work.num_draft}, and it has {start.num_draft}" if apart else error) from None
    first: Any = jax.tree.map(lambda x, wanted: jnp.asarray(x, wanted.dtype), params, like)
    return recipe._replace(init=lambda key, target_params: first)


def read_model(start: Start, lm: LM, work: Work) -> Any:
    """Parameters of a saved model of the target's family; ValueError for one of another architecture or tokenizer."""
    own, wanted = load(start.directory), recipes.reduced(lm.config, work.options.get("layers"))
    shared_ids(lm, own)
    if own.config != wanted:
        other = [name for name in wanted._fields if getattr(own.config, name) != getattr(wanted, name)]
        raise ValueError(f"{start.directory} is a model of another {', '.join(other)}: give the options it was trained with")
    return own.params


def facts(start: Start | None) -> Any:
    """What tells one beginning from another: of plan.json."""
    if start is None or start.vocabulary is None:
        return None if start is None else start.digest
    return [start.digest, list(start.vocabulary)]


def weights_digest(path: Path, recipe: str) -> str:
    """sha256 of a file of weights; FileNotFoundError where there is none."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file: give the directory of a drafter that was trained as {recipe}")
    return of_file(path)

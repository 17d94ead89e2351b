"""Training that begins from a saved drafter in place of a recipe's own first parameters: more tokens, or another corpus.

The optimizer begins anew, with its warm-up: what a published drafter leaves behind is its weights.  Its draft vocabulary
goes with it, for a mapping of ids belongs to the weights.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.drafters import files
from specjax.drafters.recipe import Recipe
from specjax.drafters.vocabulary import Ids
from specjax.models.huggingface import read_directory
from specjax.models.load import LM
from specjax.train import recipes
from specjax.train.work import Work

FREE = ("num_draft", "target", "tree", "vocabulary")
"""Facts of a saved drafter that a run may differ in: shapes hold the rest to it."""


class Start(NamedTuple):
    """Where a run begins."""

    directory: Path
    digest: str  # sha256 of the file of weights
    vocabulary: Ids | None  # the draft vocabulary of the weights; None: all of the target's tokens


def find(lm: LM, work: Work) -> Start | None:
    """The saved drafter that a run begins from; None: there is none.

    Raises:
      ValueError: it is another method's, another target's or of other options, or a draft vocabulary was asked for beside it.
      FileNotFoundError: nothing was saved there.
    """
    if work.start is None:
        return None
    entry, directory = recipes.find(work.recipe), Path(work.start)
    if work.draft_vocabulary is not None:
        raise ValueError(f"draft_vocabulary {work.draft_vocabulary}: {directory} brings its own, leave it out")
    if entry.save is recipes.save_pair:
        raise ValueError(f"{work.recipe} tunes its target too: begin it without {directory}, a drafter alone")
    if entry.save is recipes.save_model:
        return Start(directory, sha256(directory / "model.safetensors"), None)
    said = files.read_config(directory, entry.method, lm.model)
    told = recipes.facts(work.recipe, lm, num_draft=work.num_draft, options=work.options)
    other = [name for name, x in json.loads(json.dumps(told)).items() if name not in FREE and said.get(name, x) != x]
    if other:
        given = ", ".join(f"{name} {said[name]}" for name in other)
        raise ValueError(f"{directory} has {given}, which is not what would be trained: give the options it was trained with")
    ids = said.get("vocabulary")
    return Start(directory, sha256(directory / files.WEIGHTS), None if ids is None else tuple(ids))


def begun_from(recipe: Recipe, start: Start, lm: LM, work: Work) -> Recipe:
    """The recipe with the saved parameters, in float32, as its first ones.

    Raises:
      ValueError: tensors that are missing, left over or of another shape, or a model of another architecture.
    """
    like = jax.eval_shape(recipe.init, jax.random.key(0), lm.params)
    if recipes.find(work.recipe).save is recipes.save_model:
        params = model(start, lm, work)
    else:
        params = files.read_params(start.directory, lambda shapes: like)
    first: Any = jax.tree.map(lambda x, wanted: jnp.asarray(x, wanted.dtype), params, like)
    return recipe._replace(init=lambda key, target_params: first)


def model(start: Start, lm: LM, work: Work) -> Any:
    """Parameters of a saved model of the target's family; ValueError for one of another architecture."""
    _, config, params = read_directory(start.directory)
    wanted = recipes.reduced(lm.config, work.options.get("layers"))
    if config != wanted:
        other = [name for name in config._fields if getattr(config, name) != getattr(wanted, name)]
        raise ValueError(f"{start.directory} is a model of another {', '.join(other)}: give the options it was trained with")
    return params


def sha256(path: Path) -> str:
    """Of a file; FileNotFoundError where there is none."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file: give the directory of a saved drafter")
    return hashlib.sha256(path.read_bytes()).hexdigest()

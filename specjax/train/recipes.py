"""How drafters are trained, by name.  To add one: write its recipe, add its entry; options come from its signature."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.drafters import base, blockwise, files, hydra, layer, medusa, mtp, objectives, parallel_heads, small
from specjax.drafters.dflash.config import dflash_config
from specjax.drafters.dflash.dflash2 import dflash2_config
from specjax.drafters.eagle import drafter as eagle
from specjax.drafters.eagle import head as eagle_head
from specjax.drafters.eagle import parallel
from specjax.drafters.recipe import Recipe
from specjax.drafters.vocabulary import Ids, within
from specjax.models.load import LM
from specjax.models.transformer import TransformerConfig, language_model
from specjax.names import unknown
from specjax.train import blocks, joint
from specjax.train.export import describe, save_directory
from specjax.types import LanguageModel, Params

OBJECTIVES: dict[str, objectives.Objective] = {
    "hard": objectives.hard,
    "soft": objectives.soft,
    "kl": objectives.kl,
    "total_variation": objectives.total_variation,
    "log_acceptance": objectives.log_acceptance,
    "lk": objectives.lk,
}
FLOATS = ("float16", "bfloat16", "float32")
"""Numbers that a model is written in."""

DTYPES = (*FLOATS, "int8")
"""Numbers that a drafter's matrices are written in."""

READERS: base.Readers = {
    **base.READERS,
    objectives.Objective: (OBJECTIVES.__getitem__, f"one of {', '.join(OBJECTIVES)}"),
    medusa.Paths: (lambda text: tuple(map(tuple, trees.read_paths(Path(text)))), "a JSON file of rank paths"),
}
"""How an option's text is read by the type that its recipe names."""


def save_heads(directory: Path, lm: LM, params: Params, options: Mapping, config: Mapping, *, dtype: str) -> None:
    """Write what `load_drafter` takes as `weights`."""
    files.save(directory, params.drafter, config, dtype=jnp.dtype(dtype))


def save_model(directory: Path, lm: LM, params: Params, options: Mapping, config: Mapping, *, dtype: str) -> None:
    """Write a smaller model, which `load_drafter` takes as `model`, as it is published."""
    own = reduced(lm.config, options.get("layers"))
    save_directory(directory, own, params.drafter, lm.tokenizer, dtype=jnp.dtype(dtype))


def save_pair(directory: Path, lm: LM, params: Params, options: Mapping, config: Mapping, *, dtype: str) -> None:
    """Write a tuned target as a model, and in drafter/ within it what `load_drafter` takes as `weights` for that target."""
    joint.save(directory, lm.config, params, lm.tokenizer, config, dtype=jnp.dtype(dtype))


class Training(NamedTuple):
    """An entry of RECIPES."""

    method: str  # a key of METHODS: what the trained drafter is loaded as
    recipe: Callable  # (target, *, num_draft, ...what the target says, ...options) -> Recipe
    told: Callable = lambda lm: {}  # (lm) -> keyword arguments that the target says
    config: Callable = lambda lm, options: {}  # (lm, options) -> what config.json says beside method and num_draft
    save: Callable = save_heads  # (directory, lm, Params of target and drafter, options, config, *, dtype)
    dtypes: tuple[str, ...] = DTYPES


def reduced(config: TransformerConfig, layers: int | None = None) -> TransformerConfig:
    """The config of a model like the target with its first `layers` layers; a quarter of them unless given.

    Raises:
      ValueError: there are not as many.
    """
    layers = max(1, config.layers // 4) if layers is None else layers
    if not 1 <= layers <= config.layers:
        raise ValueError(f"layers={layers} does not lie in 1 to {config.layers}, the target's")
    return config._replace(layers=layers, sliding=config.sliding[:layers])


def small_recipe(
    target: LanguageModel, *, num_draft: int, config: TransformerConfig, layers: int | None = None,
    objective: objectives.Objective = objectives.soft,
) -> Recipe:  # fmt: skip
    """`small.recipe` for a model like the target, `config`, with fewer layers."""
    return small.recipe(target, language_model(reduced(config, layers)), num_draft=num_draft, objective=objective)


def trunk_recipe(
    target: LanguageModel, *, num_draft: int, config: TransformerConfig, layers: int | None = None,
    objective: objectives.Objective = objectives.soft,
) -> Recipe:  # fmt: skip
    """`small.trunk_recipe` for a target with a config."""
    return small.trunk_recipe(target, num_draft=num_draft, layers=reduced(config, layers).layers, objective=objective)


def eagle_1(
    target: LanguageModel, *, num_draft: int, config: eagle_head.EagleConfig, vocabulary: Ids | None = None,
    paths: medusa.Paths | None = None, steps: int = 1, decay: float = 0.8, objective: objectives.Objective = objectives.soft,
    law: float = 0.1, state: float = 1.0, noise: float = 0.1,
) -> Recipe:  # fmt: skip
    """`eagle.recipe` as EAGLE-1 was trained: SmoothL1 to the target's states, a tenth of soft cross-entropy, one step.

    Features are given uniform noise of +- noise x 512 / T in rows of T tokens; the authors' 0.1 is 0.025 at their T = 2048.
    """

    def blur(key, features):
        width = noise * 512 / features.shape[1]
        return features + jax.random.uniform(key, features.shape, minval=-width, maxval=width)

    how: dict[str, Any] = dict(
        num_draft=num_draft, config=config, vocabulary=vocabulary, paths=paths, steps=steps, decay=decay, objective=objective,
        law=law, state=state,
    )  # fmt: skip
    return eagle.recipe(target, noise=blur, **how)._replace(clean=eagle.recipe(target, **how).loss)


def peagle(
    target: LanguageModel, *, num_draft: int, config: eagle_head.EagleConfig, vocabulary: Ids | None = None, layers: int = 4,
    share: float = 0.7, least: float = 0.2, decay: float = 1.0, objective: objectives.Objective = objectives.soft,
) -> Recipe:  # fmt: skip
    """`parallel.recipe` for a module of `layers` layers; the paper's has four."""
    return parallel.recipe(
        target, num_draft=num_draft, config=config._replace(layers=layers), vocabulary=vocabulary, share=share, least=least,
        decay=decay, objective=objective,
    )  # fmt: skip


def of_the_family(method: str, recipe: Callable, preset: Callable) -> Training:
    """An entry for a module of the EAGLE family, given the preset of its flags."""
    return Training(
        method, recipe, told=lambda lm: {"config": preset(lm.config)},
        config=lambda lm, options: {**tree_of(lm, options), **preset(lm.config)._asdict()},
    )  # fmt: skip


def of_blocks(method: str, recipe: Callable, preset: Callable, says: Callable) -> Training:
    """An entry for a block drafter, given the preset of its backbone and what config.json says of it."""
    return Training(
        method, recipe, told=lambda lm: {"config": preset(lm.config)},
        config=lambda lm, options: says(preset(lm.config), options),
    )  # fmt: skip


def tree_of(lm: LM, options: Mapping[str, Any]) -> dict:
    """The tree that decoding uses unless told otherwise."""
    return {} if options.get("paths") is None else {"tree": options["paths"]}


RECIPES: dict[str, Training] = {
    "small": Training(
        "small", small_recipe, told=lambda lm: {"config": lm.config}, save=save_model, dtypes=FLOATS
    ),
    "small_trunk": Training(
        "small", trunk_recipe, told=lambda lm: {"config": lm.config},
        config=lambda lm, options: {"layers": reduced(lm.config, options.get("layers")).layers},
    ),
    "blockwise": Training("blockwise", blockwise.recipe),
    "medusa": Training("medusa", medusa.recipe, config=tree_of),
    "medusa_2": Training("medusa", joint.medusa_2, config=tree_of, save=save_pair, dtypes=FLOATS),
    "hydra": Training("hydra", hydra.recipe, config=tree_of),
    "hydra++": Training(
        "hydra", hydra.recipe, told=lambda lm: {"prefix": layer.config_of(lm.config)},
        config=lambda lm, options: {**tree_of(lm, options), "prefix": layer.config_of(lm.config)._asdict()},
    ),
    "parallel_heads": Training(
        "parallel_heads", parallel_heads.recipe, told=lambda lm: {"config": layer.config_of(lm.config)},
        config=lambda lm, options: {**tree_of(lm, options), **layer.config_of(lm.config)._asdict()},
    ),
    "mtp": Training(
        "mtp", mtp.recipe, told=lambda lm: {"config": mtp.config_of(lm.config)},
        config=lambda lm, options: mtp.config_of(lm.config)._asdict(),
    ),
    "eagle1": of_the_family("eagle1", eagle_1, eagle_head.eagle1),
    "eagle3": of_the_family("eagle3", eagle.recipe, eagle_head.eagle3),
    "eagle3.1": of_the_family("eagle3.1", eagle.recipe, eagle_head.eagle31),
    "peagle": Training(
        "peagle", peagle, told=lambda lm: {"config": eagle_head.peagle(lm.config)},
        config=lambda lm, options: eagle_head.peagle(lm.config, layers=options.get("layers", 4))._asdict(),
    ),
    "dflash": of_blocks("dflash", blocks.dflash, dflash_config, blocks.facts),
    "dspark": of_blocks("dspark", blocks.dspark, functools.partial(dflash_config, anchor_first=True), blocks.dspark_facts),
    "dflash2": of_blocks("dflash2", blocks.dflash2, dflash2_config, blocks.dflash2_facts),
}  # fmt: skip


def find(name: str) -> Training:
    """An entry by name; ValueError names the nearest."""
    if name not in RECIPES:
        raise ValueError(unknown("recipe", name, RECIPES))
    return RECIPES[name]


def parse_options(name: str, words: Sequence[str]) -> dict[str, Any]:
    """Options of a recipe from words NAME=VALUE; ValueError for a recipe, an option or a value that is none.

    >>> parse_options("medusa", ["layers=2", "objective=soft"])["layers"]
    2
    """
    return base.parse_options(find(name).recipe, words, READERS)


def build(
    name: str, lm: LM, *, num_draft: int, options: Mapping[str, Any], vocabulary: Ids | None = None
) -> Recipe:  # fmt: skip
    """The recipe `name` for a target, of a draft vocabulary where one is given; ValueError where it does not fit."""
    entry = find(name)
    check_options(options, num_draft, lm.model.vocab_size)
    make = lambda target, **own: entry.recipe(target, num_draft=num_draft, **entry.told(lm), **options, **own)
    if vocabulary is None:
        return make(lm.model)
    if "vocabulary" in base.options(entry.recipe):  # EAGLE's and the block drafters': they mask by it too
        return make(lm.model, vocabulary=vocabulary)
    if entry.save is not save_heads:
        raise ValueError(f"{name} trains a model whose vocabulary head is its own: leave the draft vocabulary out")
    return within(make, lm.model, vocabulary)


def check_options(options: Mapping[str, Any], num_draft: int, vocab_size: int) -> None:
    """ValueError for numbers that no recipe can be built of, and for a tree that no draft could fill."""
    for name, value in options.items():
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise ValueError(f"option {name}={value} < 1: ask for at least 1")
        if isinstance(value, float) and not (0 <= value < math.inf and (value > 0 or name != "decay")):
            raise ValueError(f"option {name}={value} is no weight: give a finite number from 0, and for decay one above 0")
    for path in options.get("paths") or ():
        if len(path) > num_draft or max(path, default=0) >= vocab_size:
            fits = f"at most {num_draft} levels, the K that is trained, of ranks below {vocab_size}, the vocabulary"
            raise ValueError(f"path {list(path)} of the tree is out of reach: give {fits}")


def check_saving(name: str, lm: LM, options: Mapping[str, Any], dtype: str) -> None:
    """ValueError where what a recipe trains for a target could not be written afterwards."""
    check_dtype(name, dtype)
    models = {save_model: lambda: reduced(lm.config, options.get("layers")), save_pair: lambda: lm.config}
    if (config := models.get(find(name).save)) is not None:
        describe(config(), lm.tokenizer.eos_ids, dtype)


def check_dtype(name: str, dtype: str) -> None:
    """ValueError for numbers that the trained weights of a recipe cannot be written in."""
    known = find(name).dtypes
    if dtype not in known:
        raise ValueError(f"dtype {dtype!r} is not one that {name} is saved in: use {', '.join(known)}")


def save(
    directory: Path, name: str, lm: LM, params: Params, *, num_draft: int, options: Mapping[str, Any], dtype: str,
    vocabulary: Ids | None = None,
) -> None:  # fmt: skip
    """Write what `Recipe.assemble` gives so that `load_drafter` takes the directory as `weights`, or as `model` if it is one.

    Of a recipe that tunes the target, `load` takes the directory, and its drafter/ is the weights.
    """
    check_dtype(name, dtype)
    config = facts(name, lm, num_draft=num_draft, options=options)
    config |= {} if vocabulary is None else {"vocabulary": vocabulary}
    find(name).save(directory, lm, params, options, config, dtype=dtype)


def facts(name: str, lm: LM, *, num_draft: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of a drafter that the recipe `name` trains for a target, but for its draft vocabulary."""
    entry = find(name)
    known = {"method": entry.method, "num_draft": num_draft, "target": lm.name}
    return known | {"vocab_size": lm.model.vocab_size, "width": lm.model.width, **entry.config(lm, options)}

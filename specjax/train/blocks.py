"""Block drafters as recipes by name: what of their shape may be chosen, and what their config.json says of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from specjax.drafters import objectives
from specjax.drafters.dflash import dflash2 as block_dflash2
from specjax.drafters.dflash import drafter as block_dflash
from specjax.drafters.dflash import dspark as block_dspark
from specjax.drafters.dflash.config import DFlashConfig, checked
from specjax.drafters.dflash.dflash2 import SelectorConfig
from specjax.drafters.dflash.dspark import DSparkConfig
from specjax.drafters.recipe import Recipe
from specjax.drafters.vocabulary import Ids
from specjax.types import LanguageModel


def dflash(
    target: LanguageModel, *, num_draft: int, config: DFlashConfig, vocabulary: Ids | None = None, layers: int | None = None,
    hidden: int | None = None, anchor_first: bool = False, blocks: int = 64, decay: float | None = None,
    objective: objectives.Objective = objectives.hard,
) -> Recipe:  # fmt: skip
    """`drafter.recipe` for a backbone of so many layers and so wide a feed-forward; `config`'s unless given."""
    config = shaped(config, layers=layers, hidden=hidden, anchor_first=anchor_first)
    how: dict[str, Any] = dict(vocabulary=vocabulary, blocks=blocks, decay=decay, objective=objective)
    return block_dflash.recipe(target, num_draft=num_draft, config=config, **how)


def dspark(
    target: LanguageModel, *, num_draft: int, config: DFlashConfig, vocabulary: Ids | None = None, layers: int | None = None,
    hidden: int | None = None, rank: int = 256, markov: str = "vanilla", blocks: int = 64, decay: float = math.exp(-1 / 4),
    text: float = 0.1, law: float = 0.9, confidence: float = 1.0,
) -> Recipe:  # fmt: skip
    """`dspark.recipe` likewise, for a Markov head of this rank and kind; without a confidence head where its weight is 0."""
    heads, config = (
        heads_of(dict(rank=rank, markov=markov, confidence=confidence)),
        shaped(config, layers=layers, hidden=hidden),
    )
    how: dict[str, Any] = dict(vocabulary=vocabulary, blocks=blocks, decay=decay, text=text, law=law, confidence=confidence)
    return block_dspark.recipe(target, num_draft=num_draft, config=config, heads=heads, **how)


def dflash2(
    target: LanguageModel, *, num_draft: int, config: DFlashConfig, vocabulary: Ids | None = None, layers: int | None = None,
    hidden: int | None = None, rank: int = 256, top_k: int = 16, blocks: int = 64, decay: float | None = None,
    objective: objectives.Objective = objectives.hard, path: float = 1.0,
) -> Recipe:  # fmt: skip
    """`dflash2.recipe` likewise, for a selector of this rank among the `top_k` best."""
    selector, config = SelectorConfig(rank, top_k), shaped(config, layers=layers, hidden=hidden)
    how: dict[str, Any] = dict(vocabulary=vocabulary, blocks=blocks, decay=decay, objective=objective, path=path)
    return block_dflash2.recipe(target, num_draft=num_draft, config=config, selector=selector, **how)


def shaped(config: DFlashConfig, **given: Any) -> DFlashConfig:
    """The config with what is given in place of its own, None being nothing; ValueError where it cannot be."""
    return checked(config._replace(**{name: x for name, x in given.items() if x is not None}))


def heads_of(options: Mapping[str, Any]) -> DSparkConfig:
    """DSpark's heads by a recipe's options."""
    usual = DSparkConfig()
    sure = options.get("confidence", 1.0) > 0
    return DSparkConfig(options.get("rank", usual.rank), options.get("markov", usual.markov), sure)


def facts(config: DFlashConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of a backbone that was trained with these options."""
    return shaped(config, **{name: options.get(name) for name in ("layers", "hidden", "anchor_first")})._asdict()


def dspark_facts(config: DFlashConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """And of a DSpark drafter."""
    return {**facts(config, options), **heads_of(options)._asdict()}


def dflash2_facts(config: DFlashConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """And of a DFlash 2 drafter."""
    usual = SelectorConfig()._asdict()
    return {**facts(config, options), **{name: options.get(name, x) for name, x in usual.items()}}

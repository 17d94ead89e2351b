"""A block drafter by the name of its method: its backbone, and what that method makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specjax.drafters import files
from specjax.drafters.base import LoadedDrafter, card
from specjax.drafters.dflash import files as block_files
from specjax.drafters.dflash.dflash2 import SelectorConfig, dflash2
from specjax.drafters.dflash.drafter import dflash
from specjax.drafters.dflash.dspark import DSparkConfig, dspark
from specjax.drafters.siblings import Siblings, find_siblings
from specjax.types import Drafter, LanguageModel


def build(target: LanguageModel, found: block_files.Module, num_draft: int, siblings: Siblings) -> Drafter:
    """The drafter: arguments in the order in which recipes give them, so that it is the same one."""
    rest: Any = {"num_draft": num_draft, "siblings": siblings, "vocabulary": found.vocabulary}
    if isinstance(found.head, DSparkConfig):
        return dspark(target, config=found.config, heads=found.head, **rest)
    if isinstance(found.head, SelectorConfig):
        return dflash2(target, config=found.config, selector=found.head, **rest)
    return dflash(target, config=found.config, **rest)


def loader(method: str) -> Callable[..., LoadedDrafter]:
    """The `load` of one of the methods."""

    def load(
        lm: Any, *, num_draft: int, weights: str | None = None, children: str = "iid", anchor_first: bool | None = None
    ) -> LoadedDrafter:  # fmt: skip
        """Draft for `lm` with a drafter that `files.save` wrote to the directory `weights`, or one published there.

        Args:
          lm: the target.
          num_draft: K, at most the tokens of a block that was trained.
          weights: the directory; see `files` for the published layouts.
          children: "iid", drawn from their laws at the request's temperature, or "point", the best token each time.
          anchor_first: whether the anchor's row predicts too; only where a published config does not say so.

        Raises:
          ValueError: no weights, weights that do not fit, or more tokens than a block has.
        """
        found = block_files.read(files.given(weights, method), lm, method, anchor_first=anchor_first)
        if found.most is not None and num_draft > found.most:
            raise ValueError(f"num_draft {num_draft} > {found.most} tokens of the blocks that it was trained on: draft fewer")
        drafter = build(lm.model, found, num_draft, find_siblings(children))
        return LoadedDrafter(drafter, found.params, card(method, found.params, f"children {children}"))

    return load

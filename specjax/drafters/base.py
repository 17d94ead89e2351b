"""What a method is to a user: a loader, and the facts by which methods are compared."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from specjax.types import Drafter

KINDS = ("none", "training-free", "same family", "trained with the target", "trained after it")


class Card(NamedTuple):
    """What running a drafter asks for beside the target."""

    method: str
    extra_parameters: int  # beside the target's own
    extra_bytes: int
    note: str = ""


class LoadedDrafter(NamedTuple):
    """A drafter ready to decode."""

    drafter: Drafter
    params: Any
    card: Card
    rule: str = "rejection"  # the rule it is usually run with


class Method(NamedTuple):
    """An entry of METHODS."""

    load: Callable  # (lm, *, num_draft, ...options) -> LoadedDrafter
    kind: str  # one of KINDS
    rule: str  # the rule it is usually run with
    summary: str


def card(method: str, params: Any, note: str = "") -> Card:
    """Count what `params` adds."""
    leaves = jax.tree.leaves(params)
    return Card(method, sum(x.size for x in leaves), sum(x.size * x.dtype.itemsize for x in leaves), note)


def options(method: Method) -> tuple[str, ...]:
    """Names of the options that a method's loader takes beside `num_draft`."""
    parameters = inspect.signature(method.load).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "num_draft")

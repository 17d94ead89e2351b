"""What a method is to a user: a loader, and the facts by which methods are compared."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import jax

from specjax.drafters.precision import converted
from specjax.names import unknown
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
    rule: str = "rejection"  # the rule it is usually run with; a method's own where its options do not change it
    notes: tuple[str, ...] = ()  # what a mesh could not divide, one line each


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


def kept_in(loaded: LoadedDrafter, dtype: Any) -> LoadedDrafter:
    """The drafter with its matrices in `dtype`, and a card that says what they take now."""
    params = converted(loaded.params, dtype)
    return loaded._replace(params=params, card=card(loaded.card.method, params, loaded.card.note))


def options(function: Callable) -> tuple[str, ...]:
    """Names of the options that a loader or a recipe takes beside `num_draft`: what is given by keyword alone."""
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "num_draft")


Readers = Mapping[Any, tuple[Callable[[str], Any], str]]

READERS: Readers = {
    int: (int, "a whole number"),
    float: (float, "a number"),
    str: (str, "text"),
    bool: ({"true": True, "false": False}.__getitem__, "true or false"),
    tuple[int, ...]: (lambda text: tuple(int(x) for x in text.split(",")), "whole numbers with commas between them"),
}
"""How an option's text is read by the type that its function names."""


def readable(function: Callable, readers: Readers = READERS) -> dict[str, Any]:
    """Those of a function's options that can be written as text, with their types; `| None` is left out."""
    hints = get_type_hints(function)
    plain = {name: _without_none(hints[name]) for name in options(function) if name in hints}
    return {name: hint for name, hint in plain.items() if hint in readers}


def parse_options(function: Callable, words: Sequence[str], readers: Readers = READERS) -> dict[str, Any]:
    """Values of the options of a loader or a recipe from words NAME=VALUE.

    Raises:
      ValueError: no such option (naming the nearest), or a value of another type.
    """
    known, values = readable(function, readers), {}
    for word in words:
        name, equals, text = word.partition("=")
        if name not in known:
            raise ValueError(unknown("option", name, known))
        read, wanted = readers[known[name]]
        try:
            values[name] = read(text if equals else "")
        except (ValueError, KeyError):
            raise ValueError(f"option {word!r}: {name} is {wanted}, write {name}=VALUE") from None
    return values


def _without_none(hint: Any) -> Any:
    """X of X | None."""
    kinds = [kind for kind in get_args(hint) if kind is not types.NoneType]
    return kinds[0] if get_origin(hint) is types.UnionType and len(kinds) == 1 else hint

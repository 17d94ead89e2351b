"""Names that people mistype: one line that says what exists, the nearest first."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def guess(name: str, known: Iterable[str]) -> str:
    """A question with the nearest of `known`, or nothing where none is near.

    >>> guess("n-gram", ["plain", "ngram"])
    "did you mean 'ngram'? "
    """
    near = difflib.get_close_matches(name, list(known), 1, 0.5)
    return f"did you mean {near[0]!r}? " if near else ""


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """An error's text for a name that does not exist."""
    known = list(known)
    return f"no {what} {name!r}: {guess(name, known)}known: {', '.join(known) or 'none'}"

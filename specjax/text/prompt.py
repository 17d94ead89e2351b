"""A prompt as it is given: text as it stands, a chat, or token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from specjax.text.tokenizer import Tokenizer

Prompt = str | Sequence[Mapping] | Sequence[int]


def token_ids(
    prompt: Prompt, tokenizer: Tokenizer | None, *, vocab_size: int, longest: int, name: str = "the prompt"
) -> list[int]:  # fmt: skip
    """Token ids of a string as it stands, of a chat through the tokenizer's template, or ids as they are.

    Raises:
      ValueError: empty, of another kind, longer than `longest`, or ids outside the vocabulary; it begins with `name`.
    """
    if not hasattr(prompt, "__len__"):
        raise ValueError(f"{name} is of type {type(prompt).__name__}: give text, a chat, or a list of token ids")
    if not len(prompt):
        raise ValueError(f"{name} is empty: give at least one token")
    chat = isinstance(prompt[0], Mapping)
    if (chat or isinstance(prompt, str)) and tokenizer is None:
        raise ValueError(f"{name} is text, and the model was loaded without a tokenizer: give token ids")
    if tokenizer is not None and isinstance(prompt, str):
        ids = tokenizer.encode(prompt)
    elif tokenizer is not None and chat:
        ids = tokenizer.chat(cast(Sequence[Mapping], prompt))
    else:
        ids = list(cast(Sequence[int], prompt)) if isinstance(prompt, Sequence) else np.asarray(prompt).tolist()
        bad = [x for x in ids if not is_whole(x)]
        if bad:
            raise ValueError(f"{name} holds {bad[0]!r}, which is no token id: ids are whole numbers")
        ids = [int(x) for x in ids]
    if not ids:
        raise ValueError(f"{name} is empty once it is tokens: give it some text")
    if len(ids) > longest:
        raise ValueError(f"{name} has {len(ids)} tokens, the context holds {longest}: shorten it")
    outside = [x for x in ids if not 0 <= x < vocab_size]
    if outside:
        raise ValueError(f"{name} holds id {outside[0]}: 0 to {vocab_size - 1} exist")
    return ids


def is_whole(x: Any) -> bool:
    """An integer of Python or NumPy, and not a truth value."""
    return isinstance(x, int | np.integer) and not isinstance(x, bool)

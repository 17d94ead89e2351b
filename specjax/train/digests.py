"""What tells one target, tokenizer or corpus from another, so that work begun on one is never gone on with on another."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.sharding import fetch
from specjax.text import Tokenizer
from specjax.train.corpus import Corpus


def of_json(facts: Any) -> str:
    """sha256 of what JSON can say.

    >>> of_json((1, "a")) == of_json([1, "a"]) != of_json([1, "b"])
    True
    """
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def of_file(path: Path) -> str:
    """sha256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digest(data: Corpus) -> str:
    """sha256 of a corpus: its tokens, borders and mask."""
    found, stretch = hashlib.sha256(), slice(int(data.starts[0]), int(data.starts[-1]))
    found.update(np.asarray(data.tokens[stretch], np.uint32).tobytes())
    found.update((data.starts - data.starts[0]).astype(np.int64).tobytes())
    if data.mask is not None:
        found.update(np.asarray(data.mask[stretch], bool).tobytes())
    return found.hexdigest()


def fingerprint(params: Any, config: Any = None) -> str:
    """sha256 of a model: its config, and names, dtypes, shapes and bytes of all its parameters.

    Every byte counts, for a tuned model may differ in one layer only; half a gigabyte takes a second.
    """
    found = hashlib.sha256(repr(config).encode())
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        array = np.ascontiguousarray(fetch(x))
        found.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def vocabulary(tokenizer: Tokenizer) -> str:
    """sha256 of which token has which id."""
    return of_json(tokenizer.backend.get_vocab(with_added_tokens=True))

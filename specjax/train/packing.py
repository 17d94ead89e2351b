"""Rows to learn from: documents cut to pieces, pieces packed into rows, and batches that depend on (seed, step) alone.

A piece begins with the last token of the one before it, so that over one epoch every token of a document but its first is
a label exactly once.  Pieces of several documents may share a row; `Batch.segments` keeps them apart.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.drafters.recipe import Batch
from specjax.train.corpus import Corpus


class Batches(NamedTuple):
    """Where the loop gets its rows."""

    at: Callable[[int], Batch]  # (step) -> rows [B, T]; the same for the same step, whatever ran before
    rows: Callable[[int], np.ndarray]  # (step) -> [B] numbers of these rows
    name: Callable[[int], str]  # (step) -> what a message calls them
    count: int  # rows of one epoch
    take: Callable[[Sequence[int]], Batch] | None = None  # (numbers of rows) -> these; None where rows differ in length


def batches(corpus: Corpus, *, length: int, batch: int, seed: int = 0) -> Batches:
    """Rows of `length` tokens, `batch` of them a step; every epoch runs through all rows in an order of its own.

    Raises:
      ValueError: no document has the two tokens that a label needs.
    """
    table = pack(corpus.starts, length)
    if not table:
        raise ValueError(f"no document of {corpus.documents} has 2 tokens: there is nothing to predict")

    def rows(step: int) -> np.ndarray:
        index = np.arange(step * batch, (step + 1) * batch)
        order = {e: np.random.default_rng([seed, e]).permutation(len(table)) for e in set((index // len(table)).tolist())}
        return np.asarray([order[i // len(table)][i % len(table)] for i in index.tolist()])

    def take(numbers: Sequence[int]) -> Batch:
        parts = [fill(corpus, table[row], length) for row in numbers]
        return Batch(*(jnp.asarray(np.stack(x)) for x in zip(*parts, strict=True)))

    def name(step: int) -> str:
        numbers = rows(step)
        starts = sorted(start for row in numbers.tolist() for start, _ in table[row])
        documents = np.unique(np.searchsorted(corpus.starts, starts, "right") - 1).tolist()
        return f"rows {numbers.tolist()}, of documents {documents}"

    return Batches(lambda step: take(rows(step).tolist()), rows, name, len(table), take)


def then(first: Batches, steps: int, second: Batches) -> Batches:
    """`first` for the steps before `steps`, `second` from there on: short rows early, long ones late.

    Each distinct [B, T] compiles once; `rows` numbers those of whichever is at work.
    """

    def at_work(step: int) -> Batches:
        return first if step < steps else second

    return Batches(
        at=lambda step: at_work(step).at(step),
        rows=lambda step: at_work(step).rows(step),
        name=lambda step: at_work(step).name(step),
        count=second.count,
    )


def pack(starts: np.ndarray, length: int) -> list[list[tuple[int, int]]]:
    """Rows as lists of pieces (start, stop) into the tokens: the longest first, each into the fullest row that takes it.

    >>> pack(np.array([0, 3, 12]), 6)
    [[(3, 9)], [(8, 12)], [(0, 3)]]
    """
    pieces = []
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        cuts = range(begin, max(end - 1, begin), length - 1)
        pieces += [(a, min(a + length, end)) for a in cuts]
    table: list[list[tuple[int, int]]] = []
    spaces: list[tuple[int, int]] = []  # (room left, row), sorted
    for piece in sorted(pieces, key=lambda p: (p[0] - p[1], p[0])):
        size = piece[1] - piece[0]
        found = bisect.bisect_left(spaces, (size, -1))
        room, row = spaces.pop(found) if found < len(spaces) else (length, len(table))
        if row == len(table):
            table.append([])
        table[row].append(piece)
        if room - size >= 2:
            bisect.insort(spaces, (room - size, row))
    return table


def fill(corpus: Corpus, pieces: list[tuple[int, int]], length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """tokens, mask and segments [T] of one row."""
    tokens, mask, segments = np.zeros(length, np.int32), np.zeros(length, bool), np.full(length, -1, np.int32)
    at = 0
    for segment, (start, stop) in enumerate(pieces):
        there = slice(at, at + stop - start)
        tokens[there] = corpus.tokens[start:stop]
        mask[there] = True if corpus.mask is None else corpus.mask[start:stop]
        segments[there] = segment
        at = there.stop
    return tokens, mask, segments

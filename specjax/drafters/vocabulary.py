"""A draft vocabulary: drafters that score the target's most frequent tokens only (FR-Spec, 2502.14856; EAGLE-3, 2503.01840).

The vocabulary head is most of what a small drafter reads: 28 of 30 million weights a token for one head on a target of width
576 and 49,152 tokens.  Outside its vocabulary a drafter's law is zero, which no rule minds: the residual has the rest.

A drafter is built for a view of its target whose `unembed` gives the logits [..., n] of some ids, which the view names.  It
draws among places 0..n-1 (`drawing_within`), and where it reads a token that it has drafted, that is the one `named` there.
Which ids they are belongs to the weights: another mapping would give every row of a law another meaning.  Ids ascend, so that
the first of two equal logits is the same token as without a vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np

from specjax.drafters.recipe import Recipe
from specjax.types import Array, LanguageModel

Ids = tuple[int, ...]


def frequent(tokens: np.ndarray, size: int, vocab_size: int) -> tuple[Ids, float]:
    """The `size` most frequent of `tokens`, ascending, and the share of `tokens` that they are.

    >>> frequent(np.array([5, 5, 2, 7, 2, 5]), 2, 9)
    ((2, 5), 0.8333333333333334)
    """
    count = np.bincount(np.asarray(tokens), minlength=vocab_size)
    ids = np.sort(np.argsort(-count, kind="stable")[:size])
    return tuple(ids.tolist()), float(count[ids].sum() / max(count.sum(), 1))


@functools.cache  # the same functions for the same ids: rebuilt closures would recompile
def narrowed(target: LanguageModel, ids: Ids) -> LanguageModel:
    """The view of a target through a draft vocabulary: logits [..., n] of `ids` alone.

    Raises:
      ValueError: the target has no head that could be narrowed, is a view itself, or ids that are not its own, ascending.
    """
    if target.narrow is None:
        raise ValueError("this target has no vocabulary head to narrow: draft with all of its tokens")
    if target.vocabulary is not None:
        raise ValueError(f"a view of {len(target.vocabulary)} ids cannot be narrowed again: narrow the target itself")
    narrow = target.narrow
    check(ids, target.vocab_size)
    unembed = lambda params, hidden: target.unembed(narrow(params, jnp.asarray(ids, jnp.int32)), hidden)
    return target._replace(unembed=unembed, vocabulary=ids)


def seen_by(target: LanguageModel, ids: Sequence[int] | None) -> LanguageModel:
    """What a drafter is built for: the target, or its view through a draft vocabulary where there is one."""
    return target if ids is None else narrowed(target, tuple(ids))


def draft_size(target: LanguageModel, ids: Ids | None) -> int:
    """How many tokens can be drafted: n, or V where there is no draft vocabulary."""
    return target.vocab_size if ids is None else len(ids)


def check(ids: Ids, vocab_size: int) -> None:
    """ValueError for ids that are not a target's own, ascending."""
    array = np.asarray(ids)
    if array.dtype.kind != "i" or array.ndim != 1 or not (np.diff(array, prepend=-1, append=vocab_size) > 0).all():
        raise ValueError(f"{len(ids)} ids of a draft vocabulary must ascend within 0 to {vocab_size - 1}, each once")


def spread(logits: Array, ids: Ids, vocab_size: int) -> Array:
    """Logits [..., n] of `ids` as [..., V], -inf outside."""
    outside = jnp.full((*logits.shape[:-1], 1), -jnp.inf)
    return jnp.concatenate([logits, outside], -1)[..., places(ids, vocab_size)]  # place -1 is the column that was added


def named(at: Array, ids: Ids | None) -> Array:
    """The target's tokens that stand `at` these places of a draft vocabulary."""
    return at if ids is None else jnp.asarray(ids, jnp.int32)[at]


def drawing_within(target: LanguageModel, ids: Ids | None, propose: Callable) -> Callable:
    """`propose` of a drafter that draws among the places of a draft vocabulary, as one that drafts the target's tokens.

    Its noise is [B, width, n], that of `ids` alone; its laws [B, N, n] become [B, N, V].  Where there is no vocabulary, itself.
    """
    if ids is None:
        return propose

    def drafting_tokens(noise, params, state, sequences):
        few = lambda depth, width=1: noise(depth, width, jnp.asarray(ids, jnp.int32))
        draft, state = propose(few, params, state, sequences)
        law = None if draft.log_q is None else spread(draft.log_q, ids, target.vocab_size)
        return draft._replace(tokens=named(draft.tokens, ids), log_q=law), state

    return drafting_tokens


def within(make: Callable[[LanguageModel], Recipe], target: LanguageModel, ids: Ids) -> Recipe:
    """The recipe that `make` gives for a target, whose loss scores `ids` alone and whose drafter proposes no others.

    A position whose label lies outside teaches nothing and counts as a miss; the target's law is renormalised within.

    Raises:
      ValueError: as `narrowed`.
    """
    few, place = make(narrowed(target, ids)), places(ids, target.vocab_size)

    def scored(loss: Callable) -> Callable:
        return lambda own, given, batch, key: loss(own, given, batch._replace(places=jnp.asarray(place)), key)

    return few._replace(loss=scored(few.loss), clean=None if few.clean is None else scored(few.clean))


def places(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """Where each of the target's tokens stands in the vocabulary: [V], -1 for one outside.

    >>> places((2, 5), 7).tolist()
    [-1, -1, 0, -1, -1, 1, -1]
    """
    found = np.full(vocab_size, -1, np.int32)
    found[list(ids)] = np.arange(len(ids))
    return found


def offsets(ids: Sequence[int]) -> np.ndarray:
    """What published drafters store as d2t: how far each token lies behind its place.

    >>> offsets((2, 5)).tolist()
    [2, 4]
    """
    return np.asarray(ids, np.int64) - np.arange(len(ids))


def from_offsets(d2t: np.ndarray) -> Ids:
    """The ids of a d2t.

    >>> from_offsets(np.array([2, 4]))
    (2, 5)
    """
    return tuple((np.asarray(d2t) + np.arange(len(d2t))).tolist())

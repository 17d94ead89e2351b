"""What earlier rounds accepted, position by position, as the confidence of the next: for drafters that give none.  NumPy.

    c_k = (kept_k + strength * pool_k) / (reached_k + strength)

`reached` are rounds of a request in which token k was verified, all before it having been accepted, `kept` those of them in
which it was accepted too.  Both are forgotten bit by bit, and so is the pool of all requests, which a request without rounds
is taken for.  Before there is a pool, everything is taken to be accepted.

What is decided from these numbers keeps the law: they are known before a draft is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specjax.schedule.confidence import outcomes


class History(NamedTuple):
    """Counts that fade."""

    reached: np.ndarray  # [B, K] by slot
    kept: np.ndarray  # [B, K]
    pool_reached: np.ndarray  # [K] of all requests, also those that have gone
    pool_kept: np.ndarray  # [K]


def nothing_yet(slots: int, num_draft: int) -> History:
    """Before the first round."""
    return History(*(np.zeros(shape) for shape in ((slots, num_draft),) * 2 + ((num_draft,),) * 2))


def forgotten(history: History, slots: Sequence[int]) -> History:
    """Other requests have these slots."""
    rows = [x.copy() for x in history[:2]]
    for x in rows:
        x[list(slots)] = 0
    return history._replace(reached=rows[0], kept=rows[1])


def learnt(
    history: History, num_accepted: np.ndarray, num_drafted: np.ndarray, *, fade: float = 0.95, pool_fade: float = 0.995
) -> History:  # fmt: skip
    """After a stretch of rounds [B, r], in which nothing drafted says nothing.

    A round that an end or a budget cut counts as it came out: a request has one of them.
    """
    b, r = num_accepted.shape
    k = history.reached.shape[1]
    seen = outcomes(num_accepted.reshape(-1), num_drafted.reshape(-1), k)
    reached = seen.reached.reshape(b, r, k).sum(1)
    kept = (seen.reached & seen.accepted).reshape(b, r, k).sum(1)
    old = np.where((reached > 0).any(1)[:, None], fade**r, 1.0)
    rows = history.reached * old + reached, history.kept * old + kept
    pool = pool_fade ** reached[:, 0].sum() if k else 1.0
    return History(*rows, history.pool_reached * pool + reached.sum(0), history.pool_kept * pool + kept.sum(0))


def expected(history: History, *, strength: float = 4.0) -> np.ndarray:
    """c [B, K] of the next round; `strength` is how many rounds the pool counts for.

    >>> two = learnt(nothing_yet(2, 1), np.array([[1], [0]]), np.array([[1], [0]]))
    >>> expected(learnt(two, np.array([[0], [0]]), np.array([[1], [0]])), strength=1.0).round(2).tolist()
    [[0.55], [0.67]]
    """
    pool = (history.pool_kept + 1) / (history.pool_reached + 1)
    return (history.kept + strength * pool[None]) / (history.reached + strength)

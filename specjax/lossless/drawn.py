"""Small laws for enumeration and audits: random targets, and every way of drawing siblings from a drafter's law q.

A way of drawing turns q into a `Proposal`: the law of a node given the prefix at its parent and its earlier siblings there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specjax.lossless.law import Proposal, Target


def random_law(seed: int, vocab_size: int, *, zeros: bool = False, concentration: float = 0.6) -> Target:
    """A law whose every row depends on its whole prefix; Dirichlet, so that rows are uneven, some entries zero if asked."""
    rows: dict[tuple[int, ...], np.ndarray] = {}

    def p(prefix: tuple[int, ...]) -> np.ndarray:
        if prefix not in rows:
            rng = np.random.default_rng([seed, *[x + 1 for x in prefix]])
            w = rng.dirichlet(np.full(vocab_size, concentration))
            if zeros and rng.random() < 0.5:
                w[rng.integers(vocab_size)] = 0
            rows[prefix] = w / w.sum()
        return rows[prefix]

    return p


def ranked(q: np.ndarray, rank: int) -> np.ndarray:
    """The point mass at the token of that rank in q [V], 0 = the most probable."""
    return np.eye(len(q))[np.argsort(-np.asarray(q), kind="stable")[rank]]


def point(q: Target) -> Proposal:
    """No chance: the argmax of q, siblings the next best ones."""
    return lambda prefix, siblings=(): ranked(q(prefix), len(siblings))


def iid(q: Target) -> Proposal:
    """Each by itself from q."""
    return lambda prefix, siblings=(): np.asarray(q(prefix), float)


def independent(q: Target) -> Proposal:
    """Each by itself, the later ones from another drafter."""
    other = random_law(77, len(q(())), zeros=True)
    return lambda prefix, siblings=(): np.asarray((other if siblings else q)(prefix), float)


def without_replacement(q: Target) -> Proposal:
    """One after the other from q without those before; anything where q has run out."""

    def draw(prefix, siblings=()):
        w = np.array(q(prefix), float)
        w[list(siblings)] = 0
        return w / w.sum() if w.sum() > 0 else np.full(len(w), 1 / len(w))

    return draw


def sampled_then_top(q: Target) -> Proposal:
    """The first sibling from all but the top one, the second is the top one."""

    def draw(prefix, siblings=()):
        best = ranked(q(prefix), 0)
        rest = np.where(best > 0, 0, q(prefix))
        return best if siblings or rest.sum() == 0 else rest / rest.sum()

    return draw


def truncated(q: Target, k: int) -> Proposal:
    """Each by itself from the k most probable tokens of q (top-k sampling)."""

    def draw(prefix, siblings=()):
        row = np.asarray(q(prefix), float)
        kept = np.where(np.argsort(np.argsort(-row, kind="stable")) < k, row, 0)
        return kept / kept.sum()

    return draw


DRAWN: dict[str, Callable[[Target], Proposal]] = {
    "point": point,
    "iid": iid,
    "independent": independent,
    "without_replacement": without_replacement,
    "sampled_then_top": sampled_then_top,
}
"""By a drafter's `children`."""

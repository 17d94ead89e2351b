"""Rung: the exact output law of the subject's rule, by enumeration of every draft, in float64.  No noise, no sample.

Small context-dependent laws stand in for target and drafter: what is tested is the rule's own `plan`, on chains and trees
whose children are drawn as the subject's drafter draws them, with zeros, equal and disjoint laws, and point masses.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from specjax.lossless import law
from specjax.lossless.finding import Finding
from specjax.lossless.lab import Lab, exactly, skipped
from specjax.lossless.law import Proposal, Target

V = 4  # with 3, faults of the residual often hide: it has a single positive entry
TOLERANCE = 1e-12
CHAINS = ((-1, 0, 1), (-1, 0, -2))
TREES = ((-1, -1, 0, 1), (-1, -1, 0, -2))

Q = Callable[[tuple[int, ...]], np.ndarray]  # (prefix) -> the drafter's law


def random_law(seed: int, *, zeros: bool) -> Q:
    """A law that depends on the whole prefix, some entries of it zero."""
    rows: dict[tuple[int, ...], np.ndarray] = {}

    def p(prefix):
        if prefix not in rows:
            rng = np.random.default_rng([seed, *[x + 1 for x in prefix]])
            w = rng.dirichlet(np.full(V, 0.8))
            if zeros and rng.random() < 0.5:
                w[rng.integers(V)] = 0
            rows[prefix] = w / w.sum()
        return rows[prefix]

    return p


def _drawn_iid(q: Q) -> Proposal:
    return lambda prefix, siblings: q(prefix)


def _drawn_independently(q: Q) -> Proposal:
    other = random_law(77, zeros=True)
    return lambda prefix, siblings: (other if siblings else q)(prefix)


def _drawn_without_replacement(q: Q) -> Proposal:
    def draw(prefix, siblings):
        w = np.array(q(prefix))
        w[list(siblings)] = 0
        return w / w.sum() if w.sum() > 0 else np.full(V, 1 / V)

    return draw


def _ranked(q: np.ndarray, rank: int) -> np.ndarray:
    return np.eye(V)[np.argsort(-q, kind="stable")[rank]]


def _drawn_by_rank(q: Q) -> Proposal:
    return lambda prefix, siblings: _ranked(q(prefix), len(siblings))


def _drawn_then_top(q: Q) -> Proposal:
    """The first sibling from all but the top one, the second is the top one."""

    def draw(prefix, siblings):
        best = _ranked(q(prefix), 0)
        rest = np.where(best > 0, 0, q(prefix))
        return best if siblings or rest.sum() == 0 else rest / rest.sum()

    return draw


DRAWN: dict[str, Callable[[Q], Proposal]] = {
    "point": _drawn_by_rank,
    "iid": _drawn_iid,
    "independent": _drawn_independently,
    "without_replacement": _drawn_without_replacement,
    "sampled_then_top": _drawn_then_top,
}
"""By a drafter's `children`: the law of a node given the prefix at its parent and its earlier siblings there."""


def pairs(children: str) -> list[tuple[str, Target, Q]]:
    """Laws of target and drafter to try, by name."""
    full = children in ("without_replacement", "sampled_then_top")  # these need as many tokens as siblings
    p, q = random_law(1, zeros=True), random_law(2, zeros=not full)
    found = [("random laws with zeros", p, q), ("equal laws", q, q)]
    if not full:
        found.append(("laws without a token in common", _half(p, 0), _half(q, 1)))
    return found


def _half(law_of: Q, which: int) -> Q:
    def p(prefix):
        w = np.where(np.arange(V) % 2 == which, law_of(prefix) + 0.1, 0)
        return w / w.sum()

    return p


def exact(lab: Lab) -> Finding:
    """Total variation between the law of a round and the target's."""
    name, rule, drafter = "exact law", lab.subject.rule, lab.subject.drafter
    looked = "the rule's output law by enumeration of all drafts (float64, V = 4) against the target's joint"
    if rule.coupled:
        return skipped(name, looked, "a coupled rule emits the target's own sample: see equality under coupling")
    shapes = CHAINS if drafter.chain else TREES
    point = drafter.children == "point"
    worst, where, cases = 0.0, "", 0
    mine = rule._replace(
        plan=lambda draft, log_p: rule.plan(draft, log_p)
    )  # a planted fault must not meet an older compilation
    with lab.subject.plant(), jax.enable_x64(True):
        for shape in shapes:
            for title, p, q in pairs(drafter.children):
                distance = off_by(mine, shape, p, DRAWN[drafter.children](q), point=point)
                cases += 1
                if not distance <= worst:  # NaN too
                    worst, where = distance, f"{title}, parents {list(shape)}"
    faults = [] if worst < TOLERANCE else [f"total variation {worst:.3g} from the target: {where}"]
    return exactly(name, looked, faults, f"{cases} laws, largest total variation {worst:.1e}")


def off_by(rule, parents: tuple[int, ...], p: Target, q: Proposal, *, point: bool) -> float:
    """Total variation between the joint law of a round's tokens, completed by the target, and the target's own."""
    result = law.exact(rule, np.asarray(parents, np.int32), p, q, V, point=point)
    return float(np.abs(result.joint - law.truth(p, V, result.joint.ndim)).sum() / 2)

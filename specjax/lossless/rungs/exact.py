"""Rung: the exact output law of the subject's rule, by enumeration of every draft, in float64.  No noise, no sample.

Small context-dependent laws stand in for target and drafter: what is tested is the rule's own `plan`, on chains and trees
whose children are drawn as the subject's drafter draws them, with zeros, equal and disjoint laws, and point masses.
"""

from __future__ import annotations

import jax
import numpy as np

from specjax.lossless import drawn, law
from specjax.lossless.finding import Finding
from specjax.lossless.lab import Lab, exactly, skipped
from specjax.lossless.law import Proposal, Target

V = 4  # with 3, faults of the residual often hide: it has a single positive entry
TOLERANCE = 1e-12
CHAINS = ((-1, 0, 1), (-1, 0, -2))
TREES = ((-1, -1, 0, 1), (-1, -1, 0, -2))


def random_law(seed: int, *, zeros: bool) -> Target:
    """A law over V tokens."""
    return drawn.random_law(seed, V, zeros=zeros, concentration=0.8)


def pairs(children: str) -> list[tuple[str, Target, Target]]:
    """Laws of target and drafter to try, by name."""
    full = children in ("without_replacement", "sampled_then_top")  # these need as many tokens as siblings
    p, q = random_law(1, zeros=True), random_law(2, zeros=not full)
    found = [("random laws with zeros", p, q), ("equal laws", q, q)]
    if not full:
        found.append(("laws without a token in common", _half(p, 0), _half(q, 1)))
    return found


def _half(law_of: Target, which: int) -> Target:
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
                distance = off_by(mine, shape, p, drawn.DRAWN[drafter.children](q), point=point)
                cases += 1
                if not distance <= worst:  # NaN too
                    worst, where = distance, f"{title}, parents {list(shape)}"
    faults = [] if worst < TOLERANCE else [f"total variation {worst:.3g} from the target: {where}"]
    return exactly(name, looked, faults, f"{cases} laws, largest total variation {worst:.1e}")


def off_by(rule, parents: tuple[int, ...], p: Target, q: Proposal, *, point: bool) -> float:
    """Total variation between the joint law of a round's tokens, completed by the target, and the target's own."""
    result = law.exact(rule, np.asarray(parents, np.int32), p, q, V, point=point)
    return float(np.abs(result.joint - law.truth(p, V, result.joint.ndim)).sum() / 2)

"""Rung: scripted coins at the very thresholds, through the functions that turn a plan into tokens, in float32.

A coin equal to a threshold refuses, the float below it accepts, and a coin of 0 never accepts what has probability 0; no
correction has mass outside the target's support; inverting a distribution function never lands on a weight of 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from specjax.lossless.drawn import DRAWN
from specjax.lossless.finding import Finding
from specjax.lossless.lab import Lab, exactly, skipped
from specjax.lossless.law import draft_probability
from specjax.lossless.rungs.exact import CHAINS, TREES, V, pairs
from specjax.types import Draft
from specjax.verify import draw

LARGEST = np.float32(1 - 2**-24)  # of uniform numbers in float32

OPTIMAL = ("rejection", "block", "recursive", "traversal", "k_seq")
"""Rules that keep a first draft with min(1, p/q), so that equal laws never refuse."""

WEIGHTS = ([0, 0.5, 0, 0.5, 0], [0, 0, 1, 0, 0], [0.3, 0, 0.7, 0, 0], [0, 0, 0, 0.1, 0.9], [1e-30, 0, 1, 0, 1e-30])


def coins(lab: Lab) -> Finding:
    """Decisions at, just below and just above every threshold; then what must never be emitted."""
    name, subject = "boundary coins", lab.subject
    looked = "scripted coins: thresholds and their neighbouring floats, u = 0, p = 0, q = 0, equal laws, NaN, empty residuals"
    if subject.rule.coupled:
        return skipped(name, looked, "a coupled rule throws no coins")
    with subject.plant():
        faults = bad_inversions()
        count = 0
        for shape in CHAINS if subject.drafter.chain else TREES:
            numbers = compiled(subject.rule.plan, shape)
            for title, p, q in pairs(subject.drafter.children):
                for case in drafts(shape, p, DRAWN[subject.drafter.children](q), subject.drafter.children == "point"):
                    count += 1
                    equal = title == "equal laws" and subject.names.rule in OPTIMAL and subject.drafter.children != "point"
                    faults += [f"{fault} ({title}, parents {list(shape)})" for fault in examine(numbers, *case, equal=equal)]
            faults += [f"{fault} (parents {list(shape)})" for fault in with_nan(numbers, shape)]
    return exactly(name, looked, faults, f"{count} drafts at every threshold, {len(WEIGHTS)} laws inverted")


def compiled(plan, shape):
    """(tokens, log_p, log_q, coins [C, N]) -> accept, where each decision leads [C, N], stop rows [C], corrections [N+1, V]."""
    parents = np.asarray(shape, np.int32)

    def numbers(tokens, log_p, log_q, coins):
        made = plan(Draft(tokens, jnp.asarray(parents), log_q), log_p)
        taken = jax.vmap(lambda c: draw.follow(made, c))(coins)
        rows = jnp.arange(len(parents) + 1, dtype=jnp.int32)
        lists = (made.accept, made.if_accept, made.if_reject)
        return lists, taken, jax.vmap(draw.walk)(taken), jnp.exp(jax.vmap(made.correction)(rows))

    return jax.jit(numbers)


def drafts(shape, p, q, point: bool):
    """Every draft that can be drawn: (tokens, log_p, log_q or None, its parents)."""
    with np.errstate(divide="ignore"):
        for tokens in np.ndindex(*(V,) * len(shape)):
            weight, prefixes, rows = draft_probability(tokens, np.asarray(shape), q)
            if weight > 0:
                log_p = np.log(np.stack([p(prefix) for prefix in prefixes])).astype(np.float32)
                log_q = None if point else np.log(np.stack(rows)).astype(np.float32)
                yield np.asarray(tokens, np.int32), log_p, log_q, shape


def examine(numbers, tokens, log_p, log_q, shape, *, equal: bool) -> list[str]:
    """What is wrong with the decisions on one draft."""
    n = len(tokens)
    arrays = (jnp.asarray(tokens), jnp.asarray(log_p), None if log_q is None else jnp.asarray(log_q))
    (accept, yes, no), *_ = jax.tree.map(np.asarray, numbers(*arrays, jnp.zeros((4, n), jnp.float32)))
    threshold = np.clip(accept, 0, 1).astype(np.float32)
    below, above = np.nextafter(threshold, np.float32(-1)), np.nextafter(threshold, np.float32(2))
    script = np.clip(np.stack([np.zeros(n, np.float32), below, threshold, above]), 0, LARGEST)
    _, taken, stop, correction = jax.tree.map(np.asarray, numbers(*arrays, jnp.asarray(script)))
    faults, differs = [], yes != no
    wrong = differs & (taken != np.where(script < accept, yes, no))
    if wrong.any():
        c, m = np.argwhere(wrong)[0]
        faults.append(f"coin {script[c, m]:.9g} against threshold {accept[m]:.9g} decides the other way")
    p = np.exp(log_p)
    for row in stop:
        at = row
        while at > 0:
            parent = shape[at - 1] + 1
            if p[parent, tokens[at - 1]] == 0:
                faults.append(f"token {tokens[at - 1]} of probability 0 is accepted")
            at = parent
        if not np.isclose(correction[row].sum(), 1, atol=1e-5):
            faults.append(f"the correction of row {row} sums to {correction[row].sum():.6g}")
        if (correction[row][p[row] == 0] > 0).any():
            faults.append(f"the correction of row {row} has mass where the target has none")
    if equal and (accept[_first_children(shape)] < 1 - 1e-5).any() and stop_early(shape, numbers, arrays):
        faults.append("equal laws are refused")
    return faults


def _first_children(shape) -> list[int]:
    return [i for i, parent in enumerate(shape) if parent >= -1 and parent not in shape[:i]]


def stop_early(shape, numbers, arrays) -> bool:
    """Whether coins of one half end a round at row 0 although a first child has the target's own law."""
    n = len(shape)
    _, _, stop, _ = jax.tree.map(np.asarray, numbers(*arrays, jnp.full((1, n), 0.999, jnp.float32)))
    return bool(stop[0] == 0)


def with_nan(numbers, shape) -> list[str]:
    """A drafter's row of NaN accepts nothing and its correction is still a law."""
    n = len(shape)
    log_p = np.log(np.tile(np.asarray([0.4, 0.3, 0.2, 0.1], np.float32), (n + 1, 1)))
    log_q = np.full((n, V), np.nan, np.float32)
    tokens = jnp.zeros(n, jnp.int32)
    _, _, stop, correction = jax.tree.map(
        np.asarray, numbers(tokens, jnp.asarray(log_p), jnp.asarray(log_q), jnp.zeros((1, n), jnp.float32))
    )
    return [] if np.isfinite(correction[stop[0]]).all() else ["a draft law of NaN leaves a correction that is none"]


def bad_inversions() -> list[str]:
    """Ends of the unit interval through `invert`: never a weight of 0."""
    faults, run = [], jax.jit(draw.invert)
    for weights in WEIGHTS:
        for u in (0.0, 0.5, float(LARGEST)):
            index = int(run(jnp.asarray(weights, jnp.float32), jnp.asarray(u, jnp.float32)))
            if not (0 <= index < len(weights) and weights[index] > 0):
                faults.append(f"u = {u:.9g} in weights {weights} gives token {index}")
    return faults

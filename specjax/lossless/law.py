"""The exact output law of a rule, by enumeration, from the very `plan` that decoding runs.

Every draft of N tokens over V is listed with its probability, the plan's decisions are followed with both answers, and
what is emitted is continued from the target to a fixed horizon.  In float64 the result is the law itself, not a sample:
a lossless rule gives the target's joint to rounding (about 1e-16), whatever the drafter.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import trees
from specjax.types import Draft, Plan, Rule

Target = Callable[[tuple[int, ...]], np.ndarray]  # (prefix) -> p [V]
Proposal = Callable[[tuple[int, ...], tuple[int, ...]], np.ndarray]  # (prefix, earlier siblings) -> q [V]


class Law(NamedTuple):
    """What a round gives, with certainty."""

    joint: np.ndarray  # [V] * horizon: probability of the next `horizon` tokens
    accepted: float  # expected number of accepted tokens


def exact(rule: Rule, parents: np.ndarray, p: Target, q: Proposal, vocab_size: int, *, point: bool = False) -> Law:
    """The law of depth + 1 tokens when one round of `rule` is followed by plain decoding.

    Args:
      rule: its `plan` is run in the dtype of jax (enable x64 for float64).
      parents: [N] topology; -2 marks nodes that do not exist.
      p: the target, context-dependent.
      q: what a node is drawn from, given the prefix at its parent and its earlier siblings there.
      vocab_size: V; the sum has V ** N terms.
      point: hand the rule `log_q=None`, for a q that is one-hot.
    """
    n = len(parents)
    seen = np.asarray(trees.ancestors(jnp.asarray(parents, jnp.int32)))
    horizon = int(seen.sum(1).max())
    thresholds = _thresholds(rule.plan, tuple(int(i) for i in parents))
    joint, accepted = np.zeros((vocab_size,) * horizon), 0.0
    for tokens in itertools.product(range(vocab_size), repeat=n):
        weight, prefixes, laws = draft_probability(tokens, parents, q)
        if weight == 0:
            continue
        log_p = _log(np.stack([p(prefix) for prefix in prefixes]))
        log_q = None if point else jnp.asarray(_log(np.stack(laws)))
        numbers = [np.asarray(x) for x in thresholds(jnp.asarray(tokens, jnp.int32), jnp.asarray(log_p), log_q)]
        for row, stop in enumerate(stop_law(*numbers[:3])):
            accepted += weight * stop * (seen[row].sum() - 1)
            for y in np.flatnonzero(numbers[3][row]):
                spread(joint, (*prefixes[row], int(y)), weight * stop * numbers[3][row][y], p)
    return Law(joint, accepted)


def truth(p: Target, vocab_size: int, horizon: int) -> np.ndarray:
    """The target's own joint of `horizon` tokens."""
    joint = np.zeros((vocab_size,) * horizon)
    spread(joint, (), 1.0, p)
    return joint


def draft_probability(tokens: tuple[int, ...], parents: np.ndarray, q: Proposal):
    """Probability of drawing `tokens` [N], the prefix at each block row, and the law of each node."""
    weight, laws = 1.0, []
    prefixes: list[tuple[int, ...]] = [()]
    for i, parent in enumerate(parents):
        prefix = prefixes[max(parent, -1) + 1]
        siblings = tuple(tokens[j] for j in range(i) if parents[j] == parent)
        law = q(prefix, siblings)
        absent = parent < -1
        weight *= float(tokens[i] == 0) if absent else law[tokens[i]]  # an absent node has one arbitrary token
        prefixes.append((*prefix, tokens[i]))
        laws.append(law)
    return weight, prefixes, laws


def stop_law(accept: np.ndarray, if_accept: np.ndarray, if_reject: np.ndarray) -> np.ndarray:
    """P(the round stops at each block row) [N+1]: mass pushed through the decision list, every pointer of which leads on."""
    n = len(accept)
    mass, stop = np.zeros(n), np.zeros(n + 1)
    if n == 0:
        return np.ones(1)
    mass[0] = 1.0
    for m in range(n):
        for share, target in ((accept[m], if_accept[m]), (1 - accept[m], if_reject[m])):
            if target >= n:
                stop[target - n] += mass[m] * share
            elif mass[m] * share > 0:
                if target <= m:
                    raise ValueError(f"decision {m} leads back to {target}: a plan must only lead on")
                mass[target] += mass[m] * share
    return stop


def spread(joint: np.ndarray, sequence: tuple[int, ...], mass: float, p: Target) -> None:
    """Add `mass` to every completion of `sequence` by the target (a longer sequence counts by its beginning)."""
    if len(sequence) >= joint.ndim:
        joint[sequence[: joint.ndim]] += mass
        return
    law = p(sequence)
    for y in np.flatnonzero(law):
        spread(joint, (*sequence, int(y)), mass * law[y], p)


@functools.lru_cache(maxsize=64)
def _thresholds(plan: Callable, parents: tuple[int, ...]) -> Callable:
    """Compiled: (tokens, log_p, log_q) -> the numbers of a plan; one compilation for all laws over a topology."""
    tree, n = np.asarray(parents, np.int32), len(parents)
    return jax.jit(lambda tokens, log_p, log_q: _numbers(plan(Draft(tokens, jnp.asarray(tree), log_q), log_p), n))


def _numbers(plan: Plan, n: int):
    """A plan as plain arrays: its three lists and the correction of every row."""
    return plan.accept, plan.if_accept, plan.if_reject, jnp.exp(jax.vmap(plan.correction)(jnp.arange(n + 1, dtype=jnp.int32)))


def _log(x: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(x)

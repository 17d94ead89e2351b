"""Measured acceptance beside what no lossless rule could exceed on the same rows: above it is a bug.

A round may accept more than its ceiling by luck; rounds on and on may not.  Given what came before, the expectation of
accepted - ceiling is at most 0, so a gambler who bets on more can multiply his money by E only with probability 1/E.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import bench, decode
from specjax.models.load import LM
from specjax.types import Drafter, Rule
from specjax.verify.limits import ROW_CEILINGS, ceiling

BETS = (0.01, 0.03, 0.1, 0.3, 0.9)
"""Shares of his money that the gambler stakes; the mean of these gamblers is one too."""

PROOF = 1e6
"""E from which acceptance is called above its ceiling."""

ROUNDING = 1e-5
"""Of a float32 probability, at each position of a path."""

run = jax.jit(decode.run, static_argnames=("target", "drafter", "rule", "max_rounds", "probe"), donate_argnames="state")


class Held(NamedTuple):
    """Accepted tokens of a round, before an end or a budget cuts them, held against their ceiling."""

    accepted: float  # mean over rounds
    ceiling: float  # mean over the same rounds
    excess: bench.Interval  # accepted - ceiling, with the 95 % percentile bootstrap over rounds: description, not proof
    e_value: float  # of the bet that acceptance is above its ceiling: a sound rule gets to E with probability 1/E
    rounds: int

    @property
    def above(self) -> bool:
        """Whether acceptance is above its ceiling beyond doubt."""
        return self.e_value >= PROOF


@functools.cache  # one probe for one kind of drafter and rule: it is a static argument
def watch(children: str, chain: bool, top_down: bool) -> Callable:
    """The probe that notes (accepted [B], ceiling [B]) of a round."""
    bound = functools.partial(ceiling, children=children, chain=chain, top_down=top_down)
    return lambda draft, log_p, verdict: (verdict.num_accepted, jax.vmap(bound)(draft, log_p, verdict))


def probe_of(drafter: Drafter, rule: Rule) -> Callable:
    """The probe for a drafter and a rule."""
    return watch(drafter.children, drafter.chain, rule.top_down)


def hold(lm: LM, contender: bench.Contender, work: bench.Work) -> Held:
    """Decode the prompts of `work` once more, slowly, with an eye on every round.

    Raises:
      ValueError: no ceiling is known for such drafts under such a rule.
    """
    seen = []
    for batch in bench.split(lm, work):
        session = bench.prepare(lm, contender, batch)
        drafter, rule = session.loaded.drafter, session.rule
        static = dict(target=lm.model, drafter=drafter, rule=rule, max_rounds=session.capacity)
        rounds = jnp.asarray(session.capacity)
        _, log = run(session.params, session.state[0], rounds, probe=probe_of(drafter, rule), **static)
        used = np.asarray(log.emitted) > 0
        seen.append([np.asarray(x, np.float64)[used] for x in log.probed])
    accepted, allowed = (np.concatenate([s[i] for s in seen]) for i in range(2))
    excess = accepted - allowed
    e_value = bet(excess, contender.loaded.drafter.depth)
    return Held(float(accepted.mean()), float(allowed.mean()), mean_of(excess), e_value, len(accepted))


def bet(excess: np.ndarray, depth: int) -> float:
    """The money, from 1, of a gambler on accepted - ceiling [R], each within depth: the most he ever had."""
    gain = np.clip((excess - depth * ROUNDING) / max(depth, 1), -1, 1)
    money = [np.exp(np.minimum(np.cumsum(np.log1p(share * gain)), 700)) for share in BETS]
    return float(np.mean(money, 0).max(initial=1.0))


def mean_of(x: np.ndarray, *, draws: int = 2000, seed: int = 0) -> bench.Interval:
    """The mean of x [R] and its 95 % percentile bootstrap interval."""
    again = np.random.default_rng(seed).integers(0, len(x), (draws, len(x)))
    low, high = np.percentile(x[again].mean(1), [2.5, 97.5])
    return bench.Interval(float(x.mean()), float(low), float(high))


def known(drafter: Drafter, rule: Rule) -> bool:
    """Whether a ceiling is known: not for sampled trees that are not decided from the root down, or whose laws differ."""
    sampled_tree = not drafter.chain and drafter.children != "point"
    return not sampled_tree or (rule.top_down and drafter.children in ROW_CEILINGS)

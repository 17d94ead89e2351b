"""Verify lengths as `decode.round(limit=)` takes them: `limit(draft, state) -> [B]`, all its numbers in `state.schedule`.

A limit may read `draft.confidence` (or the laws `draft.log_q` that tokens were drawn from), of which entry k depends on the
tokens before k alone, and anything from before this round's draft.  It never reads `draft.tokens`.  The budget of
`fixed_budget_limit` is put into the state between rounds, from `verify_length.plan_budget` on confidences of an earlier
round; while it is not replaced it simply stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.latency.cost_table import CostTable
from specjax.schedule.confidence import MarginFit, law_margins, margin_confidence, temper
from specjax.schedule.verify_length import early_stop_lengths, fixed_budget_lengths, threshold_lengths
from specjax.types import RUNNING, Array, Draft, Drafter, State


class Schedule(NamedTuple):
    """`state.schedule`: every number is traced, so another one compiles nothing.  None = not used, and compiled out."""

    lengths: Array | np.ndarray | None = None  # [B] int32, for `told`
    threshold: Array | None = None  # [] or [B], for `threshold_limit`
    table: CostTable | None = None  # for `early_stop_limit`
    budget: Array | None = None  # [] int32 drafted tokens of all rows together, for `fixed_budget_limit`
    temperatures: Array | None = None  # [K] of `fit_temperatures`
    margins: MarginFit | None = None  # confidences from margins in place of the drafter's own


def told(draft: Draft, state: State) -> Array:
    """`schedule.lengths`, decided before anything was drafted; of a tree the first so many nodes."""
    return _given(state.schedule.lengths, "lengths")


def threshold_limit(drafter: Drafter) -> Callable:
    """Verify each row up to its first confidence below `schedule.threshold`; it reads this round's confidences."""
    _check_chain(drafter)
    return lambda draft, state: threshold_lengths(confidence(draft, state), _given(state.schedule.threshold, "threshold"))


def early_stop_limit(drafter: Drafter) -> Callable:
    """Algorithm 1 over all rows of the batch with `schedule.table`; it reads this round's confidences and stops early."""
    _check_chain(drafter)

    def limit(draft: Draft, state: State) -> Array:
        live = state.status == RUNNING
        slots = jnp.where(live, state.length, 0).sum()
        return early_stop_lengths(confidence(draft, state), _given(state.schedule.table, "table"), live, slots)

    return limit


def fixed_budget_limit(drafter: Drafter) -> Callable:
    """The best `schedule.budget` tokens of the batch, by this round's confidences; the budget comes from earlier ones."""
    _check_chain(drafter)

    def limit(draft: Draft, state: State) -> Array:
        budget = _given(state.schedule.budget, "budget")
        return fixed_budget_lengths(confidence(draft, state), budget, state.status == RUNNING)

    return limit


def confidence(draft: Draft, state: State) -> Array:
    """c [B, K] as limits read it: tempered, or from margins, as `state.schedule` says; 0 where no token was drafted.

    Raises:
      ValueError: the drafter gives none, and there is nothing to make it from.
    """
    schedule = state.schedule
    if schedule.margins is not None:
        if draft.log_q is None:
            raise ValueError("margins are taken from the laws tokens were drawn from, and this drafter gives none (log_q=None)")
        c = margin_confidence(schedule.margins, law_margins(draft.log_q, state.sampling.temperature))
    elif draft.confidence is not None:
        c = draft.confidence
    else:
        raise ValueError("this drafter gives no confidence: put fitted margins (`fit_margins`) into the schedule")
    c = c if schedule.temperatures is None else temper(c, schedule.temperatures)
    return jnp.where(draft.parents >= -1, c.astype(jnp.float32), 0)


def _check_chain(drafter: Drafter) -> None:
    if not drafter.chain:
        raise ValueError("verify lengths are for chains, and this drafter proposes a tree: take its chain, or no limit")


def _given(value, name: str):
    if value is None:
        raise ValueError(f"state.schedule has no {name}: start decoding with Schedule({name}=...)")
    return value

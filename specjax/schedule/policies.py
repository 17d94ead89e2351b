"""What a server may do with a round: speculate or not, and how much of each draft to verify.  NumPy.

A policy is asked twice, so that it cannot look ahead: `policy(view)` before anything is drafted, and what that returns is
asked for lengths [B] once the round's confidences [B, K] are known.  None = a round of plain decoding, which does not pay
for the drafter; the other lengths do, however short.

Prompts that a round reads besides are not in the costs that lengths are weighed by: every token emitted brings its share of
reading with it, and a round whose reading counts as given makes drafted tokens look cheap beside it.  But where prompts are
left over for later rounds, reading is what everything waits for: it goes as fast as rounds are short.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from specjax.latency.cost_table import CostTable, draft_seconds, pass_seconds
from specjax.schedule.verify_length import early_stop_lengths, fixed_budget_lengths, plan_budget, threshold_lengths


class View(NamedTuple):
    """What is known before a round drafts."""

    table: CostTable
    earlier: np.ndarray  # [B, K] confidences of an earlier round of each request, NaN where it had none
    slots: np.ndarray  # [] cached tokens of all of them
    quiet: int  # rounds without drafts until now, or stretches of rounds where it is asked before each of these
    read: int = 0  # tokens of prompts that are read besides, a round
    unread: int = 0  # and those that are left over for later ones


Lengths = Callable[[np.ndarray], np.ndarray]  # confidence [B, K] -> lengths [B]
Policy = Callable[[View], Lengths | None]


def plain() -> Policy:
    """Never speculate."""
    return lambda view: None


def fixed(num_draft: int) -> Policy:
    """Verify the first `num_draft` tokens of every draft."""
    return lambda view: lambda confidence: np.full(len(confidence), min(num_draft, confidence.shape[1]), np.int32)


def threshold(least: float) -> Policy:
    """Verify each draft up to its first confidence below `least`."""
    return lambda view: lambda confidence: threshold_lengths(confidence, np.asarray(least))


def early_stop() -> Policy:
    """Algorithm 1 with early stop, on this round's confidences."""
    return lambda view: lambda confidence: early_stop_lengths(confidence, view.table, _all(confidence), view.slots)


def fixed_budget(*, probe_every: int = 64, probe_share: float = 0.01, slack: float = 0.02) -> Policy:
    """A budget from earlier confidences, given to the best tokens of this round; plain rounds where drafting does not pay.

    It drafts where nothing is known of any request, and after `probe_every` rounds without drafts or more, of whose time that
    drafting takes `probe_share` at most, so that what it knows does not grow old; never where drafts would not pay though
    all were accepted.  A request that has not drafted yet is taken for the mean of those that have.  What is verified where
    that may not pay, or while prompts are left over, makes a round longer by a share of `slack` at most.
    """

    def policy(view: View) -> Lengths | None:
        unknown = np.isnan(view.earlier)
        ignorant = bool(unknown.all())
        mean = np.where(unknown, 0, view.earlier).sum(0) / np.maximum((~unknown).sum(0), 1)
        likely = np.where(unknown.all(0), 1, mean)
        known = np.where(unknown, likely[None], view.earlier).astype(view.table.verify.dtype)
        plan = plan_budget(known, view.table, _all(known), view.slots)
        pays = bool(plan.rate > plan.plain_rate) and not ignorant
        old = view.quiet >= probe_every and _drafting(view) <= probe_share * view.quiet
        look = (ignorant or old) and _hopeful(view)
        if not (pays or look):
            return None  # before anything else is computed: a server asks often
        if pays and not view.unread:
            budget = plan.budget
        else:
            budget = min(plan.budget, affordable(view, slack, drafted=look))
        if not look and budget == 0:
            return None
        return lambda confidence: fixed_budget_lengths(confidence, np.asarray(budget), _all(confidence))

    return policy


def affordable(view: View, slack: float, *, drafted: bool) -> int:
    """How many tokens make the round longer by a share of `slack` at most: beside the drafting, or where `drafted` after it."""
    tokens = np.arange(view.earlier.size + 1) + len(view.earlier) + view.read
    seconds = pass_seconds(view.table, tokens, view.slots)
    drafting = 0 if drafted else draft_seconds(view.table, np.asarray(len(view.earlier)))
    return int((seconds[1:] + drafting - seconds[0] <= slack * seconds[0]).sum())


def _drafting(view: View) -> float:
    """How long drafting takes, in rounds without."""
    requests = np.asarray(len(view.earlier))
    return float(draft_seconds(view.table, requests) / pass_seconds(view.table, requests, view.slots))


def _hopeful(view: View) -> bool:
    """Whether drafts would pay if all of them were accepted."""
    certain = np.ones(view.earlier.shape, view.table.verify.dtype)
    best = plan_budget(certain, view.table, _all(certain), view.slots)
    return bool(best.rate > best.plain_rate)


def _all(rows: np.ndarray) -> np.ndarray:
    return np.ones(len(rows), bool)

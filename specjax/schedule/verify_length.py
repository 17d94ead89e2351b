"""How many drafted tokens of each request to verify: lengths [B] from confidences [B, K] and a cost table.  Chains only.

Every length here keeps the output's law, whatever the confidences are, because whether token k of a request is verified
depends on nothing that was drawn at k or after it: c_k may look at earlier tokens of its chain, and

- `threshold_lengths` stops at the first c_k below a number;
- `early_stop_lengths` (DSpark's Algorithm 1, arXiv 2607.05147) admits tokens of all requests in order of survival and stops
  at the first that does not raise the expected throughput, so what ranks below a token cannot call it back;
- `fixed_budget_lengths` admits the best `budget` tokens, and the budget was fixed before this round's tokens were drawn:
  `plan_budget` takes it from the confidences of an EARLIER round.

The argmax of the throughput over one and the same round's confidences does not keep it: c_2 is known only after x_1 is
drawn, and would decide whether x_1 is verified (App. A: P(A) = .85 where the target says .70).  Ties are broken by position,
then by request, never by what a token is.

Everything here runs in NumPy and inside jax; shapes are static and no length is.
"""

from __future__ import annotations

from typing import NamedTuple

from specjax.latency.cost_table import CostTable, Numbers, pass_seconds, round_seconds
from specjax.schedule.confidence import survival


class Plan(NamedTuple):
    """A budget for a later round, and what it is worth."""

    budget: Numbers  # [] int32 drafted tokens to verify, over all requests
    rate: Numbers  # [] tokens a second expected of it
    plain_rate: Numbers  # [] tokens a second of a round in which nothing is drafted


def threshold_lengths(confidence: Numbers, threshold: Numbers) -> Numbers:
    """Tokens of each request before its first confidence below `threshold` ([] or [B]).  Costs are not looked at.

    >>> import numpy as np
    >>> threshold_lengths(np.array([[0.9, 0.4, 0.9], [0.9, 0.8, 0.7]]), np.array(0.5)).tolist()
    [1, 3]
    """
    xp = confidence.__array_namespace__()
    kept = (confidence >= threshold.reshape(-1, 1)).astype(xp.int32)
    return xp.cumprod(kept, 1).sum(1, dtype=xp.int32)


def early_stop_lengths(confidence: Numbers, table: CostTable, live: Numbers, slots: Numbers) -> Numbers:
    """Algorithm 1 with early stop: the next-best token of any request, as long as tokens per second rise.

    On a cost that climbs in stairs it stops at the first stair that does not pay for its first token.

    Args:
      confidence: [B, K] of this round's drafts.
      table: what a round costs.
      live: [B] bool: requests that are being decoded.
      slots: [] tokens in their caches.
    """
    xp = confidence.__array_namespace__()
    alive = _survival(confidence, live)
    best_first, rank = _ranked(alive)
    rate = _rates(best_first, table, live, slots)
    raised = (rate[1:] > rate[:-1]).astype(xp.int32)
    return _admitted(alive, rank, xp.cumprod(raised, 0).sum(dtype=xp.int32))


def fixed_budget_lengths(confidence: Numbers, budget: Numbers, live: Numbers) -> Numbers:
    """The `budget` [] tokens that are most likely to be accepted with all before them, of all requests together.

    `confidence` [B, K] is this round's; the budget must not come from it.
    """
    alive = _survival(confidence, live)
    return _admitted(alive, _ranked(alive)[1], budget)


def plan_budget(earlier_confidence: Numbers, table: CostTable, live: Numbers, slots: Numbers) -> Plan:
    """The budget that gives most tokens a second, stairs or not, for a LATER round than that of `earlier_confidence` [B, K].

    Give rows that have no earlier round a confidence of 1.  Where `plain_rate` is above `rate`, drafting does not pay.
    """
    xp = earlier_confidence.__array_namespace__()
    best_first = -xp.sort(-_survival(earlier_confidence, live).reshape(-1))
    rate = _rates(best_first, table, live, slots)
    budget = xp.argmax(rate).astype(xp.int32)
    requests = live.sum().astype(rate.dtype)
    return Plan(budget, rate[budget], requests / pass_seconds(table, requests, slots))


def _survival(confidence: Numbers, live: Numbers) -> Numbers:
    """a [B, K], 0 for requests that are done."""
    return confidence.__array_namespace__().where(live[:, None], survival(confidence), 0)


def _ranked(alive: Numbers) -> tuple[Numbers, Numbers]:
    """Survivals of all requests, greatest first [B*K], and the place of each in that order [B, K]."""
    xp = alive.__array_namespace__()
    flat = alive.T.reshape(-1)  # by position, then request: a stable sort keeps this order in ties
    order = xp.argsort(-flat, stable=True)
    return flat[order], xp.argsort(order).reshape(alive.T.shape).T


def _rates(best_first: Numbers, table: CostTable, live: Numbers, slots: Numbers) -> Numbers:
    """Tokens a second expected of a round that verifies the best 0, 1, .. B*K tokens: [B*K+1]."""
    xp, dtype = best_first.__array_namespace__(), best_first.dtype
    requests = live.sum().astype(dtype)
    tokens = requests + xp.arange(best_first.shape[0] + 1, dtype=dtype)
    expected = requests + xp.concatenate([xp.zeros((1,), dtype), xp.cumsum(best_first)])
    return expected / round_seconds(table, requests, tokens, slots).astype(dtype)


def _admitted(alive: Numbers, rank: Numbers, count: Numbers) -> Numbers:
    """Lengths [B] when the first `count` places are admitted.  A survival of 0 never is."""
    return ((rank < count.astype(rank.dtype)) & (alive > 0)).sum(1, dtype=alive.__array_namespace__().int32)

"""What a round costs, as a table that a schedule reads: from a roofline, or from measurements (`calibrate`).

    seconds = verify(tokens in the target's pass) + draft(requests) + per_slot * cached tokens

Tokens in the pass are the last committed token of each request and every drafted token that is verified.  Tables are arrays
and go into `state.schedule`: another table compiles nothing.  Everything here runs in NumPy and inside jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Numbers = Any
"""An array of NumPy or of jax: functions of these run in both."""


class CostTable(NamedTuple):
    """Seconds, never falling with more tokens or requests; linear between the points and past the last."""

    tokens: Numbers  # [n] float, ascending: tokens in the target's pass
    verify: Numbers  # [n] seconds of that pass
    requests: Numbers  # [m] float, ascending
    draft: Numbers  # [m] seconds in which the drafter proposes for so many requests, and takes in what was decided
    per_slot: Numbers  # [] seconds that a round takes longer for each token in the caches


def cost_table(
    tokens: Sequence[float], verify: Sequence[float], *, requests: Sequence[float] = (1,), draft: Sequence[float] = (0,),
    per_slot: float = 0.0, dtype: type = np.float32,
) -> CostTable:  # fmt: skip
    """A table from points, under their monotone envelope: measured times that fall as work grows are noise.

    Raises:
      ValueError: points that do not ascend, fewer than two for the pass, or seconds that are not positive.
    """
    for name, at, seconds, least in (("tokens", tokens, verify, 2), ("requests", requests, draft, 1)):
        if len(at) != len(seconds) or len(at) < least or (np.diff(at) <= 0).any():
            raise ValueError(f"{name} {list(at)} with {len(seconds)} times: give {least} or more, ascending, with a time each")
    if not (np.asarray(verify) > 0).all() or not (np.asarray(draft) >= 0).all() or not per_slot >= 0:
        raise ValueError(f"times {list(verify)}, {list(draft)}, {per_slot}: seconds are positive (0 where nothing is drafted)")
    arrays = tokens, np.maximum.accumulate(verify), requests, np.maximum.accumulate(draft), per_slot
    return CostTable(*(np.asarray(x, dtype) for x in arrays))


def staircase(buckets: Sequence[int], seconds: Sequence[float]) -> tuple[list[float], list[float]]:
    """(tokens, verify) of an engine that pads a pass to the next of its buckets; past the last, the slope before it.

    >>> staircase([8, 16], [1.0, 1.5])
    ([1.0, 8.0, 9.0, 16.0, 32.0], [1.0, 1.0, 1.5, 1.5, 2.5])
    """
    tokens, cost = [], []
    for first, last, time in zip([1, *(b + 1 for b in buckets)], buckets, seconds, strict=False):
        tokens += [first] if first == last else [first, last]
        cost += [time] * (len(tokens) - len(cost))
    slope = (seconds[-1] - seconds[-2]) / (buckets[-1] - buckets[-2]) if len(buckets) > 1 else seconds[-1] / buckets[-1]
    beyond = 2 * buckets[-1]
    return [float(t) for t in (*tokens, beyond)], [*cost, seconds[-1] + slope * (beyond - buckets[-1])]


def round_seconds(table: CostTable, requests: Numbers, tokens: Numbers, slots: Numbers) -> Numbers:
    """Seconds of a round with drafts: `requests` [], `tokens` [...] in the pass, `slots` [] cached tokens of them all."""
    return draft_seconds(table, requests) + pass_seconds(table, tokens, slots)


def pass_seconds(table: CostTable, tokens: Numbers, slots: Numbers) -> Numbers:
    """Seconds of the target's pass alone, which is all that a round of plain decoding is."""
    dtype = table.verify.dtype
    return interpolate(tokens.astype(dtype), table.tokens, table.verify) + table.per_slot * slots.astype(dtype)


def draft_seconds(table: CostTable, requests: Numbers) -> Numbers:
    """Seconds of the drafter's work in a round."""
    return interpolate(requests.astype(table.draft.dtype), table.requests, table.draft)


def interpolate(x: Numbers, at: Numbers, y: Numbers) -> Numbers:
    """y(x), linear between the points `at` [n] and past the last, constant before the first.

    >>> interpolate(np.array([0.0, 1.5, 4.0]), np.array([1.0, 2.0]), np.array([10.0, 20.0])).tolist()
    [10.0, 15.0, 40.0]
    """
    if at.shape[0] == 1:
        return 0 * x + y[0]
    xp = at.__array_namespace__()
    left = xp.minimum(xp.maximum(xp.searchsorted(at, x, side="right") - 1, 0), at.shape[0] - 2)  # `clip` is slow in NumPy
    slope = (y[left + 1] - y[left]) / (at[left + 1] - at[left])
    return y[left] + xp.maximum(x - at[left], 0) * slope

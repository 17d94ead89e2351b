"""Per-round counts -> acceptance statistics, under vLLM's per-request names.

Only what a user receives is counted: tokens past an end, a stop string or a budget are neither emitted nor accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specjax.types import RoundInfo


class Statistics(NamedTuple):
    """Acceptance of one request, or of several merged; counts first, then what follows from them."""

    num_spec_steps: int  # rounds, those without a draft included
    num_draft_tokens: int  # tokens drafted and verified
    num_accepted_draft_tokens: int  # of these, accepted and emitted
    num_spec_tokens: int  # K: the most tokens a round may draft along one path
    num_emitted_tokens: int
    mean_acceptance_length: float  # tau = 1 + accepted / steps: counts a bonus that an end cut off
    tokens_per_step: float  # emitted / steps: does not
    draft_acceptance_rate: float  # accepted / drafted
    acceptance_histogram: tuple[int, ...]  # [K+1] rounds by accepted tokens, bonus excluded
    acceptance_histogram_by_draft_length: tuple[tuple[int, ...], ...]  # [N+1][K+1] the same, by tokens drafted
    per_position_acceptance_rate: tuple[float, ...]  # [K] share of rounds that accepted the token at each depth


def cut(rounds: RoundInfo, kept: int) -> RoundInfo:
    """Rounds [R] of one request as if it had ended after `kept` tokens: later ones vanish, the last is shortened.

    >>> cut(RoundInfo(drafted=[4, 4, 4], accepted=[2, 4, 1], emitted=[3, 5, 2]), 5).emitted.tolist()
    [3, 2]
    """
    drafted, accepted, emitted = (np.asarray(x) for x in rounds[:3])
    before = np.cumsum(emitted) - emitted
    used = (emitted > 0) & (before < kept)
    emitted = np.minimum(emitted, kept - before)[used]
    return RoundInfo(drafted[used], np.minimum(accepted[used], emitted), emitted)


def statistics(rounds: RoundInfo | Sequence[RoundInfo], num_draft: int) -> Statistics:
    """Statistics of rounds [R] (as `cut` returns them), of one request or pooled over several.

    Args:
      rounds: what each round drafted, accepted and emitted.
      num_draft: K, the deepest a draft may go.
    """
    several = [rounds] if isinstance(rounds, RoundInfo) else rounds
    drafted, accepted, emitted = (
        np.concatenate([np.asarray(r[i], np.int64) for r in several] or [np.zeros(0, np.int64)]) for i in range(3)
    )
    by_length = np.zeros((int(drafted.max(initial=num_draft)) + 1, num_draft + 1), np.int64)
    np.add.at(by_length, (drafted, accepted), 1)
    return _from_counts(by_length, int(emitted.sum()))


def merge(several: Sequence[Statistics]) -> Statistics:
    """Statistics of several requests pooled: counts are added, rates follow from the sums.

    Raises:
      ValueError: none, or of different K.
    """
    depths = sorted({s.num_spec_tokens for s in several})
    if len(depths) != 1:
        raise ValueError(f"statistics with num_spec_tokens {depths} cannot be pooled: give some, all of one K")
    tables = [np.asarray(s.acceptance_histogram_by_draft_length, np.int64) for s in several]
    total = np.zeros((max(map(len, tables)), depths[0] + 1), np.int64)
    for table in tables:
        total[: len(table)] += table
    return _from_counts(total, sum(s.num_emitted_tokens for s in several))


def _from_counts(by_length: np.ndarray, num_emitted: int) -> Statistics:
    """by_length [N+1, K+1] counts rounds by tokens drafted and tokens accepted; all but `num_emitted` follows from it."""
    histogram, num_draft = by_length.sum(0), by_length.shape[1] - 1
    steps = int(histogram.sum())
    num_drafted = int(by_length.sum(1) @ np.arange(len(by_length)))
    num_accepted = int(histogram @ np.arange(num_draft + 1))
    reached = histogram[::-1].cumsum()[::-1][1:]  # rounds that accepted at least 1, 2, .. K tokens
    return Statistics(
        num_spec_steps=steps,
        num_draft_tokens=num_drafted,
        num_accepted_draft_tokens=num_accepted,
        num_spec_tokens=num_draft,
        num_emitted_tokens=num_emitted,
        mean_acceptance_length=1 + num_accepted / steps if steps else 0.0,
        tokens_per_step=num_emitted / steps if steps else 0.0,
        draft_acceptance_rate=num_accepted / num_drafted if num_drafted else 0.0,
        acceptance_histogram=tuple(histogram.tolist()),
        acceptance_histogram_by_draft_length=tuple(tuple(row) for row in by_length.tolist()),
        per_position_acceptance_rate=tuple((reached / steps).tolist()) if steps else (0.0,) * num_draft,
    )

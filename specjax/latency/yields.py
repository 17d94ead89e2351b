"""What a round yields and what that is worth: tokens per round, latency, speed-up, break-even, best K.

Everything follows from acceptance and from two costs in units of one plain pass of the target: drafting (k c for k tokens)
and verifying (v_k for a pass over k + 1 tokens).  Leviathan et al. (arXiv 2211.17192) have v_k = 1, which holds as long as
a pass is bound by memory.  `roofline` and `calibrate` say what c and v_k are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize

Row = Sequence[float] | np.ndarray


class Best(NamedTuple):
    """The number of drafted tokens that is fastest."""

    num_draft: int  # 0 = do not speculate
    speedup: float  # over plain decoding
    speedups: np.ndarray  # [K+1] of every number of drafted tokens


def expected_tokens(alpha: float, num_draft: int) -> float:
    """E[N] = (1 - alpha^(k+1)) / (1 - alpha) tokens per round, the bonus counted, when each is accepted with `alpha`.

    >>> round(expected_tokens(0.8, 4), 2), expected_tokens(1.0, 4)
    (3.36, 5.0)
    """
    return float((alpha ** np.arange(num_draft + 1)).sum())


def expected_tokens_by_position(survival: Row) -> float:
    """E[N] from P(prefix of k accepted) [K], the bonus counted: `Statistics.per_position_acceptance_rate` gives tau."""
    return 1 + float(np.sum(survival))


def expected_tokens_of_tree(parents: Sequence[int], accept: Row) -> float:
    """E[N] of a tree: 1 + the sum over its nodes of P(node accepted).

    Args:
      parents: [N] a node, -1 for the root, -2 for no such node; parents stand before children.
      accept: [N] P(accepted | its parent was), which for one of several siblings is that IT is the accepted one.
    """
    reached: list[float] = []
    for parent, p in zip(parents, accept, strict=True):
        reached.append(0.0 if parent < -1 else p * (1.0 if parent == -1 else reached[parent]))
    return 1 + sum(reached)


def inter_token_latency(draft: float, verify: float, tau: float) -> float:
    """(T_draft + T_verify) / tau, in the unit of the times."""
    return (draft + verify) / tau


def speedup(tokens: float, draft: float, verify: float) -> float:
    """E[N] / (k c + v_k): `draft` and `verify` of a whole round, in plain passes.

    >>> round(speedup(expected_tokens(0.8, 4), draft=0.2, verify=1.0), 1)
    2.8
    """
    return tokens / (draft + verify)


def operations(alpha: float, num_draft: int, drafter_operations: float = 0.0) -> float:
    """Arithmetic per emitted token, over that of plain decoding: (k c^ + k + 1) / E[N] (Leviathan et al., Theorem 3.11).

    `drafter_operations` c^ is what the drafter spends on a token, in units of what the target does.
    """
    return (num_draft * drafter_operations + num_draft + 1) / expected_tokens(alpha, num_draft)


def break_even(num_draft: int, draft: float, verify: float) -> float:
    """The alpha at which a round pays for itself, E[N] = k c + v_k; 0 where it always does, inf where it never does.

    >>> round(break_even(1, draft=0.25, verify=1.0), 12)
    0.25
    """
    gain = lambda alpha: expected_tokens(alpha, num_draft) - draft - verify
    if gain(0.0) >= 0:
        return 0.0
    return math.inf if gain(1.0) < 0 else np.asarray(optimize.brentq(gain, 0, 1, xtol=1e-14)).item()


def best_num_draft(tokens: Row, draft: Row, verify: Row) -> Best:
    """The fastest of 0, 1, .. K drafted tokens, not speculating included; the fewest of equally fast ones.

    Args:
      tokens: [K+1] E[N], 1 for none.
      draft: [K+1] time of drafting, 0 for none.
      verify: [K+1] time of a pass over k + 1 tokens, in the same unit.

    Raises:
      ValueError: the first entries are not those of plain decoding.
    """
    if tokens[0] != 1 or draft[0] != 0:
        raise ValueError(f"entry 0 is plain decoding, 1 token and no drafting: got {tokens[0]} tokens, drafting {draft[0]}")
    plain = verify[0]
    speedups = np.asarray([speedup(t, d / plain, v / plain) for t, d, v in zip(tokens, draft, verify, strict=True)])
    best = int(speedups.argmax())
    return Best(best, float(speedups[best]), speedups)

"""Tests of samples against a known law, each with the smallest fault that it would have seen.

Fixed-size tests (`g_test`, `martingale_test`, `uniform_test`) give a p-value; bets (`bets`, `e_acceptance`, judged by
`e_test`) give a running e-value that may be looked at, and stopped, at any time: P(it ever reaches 1/alpha) <= alpha under
the null (Ville 1939).  Every `Test` holds at the false-alarm rate `alpha` asked, and its `effect` is what is then found
with probability .99.  Pure NumPy; nothing here knows about models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import optimize, special, stats

from specjax.lossless.finding import Test
from specjax.lossless.kernel import two_sample as two_sample  # one door to all tests

POWER = 0.99
SMALLEST_CELL = 5.0
"""Expected samples below which a cell is pooled: chi-square is no good approximation there."""
BINS = 20
STRENGTHS = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Bets, as fractions of the wealth: a tilt of TV t on half of the mass is best bet on with 4 t."""
GROUPS = 16


def g_test(counts: np.ndarray, law: np.ndarray, *, alpha: float, unit: str = "TV of the joint") -> Test:
    """G-test of counts against a known law of the same shape, usually the joint of several tokens.

    G = 2 sum O ln(O/E), divided by Williams' (1976) factor, against chi-square.  Cells that expect fewer than 5 samples are
    pooled by the law alone, before any count is seen; a count where the law has 0 gives p_value 0.

    The effect: with noncentrality lambda for power .99 a fault of total variation t has n chi2 >= 4 n t^2, with equality
    where every cell of one half of the mass is scaled by 1 + 2t and the other by 1 - 2t; that worst, even split gives
    t = sqrt(lambda / n) / 2.  What may hide within pooled cells, at most their mass, is added: any fault that large is found.
    """
    counts, law = np.asarray(counts, float).ravel(), np.asarray(law, float).ravel()
    if counts.shape != law.shape or not math.isclose(law.sum(), 1, abs_tol=1e-3):
        raise ValueError(f"{counts.size} counts, a law of {law.size} cells with sum {law.sum()}: give a law of the same cells")
    law, n, possible = law / law.sum(), counts.sum(), law > 0
    impossible = counts[~possible].sum() > 0
    group, pooled = pool(n * law[possible])
    expected = np.bincount(group, n * law[possible])
    observed = np.bincount(group, counts[possible])
    cells = len(expected)
    if cells < 2:
        return Test(math.inf if impossible else 0.0, float(not impossible), int(n), math.inf, unit)
    effect = float(math.sqrt(noncentrality(cells - 1, alpha) / n) / 2 + pooled / n)
    williams = 1 + ((n / expected).sum() - 1) / (6 * n * (cells - 1))
    g = math.inf if impossible else 2 * special.xlogy(observed, observed / expected).sum() / williams
    return Test(float(g), float(stats.chi2.sf(g, cells - 1)), int(n), effect if effect < 1 else math.inf, unit)


def pool(expected: np.ndarray) -> tuple[np.ndarray, float]:
    """Group [cells] of each cell such that every group expects 5 or more, and the expected samples that were pooled.

    Small cells fill one group after the other in ascending order; a remainder joins the group before it.
    """
    group, order = np.zeros(len(expected), int), np.argsort(expected, kind="stable")
    filled, current, pooled = 0.0, 0, 0.0
    for i in order:
        if filled >= SMALLEST_CELL:
            current, filled = current + 1, 0.0
        if filled > 0 or expected[i] < SMALLEST_CELL:
            pooled += expected[i]
        group[i], filled = current, filled + expected[i]
    if 0 < filled < SMALLEST_CELL and current > 0:  # nothing is larger: all were small
        group[group == current] = current - 1
    return group, float(pooled)


def noncentrality(df: int, alpha: float) -> float:
    """The lambda at which a chi-square test at `alpha` has power .99."""
    critical = float(stats.chi2.isf(alpha, df))
    return _root(lambda x: float(stats.ncx2.sf(critical, df, x)) - POWER, 1e-3, 20 * (critical + 50))


def samples_needed(effect: float, *, cells: int, alpha: float) -> int:
    """Samples for a `g_test` of so many cells, none pooled, to find a TV of `effect` with probability .99.

    >>> samples_needed(0.02, cells=64, alpha=1e-6)
    76123
    """
    return math.ceil(noncentrality(cells - 1, alpha) / (4 * effect**2))


def martingale_test(values: np.ndarray, variances: np.ndarray, *, alpha: float, unit: str = "mean per step") -> Test:
    """Two-sided test that differences |D| <= 1, each of mean 0 given the past, sum to nothing.

    D = accepted - (1 - TV(p, q)), or 1[y = a watched token] - p(it); their conditional variances are known, a (1 - a).
    The statistic is z = S / sqrt(V).  Its p-value is 2 P(Poisson(V) >= V + |S|): the normal one where V is large, and right
    where it is small (a token of probability .001), when a normal tail is too thin by orders of magnitude; bounded
    differences exceed it by a constant at most (Bentkus 2004).  The effect is a mean difference per step.
    """
    values, variances = np.asarray(values, float).ravel(), np.asarray(variances, float).ravel()
    if values.shape != variances.shape or (len(values) and np.abs(values).max() > 1 + 1e-6):
        raise ValueError(f"{values.size} values up to {np.abs(values).max()}, {variances.size} variances: differences are <= 1")
    n, total, variance = len(values), abs(values.sum()), variances.sum()
    if variance <= 1e-9 * max(n, 1):  # nothing was left to chance
        exact = total <= 1e-5 * n
        return Test(0.0 if exact else math.inf, float(exact), n, 0.0 if n else math.inf, unit)

    def tail(s):
        return min(1.0, 2 * special.gammainc(variance + s, variance))

    root = math.sqrt(variance)
    critical = _root(lambda s: math.log(max(tail(s), 1e-300) / alpha), 1e-12, 50 * root + 200)
    effect = (critical + stats.norm.isf(1 - POWER) * root) / n
    return Test(float(values.sum() / root), float(tail(total)), n, float(effect), unit)


def uniform_test(u: np.ndarray, *, alpha: float, unit: str = "TV of a token") -> Test:
    """Are randomised-CDF values uniform?  A `g_test` of 20 equal bins.

    Why bins: a fault moves mass between tokens that interleave in any order, and Kolmogorov-Smirnov sees only what piles up
    from one side.  At TV .02, n = 40,000 and alpha 1e-6 it finds 1.00 of shifts from one half of the interval to the other,
    bins .89 of them; between ten tokens in random order KS finds .13, bins .88; between sixteen .07 and .55.  The TV is that
    of a token where the fault is the same in all contexts; structure finer than a bin is not seen.
    """
    u = np.asarray(u, float).ravel()
    outside = ~((u >= 0) & (u <= 1))  # NaN too
    if outside.any():
        raise ValueError(f"{outside.sum()} values lie outside [0, 1]: give U = F(y - 1) + v p(y)")
    counts = np.bincount(np.minimum((u * BINS).astype(int), BINS - 1), minlength=BINS)
    return g_test(counts, np.full(BINS, 1 / BINS), alpha=alpha, unit=unit)


def randomised_cdf(outcomes: np.ndarray, laws: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """U [n] = F(y - 1) + v p(y): uniform, and independent of the past, iff outcome y [n] ~ laws [n, V], with v [n] uniform.

    Tokens are summed in one fixed random order, so that a fault between likely and unlikely ids does not cancel.  Give every
    emitted token: the accepted ones alone, or the corrections alone, are not p-distributed even when all is right.
    """
    outcomes, laws = np.asarray(outcomes), np.asarray(laws, float)
    place = np.random.default_rng(0).permutation(laws.shape[-1])
    step, own = np.arange(len(outcomes)), place[outcomes]
    before = np.where(place[None] < own[:, None], laws, 0).sum(-1)
    return np.clip(before + np.asarray(noise) * laws[step, outcomes], 0, 1)


def groups(vocab_size: int) -> np.ndarray:
    """[M, V] bool: sets of tokens to bet on.  Every split in two where V <= 5, else 16 random halves."""
    if vocab_size <= 5:
        codes = np.arange(1, 2 ** (vocab_size - 1))
        return (codes[:, None] >> np.arange(vocab_size)[None]) % 2 == 1
    return np.random.default_rng(0).random((GROUPS, vocab_size)) < 0.5


def bets(outcomes: np.ndarray, laws: np.ndarray) -> np.ndarray:
    """Running e-values [n] of outcomes [n] against their rows [n, V]; inf from the first token of probability 0 on.

    The alternatives tilt p to or away from a set A: p'(y) = p(y) (1 + b (1[y in A] - p(A))), so the likelihood ratio is a
    bet of b; wealth multiplies along the sequence and is averaged over sets and strengths.  Sets: `groups`, the row's argmax,
    and its most probable tokens up to half of the mass.  They may depend on the row and the emitted past only: never bet
    upon a draft or a coin of the same round.

    V = 4, alpha 1e-6, one law for all rows: a TV of .02 is found with probability .99 by n = 45,000 where it scales half of
    the mass evenly (median 24,000), by 34,000 where it moves from a token of .3 to one of .4; a `g_test` takes 38,000.
    """
    outcomes, laws = np.asarray(outcomes), np.asarray(laws, float)
    step, own = np.arange(len(outcomes)), laws[np.arange(len(outcomes)), outcomes]
    ordered = -np.sort(-laws, -1)
    least = ordered[step, (np.cumsum(ordered, -1) >= 0.5).argmax(-1)]  # of the tokens in the upper half
    top = laws.argmax(-1)
    scores = [(outcomes == top) - laws[step, top], (own >= least) - np.where(laws >= least[:, None], laws, 0).sum(-1)]
    scores += [chosen[outcomes] - laws[:, chosen].sum(-1) for chosen in groups(laws.shape[-1])]
    return np.where(np.cumsum(own <= 0) > 0, math.inf, _wealth(np.stack(scores)))


def e_acceptance(accepted: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Running e-values [n] of acceptance against what it must be, step by step.

    D = accepted - expected, in [-1, 1], has mean 0 given the past: for token verification expected = 1 - TV(p, q) of the row
    reached (`limits.one_draft`).  Bets of every strength on more and on less are averaged.  A mean that is off by .02 at an
    expected .7 is found with probability .99 by n = 40,000 (median 16,000; alpha 1e-6).

    Raises:
      ValueError: a difference beyond 1 in size, of a whole round say: give steps, or divide by what a round can accept.
    """
    difference = np.asarray(accepted, float) - np.asarray(expected, float)
    if len(difference) and np.abs(difference).max() > 1 + 1e-6:
        raise ValueError(f"accepted - expected reaches {np.abs(difference).max()}: give steps, each between 0 and 1")
    return _wealth(np.clip(difference, -1, 1)[None])


def _wealth(scores: np.ndarray) -> np.ndarray:
    """Mean over scores [M, n] of mean 0 and bets of both signs -> running wealth [n], capped below overflow."""
    total = np.full(scores.shape[1], -math.inf)
    for score in scores:
        for bet in (*STRENGTHS, *(-b for b in STRENGTHS)):
            total = np.logaddexp(total, np.cumsum(np.log1p(bet * score)))
    return np.exp(np.minimum(total - math.log(2 * len(STRENGTHS) * len(scores)), 700))


def e_test(e_values: np.ndarray, *, alpha: float, unit: str = "TV of a token", alternatives: int = 90) -> Test:
    """Judge running e-values [n]: the null is refuted iff they ever reach 1 / alpha.

    The p-value is 1 / max e (Ville).  The effect is that of a bet at the right strength on the right half of the mass, which
    earns 2 t^2 a step with deviation 2 t, after paying for `alternatives` in the mixture (90 where V = 4, 10 for acceptance).
    """
    e_values = np.asarray(e_values, float)
    if not len(e_values):
        return Test(1.0, 1.0, 0, math.inf, unit, 1.0)
    price, z = math.log(alternatives / alpha), stats.norm.isf(1 - POWER)
    effect = (z + math.sqrt(z**2 + 2 * price)) / 2 / math.sqrt(len(e_values))
    best = max(1.0, float(e_values.max()))
    return Test(best, 1 / best, len(e_values), float(effect), unit, best)


def product_of_e(e_values: Sequence[float]) -> float:
    """The e-value of independent streams together (last or stopped values, not maxima)."""
    return float(np.prod(np.asarray(e_values, float)))


def holm(p_values: Sequence[float], alpha: float) -> np.ndarray:
    """Which nulls are rejected when P(any false alarm) is to stay below alpha (Holm 1979), [M] bool.

    >>> holm([0.01, 0.04, 0.03, 0.005], alpha=0.05)
    array([ True, False, False,  True])
    """
    p = np.asarray(p_values, float)
    order = np.argsort(p, kind="stable")
    passed = np.cumsum(p[order] > alpha / (len(p) - np.arange(len(p)))) > 0
    rejected = np.zeros(len(p), bool)
    rejected[order[~passed]] = True
    return rejected


def binomial_interval(k: int, n: int, level: float = 0.99) -> tuple[float, float]:
    """Clopper and Pearson's (1934) interval for a rate of which k of n were seen: it holds with `level` or more.

    >>> print(*(round(x, 3) for x in binomial_interval(0, 100, 0.95)))
    0.0 0.036
    """
    low = 0.0 if k == 0 else float(stats.beta.ppf((1 - level) / 2, k, n - k + 1))
    high = 1.0 if k == n else float(stats.beta.isf((1 - level) / 2, k + 1, n - k))
    return low, high


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    return float(np.asarray(optimize.brentq(function, low, high)))

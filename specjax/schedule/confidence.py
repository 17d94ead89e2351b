"""Confidence that can be trusted: temperatures fitted on held-out rounds, margins where a drafter has no confidence, scores.

c_k is P(token k accepted | those before it accepted), as in `Draft.confidence`; a_k = c_1 .. c_k is the survival of the
prefix.  A schedule ranks and sums survivals, so it is these that have to be calibrated: sequential temperature scaling
(DSpark, arXiv 2607.05147, 3.2.1) fits T_1, T_2, .. in order, each so that the product up to it is.  No token's law depends
on any of this: a bad fit costs speed.

Fits and scores are NumPy, done once on a host; `survival`, `temper` and `margin_confidence` run in NumPy and inside jax.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special, stats

from specjax.latency.cost_table import Numbers

GRID = np.geomspace(0.125, 8, 49)
"""Temperatures that are tried (vLLM's grid)."""

EDGE = 1e-6
"""Confidences are held this far from 0 and 1 before their logit is taken."""


class Outcomes(NamedTuple):
    """What is known of each position of rounds [R, K]."""

    accepted: np.ndarray  # bool: the prefix up to here was accepted
    known: np.ndarray  # bool: `accepted` is known; not past the end of a draft that was accepted whole
    reached: np.ndarray  # bool: the token here was verified, all before it having been accepted


class Bins(NamedTuple):
    """A reliability diagram: M bins of equal width over [0, 1]."""

    edges: np.ndarray  # [M+1]
    count: np.ndarray  # [M]
    predicted: np.ndarray  # [M] mean probability, NaN in an empty bin
    observed: np.ndarray  # [M] share accepted, NaN in an empty bin


class Scores(NamedTuple):
    """How good probabilities are, position by position; NaN where nothing is known."""

    ece: np.ndarray  # [K] expected calibration error
    auroc: np.ndarray  # [K] P(an accepted one was given more than a refused one); NaN where all were one or the other
    brier: np.ndarray  # [K] mean squared error
    count: np.ndarray  # [K] rounds that were scored


class MarginFit(NamedTuple):
    """c_k = sigmoid(weight_k * margin + bias_k)."""

    weight: Numbers  # [K]
    bias: Numbers  # [K]


def survival(confidence: Numbers) -> Numbers:
    """a [..., K] from c [..., K]: never increasing along K, whatever c is; what is not a number is 0.

    >>> survival(np.array([0.5, 0.5, np.nan, 1.0])).tolist()
    [0.5, 0.25, 0.0, 0.0]
    """
    xp = confidence.__array_namespace__()
    sound = xp.where(confidence >= 0, xp.minimum(confidence, 1), 0)
    alive = [xp.ones_like(sound[..., 0])]
    for k in range(sound.shape[-1]):  # one product after the other: a parallel scan may round a later one up
        alive.append(alive[-1] * sound[..., k])
    return xp.stack(alive[1:], -1)


def outcomes(num_accepted: np.ndarray, num_drafted: np.ndarray, num_draft: int) -> Outcomes:
    """What rounds [R] tell, by tokens accepted and tokens verified.

    Leave out the last round of a request: an end or a budget cuts it, which is no refusal.
    """
    position = np.arange(1, num_draft + 1)[None]
    accepted, drafted = np.asarray(num_accepted)[:, None], np.asarray(num_drafted)[:, None]
    inside = position <= drafted
    return Outcomes(accepted >= position, inside | (accepted < drafted), inside & (accepted >= position - 1))


def fit_temperatures(
    logits: np.ndarray, accepted: np.ndarray, known: np.ndarray | None = None, *, grid: np.ndarray = GRID, num_bins: int = 20
) -> np.ndarray:
    """T [K]: each minimises, given those before it, the ECE of prod_{i<=k} sigmoid(z_i / T_i) against `accepted`.

    Args:
      logits: [R, K] z, what the confidence head gave before its sigmoid, in rounds that were verified whole: lengths that
        a scheduler chose by these very logits leave out what it thought bad.
      accepted: [R, K] whether the prefix up to k was accepted.
      known: [R, K] where that is known; everywhere unless given.
      grid: temperatures to try.  Of equally good ones the nearest to 1 is taken: 1 where nothing is known.
      num_bins: bins of the ECE.
    """
    logits, known = np.asarray(logits, np.float64), np.ones(accepted.shape, bool) if known is None else known
    before, fitted = np.ones(len(logits)), []
    nearest = grid[np.argsort(np.abs(np.log(grid)), stable=True)]
    for k in range(logits.shape[1]):
        here = known[:, k]
        error = [ece((before * special.expit(logits[:, k] / t))[here], accepted[here, k], num_bins) for t in nearest]
        fitted.append(nearest[int(np.argmin(np.round(np.nan_to_num(error), 12)))])
        before = before * special.expit(logits[:, k] / fitted[-1])
    return np.asarray(fitted)


def temper(confidence: Numbers, temperatures: Numbers) -> Numbers:
    """sigmoid(logit(c) / T): c [..., K] as `fit_temperatures` has it."""
    return _sigmoid(logits(confidence) / temperatures.reshape((1,) * (confidence.ndim - 1) + (-1,)))


def logits(confidence: Numbers) -> Numbers:
    """Before the sigmoid: what `fit_temperatures` takes, of confidences held EDGE from 0 and 1."""
    xp = confidence.__array_namespace__()
    held = xp.clip(confidence, EDGE, 1 - EDGE)
    return xp.log(held) - xp.log1p(-held)


def margins(logits: Numbers) -> Numbers:
    """Top logit minus the next, [...] from [..., V]: it depends on the tokens before, never on the one drawn there."""
    best = jax.lax.top_k(logits, 2)[0]
    return best[..., 0] - best[..., 1]


def margin_confidence(fit: MarginFit, margins: Numbers) -> Numbers:
    """c [..., K] from margins [..., K] of the drafter's logits."""
    row = (1,) * (margins.ndim - 1) + (-1,)
    return _sigmoid(fit.weight.reshape(row) * margins + fit.bias.reshape(row))


def law_margins(log_q: Numbers, temperature: Numbers) -> Numbers:
    """Margins [B, N] of the logits behind the laws log_q [B, N, V] that tokens were drawn from at temperatures [B].

    At temperature 0 the law is a point and no longer tells: the margin is infinite, and a positive weight makes it 1.
    """
    margin = margins(log_q)
    heat = temperature[:, None].astype(margin.dtype)
    return jnp.where(heat > 0, margin * heat, jnp.inf)


def fit_margins(margins: np.ndarray, accepted: np.ndarray, reached: np.ndarray, *, strength: float = 1.0) -> MarginFit:
    """Logistic regression at every position [K], on the rounds [R, K] that reached it, by Newton's method.

    Each is drawn to the fit of all positions together, as if by `strength` observations: a position seldom reached takes
    that, and no fit is infinite where margins separate the outcomes.

    Raises:
      ValueError: no position was ever reached.
    """
    margins, label = np.asarray(margins, np.float64), np.asarray(accepted, np.float64)
    if not reached.any():
        raise ValueError("no round verified any token: fit margins on rounds with drafts")
    pooled = _newton(margins[reached], label[reached], np.zeros(2), strength)
    each = [_newton(margins[on, k], label[on, k], pooled, strength) for k, on in enumerate(reached.T)]
    return MarginFit(*np.asarray(each).T)


def _newton(margin: np.ndarray, label: np.ndarray, centre: np.ndarray, strength: float) -> np.ndarray:
    """(weight, bias) that minimise the negative log likelihood + strength/2 |(weight, bias) - centre|^2."""
    x, theta = np.stack([margin, np.ones_like(margin)], -1), centre

    def loss(theta):
        z = x @ theta
        return np.logaddexp(0, z).sum() - label @ z + strength / 2 * ((theta - centre) ** 2).sum()

    for _ in range(100):
        p = special.expit(x @ theta)
        gradient = x.T @ (p - label) + strength * (theta - centre)
        step = np.linalg.solve(x.T * (p * (1 - p)) @ x + strength * np.eye(2), gradient)
        while loss(theta - step) > loss(theta) and np.abs(step).max() > 1e-12:  # a full step may leap over the minimum
            step = step / 2
        theta = theta - step
        if np.abs(step).max() < 1e-10:
            break
    return theta


def reliability(probability: np.ndarray, accepted: np.ndarray, num_bins: int = 20) -> Bins:
    """The reliability diagram of probabilities [n] of events [n]."""
    index = np.minimum((probability * num_bins).astype(int), num_bins - 1)
    count = np.bincount(index, minlength=num_bins)
    some = np.where(count > 0, count, np.nan)
    predicted, observed = (np.bincount(index, x, num_bins) / some for x in (probability, np.asarray(accepted, np.float64)))
    return Bins(np.linspace(0, 1, num_bins + 1), count, predicted, observed)


def ece(probability: np.ndarray, accepted: np.ndarray, num_bins: int = 20) -> float:
    """Expected calibration error: mean over events [n] of |predicted - observed| in their bin; NaN without events.

    >>> round(ece(np.array([0.9, 0.9, 0.2, 0.2]), np.array([1, 1, 0, 1])), 12)
    0.2
    """
    bins = reliability(probability, accepted, num_bins)
    total = bins.count.sum()
    return float(np.nansum(bins.count * np.abs(bins.predicted - bins.observed)) / total) if total else float("nan")


def auroc(probability: np.ndarray, accepted: np.ndarray) -> float:
    """P(an accepted one has the greater probability), ties counted half; NaN where all were accepted, or none."""
    yes = np.asarray(accepted, bool)
    positive, negative = int(yes.sum()), int((~yes).sum())
    if positive * negative == 0:
        return float("nan")
    ranks = stats.rankdata(probability)
    return float((ranks[yes].sum() - positive * (positive + 1) / 2) / (positive * negative))


def scores(probability: np.ndarray, accepted: np.ndarray, known: np.ndarray | None = None, *, num_bins: int = 20) -> Scores:
    """Scores at every position of probabilities [R, K].

    Give survivals, `accepted` and `known` of `outcomes` to score prefixes; confidences, `accepted` and `reached` to score
    each token given those before it.
    """
    known = np.ones(accepted.shape, bool) if known is None else known
    pairs = [(probability[on, k], accepted[on, k]) for k, on in enumerate(known.T)]
    error = [float(np.mean((p - y) ** 2)) if len(p) else float("nan") for p, y in pairs]
    calibration, ranking = [ece(p, y, num_bins) for p, y in pairs], [auroc(p, y) for p, y in pairs]
    return Scores(np.asarray(calibration), np.asarray(ranking), np.asarray(error), known.sum(0))


def _sigmoid(x: Numbers) -> Numbers:
    return (1 + x.__array_namespace__().tanh(x / 2)) / 2

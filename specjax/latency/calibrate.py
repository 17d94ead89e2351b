"""Measured passes -> a fit -> predicted speed-ups, their error, and the table that a schedule reads.

    target   base(batch * width)                                        + (per_slot + per_score * width) * batch * context
    drafter  fixed + per_token * k + per_request * batch + each * k * batch + (per_slot + per_score * k) * batch * context

`base` is linear between the token counts that were measured and never falls.  A drafter may run k passes or one, so k and
the batch each have a part, and their product.  All coefficients are at least 0: fits extrapolate sanely.  They minimise
relative error, so that a pass of 1 ms counts as much as one of 1 s, and tend to the mean of noisy times.  The measuring itself
is the caller's: `measure` walks the grid.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize

from specjax.latency.cost_table import CostTable, cost_table
from specjax.latency.hardware import Hardware
from specjax.latency.yields import Best, Row, best_num_draft

REWEIGHTED = 32
"""Fits in a row, each weighted by what those before predict."""


class Timing(NamedTuple):
    """One measured pass."""

    width: int  # per request: k + 1 tokens for a verification, k for the drafting of as many
    batch: int
    context: int  # tokens in each request's cache
    seconds: float


class PassFit(NamedTuple):
    """Seconds of a target's pass."""

    knots: np.ndarray  # [U] tokens, ascending
    base: np.ndarray  # [U] seconds there, never falling
    per_slot: float  # seconds a cached token takes
    per_score: float  # seconds a cached token takes for each token that looks at it


class DraftFit(NamedTuple):
    """Seconds of a drafter's work in a round."""

    fixed: float
    per_token: float  # for each of the k tokens, whatever the batch
    per_request: float
    each: float  # for each token of each request
    per_slot: float
    per_score: float


class Check(NamedTuple):
    """Predicted against measured speed-ups."""

    error: np.ndarray  # [n] predicted / measured - 1
    median: float  # of |error|
    worst: float
    regret: float  # how much faster the measured best is than what was predicted to be best


def measure(
    time_pass: Callable[[int, int, int], float], widths: Sequence[int], batches: Sequence[int], contexts: Sequence[int], *,
    sweeps: int = 3, progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Timing]:  # fmt: skip
    """Time a pass over the whole grid, `sweeps` times over, and keep each point's median: what else the machine did is spread.

    `time_pass(width, batch, context)` gives seconds of one pass that has run before; `progress(done, total)` is called before
    every one.
    """
    grid = list(itertools.product(widths, batches, contexts))
    taken: list[list[float]] = [[] for _ in grid]
    for sweep in range(sweeps):
        for i, point in enumerate(grid):
            progress(sweep * len(grid) + i, sweeps * len(grid))
            taken[i].append(time_pass(*point))
    return [Timing(*point, float(np.median(t))) for point, t in zip(grid, taken, strict=True)]


def fit_pass(timings: Sequence[Timing]) -> PassFit:
    """The fit of measured passes, by non-negative least squares on relative errors.

    What was not varied is not told apart: with one context the caches' part is in `base`, or the other way round.

    Raises:
      ValueError: fewer than two token counts, or seconds that are not positive.
    """
    width, batch, context, seconds = (np.asarray(x, np.float64) for x in zip(*timings, strict=True))
    tokens = width * batch
    knots = np.unique(tokens)
    if len(knots) < 2 or not (seconds > 0).all():
        raise ValueError(f"{len(knots)} token counts, shortest pass {seconds.min()} s: time two token counts or more")
    ramps = np.clip(tokens[:, None] - knots[None, :-1], 0, np.diff(knots)[None]) / np.diff(knots)[None]
    columns = np.column_stack([np.ones_like(tokens), ramps, batch * context, tokens * context])
    solution = _non_negative(columns, seconds)
    return PassFit(knots, np.cumsum(solution[:-2]), float(solution[-2]), float(solution[-1]))


def fit_draft(timings: Sequence[Timing]) -> DraftFit:
    """The fit of a drafter's work, `width` being the number of drafted tokens.

    Raises:
      ValueError: seconds that are not positive.
    """
    k, batch, context, seconds = (np.asarray(x, np.float64) for x in zip(*timings, strict=True))
    if not (seconds > 0).all():
        raise ValueError(f"shortest drafting {seconds.min()} s: a drafter that costs nothing needs no fit, give None")
    columns = np.column_stack([np.ones_like(k), k, batch, k * batch, batch * context, k * batch * context])
    return DraftFit(*_non_negative(columns, seconds).tolist())


def _non_negative(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Coefficients >= 0 that minimise the squared error relative to what they predict.

    Relative to what was measured, a slow reading would count least: with a spread of 30 % all would come out a fifth too fast.
    """
    scale, expected = np.maximum(columns.max(0), 1e-300), seconds  # caches hold thousands of tokens, ramps end at 1
    for _ in range(REWEIGHTED):
        found = optimize.nnls(columns / scale / expected[:, None], seconds / expected)[0] / scale
        expected = np.sqrt(expected * np.maximum(columns @ found, 1e-3 * seconds))  # half-way, or two fits could take turns
    return found


def predict(fit: PassFit, width: float, batch: float, context: float) -> float:
    """Seconds of a pass; past the last knot with the slope before it."""
    tokens = width * batch
    left = int(np.clip(np.searchsorted(fit.knots, tokens, side="right") - 1, 0, len(fit.knots) - 2))
    slope = (fit.base[left + 1] - fit.base[left]) / (fit.knots[left + 1] - fit.knots[left])
    base = fit.base[left] + max(tokens - fit.knots[left], 0) * slope
    return float(base + (fit.per_slot * batch + fit.per_score * tokens) * context)


def predict_draft(fit: DraftFit | None, num_draft: float, batch: float, context: float) -> float:
    """Seconds in which `num_draft` tokens are drafted; 0 for none, and for a drafter that costs nothing (None)."""
    if fit is None or num_draft == 0:
        return 0.0
    own = fit.fixed + fit.per_token * num_draft + fit.per_request * batch + fit.each * num_draft * batch
    return own + (fit.per_slot + fit.per_score * num_draft) * batch * context


def predict_speedups(
    verify: PassFit, draft: DraftFit | None, tokens: Row, *, batch: int, context: int, overhead: float = 0.0,
    finds: float = 1.0,
) -> Best:  # fmt: skip
    """Speed-up over plain decoding of every K, 0 included, and the best of them.

    Args:
      verify: of the target, by width.
      draft: of the drafter's work in a round, by the number of drafted tokens; None where it costs nothing.
      tokens: [K+1] expected tokens of a round with k drafted ones; 1 for none.
      batch: requests.
      context: tokens in each one's cache.
      overhead: seconds that a round takes besides, with and without a draft.
      finds: the share of a request's rounds in which the drafter has any draft; a round where no request has one runs a
        plain pass (`Drafter.widths`), requests being taken as independent.
    """
    num, wide = len(tokens), 1 - (1 - finds) ** batch
    drafting = [predict_draft(draft, k, batch, context) for k in range(num)]
    passes = [predict(verify, k + 1, batch, context) for k in range(num)]
    return best_num_draft(tokens, drafting, [wide * p + (1 - wide) * passes[0] + overhead for p in passes])


def check(predicted: Row, measured: Row) -> Check:
    """Predicted speed-ups [n] against the measured ones of the same settings.

    >>> check([1.0, 2.2, 1.5], [1.0, 2.0, 2.1]).regret.__round__(3)
    0.05
    """
    predicted, measured = np.asarray(predicted, np.float64), np.asarray(measured, np.float64)
    error = predicted / measured - 1
    regret = measured.max() / measured[predicted.argmax()] - 1
    return Check(error, float(np.median(np.abs(error))), float(np.abs(error).max()), float(regret))


def table_of(
    verify: PassFit, draft: DraftFit | None, *, num_draft: int, most_requests: int, context: int, overhead: float = 0.0
) -> CostTable:
    """The table a schedule reads, for chains of `num_draft` tokens and up to `most_requests` requests.

    A pass of n tokens is taken to cost the same however they are spread over requests.  Scores are priced at `context`.
    """
    most = most_requests * (num_draft + 1)
    tokens = sorted({1.0, float(max(most, 2)), *(float(k) for k in verify.knots if k < most)})
    requests = sorted({*(1 << i for i in range(most_requests.bit_length())), most_requests})
    scores = verify.per_score * context
    return cost_table(
        tokens,
        [predict(verify, 1, t, 0) + scores * t + overhead for t in tokens],
        requests=requests,
        draft=[predict_draft(draft, num_draft, r, 0) for r in requests],
        per_slot=verify.per_slot + (0.0 if draft is None else draft.per_slot + draft.per_score * num_draft),
    )


def median_seconds(call: Callable[[], object], *, calls: int = 7) -> float:
    """Median time of `call`, which returns jax arrays, after one that warms up."""
    times = []
    for _ in range(calls + 1):
        begin = perf_counter()
        jax.block_until_ready(call())
        times.append(perf_counter() - begin)
    return float(np.median(times[1:]))


def measure_device(*, size: int = 2048, dtype: type = jnp.float32, calls: int = 7) -> Hardware:
    """The device at hand as a `Hardware`: FLOP/s of a product [size, size], bytes/s of a vector through such a matrix.

    Its matrix must not fit any cache: 2048 makes 16 MB of float32, too little for a large CPU.  One device: `link` is 0.
    """
    device = jax.devices()[0]
    matrix = jnp.ones((size, size), dtype)
    product = median_seconds(lambda: matrix @ matrix, calls=calls)
    stream = median_seconds(lambda: matrix @ matrix[:, 0], calls=calls)
    memory = (device.memory_stats() or {}).get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware(device.device_kind, 2 * size**3 / product, matrix.nbytes / stream, float(memory), 0.0)

"""Two samples of token sequences, neither law known: MMD with a string kernel (Gretton et al. 2012; arXiv 2410.20247).

For a real model, where no law can be written down.  It sees gross faults in few samples; it complements the exact laws and
the tests against known rows, never replaces them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import sparse, stats

from specjax.lossless.finding import Test

ORDERS = (1, 2, 3)


def spectrum(sequences: Sequence[Sequence[int]], orders: tuple[int, ...] = ORDERS) -> np.ndarray:
    """Gram matrix [n, n] of the spectrum kernel (Leslie et al. 2002): shared n-grams, as cosine, averaged over `orders`.

    A sequence is 1 with itself; one too short for an order has a feature of its own there, shared with all such.
    """
    gram = np.zeros((len(sequences), len(sequences)))
    for order in orders:
        index: dict[tuple[int, ...], int] = {}
        rows, columns = [], []
        for row, sequence in enumerate(sequences):
            tokens = tuple(int(t) for t in sequence)
            grams = [tokens[i : i + order] for i in range(len(tokens) - order + 1)] or [()]
            rows += [row] * len(grams)
            columns += [index.setdefault(gram, len(index)) for gram in grams]
        counts = sparse.csr_array((np.ones(len(rows)), (rows, columns)), shape=(len(sequences), len(index)))
        counts.sum_duplicates()
        product = (counts @ counts.T).toarray()
        norm = np.sqrt(np.diag(product))
        gram += product / norm[:, None] / norm[None]
    return gram / len(orders)


def two_sample(
    a: Sequence[Sequence[int]],
    b: Sequence[Sequence[int]],
    *,
    seed: int,
    permutations: int,
    alpha: float,
    strata: Sequence[int] | None = None,
) -> Test:
    """Are a and b, lists of token sequences, drawn from one law?  MMD^2 under `spectrum`, against permuted labels.

    p = (1 + permutations that reach the statistic) / (1 + permutations), which is exact for any law and any kernel.
    `strata` names the prompt of each sequence, a's then b's: labels are then permuted within a prompt only.  Time and
    memory O((n_a + n_b)^2); 2,000 sequences and 999 permutations take about a second.

    The effect is an MMD (0 to sqrt 2).  The estimate of MMD^2 = m^2 has the null's spread plus 2 m times that of the mean of
    the witness function, whose variance is at most the largest eigenvalue of the centred Gram matrix over n; the effect is
    the m that then clears the permutations' 1 - alpha quantile with probability .99, whatever the direction of the fault.

    Raises:
      ValueError: so few permutations that p can never reach alpha.
    """
    if permutations + 1 < 1 / alpha - 1e-6:
        raise ValueError(
            f"{permutations} permutations give p >= {1 / (1 + permutations):.2g}: "
            f"alpha {alpha:g} needs at least {math.ceil(1 / alpha) - 1}"
        )
    gram = spectrum([*a, *b])
    n, na, nb = len(gram), len(a), len(b)
    weight = np.repeat([1 / na, -1 / nb], [na, nb])
    observed = float(weight @ gram @ weight)
    rng = np.random.default_rng(seed)
    blocks = [np.arange(n)] if strata is None else [np.flatnonzero(np.asarray(strata) == s) for s in np.unique(strata)]
    shuffled = np.tile(weight, (permutations, 1))
    for block in blocks:
        shuffled[:, block] = rng.permuted(shuffled[:, block], axis=1)
    null = np.einsum("ij,ij->i", shuffled @ gram, shuffled)
    p_value = (1 + (null >= observed - 1e-12).sum()) / (1 + permutations)
    return Test(observed, float(p_value), n, _effect(gram, null, na, nb, alpha), "MMD of n-grams 1..3")


def _effect(gram: np.ndarray, null: np.ndarray, na: int, nb: int, alpha: float) -> float:
    """The m of `two_sample`: E[statistic] = m^2 + the null's mean must clear the critical value by 2.33 deviations."""
    centre = gram - gram.mean(0)[None] - gram.mean(1)[:, None] + gram.mean()
    slope = 4 * np.linalg.eigvalsh(centre)[-1] / len(gram) * (1 / na + 1 / nb)
    z, spread = stats.norm.isf(0.01), null.var()
    above = np.quantile(null, 1 - alpha, method="higher") - null.mean()
    linear = 2 * above + z**2 * slope  # (m^2 - above)^2 = z^2 (spread + slope m^2)
    return float(math.sqrt((linear + math.sqrt(linear**2 - 4 * (above**2 - z**2 * spread))) / 2))

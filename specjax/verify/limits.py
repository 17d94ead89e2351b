"""Ceilings: what no lossless rule can exceed.  Acceptance above one of them is a bug, by proof.

Each is a function of the rows that a round has anyway, written for one row; vmap outside.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from specjax import trees
from specjax.types import Array, Draft
from specjax.verify.common import at_tokens, parent_rows


def one_draft(p: Array, q: Array) -> Array:
    """1 - TV(p, q) = sum min(p, q): one token drawn from q [V] (maximal coupling)."""
    return jnp.minimum(p, q).sum()


def fixed_set(p: Array, tokens: Array) -> Array:
    """p of a set of candidates chosen without chance: `tokens` [K], repeats counted once."""
    return jnp.where(jnp.zeros(p.shape, bool).at[tokens].set(True), p, 0).sum()


def iid_drafts(p: Array, q: Array, num_drafts: int) -> Array:
    """Optimal transport from K i.i.d. draws: 1 + min over prefixes H of P(H) - q(H)^K, tokens sorted by p/q.

    O(V log V); the minimum over all sets is attained at such a prefix (verification facts, A5 d).
    """
    p, q = _by_ratio(p, q)
    return 1 + jnp.minimum(0, (jnp.cumsum(p) - jnp.cumsum(q) ** num_drafts).min())


def without_replacement_drafts(p: Array, q: Array, num_drafts: int, *, nodes: int = 64) -> Array:
    """The same for K draws without replacement: Q(H) = P(all K draws lie in H).

    Draws without replacement are the first K arrivals of independent exponential clocks of rates q, so
    Q(H) = E[P(at least K clocks of H have rung)] at the time the first one outside H rings; the expectation is a Gauss-
    Legendre sum over `nodes` quantiles of that time, the inner probability an elementary symmetric polynomial.
    """
    p, q = _by_ratio(p, q)
    points, weights = np.polynomial.legendre.leggauss(nodes)
    quantiles = jnp.asarray((points + 1) / 2, p.dtype)
    outside = jnp.maximum(1 - jnp.cumsum(q), 0)

    def one_quantile(u):
        def prefix(carry, x):  # polynomial of the ringing clocks of H at this prefix's own time cannot be carried: recompute
            return carry, _all_within(q, x[0], x[1], u, num_drafts)

        index = jnp.arange(q.shape[0], dtype=jnp.int32)
        return jax.lax.scan(prefix, None, (index, outside))[1]

    within = (jax.vmap(one_quantile)(quantiles) * jnp.asarray(weights / 2, p.dtype)[:, None]).sum(0)
    within = jnp.where(outside > 0, within, 1)
    return 1 + jnp.minimum(0, (jnp.cumsum(p) - within).min())


def _all_within(q: Array, last: Array, outside: Array, u: Array, k: int) -> Array:
    """P(at least k of the clocks 0..last have rung) when the first outside clock rings, at its quantile u."""
    time = -jnp.log1p(-u) / jnp.where(outside > 0, outside, 1)
    rung = jnp.where(jnp.arange(q.shape[0], dtype=jnp.int32) <= last, -jnp.expm1(-q * time), 0)

    def add(counts, r):  # counts [k]: P(exactly 0..k-1 have rung)
        return counts * (1 - r) + jnp.concatenate([jnp.zeros(1, q.dtype), counts[:-1]]) * r, None

    counts, _ = jax.lax.scan(add, jnp.zeros(k, q.dtype).at[0].set(1), rung)
    return 1 - counts.sum()


def path_sum(draft: Draft, log_p: Array) -> Array:
    """Expected accepted tokens of a tree fixed without chance: the sum of its nodes' path probabilities.

    Any lossless rule has this expectation or less, and `target_match` attains it.  log_p [N+1, V] of one sequence; a twin
    of an earlier sibling adds nothing.
    """
    twin = trees.twins(draft.tokens, draft.parents)
    p_x = jnp.where((draft.parents >= -1) & ~twin, at_tokens(log_p, parent_rows(draft), draft.tokens), 0)
    path = trees.ancestors(draft.parents)[1:, 1:]
    return jnp.where(draft.parents >= -1, jnp.where(path, p_x[None], 1).prod(-1), 0).sum()


def ideal_block(p_paths: Array, q_paths: Array) -> Array:
    """sum over prefixes of min(p(prefix), q(prefix)): what no rule on one sampled path can exceed (Sun et al. 2024).

    Probabilities of whole prefixes, of every length from 1 to L, in any order but the same in both.
    """
    return jnp.minimum(p_paths, q_paths).sum()


def _by_ratio(p: Array, q: Array) -> tuple[Array, Array]:
    """Both laws in ascending order of p/q; tokens that q never draws come last."""
    order = jnp.argsort(jnp.where(q > 0, p / jnp.where(q > 0, q, 1), jnp.inf))
    return p[order], q[order]

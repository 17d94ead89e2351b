"""K-SEQ (SpecTr, Sun et al., arXiv 2310.15141): one threshold for K i.i.d. siblings.  Lossless, i.i.d. children.

beta(g) = sum min(q, p/g); g in [1, K] solves 1 - (1 - beta)^K = g beta; each child is accepted with min(1, p/(g q)); when
all fail, norm(p - c min(q, p/g)) with c = (1 - (1 - beta)^K)/beta.  At least 1 - 1/e of what optimal transport accepts.
Any g with c <= g is exact, so bisection keeps the upper end and rounding costs acceptance, never the law.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.types import Array, Draft, Plan, Rule
from specjax.verify import target_match
from specjax.verify.common import at_tokens, normalised, parent_rows, ratio, top_down


def plan(draft: Draft, log_p: Array) -> Plan:
    """Draft of one tree whose siblings share a law, log_p [N+1, V] -> Plan.  About 30 passes over the rows (60 in float64)."""
    if draft.log_q is None:
        return target_match.plan(draft, log_p)
    n = draft.tokens.shape[0]
    rows, log_q = parent_rows(draft), draft.log_q.astype(log_p.dtype)
    here = draft.parents >= -1
    children = jnp.zeros(n + 1, log_p.dtype).at[rows].add(here.astype(log_p.dtype))
    first = jnp.minimum(trees.links(draft.parents)[0], n - 1)
    gamma = jax.lax.map(
        lambda r: solve(jnp.exp(log_p[r]), jnp.exp(log_q[first[r]]), children[r]), jnp.arange(n + 1, dtype=jnp.int32)
    )
    p_x = at_tokens(log_p, rows, draft.tokens)
    q_x = at_tokens(log_q, jnp.arange(n, dtype=jnp.int32), draft.tokens)

    def correction(row):
        p, q, k = jnp.exp(log_p[row]), jnp.exp(log_q[first[row]]), children[row]
        kept = jnp.minimum(q, p / gamma[row])
        left = jnp.maximum(p - factor(kept.sum(), k) * kept, 0)
        return jnp.log(jnp.where(k > 0, normalised(left, p), p))

    return top_down(draft, ratio(p_x / gamma[rows], q_x), correction)


def factor(beta: Array, k: Array) -> Array:
    """c = (1 - (1 - beta)^K) / beta: how often each acceptable token gets out, against a single attempt."""
    some = beta > 0
    return jnp.where(some, -jnp.expm1(k * jnp.log1p(-jnp.minimum(beta, 1))) / jnp.where(some, beta, 1), k)


def solve(p: Array, q: Array, k: Array) -> Array:
    """The smallest g in [1, K] that bisection finds with c(g) <= g; 1 where there is one child or none."""
    steps = 60 if p.dtype == jnp.float64 else 30

    def halve(_, bracket):
        low, high = bracket
        g = (low + high) / 2
        exact = factor(jnp.minimum(q, p / g).sum(), k) <= g
        return jnp.where(exact, low, g), jnp.where(exact, g, high)

    one = jnp.ones((), p.dtype)
    return jax.lax.fori_loop(0, steps, halve, (one, jnp.maximum(k, one)))[1]


k_seq = Rule(plan, accepts=("point", "iid"))

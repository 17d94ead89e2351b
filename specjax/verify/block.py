"""Block verification (Sun et al., arXiv 2403.10444).  Lossless, chains; never keeps fewer tokens than `rejection`.

P_i = min(1, P_{i-1} p(x_i)/q(x_i)); Z_i = sum max(P_i p - q, 0); h_i = Z_i / (Z_i + 1 - P_i), h_L = P_L.  The round stops
at the LARGEST i whose coin is below h_i, which is a list of decisions from the deepest node up; the correction is
norm(max(P_i p - q, 0)).  With a point mass it is `rejection`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax.types import CHILDREN, Array, Draft, Plan, Rule
from specjax.verify import rejection
from specjax.verify.common import at_tokens, normalised


def plan(draft: Draft, log_p: Array) -> Plan:
    """Draft of one chain, log_p [N+1, V] -> Plan."""
    if draft.log_q is None:
        return rejection.plan(draft, log_p)
    n = draft.tokens.shape[0]
    node = jnp.arange(n, dtype=jnp.int32)
    log_q = draft.log_q.astype(log_p.dtype)
    drafted = (draft.parents >= -1).sum(dtype=jnp.int32)
    lawful = jnp.isfinite(log_p.max(-1))  # a row without a law has all its mass on an error, which q never draws
    p_x = jnp.where(lawful[:n], at_tokens(log_p, node, draft.tokens), 0)
    kept = kept_mass(p_x, at_tokens(log_q, node, draft.tokens))  # P_0..P_N

    def scaled(row):  # max(P_i p - q, 0) of one row
        return jnp.maximum(kept[row] * jnp.exp(log_p[row]) - jnp.exp(log_q[jnp.minimum(row, n - 1)]), 0)

    z = jax.lax.map(lambda row: scaled(row).sum(), jnp.arange(1, n, dtype=jnp.int32))  # one row at a time: no [N, V] temporary
    z = jnp.where(lawful[1:n], z, kept[1:n])
    rest = z + 1 - kept[1:n]
    h = jnp.append(jnp.where(rest > 0, z / jnp.where(rest > 0, rest, 1), 1), 0)
    h = jnp.where(node + 1 == drafted, kept[1:], jnp.where(node + 1 < drafted, h, 0))

    def correction(row):
        p = jnp.exp(log_p[row])
        return jnp.log(jnp.where(row < drafted, normalised(scaled(row), p), p))

    deepest_first = n - 1 - node  # decision m tests node n - 1 - m
    return Plan(h[deepest_first], n + deepest_first + 1, jnp.where(node == n - 1, n, node + 1), correction)


def kept_mass(p_x: Array, q_x: Array) -> Array:
    """P_0..P_N [N+1] from the probabilities of the drafted tokens [N]; 0 from a token that q could not draw."""
    raw = jnp.where(q_x > 0, p_x / jnp.where(q_x > 0, q_x, 1), 0)

    def step(mass, r):
        mass = jnp.minimum(1, mass * r)
        return mass, mass

    _, kept = jax.lax.scan(step, jnp.ones((), p_x.dtype), raw)
    return jnp.concatenate([jnp.ones(1, p_x.dtype), kept])


block = Rule(plan, accepts=CHILDREN, chain=True, top_down=False)

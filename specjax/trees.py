"""Tree topology from parents, static or traced by one code path.  Everything here is for ONE sequence; vmap outside.

A draft of N nodes is verified as a block of N + 1 rows: row 0 is the last committed token, row i + 1 is node i.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from specjax.types import Array


def chain(num_draft: int) -> np.ndarray:
    """Parents of a chain.

    >>> chain(3)
    array([-1,  0,  1], dtype=int32)
    """
    return np.arange(-1, num_draft - 1, dtype=np.int32)


def ancestors(parents: Array) -> Array:
    """Parents [N] -> [N+1, N+1] bool: row i sees row j (itself included).  An absent node sees itself and row 0 only."""
    n = parents.shape[0]
    up = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.maximum(parents + 1, 0)])
    seen = jnp.eye(n + 1, dtype=bool)
    for _ in range(n.bit_length()):  # after i doublings a row sees 2 ** i generations
        seen, up = seen | seen[up], up[up]
    return seen.at[:, 0].set(True)


def links(parents: Array) -> tuple[Array, Array]:
    """First child of each block row [N+1] and next sibling of each node [N]; N where there is none."""
    n = parents.shape[0]
    node = jnp.arange(n, dtype=jnp.int32)
    child = parents[None] == jnp.arange(-1, n, dtype=jnp.int32)[:, None]
    sibling = (parents[None] == parents[:, None]) & (node[None] > node[:, None])
    return jnp.where(child, node[None], n).min(-1, initial=n), jnp.where(sibling, node[None], n).min(-1, initial=n)


def path_to(row: Array, seen: Array, depth: int) -> Array:
    """Block rows [depth+1] from row 0 down to `row`, given ancestors `seen`; zeros past its depth."""
    level = seen.sum(-1, dtype=jnp.int32) - 1
    return (
        jnp.zeros(depth + 1, jnp.int32)
        .at[jnp.where(seen[row], level, depth + 1)]
        .set(jnp.arange(level.shape[0], dtype=jnp.int32), mode="drop")
    )

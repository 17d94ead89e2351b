"""Small control flow for device loops whose carry holds caches: what must not be copied, and what must not change."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.types import Array, KVCache


def when(flag: Array, f: Callable, carry):
    """`f(carry) if flag else carry`, as a loop of at most one trip: XLA copies caches through a conditional, not a loop."""
    return jax.lax.while_loop(lambda c: c[0], lambda c: (jnp.zeros((), bool), f(c[1])), (flag, carry))[1]


def padded(tree, shapes):
    """Every leaf of `tree` with zeros at the end of its second axis, up to the size in `shapes`."""

    def one(x, shape):
        missing = [(0, want - have) for want, have in zip(shape.shape, x.shape, strict=True)]
        return jnp.pad(x, missing) if any(after for _, after in missing) else x

    return jax.tree.map(one, tree, shapes)


def freeze(live: Array, new, old):
    """`new` for live rows and `old` for the others, K/V buffers excepted: what a done row writes there is never read."""

    def one(n, o):
        if isinstance(n, KVCache):
            return n._replace(length=one(n.length, o.length))
        return jnp.where(live.reshape(live.shape + (1,) * (n.ndim - 1)), n, o)

    return jax.tree.map(one, new, old, is_leaf=lambda x: isinstance(x, KVCache))

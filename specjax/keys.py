"""Every `fold_in` of the library: which randomness belongs to which request, round and purpose.

A request has its own key.  Within it, coins and draft noise are keyed by the length at the START of the round, never by
absolute position: a round that looks past its stopping point would otherwise reuse noise it has already conditioned on,
which is a real bias.  Only the noise of coupled decoding is keyed by position, because there it IS the target's sample.
"""

from __future__ import annotations

import jax

from specjax.types import Array

TARGET, DRAFT, ACCEPT, EMIT = range(4)  # one stream a purpose; streams never meet


def request_keys(key: Array, ids: Array) -> Array:
    """One key a request: ids [B] -> keys [B].  A row's output depends on its key, not on its place in the batch."""
    return jax.vmap(lambda i: jax.random.fold_in(key, i))(ids)


def round_keys(keys: Array, stream: int, length: Array) -> Array:
    """Keys [B] of one stream for the round that starts with `length` [B] committed tokens."""
    return jax.vmap(lambda k, n: jax.random.fold_in(jax.random.fold_in(k, stream), n))(keys, length)


def gumbel(keys: Array, depth: int | Array, shape: tuple[int, ...]) -> Array:
    """Standard Gumbel noise [B, *shape] for draws at `depth`, independent between depths.

    Mode "high": the default's 23-bit uniforms cut Gumbel noise off at 15.9, and with a head of .99 over a vocabulary of
    49k a quarter of the tail would never be drawn.
    """
    return jax.vmap(lambda k: jax.random.gumbel(jax.random.fold_in(k, depth), shape, mode="high"))(keys)


def gumbel_at(keys: Array, position: Array, vocab_size: int) -> Array:
    """The request's own noise [B, V] for the token at absolute `position` [B]: equal whoever asks, and when."""
    return jax.vmap(lambda k: jax.random.gumbel(k, (vocab_size,), mode="high"))(round_keys(keys, TARGET, position))

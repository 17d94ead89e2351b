"""A language model whose law is a table of the last `order` tokens: every probability is known, for tests.

Its cache remembers tokens in place of keys, so the whole machinery of decoding (prefill, trees, rewinding) is exercised.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax.types import Array, KVCache, LanguageModel, Output


@functools.cache  # the same functions for the same config: rebuilt closures would recompile
def table(vocab_size: int, *, order: int = 2, max_length: int = 1 << 20) -> LanguageModel:
    """A model with params = log-probabilities [V+1, ..., V+1, V]: one axis for each of the last `order` tokens, oldest first.

    Index V on an axis stands for "before the first token".  hidden is the one-hot last token [V], so that width = V.
    """

    def apply(params, tokens, cache, *, positions=None, mask=None, features=(), context=None, pack=None):
        del pack  # nothing here costs by the token
        if context is not None or features:
            raise ValueError("a table has no layers: neither `features` nor a `context` cache exists for it")
        b, t = tokens.shape
        seen = visible_tokens(tokens, cache, mask, order)  # [B, T, order], V where there is none
        seen = jnp.where(seen < 0, vocab_size, seen)
        logits = params[tuple(seen[..., i] for i in range(order))]
        hidden = jax.nn.one_hot(tokens, vocab_size)
        slots = cache.length[:, None] + jnp.arange(t)[None]
        store = jax.vmap(lambda k, s, x: k.at[0, 0, s].set(x.astype(k.dtype), mode="drop"))(cache.k[0], slots, tokens)
        return Output(logits, hidden, jnp.zeros((b, t, 0, vocab_size))), KVCache((store,), cache.v, cache.length)

    def init(key):
        return jax.nn.log_softmax(jax.random.normal(key, (vocab_size + 1,) * order + (vocab_size,)), -1)

    def init_cache(batch, capacity):
        return KVCache(
            (jnp.zeros((batch, 1, 1, capacity)),), (jnp.zeros((batch, 1, capacity, 1)),), jnp.zeros(batch, jnp.int32)
        )

    def truncate(num_layers):
        raise ValueError("a table has no layers to keep")

    return LanguageModel(
        init=init,
        apply=apply,
        init_cache=init_cache,
        embed=lambda params, tokens: jax.nn.one_hot(tokens, vocab_size),
        unembed=lambda params, hidden: hidden,
        truncate=truncate,
        vocab_size=vocab_size,
        width=vocab_size,
        num_layers=1,
        max_length=max_length,
    )


def visible_tokens(tokens: Array, cache: KVCache, mask: Array | None, order: int) -> Array:
    """The last `order` tokens each new token sees, itself last: [B, T, order], -1 where there are fewer."""
    b, t = tokens.shape
    mask = jnp.tril(jnp.ones((t, t), bool)) if mask is None else mask
    mask = jnp.broadcast_to(mask, (b, *mask.shape[-2:]))

    def row(tokens, mask, stored, length):
        earlier = jnp.where(jnp.arange(stored.shape[0]) < length + t - mask.shape[1], stored.astype(jnp.int32), -1)
        window = stored.at[length + jnp.arange(t)].set(tokens.astype(stored.dtype), mode="drop").astype(jnp.int32)
        recent = window[jnp.clip(length + t - mask.shape[1] + jnp.arange(mask.shape[1]), 0, stored.shape[0] - 1)]

        def one(m):
            line = jnp.concatenate([earlier, jnp.where(m, recent, -1)])
            rank = jnp.cumsum((line >= 0)[::-1])[::-1]  # 1 = the newest visible token
            return jnp.stack([jnp.where((line >= 0) & (rank == i), line + 1, 0).sum() - 1 for i in range(order, 0, -1)])

        return jax.vmap(one)(mask)

    return jax.vmap(row)(tokens, mask, cache.k[0][:, 0, 0], cache.length)

r"""The backbone of block drafters: what the target has seen enters every layer, and a block is filled in one pass.

    features of M layers ──fc──norm──► c_p ──► k, v of every layer at position p, once for each committed token
    E([x_n, mask, .., mask]) ──► layers: attention over all c before n, and over the block both ways ──norm──► vocabulary head

x_n is the last committed token, the anchor: the target has not run it yet.  In DFlash (arXiv 2602.06036) row t of the block
predicts token n + t, the anchor's own row nothing; DSpark (2607.05147) is `anchor_first`, row t predicts token n + t + 1.
The c_p never meet a query, a feed-forward or a residual.  DFlash 2 has convolutions around every sublayer (see `conv`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from specjax import cache as kv
from specjax.drafters.dflash.config import DFlashConfig, block_rows, seen_by_layer
from specjax.drafters.dflash.conv import Kernels, convolved
from specjax.drafters.vocabulary import Ids, seen_by
from specjax.models.layers import MLP, Linear, RMSNorm, Segment, rope, rope_frequencies
from specjax.types import Array, KVCache, LanguageModel, Params


class Attention(nn.Module):
    """Grouped-query attention of rows over what the target has seen and over their own block."""

    config: DFlashConfig

    def setup(self):
        c = self.config
        self.q = Linear((c.kv_heads, c.heads // c.kv_heads, c.head_dim), c.attention_bias)
        self.kv = Linear((c.kv_heads, 2, c.head_dim), c.attention_bias)
        self.out = Linear((c.width,))
        if c.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(c.norm_eps), RMSNorm(c.norm_eps)

    def entry(self, x: Array, positions: Array) -> tuple[Array, Array]:
        """x [B, T, D] at positions [B, T] -> k, v [B, T, G, head_dim]."""
        both = self.kv(x)
        k = self.k_norm(both[..., 0, :]) if self.config.qk_norm else both[..., 0, :]
        return rope(k, positions, self.frequency()), both[..., 1, :]

    def __call__(self, x: Array, positions: Array, context: Segment, own: Array) -> Array:
        """x [B, N, R, D], positions [B, N, R], context.seen [B, N R, S], own [R, R] -> [B, N, R, D]."""
        b, n, r, d = x.shape
        flat, at = x.reshape(b, n * r, d), positions.reshape(b, n * r)
        q = self.q(flat)
        q = self.q_norm(q) if self.config.qk_norm else q
        q = rope(q.reshape(b, n * r, -1, q.shape[-1]), at, self.frequency()).reshape(q.shape)
        k, v = (y.reshape(b, n, r, *y.shape[2:]) for y in self.entry(flat, at))
        y = attend(q.reshape(b, n, r, *q.shape[2:]), k, v, context, own)
        return self.out(y.reshape(b, n, r, -1))

    def frequency(self) -> Array:
        return rope_frequencies(self.config.head_dim, self.config.rope_theta, self.config.rope_scaling)


def attend(q: Array, k: Array, v: Array, context: Segment, own: Array) -> Array:
    """q [B, N, R, G, H / G, head_dim], k and v [B, N, R, G, head_dim] of the blocks themselves -> like q.

    Keys of the context are never copied for the N blocks that look at them.
    """
    b, n, r, g, h, d = q.shape
    q = q.transpose(0, 3, 4, 1, 2, 5) * d**-0.5
    rows = q.reshape(b, g, h * n * r, d).astype(context.k.dtype)
    past = jnp.matmul(rows, context.k, preferred_element_type=jnp.float32).reshape(b, g, h, n, r, -1)
    past = jnp.where(context.seen.reshape(b, 1, 1, n, r, -1), past, -1e30)
    now = jnp.where(own.reshape((1,) * 4 + own.shape), jnp.einsum("bghnrd,bnsgd->bghnrs", q, k), -1e30)
    weights = jax.nn.softmax(jnp.concatenate([past, now], -1), -1)
    past, now = weights[..., :-r], weights[..., -r:]
    past = past.reshape(b, g, h * n * r, -1).astype(context.v.dtype)
    y = jnp.matmul(past, context.v, preferred_element_type=jnp.float32).reshape(q.shape)
    return (y + jnp.einsum("bghnrs,bnsgd->bghnrd", now, v)).transpose(0, 3, 4, 1, 2, 5)


class Layer(nn.Module):
    """One layer on the rows of blocks; the context is read as it is."""

    config: DFlashConfig

    def setup(self):
        c = self.config
        self.attention_norm, self.mlp_norm = RMSNorm(c.norm_eps), RMSNorm(c.norm_eps)
        self.attention, self.mlp = Attention(c), MLP(c.width, c.hidden)
        if c.conv_taps:
            self.attention_conv, self.mlp_conv = (Kernels(c.conv_taps, c.conv_group) for _ in range(2))

    def entry(self, context: Array, positions: Array) -> tuple[Array, Array]:
        return self.attention.entry(context, positions)

    def __call__(self, x: Array, positions: Array, context: Segment, own: Array) -> Array:
        """x, positions, context and own as `Attention` has them -> [B, N, R, D]."""
        u = self.attention_norm(x)
        before, after = self.around("attention_conv", u)
        x = x + after(self.attention(before(u), positions, context, own))
        u = self.mlp_norm(x)
        before, after = self.around("mlp_conv", u)
        return x + after(self.mlp(before(u)))

    def around(self, name: str, u: Array):
        """What is done to the input and to the output of a sublayer."""
        if not self.config.conv_taps:
            return (lambda x: x), (lambda x: x)
        kernel = getattr(self, name)(u)
        return tuple(functools.partial(convolved, kernel[..., i, :, :]) for i in range(2))


class Backbone(nn.Module):
    """Two functions of the same parameters: features -> keys and values of every layer, and the pass over blocks."""

    config: DFlashConfig

    def setup(self):
        c = self.config
        self.fc, self.context_norm, self.norm = Linear((c.width,)), RMSNorm(c.norm_eps), RMSNorm(c.norm_eps)
        self.layer = [nn.remat(Layer)(c) for _ in range(c.layers)]  # in training, scores [B, H, N R, T] of one layer at a time

    def entries(self, features: Array, positions: Array):
        """features [B, T, M, D], positions [B, T] -> k and v of each layer [B, T, G, head_dim]."""
        context = self.context_norm(self.fc(features.reshape(*features.shape[:2], -1)))
        return zip(*(layer.entry(context, positions) for layer in self.layer), strict=True)

    def rows(self, x: Array, positions: Array, ks, vs, near: Array, places: Array) -> Array:
        """x [B, N, R, D] -> [B, N, R, D] as the vocabulary head reads it; the rest is as `run_blocks` has it."""
        for i, (layer, k, v) in enumerate(zip(self.layer, ks, vs, strict=True)):
            window, causal = seen_by_layer(self.config, i)
            x = layer(x, positions, Segment(k, v, past(positions, near, places, window)), own_rows(x.shape[2], window, causal))
        return self.norm(x)

    def __call__(self, features, at, *rest):
        self.entries(features, at)
        return self.rows(*rest)


def past(positions: Array, near: Array, places: Array, window: int | None) -> Array:
    """Which of S entries at `places` [B, S] the rows at positions [B, N, R] see, of those `near` [B, N, S]: [B, N R, S]."""
    b, n, r = positions.shape
    seen = jnp.broadcast_to(near[:, :, None], (b, n, r, near.shape[-1]))
    if window is not None:
        seen = seen & (positions[..., None] - places[:, None, None] < window)
    return seen.reshape(b, n * r, -1)


def own_rows(rows: int, window: int | None, causal: bool) -> Array:
    """Which rows of its block each row sees: [R, R]."""
    apart = np.arange(rows)[:, None] - np.arange(rows)[None]
    seen = np.abs(apart) < (rows if window is None else window)
    return jnp.asarray(seen & (apart >= 0) if causal else seen)


# As functions.


def entries(config: DFlashConfig, params, features: Array, positions: Array) -> tuple[Sequence[Array], Sequence[Array]]:
    """`Backbone.entries`; what is not finite of a value is 0, for a weight of 0 would not hide it."""
    ks, vs = cast(Any, Backbone(config).apply({"params": params}, features, positions, method="entries"))
    return ks, [jnp.where(jnp.isfinite(v), v, 0) for v in vs]


def run_blocks(
    target: LanguageModel, config: DFlashConfig, params: Params, anchors: Array, positions: Array, cache: KVCache, near: Array,
    places: Array, *, num_draft: int,
) -> Array:  # fmt: skip
    """What N blocks of each sequence give, [B, N, K, D]: row k as the vocabulary head reads it to predict token k + 1.

    Args:
      target: the model to draft for.
      config: of the backbone.
      params: of both.
      anchors: [B, N] tokens that the blocks begin with.
      positions: [B, N] of these.
      cache: keys and values of what the target has seen; only read.
      near: [B, N, S] which of them each block may look at: those of its document before the anchor.
      places: [B, S] positions of these.
      num_draft: K.
    """
    rows = block_rows(config, num_draft)
    masks = jnp.full((*anchors.shape, rows - 1), config.mask_token, jnp.int32)
    x = target.embed(params.target, jnp.concatenate([anchors[..., None], masks], -1)) * config.embedding_scale
    at = positions[..., None] + jnp.arange(rows)[None, None]
    inputs = (x, at, cache.k, cache.v, near, places)
    return cast(Any, Backbone(config).apply({"params": params.drafter}, *inputs, method="rows"))[:, :, rows - num_draft :]


def few_logits(target: LanguageModel, config: DFlashConfig, vocabulary: Ids | None, target_params, hidden: Array) -> Array:
    """hidden [..., D] -> logits [..., n] of the vocabulary's ids, or [..., V] where there is none."""
    source = seen_by(target, vocabulary)
    logits = source.unembed(target_params, hidden) * config.output_multiplier
    return logits if config.softcap is None else jnp.tanh(logits / config.softcap) * config.softcap


def empty_cache(config: DFlashConfig, batch: int, capacity: int) -> KVCache:
    """A cache of every layer."""
    return kv.allocate(
        layers=config.layers, batch=batch, kv_heads=config.kv_heads, head_dim=config.head_dim, capacity=capacity
    )  # fmt: skip

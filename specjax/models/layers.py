"""Layers that the target and the drafting heads are built from: linear, norms, rotary, attention, feed-forward.

Kernels are stored [in, out] (which way is faster differs by CPU, rows and numbers: experiments/few_rows.py) with the
output axis kept in its parts, so that a sharding rule can cut it by KV head: q, k and v are one product, and so are
gate and up.  Norms, probabilities and sums are float32 whatever the weights are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from specjax import cache as kv
from specjax.types import Array, KVCache

PRODUCT = "product"
"""The name of every product with weights, for a checkpoint policy that keeps those alone."""


class Linear(nn.Module):
    """x [..., in] -> [..., *features], accumulated in float32 from weights of any dtype.

    A single row of bfloat16 falls on a very slow CPU kernel (184 ms against 18), so it is computed as two.

    The kernel is [in, out], or [in, *features] where it was put on a mesh that cuts one of the features (`sharding.parted`).
    """

    features: tuple[int, ...]
    bias: bool = False
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        size = math.prod(self.features)
        given = self.get_variable("params", "kernel")
        shape = (x.shape[-1], size) if given is None or given.ndim == 2 else (x.shape[-1], *self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape, self.dtype)
        y = matmul(x, kernel).reshape(x.shape[:-1] + self.features)
        if not self.bias:
            return y
        bias = self.param("bias", nn.initializers.zeros, (size,), jnp.float32)
        return y + bias.reshape((1,) * (x.ndim - 1) + self.features)


def matmul(x: Array, kernel: Array, *, axis: int = 0) -> Array:
    """x [..., in] times a kernel whose `axis` is in -> float32 [..., *out].  A transposed kernel is never copied."""
    rows = x.reshape(-1, x.shape[-1]).astype(kernel.dtype)
    pad = rows.shape[0] == 1 and kernel.dtype == jnp.bfloat16
    rows = jnp.concatenate([rows, rows]) if pad else rows
    y = jax.lax.dot_general(rows, kernel, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)
    y = (y[:1] if pad else y).reshape(*x.shape[:-1], *kernel.shape[:axis], *kernel.shape[axis + 1 :])
    return checkpoint_name(y, PRODUCT)


def last_axis(vector: Array, x: Array) -> Array:
    """A vector given the rank of x, along its last axis: ranks are never promoted silently here."""
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)


class RMSNorm(nn.Module):
    """x / rms(x) * scale, in float32.  Gemma's 1 + w is folded into `scale` when weights are read."""

    eps: float = 1e-6

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.eps) * last_axis(scale, x)


class RopeScaling(NamedTuple):
    """How rotary frequencies are stretched for long contexts.  `low`, `high`, `original` belong to Llama 3's rule.

    `factors` [head_dim / 2] divide each frequency beside `factor`: what a GGUF file stores of Llama 3's rule.
    """

    factor: float
    low: float | None = None
    high: float | None = None
    original: int | None = None
    factors: tuple[float, ...] | None = None


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Array:
    """Radians per position [head_dim / 2]: plain, scaled linearly or by given factors, or Llama 3's (rope_type "llama3")."""
    frequency = 1.0 / theta ** (jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None:
        return frequency
    if scaling.factors is not None:
        frequency = frequency / jnp.asarray(scaling.factors, jnp.float32)
    if scaling.original is None or scaling.low is None or scaling.high is None:
        return frequency / scaling.factor
    turns = scaling.original * frequency / (2 * math.pi)  # full turns within the original context
    smooth = jnp.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return frequency * ((1 - smooth) / scaling.factor + smooth)


def rope(x: Array, positions: Array, frequency: Array) -> Array:
    """Rotate x [B, T, heads, head_dim] by positions [B, T], half-split as in the published weights."""
    angle = positions[:, :, None].astype(jnp.float32) * frequency[None, None]
    cos, sin = jnp.cos(angle)[:, :, None], jnp.sin(angle)[:, :, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def visible(
    length: Array, positions: Array, slots: int, mask: Array | None, window: int | None = None, offset: Array | int = 0
) -> Array:
    """Which of `slots` cache slots each new token sees: [B, T, S].

    mask [T, W] or [B, T, W] speaks of the LAST W slots, ending with the T new ones; every earlier slot is visible.  None
    is causal.  `window` hides committed and new tokens at `window` positions or more before; slots of the mask before the
    T new ones (a drafter's levels) are taken to lie inside it.  `offset` is the position of slot 0: 0, or [B] the length
    of a read-only cache before this one.
    """
    b, t = positions.shape
    mask = jnp.tril(jnp.ones((t, t), bool)) if mask is None else mask
    mask = jnp.broadcast_to(mask, (b, *mask.shape[-2:]))
    width = mask.shape[-1]
    if window is not None:
        near = positions[:, :, None] - positions[:, None] < window
        mask = mask.at[:, :, width - t :].set(mask[:, :, width - t :] & near)
    slot = jnp.arange(slots)[None]
    index = slot - (length + t - width)[:, None]  # [B, S] place within the mask
    inside = jnp.take_along_axis(mask, jnp.broadcast_to(jnp.clip(index, 0, width - 1)[:, None], (b, t, slots)), 2)
    earlier = jnp.broadcast_to((index < 0)[:, None], (b, t, slots))
    if window is not None:
        earlier = earlier & (positions[:, :, None] - (slot + jnp.reshape(offset, (-1, 1)))[:, None] < window)
    return earlier | (inside & ((index >= 0) & (index < width))[:, None])


def committed(context: KVCache, positions: Array, window: int | None = None) -> Array:
    """Which slots of a read-only cache each new token sees: all in use, or those within `window`.  [B, T, S]."""
    slot = jnp.arange(context.k[0].shape[-1])[None, None]
    seen = jnp.broadcast_to(slot < context.length[:, None, None], (*positions.shape, slot.shape[-1]))
    return seen if window is None else seen & (positions[:, :, None] - slot < window)


def packed(x: Array, pack: Array | None) -> Array:
    """Rows `pack` [P] of x [B, T, ...], counted through all of B x T: [1, P, ...].  Zeros past the end; None is all of x."""
    return x if pack is None else x.reshape(-1, *x.shape[2:]).at[pack].get(mode="fill", fill_value=0)[None]


def spread(x: Array, pack: Array | None, shape: tuple[int, ...]) -> Array:
    """What `packed` made of an array of `shape` (B, T), back in its rows [B, T, ...]; zeros in the others."""
    if pack is None:
        return x
    rows = jnp.zeros((math.prod(shape), *x.shape[2:]), x.dtype)
    return rows.at[pack].set(x[0], mode="drop").reshape(*shape, *x.shape[2:])


class Segment(NamedTuple):
    """A stretch of keys and values of one layer that queries may look at."""

    k: Array  # [B, G, head_dim, S]
    v: Array  # [B, G, S, head_dim]
    seen: Array  # [B, T, S] bool


class Columns(NamedTuple):
    """J keys and values for each query, which nobody else sees: J columns of scores, where a segment would have J x T."""

    k: Array  # [B, T, G, J, head_dim]
    v: Array  # [B, T, G, J, head_dim]


def attend(q: Array, segments: tuple[Segment, ...], scale: float, columns: Columns | None = None) -> Array:
    """Softmax attention of q [B, T, G, R, head_dim] over one or more segments, without joining or transposing their keys.

    With `columns` each query sees its own of them beside the segments.
    """
    b, t, g, r, d = q.shape
    q = q.transpose(0, 2, 3, 1, 4).reshape(b, g, r * t, d) * scale
    scores = [jnp.matmul(q.astype(s.k.dtype), s.k, preferred_element_type=jnp.float32) for s in segments]
    seen = [jnp.broadcast_to(s.seen[:, None, None], (b, 1, r, *s.seen.shape[1:])).reshape(b, 1, r * t, -1) for s in segments]
    scores = [jnp.where(m, x, -1e30) for m, x in zip(seen, scores, strict=True)]
    if columns is not None:
        scores.append(jnp.einsum("bgrtd,btgjd->bgrtj", q.reshape(b, g, r, t, d), columns.k).reshape(b, g, r * t, -1))
    ends = [sum(s.seen.shape[-1] for s in segments[: i + 1]) for i in range(len(segments))]
    ends = ends if columns is not None else ends[:-1]
    weights = jnp.split(jax.nn.softmax(jnp.concatenate(scores, -1), -1), ends, -1)
    parts = [
        jnp.matmul(w.astype(s.v.dtype), s.v, preferred_element_type=jnp.float32)
        for w, s in zip(weights, segments, strict=False)  # the last weights are those of the columns
    ]
    if columns is not None:
        own = weights[-1].reshape(b, g, r, t, -1)
        parts.append(jnp.einsum("bgrtj,btgjd->bgrtd", own, columns.v).reshape(b, g, r * t, d))
    return sum(parts[1:], parts[0]).reshape(b, g, r, t, d).transpose(0, 3, 1, 2, 4)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions over a KV cache, plus an optional read-only one before it."""

    width: int
    kv_heads: int
    group: int  # query heads a KV head serves
    head_dim: int
    scale: float
    bias: bool = False
    qk_norm: bool = False
    eps: float = 1e-6
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(
        self, x, k, v, at, positions, frequency, seen, context: Segment | None = None, columns: Columns | None = None,
        pack: Array | None = None,
    ):  # fmt: skip
        """x [B, T, *] -> [B, T, D] and the layer's k, v with the new tokens written at slots at[b] and on.

        With `pack` [P] x and the result are `packed`, [1, P, *]; tokens left out are seen by none of them.

        With `columns` k and v are only read, and the new tokens become one more column, each its own: what is returned for
        k and v are those of Columns.
        """
        qkv = Linear((self.kv_heads, self.group + 2, self.head_dim), self.bias, self.dtype, name="qkv")(x)
        qkv = spread(qkv, pack, positions.shape)
        q, new_k, new_v = qkv[..., : self.group, :], qkv[..., self.group, :], qkv[..., self.group + 1, :]
        if self.qk_norm:
            q, new_k = RMSNorm(self.eps, name="q_norm")(q), RMSNorm(self.eps, name="k_norm")(new_k)
        q = rope(q.reshape(*q.shape[:2], -1, self.head_dim), positions, frequency).reshape(q.shape)
        sound = jnp.isfinite(new_v)  # 0 x NaN is NaN: what a broken token stores would reach the rows that do not see it
        new_v = jnp.where(sound, new_v, 0)
        new_k, before = rope(new_k, positions, frequency), () if context is None else (context,)
        if columns is None:
            k, v = kv.write(k, v, new_k, new_v, at)
            y = attend(q, (*before, Segment(k, v, seen)), self.scale)
        else:
            more = [jnp.concatenate([x, new[:, :, :, None]], 3) for x, new in zip(columns, (new_k, new_v), strict=True)]
            y = attend(q, (*before, Segment(k, v, seen)), self.scale, Columns(*more))
            k, v = more
        y = jnp.where(sound.all(3)[..., None, None], y, jnp.nan)  # but not its own: it is broken, in one head and so in the sum
        return Linear((self.width,), dtype=self.dtype, name="out")(packed(y.reshape(*y.shape[:2], -1), pack)), k, v


class MLP(nn.Module):
    """Gated feed-forward: down(activation(gate(x)) * up(x))."""

    width: int
    hidden: int
    activation: Callable[[Array], Array] = nn.silu
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        gate_up = Linear((2, self.hidden), dtype=self.dtype, name="gate_up")(x)
        y = self.activation(gate_up[..., 0, :]) * gate_up[..., 1, :]
        return Linear((self.width,), dtype=self.dtype, name="down")(y)

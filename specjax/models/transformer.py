"""One decoder for Llama, Mistral, Qwen2, Qwen3 and Gemma 3, as a Flax Linen module behind a `LanguageModel`.

Layers are a Python loop over parameters of their own, not a scan over stacked ones: on CPU a scan copies the weights of
each layer (46 ms against 31 ms a token for a 135M model).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from specjax import cache as kv
from specjax.models.layers import (
    MLP,
    Attention,
    RMSNorm,
    RopeScaling,
    Segment,
    committed,
    matmul,
    packed,
    rope_frequencies,
    spread,
    visible,
)
from specjax.types import Array, KVCache, LanguageModel, Output


class TransformerConfig(NamedTuple):
    """Facts of an architecture.  `families.py` makes it from a published config.json or GGUF header."""

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int  # width of the feed-forward
    max_length: int
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tied: bool = False  # the head is the embedding
    attention_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3, Gemma 3
    post_norms: bool = False  # Gemma 3: a norm after attention and after the feed-forward too
    gelu: bool = False  # Gemma 3: gelu(tanh) in place of silu
    embed_scale: float = 1.0
    query_scale: float | None = None  # attention scale; None = head_dim ** -0.5
    window: int | None = None  # sliding window of the layers that have one, in tokens
    sliding: tuple[bool, ...] = ()  # per layer; () = none
    rope_theta_sliding: float | None = None  # rotary base of sliding layers, never scaled; None = as the others


class Block(nn.Module):
    """One pre-norm layer."""

    config: TransformerConfig
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x, k, v, at, positions, frequency, seen, context=None, pack=None):
        c = self.config
        norm = functools.partial(RMSNorm, c.norm_eps)
        scale = c.head_dim**-0.5 if c.query_scale is None else c.query_scale
        attention = Attention(
            c.width, c.kv_heads, c.heads // c.kv_heads, c.head_dim, scale,
            bias=c.attention_bias, qk_norm=c.qk_norm, eps=c.norm_eps, dtype=self.dtype, name="attention",
        )  # fmt: skip
        y, k, v = attention(norm(name="attention_norm")(x), k, v, at, positions, frequency, seen, context, pack=pack)
        x = x + (norm(name="post_attention_norm")(y) if c.post_norms else y)
        activation = functools.partial(nn.gelu, approximate=True) if c.gelu else nn.silu
        y = MLP(c.width, c.hidden, activation, self.dtype, name="mlp")(norm(name="mlp_norm")(x))
        return x + (norm(name="post_mlp_norm")(y) if c.post_norms else y), k, v


class Transformer(nn.Module):
    """tokens [B, T] -> Output, with caches as arguments and results.

    Everything but attention itself runs on the tokens of `pack` alone; what is given for the others is zero.
    """

    config: TransformerConfig
    dtype: jnp.dtype = jnp.float32  # of the weights; sums are float32

    def setup(self):
        c = self.config
        self.embedding = self.param("embedding", nn.initializers.normal(1.0), (c.vocab_size, c.width), self.dtype)
        self.layer = [Block(c, self.dtype) for _ in range(c.layers)]
        self.norm = RMSNorm(c.norm_eps)
        if not c.tied:
            self.head = self.param("head", nn.initializers.lecun_normal(), (c.width, c.vocab_size), self.dtype)

    def embed(self, tokens: Array) -> Array:
        table = self.embedding
        if table.dtype != jnp.float32:  # XLA for CPU would move a float32 copy of the whole table out of a loop
            table, tokens = lax.optimization_barrier((table, tokens))
        return table[tokens].astype(jnp.float32) * self.config.embed_scale

    def unembed(self, hidden: Array) -> Array:
        return unembed(self.config, {"embedding": self.embedding} if self.config.tied else {"head": self.head}, hidden)

    def __call__(
        self, tokens, cache: KVCache, positions=None, mask=None, features=(), context: KVCache | None = None, pack=None
    ):  # fmt: skip
        c = self.config
        before = 0 if context is None else context.length
        if positions is None:
            positions = (before + cache.length)[:, None] + jnp.arange(tokens.shape[1])[None]
        slots = cache.k[0].shape[-1]
        seen = {w: visible(cache.length, positions, slots, mask, w, before) for w in {self._window(i) for i in range(c.layers)}}
        x, ks, vs, taps = self.embed(packed(tokens, pack)), [], [], {}
        for i, layer in enumerate(self.layer):
            window = self._window(i)
            past = None if context is None else Segment(context.k[i], context.v[i], committed(context, positions, window))
            x, k, v = layer(x, cache.k[i], cache.v[i], cache.length, positions, self._frequency(i), seen[window], past, pack)
            ks.append(k)
            vs.append(v)
            taps[i] = x
        hidden = self.norm(x)
        tapped = jnp.stack([taps[i] for i in features], 2) if features else jnp.zeros((*x.shape[:2], 0, c.width))
        out = [spread(y, pack, tokens.shape) for y in (self.unembed(hidden), hidden, tapped)]
        return Output(*out), KVCache(tuple(ks), tuple(vs), cache.length)

    def _window(self, i: int) -> int | None:
        return self.config.window if self.config.sliding and self.config.sliding[i] else None

    def _frequency(self, i: int) -> Array:
        c = self.config
        if self._window(i) is not None and c.rope_theta_sliding is not None:
            return rope_frequencies(c.head_dim, c.rope_theta_sliding)
        return rope_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)


def unembed(config: TransformerConfig, params, hidden: Array) -> Array:
    """hidden [..., D] -> logits [..., V], or those of the ids that `narrow` kept."""
    return matmul(hidden, params["embedding"], axis=1) if config.tied else matmul(hidden, params["head"])


def narrow(config: TransformerConfig, params, ids: Array) -> dict[str, Array]:
    """The vocabulary head of some ids [n] alone, which is a copy."""
    return {"embedding": params["embedding"][ids]} if config.tied else {"head": params["head"][:, ids]}


@functools.cache  # the same functions for the same config: rebuilt closures would recompile
def language_model(config: TransformerConfig, *, dtype=jnp.float32, cache_dtype=jnp.float32) -> LanguageModel:
    """A transformer as the library sees one.  `dtype` is the weights': bfloat16 is another target with its own exact law."""
    module = Transformer(config, dtype)

    def init_cache(batch: int, capacity: int) -> KVCache:
        return kv.allocate(
            layers=config.layers,
            batch=batch,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            capacity=capacity,
            dtype=cache_dtype,
        )

    def init(key):
        return module.init(key, jnp.zeros((1, 1), jnp.int32), init_cache(1, 1))["params"]

    def apply(params, tokens, cache, *, positions=None, mask=None, features=(), context=None, pack=None):
        bad = [i for i in features if not 0 <= i < config.layers]
        if bad:
            raise ValueError(f"feature layers {bad} do not exist: this model has layers 0 to {config.layers - 1}")
        return module.apply({"params": params}, tokens, cache, positions, mask, features, context, pack)

    def truncate(num_layers: int) -> LanguageModel:
        if not 1 <= num_layers <= config.layers:
            raise ValueError(f"cannot keep {num_layers} layers of a model of {config.layers}: choose 1 to {config.layers}")
        short = config._replace(layers=num_layers, sliding=config.sliding[:num_layers])
        return language_model(short, dtype=dtype, cache_dtype=cache_dtype)

    return LanguageModel(
        init=init,
        apply=apply,
        init_cache=init_cache,
        embed=lambda params, tokens: module.apply({"params": params}, tokens, method="embed"),
        unembed=functools.partial(unembed, config),
        truncate=truncate,
        vocab_size=config.vocab_size,
        width=config.width,
        num_layers=config.layers,
        max_length=config.max_length,
        narrow=functools.partial(narrow, config),
    )

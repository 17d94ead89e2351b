r"""The module of the EAGLE family, and the flags by which published ones differ.

    EAGLE-1      [E(x_{t+1}); f_t] ──fc──► g ─► attention ─► + ─► norm, feed-forward ─► + ─► r, which is recycled as f_{t+1}
    EAGLE-3      features of several layers ──fc──► g_t, at true entries alone
                 [norm E(x_{t+1}); norm g_t] ─► attention over 2 D ─► + g_t ─► norm, feed-forward ─► + ─► r ─norm─► head
    EAGLE 3.1    a norm on each feature, and what is recycled is norm(r), which does not grow from step to step
    P-EAGLE      EAGLE-3 with more layers on top of the first, which are like a target's; nothing is recycled: in place of
                 tokens that are not known yet it reads a mask, a feature and an embedding that are learnt

f_t is the target's last hidden state.  EAGLE: Li et al., arXiv 2401.15077; EAGLE-3: 2503.01840; 3.1: the attention drift of
2605.09992; P-EAGLE: 2602.01469.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from specjax import cache as kv
from specjax.drafters import files
from specjax.drafters.layer import Layer, LayerConfig, config_of
from specjax.drafters.vocabulary import Ids, seen_by
from specjax.models.layers import MLP, PRODUCT, Attention, Columns, Linear, RMSNorm, RopeScaling, matmul, rope_frequencies
from specjax.types import Array, KVCache, LanguageModel, Output, Params

Layers = tuple[Array, ...]
"""Keys or values, an array a layer."""


class EagleConfig(NamedTuple):
    """Facts of a module.  Names are those of the target's config, and of published ones where they have the flag."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    qk_norm: bool = False
    taps: tuple[int, ...] = ()  # layers whose outputs are the features; (): the last hidden state, after its norm
    wide: bool = False  # embedding and feature enter attention side by side (EAGLE-3); or fc makes one of them before it
    fc_bias: bool = False
    fc_norm: bool = False  # a norm on each feature before fc (EAGLE 3.1)
    norm_before_fc: bool = False  # one norm on all of them
    input_norm: bool = True  # on the embedding (wide), or on what enters attention
    norm_before_residual: bool = False  # what attention is added to: the feature after its norm, or as it is
    output_norm: bool = True  # before the vocabulary head
    norm_output: bool = False  # what is recycled: after that norm (EAGLE 3.1), or before it
    own_head: bool = False  # a vocabulary head of its own, or the target's
    layers: int = 1  # that one, and others on top of it
    masked: bool = False  # it has a mask (P-EAGLE)
    own_embedding: bool = False  # an embedding of its own, or the target's


def default_taps(layers: int) -> tuple[int, ...]:
    """The layers whose outputs EAGLE-3 fuses: 1, L/2 - 1 and L - 4, moved apart and into the target where it is shallow.

    >>> default_taps(32), default_taps(6), default_taps(2)
    ((1, 15, 28), (1, 2, 3), (0, 1))
    """
    low = min(1, max(layers - 3, 0))
    middle = max(layers // 2 - 1, low + 1)
    return tuple(sorted({min(i, layers - 1) for i in (low, middle, max(layers - 4, middle + 1))}))


def eagle1(target_config: Any, **flags) -> EagleConfig:
    """EAGLE-1's module, shaped like a layer of the target; `flags` replace fields."""
    return shaped(target_config, {"fc_bias": True, "input_norm": False, "output_norm": False}, flags)


def eagle3(target_config: Any, **flags) -> EagleConfig:
    """EAGLE-3's."""
    return shaped(target_config, {"taps": default_taps(target_config.layers), "wide": True, "own_head": True}, flags)


def eagle31(target_config: Any, **flags) -> EagleConfig:
    """EAGLE 3.1's."""
    return eagle3(target_config, **{"fc_norm": True, "norm_output": True, **flags})


def peagle(target_config: Any, **flags) -> EagleConfig:
    """P-EAGLE's, of four layers as in the paper; there the embedding is trained too."""
    return eagle3(target_config, **{"layers": 4, "masked": True, **flags})


def shaped(target_config: Any, preset: Mapping[str, Any], flags: Mapping[str, Any]) -> EagleConfig:
    """A config from the target's, a preset and what replaces either; ValueError where it cannot be."""
    layer = config_of(target_config, **{n: x for n, x in flags.items() if n in LayerConfig._fields})
    rest = {n: tuple(x) if isinstance(x, list) else x for n, x in flags.items() if n not in LayerConfig._fields}
    config = EagleConfig(*layer, **{**preset, **rest})
    if not config.wide and len(config.taps) > 1:
        raise ValueError(f"{len(config.taps)} features with one narrow fc: set wide, or give one layer or none as taps")
    return config


class Eagle(nn.Module):
    """Functions of the same parameters: features -> what a true entry starts from, one step of the recursion, the mask."""

    config: EagleConfig

    def setup(self):
        c, norm = self.config, functools.partial(RMSNorm, self.config.norm_eps)
        if c.fc_norm:
            self.fc_norm = [norm() for _ in c.taps or (0,)]
        if c.norm_before_fc:
            self.fused_norm = norm()
        if not c.wide or len(c.taps) > 1:
            self.fc = Linear((c.width,), bias=c.fc_bias)
        if c.input_norm:
            self.input_norm = norm()
        if c.wide:
            self.hidden_norm = norm()
        self.attention = Attention(
            c.width, c.kv_heads, c.heads // c.kv_heads, c.head_dim, c.head_dim**-0.5,
            bias=c.attention_bias, qk_norm=c.qk_norm, eps=c.norm_eps,
        )  # fmt: skip
        self.mlp_norm, self.mlp = norm(), MLP(c.width, c.hidden)
        if c.output_norm:
            self.norm = norm()
        self.deeper = [Layer(cast(Any, c)) for _ in range(c.layers - 1)]
        if c.masked:
            drawn = nn.initializers.normal(1.0)
            self.mask_hidden = self.param("mask_hidden", drawn, ((len(c.taps) or 1) * c.width,))
            self.mask_embedding = self.param("mask_embedding", drawn, (c.width,))

    def fuse(self, features: Array) -> Array:
        """features [B, T, M, D] -> g [B, T, D]."""
        c, parts = self.config, [features[:, :, i] for i in range(features.shape[2])]
        if c.fc_norm:
            parts = [norm(x) for norm, x in zip(self.fc_norm, parts, strict=True)]
        x = jnp.concatenate(parts, -1)
        x = self.fused_norm(x) if c.norm_before_fc else x
        return self.fc(x) if c.wide and len(parts) > 1 else x

    def mask(self):
        """What the module reads in place of a token that is not known: its embedding and its g, each [D]."""
        return self.mask_embedding, self.fuse(self.mask_hidden.reshape(1, 1, -1, self.config.width))[0, 0]

    def step(self, embedded, hidden, k, v, at, positions, seen, columns=None):
        """embedded, hidden [B, T, D] -> ((recycled, normed) [B, T, D], k, v).

        k, v and columns have an entry for each layer; for the rest see `layers.Attention`.
        """
        c, columns = self.config, columns or (None,) * self.config.layers
        entering = (lambda x: self.input_norm(x)) if c.input_norm else lambda x: x
        if c.wide:
            normed = self.hidden_norm(hidden)
            x, residual = jnp.concatenate([entering(embedded), normed], -1), normed if c.norm_before_residual else hidden
        else:
            residual = self.fc(jnp.concatenate([embedded, hidden], -1))
            x = entering(residual)
            residual = x if c.norm_before_residual else residual
        frequency = rope_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
        y, *first = self.attention(x, k[0], v[0], at, positions, frequency, seen, columns=columns[0])
        x, kept = residual + y, [first]
        x = x + self.mlp(self.mlp_norm(x))
        for i, layer in enumerate(self.deeper, 1):
            x, *more = layer(x, k[i], v[i], at, positions, seen, columns[i])
            kept.append(more)
        normed = self.norm(x) if c.output_norm else x
        return (normed if c.norm_output else x, normed), *map(tuple, zip(*kept, strict=True))

    def __call__(self, features, embedded, *rest):
        return self.step(embedded, self.fuse(features), *rest)


def features_of(config: EagleConfig, output: Output) -> Array:
    """What the module reads of the target: [B, T, M, D]."""
    return output.features if config.taps else output.hidden[:, :, None]


def fuse(config: EagleConfig, params, features: Array) -> Array:
    """`Eagle.fuse` as a function."""
    return cast(Any, Eagle(config).apply({"params": params}, features, method="fuse"))


def mask(config: EagleConfig, params) -> tuple[Array, Array]:
    """`Eagle.mask` as a function."""
    return cast(Any, Eagle(config).apply({"params": params}, method="mask"))


def step(
    config: EagleConfig, params, embedded: Array, hidden: Array, k: Layers, v: Layers, at: Array, positions: Array, seen: Array,
    columns: tuple[Columns, ...] | None = None,
) -> tuple[tuple[Array, Array], Layers, Layers]:  # fmt: skip
    """`Eagle.step` as a function."""
    inputs = (embedded, hidden, k, v, at, positions, seen, columns)
    return cast(Any, Eagle(config).apply({"params": params}, *inputs, method="step"))


def trained_step(config: EagleConfig) -> Callable:
    """`step` for many positions at once: only products with weights are kept for the backward pass.

    They grow with the positions, while scores of attention, which are made again, grow with their square.  XLA for CPUs is
    free to make them early, and then holds them all the same.
    """
    return jax.checkpoint(functools.partial(step, config), policy=jax.checkpoint_policies.save_only_these_names(PRODUCT))


def empty_cache(config: EagleConfig, batch: int, capacity: int) -> KVCache:
    """A cache of the module's layers."""
    return kv.allocate(layers=config.layers, batch=batch, kv_heads=config.kv_heads, head_dim=config.head_dim, capacity=capacity)


# Parameters: those of the Linen module, and beside them what is its own: {"head": [D, n]}, {"embedding": [V, D]}.


def module_init(config: EagleConfig, key) -> dict[str, Any]:
    """The Linen module's parameters as flax draws them, without head and embedding."""
    one, at = jnp.zeros((1, 1, config.width)), jnp.zeros((1, 1), jnp.int32)
    features, cache = jnp.zeros((1, 1, len(config.taps) or 1, config.width)), empty_cache(config, 1, 1)
    rest = (cache.k, cache.v, at[0], at, at[:, None] == 0)
    return cast(Any, Eagle(config).init(key, features, one, *rest)["params"])


def embed(target: LanguageModel, config: EagleConfig, params: Params, tokens: Array) -> Array:
    """What the module reads of tokens [...]: [..., D], float32."""
    if config.own_embedding:
        return params.drafter["embedding"][tokens].astype(jnp.float32)
    return target.embed(params.target, tokens)


def few_logits(target: LanguageModel, config: EagleConfig, vocabulary: Ids | None, params: Params, normed: Array) -> Array:
    """normed [..., D] -> logits [..., n] of the vocabulary's ids, or [..., V] where there is none."""
    if config.own_head:
        return matmul(normed, params.drafter["head"])
    source = seen_by(target, vocabulary)
    return source.unembed(params.target, normed)


def saved_config(saved: dict[str, Any]) -> EagleConfig:
    """The config of a saved module from its config.json."""
    facts = {n: saved[n] for n in EagleConfig._fields if n in saved}
    scaling = facts.get("rope_scaling")
    scaling = None if scaling is None else RopeScaling(*(tuple(x) if isinstance(x, list) else x for x in scaling))
    return EagleConfig(**{**facts, "taps": tuple(facts.get("taps", ())), "rope_scaling": scaling})


def like(config: EagleConfig, size: int, vocab_size: int = 0) -> dict[str, Any]:
    """Shapes of a module's parameters, with a vocabulary head [D, size] and an embedding [V, D] where they are its own."""
    shapes, matrix = (
        files.shapes(functools.partial(module_init, config)),
        functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32),
    )
    shapes |= {"embedding": matrix((vocab_size, config.width))} if config.own_embedding else {}
    return {**shapes, "head": matrix((config.width, size))} if config.own_head else shapes

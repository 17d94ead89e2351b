r"""One decoder layer on what the target has computed, with a cache of its own: what several drafters put before their heads.

    h_0 .. h_t ──► attention + feed-forward, each added to what went in ──► g_t

h_t is the target's last hidden state.  Layers stand side by side, never on one another; all of them enter each row that the
target keeps, and none is run while drafting.  A layer begins with output matrices of zero, so that g_t = h_t.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from specjax import cache as kv
from specjax.drafters.recipe import layout
from specjax.models.layers import MLP, Attention, Columns, RMSNorm, RopeScaling, rope_frequencies, visible
from specjax.types import Array, Draft, Drafter, KVCache, LanguageModel, Sequences


class LayerConfig(NamedTuple):
    """Facts of a layer.  The names are those of the target's config."""

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


class LayerState(NamedTuple):
    """State of a drafter of J layers.

    Invariant: with n committed tokens the cache holds the entries 0..n-2, of true states; rows past them are free.
    """

    cache: KVCache  # J layers
    last: Array  # [B, J, D] what each gave at entry n - 2; zeros where n = 1


def layer_drafter(
    target: LanguageModel, config: LayerConfig, names: tuple[str, ...], propose: Callable, *, num_nodes: int, depth: int,
    children: str,
) -> Drafter:  # fmt: skip
    """A drafter whose state is what its layers, params.drafter[names[j]], give at the row where the last round stopped."""

    def enter(params, state, hidden, count):
        return entered(config, [params.drafter[name] for name in names], state, hidden, count)

    def commit(params, state, out, verdict):
        return enter(params, state, kv.take(out.hidden, verdict.path), verdict.num_accepted + 1)

    return Drafter(
        init=lambda params, batch, capacity: empty(config, len(names), batch, capacity),
        absorb=lambda params, state, sequences, out, count: enter(params, state, out.hidden, count),
        propose=propose,
        commit=commit,
        num_nodes=num_nodes,
        depth=depth,
        children=children,
        chain=num_nodes == depth,
        vocab_size=target.vocab_size,
    )


def block(
    c: Any, x: Array, k: Array, v: Array, at: Array, positions: Array, seen: Array, columns: Columns | None = None
) -> tuple[Array, Array, Array]:
    """A layer within a Linen module, under the names of a target's; `c` is a config with the fields of LayerConfig."""
    norm = functools.partial(RMSNorm, c.norm_eps)
    attention = Attention(
        c.width, c.kv_heads, c.heads // c.kv_heads, c.head_dim, c.head_dim**-0.5,
        bias=c.attention_bias, qk_norm=c.qk_norm, eps=c.norm_eps, name="attention",
    )  # fmt: skip
    frequency = rope_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
    y, k, v = attention(norm(name="attention_norm")(x), k, v, at, positions, frequency, seen, columns=columns)
    x = x + y
    return x + MLP(c.width, c.hidden, name="mlp")(norm(name="mlp_norm")(x)), k, v


class Layer(nn.Module):
    """x [B, T, D] -> [B, T, D], k, v."""

    config: LayerConfig

    @nn.compact
    def __call__(self, x, k, v, at, positions, seen, columns=None):
        return block(self.config, x, k, v, at, positions, seen, columns)


def apply(config: LayerConfig, params, *inputs: Array) -> tuple[Array, Array, Array]:
    """The layer as a function."""
    return cast(Any, Layer(config).apply({"params": params}, *inputs))


def entered(config: LayerConfig, layers: Sequence[Any], state: LayerState, hidden: Array, count: Array) -> LayerState:
    """Take in the first `count` [B] of the states hidden [B, T, D]; what each layer gives at the last of them."""
    cache, last = state.cache, jnp.maximum(count - 1, 0)[:, None]
    positions = cache.length[:, None] + jnp.arange(hidden.shape[1])[None]
    seen = visible(cache.length, positions, cache.k[0].shape[-1], None)
    rows = [
        apply(config, params, hidden, k, v, cache.length, positions, seen)
        for params, k, v in zip(layers, cache.k, cache.v, strict=True)
    ]
    given, ks, vs = zip(*rows, strict=True)
    now = jnp.stack([kv.take(x, last)[:, 0] for x in given], 1)
    return LayerState(KVCache(ks, vs, cache.length + count), jnp.where((count > 0)[:, None, None], now, state.last))


def over_rows(config: LayerConfig, params, hidden: Array, segments: Array) -> Array:
    """What `entered` would give at every position of training rows [B, T, D], each document by itself."""
    positions, causal = layout(segments)
    cache = empty(config, 1, *segments.shape).cache
    return apply(config, params, hidden, cache.k[0], cache.v[0], cache.length, positions, causal)[0]


def no_columns(config: Any, batch: int, queries: int) -> Columns:
    """No column yet: what the second of several unrolled steps sees beside the first one's keys, before it adds its own.

    `config` has the fields of LayerConfig.
    """
    nothing = jnp.zeros((batch, queries, config.kv_heads, 0, config.head_dim))
    return Columns(nothing, nothing)


def empty(config: LayerConfig, layers: int, batch: int, capacity: int) -> LayerState:
    """The state before anything has run."""
    cache = kv.allocate(layers=layers, batch=batch, kv_heads=config.kv_heads, head_dim=config.head_dim, capacity=capacity)
    return LayerState(cache, jnp.zeros((batch, layers, config.width)))


# What drafters share whose entry t pairs the target's state at t with token t + 1.


def tokens_after(sequences: Sequences, length: Array, count: int) -> Array:
    """The token that follows each of the next `count` entries of caches of `length` [B]: [B, count]."""
    index = length[:, None] + 1 + jnp.arange(count)[None]
    return kv.take(sequences.tokens, jnp.minimum(index, sequences.tokens.shape[1] - 1))


def if_begun(draft: Draft, length: Array) -> Draft:
    """The draft of rows whose cache, of `length` [B], has an entry; a prompt of one token has none yet, and drafts nothing."""
    return draft._replace(parents=jnp.where((length > 0)[:, None], draft.parents, -2))


def config_of(target_config: Any, **facts) -> LayerConfig:
    """A layer shaped like one of the target's, given its config; `facts` replace fields, as config.json writes them."""
    return filled(LayerConfig, target_config, facts)


def filled(kind: Any, target_config: Any, facts: Mapping[str, Any]) -> Any:
    """A config `kind`, a NamedTuple with the fields of LayerConfig: `facts`, and of what they do not say the target's own.

    Raises:
      ValueError: a field that neither has, or heads that cannot be.
    """
    shared = {name: getattr(target_config, name) for name in kind._fields if hasattr(target_config, name)}
    fields = {**shared, **facts}
    lacking = [name for name in kind._fields if name not in {*fields, *kind._field_defaults}]
    if lacking:
        raise ValueError(
            f"a target without a config does not say {', '.join(lacking)} of its layers: give these in config.json"
        )
    if fields["heads"] % fields["kv_heads"] or fields["head_dim"] % 2:
        said = ", ".join(f"{name} {fields[name]}" for name in ("heads", "kv_heads", "head_dim"))
        raise ValueError(f"{said}: heads must be a multiple of kv_heads, and head_dim even")
    if fields.get("rope_scaling") is not None:
        listed: Any = (tuple(x) if isinstance(x, list) else x for x in fields["rope_scaling"])
        fields["rope_scaling"] = scaling = RopeScaling(*listed)
        if scaling.factors is not None and len(scaling.factors) != fields["head_dim"] // 2:
            raise ValueError(f"rope_scaling has {len(scaling.factors)} factors != {fields['head_dim'] // 2}, half of head_dim")
    return kind(**fields)


def saved_config(lm, facts: Mapping[str, Any], source: Any) -> LayerConfig:
    """The config of a saved layer: what its config.json says, and of what it does not say the target's own.

    Raises:
      ValueError: it is of another width than the target.
    """
    config = config_of(lm.config, **{name: facts[name] for name in LayerConfig._fields if name in facts})
    if config.width != lm.model.width:
        raise ValueError(f"{source}: a layer of width {config.width} != target {lm.model.width}: train one for this target")
    return config


def layer_init(config: LayerConfig, key, target_params: Any = (), last: int = -1) -> dict[str, Any]:
    """A layer that gives what it is given: the target's layer `last`, where shapes are its own, but for two outputs of zero."""
    row, at = jnp.zeros((1, 1, config.width)), jnp.zeros((1, 1), jnp.int32)
    cache = empty(config, 1, 1, 1).cache
    own = Layer(config).init(key, row, cache.k[0], cache.v[0], at[0], at, at[:, None] == 0)["params"]
    known = target_params if isinstance(target_params, Mapping) else {}
    start = taken_over(own, known.get(f"layer_{last}", {}))
    silent = lambda name, part: {**start[name], part: jax.tree.map(jnp.zeros_like, start[name][part])}
    return {**start, "attention": silent("attention", "out"), "mlp": silent("mlp", "down")}


def taken_over(own: Mapping[str, Any], donor: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of `own`, as the donor has them where their shapes are the same."""
    same = lambda name: name in donor and jax.tree.map(jnp.shape, donor[name]) == jax.tree.map(jnp.shape, own[name])
    return {name: jax.tree.map(lambda x: x.astype(jnp.float32), donor[name]) if same(name) else own[name] for name in own}

"""A backbone's parameters: their shapes, and what they are as training begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp

from specjax.drafters.dflash.backbone import Backbone, empty_cache
from specjax.drafters.dflash.config import DFlashConfig
from specjax.drafters.layer import taken_over
from specjax.types import LanguageModel


def module_init(config: DFlashConfig, key) -> dict[str, Any]:
    """The Linen module's parameters as flax draws them."""
    at, cache = jnp.zeros((1, 1), jnp.int32), empty_cache(config, 1, 1)
    features, x = jnp.zeros((1, 1, len(config.taps), config.width)), jnp.zeros((1, 1, 1, config.width))
    rest = (x, at[None], cache.k, cache.v, at[None] == 0, at)
    return cast(Any, Backbone(config).init(key, features, at, *rest)["params"])


def params_init(target: LanguageModel, config: DFlashConfig, key, target_params: Any) -> dict[str, Any]:
    """Parameters as training begins: the target's last layers and its norm, where their shapes are its own.

    fc begins as the identity on the highest feature, convolutions as one on their rows; what a sublayer adds begins as zero
    where the target has none like it.
    """
    own, known = module_init(config, key), target_params if isinstance(target_params, Mapping) else {}
    start = taken_over(own, {n: known[n] for n in ("norm",) if n in known})
    blocks = jnp.zeros_like(own["fc"]["kernel"]).reshape(-1, config.width, config.width).at[-1].set(jnp.eye(config.width))
    start["fc"] = {"kernel": blocks.reshape(own["fc"]["kernel"].shape)}
    for i in range(config.layers):
        donor = known.get(f"layer_{target.num_layers - config.layers + i}", {})
        start[f"layer_{i}"] = layer_init(config, own[f"layer_{i}"], donor)
    return start


def layer_init(config: DFlashConfig, own: Mapping[str, Any], donor: Mapping[str, Any]) -> dict[str, Any]:
    """A layer as training begins, from one of the target's."""
    theirs = split(config, donor["attention"]) if "attention" in donor else {}
    parts = {**donor, "attention": {name: theirs.get(name, x) for name, x in own["attention"].items()}}
    start = taken_over(own, parts)
    for name, part, there in (("attention", "out", "q" in theirs), ("mlp", "down", "mlp" in donor)):
        if not there or jax.tree.map(jnp.shape, parts[name]) != jax.tree.map(jnp.shape, own[name]):
            start[name] = {**start[name], part: jax.tree.map(jnp.zeros_like, start[name][part])}
    for name in ("attention_conv", "mlp_conv") if config.conv_taps else ():
        start[name] = {**start[name], "dynamic": jax.tree.map(jnp.zeros_like, start[name]["dynamic"])}
    return start


def split(config: DFlashConfig, attention: Mapping[str, Any]) -> dict[str, Any]:
    """A target's attention with q, and k and v, apart; nothing where it has other heads."""
    c, group = config, config.heads // config.kv_heads
    if attention["qkv"]["kernel"].shape[-1] != c.kv_heads * (group + 2) * c.head_dim:
        return {}
    by_head = {n: x.reshape(*x.shape[:-1], c.kv_heads, group + 2, c.head_dim) for n, x in attention["qkv"].items()}
    part = lambda rows: {n: x[..., rows, :].reshape(*x.shape[:-3], -1) for n, x in by_head.items()}
    return {**attention, "q": part(slice(group)), "kv": part(slice(group, None))}

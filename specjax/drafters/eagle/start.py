"""A module as training begins: the target's last layer, and what makes its inputs one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax.drafters.eagle.head import EagleConfig, module_init
from specjax.drafters.layer import taken_over
from specjax.drafters.vocabulary import Ids, seen_by
from specjax.types import Array, LanguageModel


def params_init(
    target: LanguageModel, config: EagleConfig, vocabulary: Ids | None, key, target_params: Any
) -> dict[str, Any]:  # fmt: skip
    """Parameters as training begins: see `started`; a head and an embedding of its own begin as the target's."""
    every = target.embed(target_params, jnp.arange(target.vocab_size))
    size = jnp.sqrt(jnp.square(every).mean() + 1e-12)
    params = started(config, module_init(config, key), target_params, target.num_layers - 1, size)
    params |= {"embedding": every} if config.own_embedding else {}
    if not config.own_head:
        return params
    source = seen_by(target, vocabulary)
    return {**params, "head": source.unembed(target_params, jnp.eye(target.width))}


def started(config: EagleConfig, own: Mapping[str, Any], target_params: Any, last: int, size: Array) -> dict[str, Any]:
    """Parameters as training begins: the target's layer `last` and final norm, where their shapes are its own.

    fc begins as the identity on the highest feature, and of EAGLE-1 on the sum of feature and embedding, which is of `size`.
    What a layer adds begins as zero unless it is added to a state of the size that it has in the target, and so do the
    layers on top of the first.  A mask's embedding begins at random, of the size of the others.
    """
    known = target_params if isinstance(target_params, Mapping) else {}
    donor = {**known.get(f"layer_{last}", {}), **{n: known[n] for n in ("norm",) if n in known}}
    if "attention" in donor:
        donor |= entering(config, donor["attention"], donor["attention_norm"])
    start = taken_over(own, donor)
    if not (config.wide and config.taps) or config.fc_norm or config.norm_before_fc or config.norm_before_residual:
        start = silent(start)
    for name in (f"deeper_{i}" for i in range(config.layers - 1)):
        start[name] = silent(taken_over(own[name], known.get(f"layer_{last}", {})))
    if "fc" in own:
        start["fc"] = {**own["fc"], "kernel": identity(config, own["fc"]["kernel"], size)}
    return {**start, "mask_embedding": own["mask_embedding"] * size} if config.masked else start


def silent(layer: Mapping[str, Any]) -> dict[str, Any]:
    """A layer that adds nothing."""
    zeros = lambda name, part: {**layer[name], part: jax.tree.map(jnp.zeros_like, layer[name][part])}
    return {**layer, "attention": zeros("attention", "out"), "mlp": zeros("mlp", "down")}


def entering(config: EagleConfig, attention: Mapping[str, Any], norm: Mapping[str, Array]) -> dict[str, Any]:
    """A layer's attention and the norm before it, for one that reads both halves, or one that has no norm before it."""
    kernel = attention["qkv"]["kernel"].astype(jnp.float32)
    if config.wide:
        kernel = jnp.concatenate([kernel, kernel]) * 0.5**0.5
    elif not config.input_norm:
        kernel = kernel * norm["scale"][:, None]
    lacking = () if config.qk_norm else ("q_norm", "k_norm")
    rest = {name: x for name, x in attention.items() if name not in lacking}
    return {"attention": {**rest, "qkv": {**attention["qkv"], "kernel": kernel}}, "input_norm": norm, "hidden_norm": norm}


def identity(config: EagleConfig, kernel: Array, size: Array) -> Array:
    """fc's kernel as training begins: [D, D] blocks, all zero but that of the last feature, and the embedding's."""
    blocks = jnp.zeros_like(kernel).reshape(-1, config.width, config.width).at[-1].set(jnp.eye(config.width))
    if not config.wide:  # lifted to size 1: embeddings are small beside a normed state (.07 against 1, say)
        blocks = blocks.at[0].set(jnp.eye(config.width) / size)
    return blocks.reshape(kernel.shape)

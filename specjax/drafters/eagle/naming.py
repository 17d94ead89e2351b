"""One of our parameters <-> published tensors by speculators' names, [out, in] for matrices."""

from __future__ import annotations

import re

import numpy as np

from specjax.drafters.eagle.facts import AFTER, ATTENTION, GATE, K, Q, Tensors
from specjax.drafters.eagle.head import EagleConfig

MASK = "embed_tokens.weight, the mask's row"

NAMES = {  # of ours: the published ones that are laid side by side in it
    "fc": ("fc",),
    "fused_norm": ("input_norm",),
    "input_norm": ("layers.0.input_layernorm",),
    "hidden_norm": ("layers.0.hidden_norm",),
    "attention/qkv": (Q, K, f"{ATTENTION}.v_proj"),
    "attention/q_norm": (f"{ATTENTION}.q_norm",),
    "attention/k_norm": (f"{ATTENTION}.k_norm",),
    "attention/out": (f"{ATTENTION}.o_proj",),
    "mlp_norm": (AFTER,),
    "mlp/gate_up": (GATE, "layers.0.mlp.up_proj"),
    "mlp/down": ("layers.0.mlp.down_proj",),
    "norm": ("norm",),
    "attention_norm": ("layers.0.input_layernorm",),  # of the layers on top of the first
}
WHOLE = {"head": "lm_head.weight", "embedding": "embed_tokens.weight", "mask_hidden": "mask_hidden", "mask_embedding": MASK}
"""Of ours that belong to no part of the module."""


def split(config: EagleConfig, path: str, x: np.ndarray) -> Tensors:
    """A parameter by our path as published tensors by name."""
    module, _, kind = path.rpartition("/")
    if not module:
        return {WHOLE[path]: x.T if path == "head" else x}
    y, ending = x.T, "bias" if kind == "bias" else "weight"
    if module.endswith("attention/qkv"):  # each KV head's query heads, then its k, then its v
        by_head = y.reshape(config.kv_heads, -1, config.head_dim, *y.shape[1:])
        parts = [part.reshape(-1, *y.shape[1:]) for part in (by_head[:, :-2], by_head[:, -2], by_head[:, -1])]
    else:
        parts = np.split(y, 2) if module.endswith("mlp/gate_up") else [y]
    return {f"{name}.{ending}": part for name, part in zip(published(module), parts, strict=True)}


def join(config: EagleConfig, path: str, parts: list[np.ndarray]) -> np.ndarray:
    """The inverse of `split`; norms and biases in float32, and matrices too unless they are bfloat16."""
    kept = lambda x: x if x.dtype.name == "bfloat16" and x.ndim > 1 else x.astype(np.float32)
    if "attention/qkv/" in path:
        parts = [x.reshape(config.kv_heads, -1, config.head_dim, *x.shape[1:]) for x in parts]
        return kept(np.concatenate(parts, 1).reshape(-1, *parts[0].shape[3:]).T)
    return kept(parts[0] if path == "embedding" else np.concatenate(parts).T)


def published(module: str) -> tuple[str, ...]:
    """The names of one of our modules."""
    if deeper := re.fullmatch(r"deeper_(\d+)/(.+)", module):
        return tuple(name.replace("layers.0.", f"layers.{int(deeper[1]) + 1}.") for name in NAMES[deeper[2]])
    return NAMES.get(module) or (re.sub(r"^fc_norm_(\d+)$", r"fc_norm.\1", module),)

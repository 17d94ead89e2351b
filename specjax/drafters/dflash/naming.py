"""One of our parameters <-> published tensors, [out, in] for matrices."""

from __future__ import annotations

import re

import numpy as np

from specjax.drafters.dflash.config import DFlashConfig
from specjax.drafters.eagle.facts import Tensors

LAYER = {  # of ours: the published ones that are laid side by side in it
    "attention_norm": ("input_layernorm",),
    "attention/q": ("self_attn.q_proj",),
    "attention/kv": ("self_attn.k_proj", "self_attn.v_proj"),
    "attention/q_norm": ("self_attn.q_norm",),
    "attention/k_norm": ("self_attn.k_norm",),
    "attention/out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp/gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp/down": ("mlp.down_proj",),
    "attention_conv/dynamic": ("attention_conv.kernel_projection",),
    "mlp_conv/dynamic": ("mlp_conv.kernel_projection",),
}
NAMES = {
    "fc": ("fc",),
    "context_norm": ("hidden_norm",),
    "norm": ("norm",),
    "heads/sure": ("confidence_head.proj",),
    "selector/project": ("candidate_selector.hidden_projection",),
}
MIX = {"gated": "markov_head.gate_proj", "rnn": "markov_head.joint_proj"}
AS_THEY_ARE = {
    "heads/before": "markov_head.markov_w1.weight",
    "selector/before": "candidate_selector.predecessor_codebook.weight",
    "selector/after": "candidate_selector.successor_codebook.weight",
}
"""Tables that are stored the same way."""


def split(config: DFlashConfig, markov: str, path: str, x: np.ndarray) -> Tensors:
    """A parameter by our path as published tensors by name; `markov` is the kind of Markov head."""
    if path in AS_THEY_ARE:
        return {AS_THEY_ARE[path]: x}
    if path.endswith("_conv/base"):
        return {published(path, markov)[0]: x}
    if path == "heads/after":
        return {"markov_head.markov_w2.weight": x.T}
    module, _, kind = path.rpartition("/")
    y, ending = x.T, "bias" if kind == "bias" else "weight"
    if module.endswith("attention/kv"):  # each KV head's k, then its v
        by_head = y.reshape(config.kv_heads, 2, config.head_dim, *y.shape[1:])
        parts = [part.reshape(-1, *y.shape[1:]) for part in (by_head[:, 0], by_head[:, 1])]
    else:
        parts = np.split(y, 2) if module.endswith("mlp/gate_up") else [y]
    return {f"{name}.{ending}": part for name, part in zip(published(module, markov), parts, strict=True)}


def join(config: DFlashConfig, path: str, parts: list[np.ndarray]) -> np.ndarray:
    """The inverse of `split`; norms and biases in float32, and matrices too unless they are bfloat16."""
    kept = lambda x: x if x.dtype.name == "bfloat16" and x.ndim > 1 else x.astype(np.float32)
    if path in AS_THEY_ARE or path.endswith("_conv/base"):
        return kept(parts[0])
    if "attention/kv/" in path:
        by_head = [x.reshape(config.kv_heads, 1, config.head_dim, *x.shape[1:]) for x in parts]
        return kept(np.concatenate(by_head, 1).reshape(-1, *parts[0].shape[1:]).T)
    return kept(np.concatenate(parts).T)


def published(module: str, markov: str) -> tuple[str, ...]:
    """The names of one of our modules."""
    if module == "heads/mix":
        return (MIX[markov],)
    if found := re.fullmatch(r"layer_(\d+)/(.+)", module):
        inner = LAYER.get(found[2], (found[2].replace("_conv/base", "_conv.base_kernel"),))
        return tuple(f"layers.{found[1]}.{name}" for name in inner)
    return NAMES[module]

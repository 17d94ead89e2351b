"""Trained parameters -> a published directory: config.json, model.safetensors, tokenizer.json, as Hugging Face lays them out.

The reader (`models.huggingface`) says which tensors a leaf is made of; this file takes the leaves apart again, and reads
back what it wrote before it says that it is done.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from specjax import text
from specjax.models.families import config_from_hf
from specjax.models.huggingface import read_directory
from specjax.models.transformer import TransformerConfig
from specjax.models.weights import recipes

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def save_directory(
    path: str | Path, config: TransformerConfig, params: Any, tokenizer: text.Tokenizer, *, dtype: Any = np.float16
) -> Path:  # fmt: skip
    """Write a model that `specjax.load` and transformers read; the directory is made if need be.

    Args:
      path: where.
      config: of a Llama, Qwen2 or Qwen3 architecture without windows or rotary scaling.
      params: as `language_model(config).init` lays them out.
      tokenizer: its backend and end-of-sequence ids are written.
      dtype: of every tensor in the file.

    Raises:
      ValueError: the architecture cannot be published so, or a weight is too large for `dtype`.
    """
    path = Path(path)
    published = describe(config, tokenizer.eos_ids, np.dtype(dtype).name)
    full = tensors(config, params)
    large = [name for name, x in full.items() if not np.abs(x).max() <= float(jnp.finfo(dtype).max)]
    if large:
        raise ValueError(f"{large[0]} holds NaN or what {np.dtype(dtype).name} cannot: look at it, or choose float32")
    weights = {name: np.ascontiguousarray(x.astype(dtype)) for name, x in full.items()}
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    (path / "model.safetensors").chmod(0o644)  # safetensors writes for its owner alone; a package is for everyone
    (path / "config.json").write_text(json.dumps(published, indent=2) + "\n", "utf-8")
    tokenizer.backend.save(str(path / "tokenizer.json"))
    _, _, again = read_directory(path)
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(dtype).astype(np.float32), params)
    if not jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), b), again, rounded)):
        raise ValueError(f"{path}: what was written does not read back as it was: this is a fault of specjax, report it")
    return path


def describe(config: TransformerConfig, eos_ids: tuple[int, ...], dtype: str) -> dict[str, Any]:
    """config.json; ValueError for what it could not say."""
    family = "qwen3" if config.qk_norm else "qwen2" if config.attention_bias else "llama"
    published = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.hidden,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": list(eos_ids) if len(eos_ids) != 1 else eos_ids[0],
        "torch_dtype": dtype,
    }
    if config_from_hf(published) != config:
        raise ValueError(f"a config.json of {family} cannot say all of {config}: windows, scales and biases are not published")
    return published


def tensors(config: TransformerConfig, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Published tensors by name: the inverse of `models.weights.assemble`."""
    flat = {"/".join(k.key for k in keys): np.asarray(x) for keys, x in jax.tree_util.tree_leaves_with_path(params)}
    found: dict[str, np.ndarray] = {}
    for leaf, recipe in recipes(config).items():
        x = flat[leaf]
        if "/qkv/" in leaf:
            parts = _heads(config, x.T)
        elif "gate_up" in leaf:
            parts = np.split(x.T, 2)
        else:
            parts = [x.T if leaf.endswith(("kernel", "head")) else x]
        found |= dict(zip(recipe.names, parts, strict=True))
    return {name if name.startswith("lm_head") else f"model.{name}": x for name, x in found.items()}


def _heads(c: TransformerConfig, x: np.ndarray) -> list[np.ndarray]:
    """q, k, v [heads * head_dim, *] from the fused [G * (R+2) * head_dim, *]."""
    group = c.heads // c.kv_heads
    by_head = x.reshape(c.kv_heads, group + 2, c.head_dim, *x.shape[1:])
    parts = (by_head[:, :group], by_head[:, group : group + 1], by_head[:, group + 1 :])
    return [part.reshape(-1, *x.shape[1:]) for part in parts]

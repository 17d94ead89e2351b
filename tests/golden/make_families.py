"""Make families.npz: what transformers computes for tiny models of every family, float32, eager attention.

    python tests/golden/make_families.py        (torch, transformers 5.24; 15 seconds)

The configs are in the layouts that are published, old (rope_theta, rope_scaling) and transformers 5 (rope_parameters).
The weights are drawn here from a fixed seed, under their published names, so that tests remake them without torch and the
file holds only results: for the real tokens of a ragged batch, logits [n, V], hidden [n, D] (after the last norm) and
features [n, L, D] (raw outputs of the layers, taken by hooks).
"""

import json
import tempfile
import zlib
from pathlib import Path

import numpy as np

LENGTHS = (20, 13)  # of the ragged batch

BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
PLAIN = {"rope_type": "default", "rope_theta": 1e6}
WINDOW = {"sliding_window": 5, "max_window_layers": 1}
GEMMA = {
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 16,
    "num_hidden_layers": 3,
    "sliding_window": 5,
    "tie_word_embeddings": True,
}
CONFIGS = {
    "llama": {**BASE, "model_type": "llama", "rope_theta": 10_000.0, "rope_scaling": None},
    "llama3": {**BASE, "model_type": "llama", "rope_theta": 1000.0, "rope_scaling": LLAMA3, "tie_word_embeddings": True},
    "llama3_new": {**BASE, "model_type": "llama", "rope_parameters": {**LLAMA3, "rope_theta": 500.0}},
    "llama_linear": {**BASE, "model_type": "llama", "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "mistral": {**BASE, "model_type": "mistral", "rope_theta": 10_000.0, "sliding_window": 6},
    "qwen2": {**BASE, "model_type": "qwen2", "rope_theta": 1e6, **WINDOW, "use_sliding_window": False},
    "qwen2_window": {**BASE, "model_type": "qwen2", "rope_theta": 1e6, **WINDOW, "use_sliding_window": True},
    "qwen3": {**BASE, "model_type": "qwen3", "hidden_size": 20, "head_dim": 8, "rope_parameters": PLAIN},
    "gemma3_old": {
        **BASE,
        **GEMMA,
        "query_pre_attn_scalar": 16,
        "sliding_window_pattern": 2,
        "rope_theta": 10_000.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma3_new": {
        **BASE,
        **GEMMA,
        "query_pre_attn_scalar": 10,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
        },
    },
}


def shapes(c):
    """Published names and shapes of a config's tensors."""
    d, f, family = c["hidden_size"], c["intermediate_size"], c["model_type"]
    head = c.get("head_dim") or d // c["num_attention_heads"]
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (c["vocab_size"], d)
    yield "model.norm.weight", (d,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (c["vocab_size"], d)
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if family == "gemma3_text" else []
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for part, size in (("q", q), ("k", kv), ("v", kv)):
            yield f"{at}self_attn.{part}_proj.weight", (size, d)
            if family == "qwen2":
                yield f"{at}self_attn.{part}_proj.bias", (size,)
        yield f"{at}self_attn.o_proj.weight", (d, q)
        for part in ("q_norm", "k_norm") if family in ("qwen3", "gemma3_text") else ():
            yield f"{at}self_attn.{part}.weight", (head,)
        for name in norms:
            yield f"{at}{name}.weight", (d,)
        yield f"{at}mlp.gate_proj.weight", (f, d)
        yield f"{at}mlp.up_proj.weight", (f, d)
        yield f"{at}mlp.down_proj.weight", (d, f)


def weights(name):
    """Random weights of a config, float32, the same on every machine."""
    config, draw = CONFIGS[name], np.random.default_rng(zlib.crc32(name.encode()))
    result = {}
    for key, shape in shapes(config):
        x = draw.standard_normal(shape)
        if key.endswith("bias"):
            x = 0.5 * x
        elif len(shape) == 1:
            x = 0.3 * x + (config["model_type"] != "gemma3_text")
        else:
            x = 0.5 * x if "embed" in key else x / shape[1] ** 0.5
        result[key] = x.astype(np.float32)
    return result


def batch():
    """Tokens [2, 20], right-padded with token 0; `LENGTHS` says how many are real."""
    tokens = np.random.default_rng(7).integers(3, 61, (len(LENGTHS), max(LENGTHS))).astype(np.int32)
    return np.where(np.arange(max(LENGTHS))[None] < np.asarray(LENGTHS)[:, None], tokens, 0)


def real(x):
    """x [2, 20, ...] -> [33, ...]: the real tokens, row after row."""
    return np.concatenate([row[:n] for row, n in zip(x, LENGTHS, strict=True)])


def save(directory, config, tensors):
    """A checkpoint directory as published."""
    from safetensors.numpy import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def transformers_results(directory, tokens):
    """Logits, hidden and raw layer outputs of a checkpoint directory, computed by transformers (numpy arrays)."""
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    faults = {k: v for k, v in info.items() if v and k in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if faults:
        raise ValueError(f"{directory}: transformers did not take every tensor: {faults}")
    return model_results(model.eval(), model.model.layers, tokens)


def model_results(model, layers, tokens):
    import torch

    taps = []
    hooks = [layer.register_forward_hook(lambda m, a, y: taps.append(y[0] if isinstance(y, tuple) else y)) for layer in layers]
    with torch.no_grad():
        out = model(torch.from_numpy(tokens).long(), output_hidden_states=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    for ours, theirs in zip(taps[:-1], out.hidden_states[1:-1], strict=True):
        assert torch.equal(ours, theirs)  # transformers' hidden_states, but for the last one, which is normed
    return out.logits.numpy(), out.hidden_states[-1].numpy(), torch.stack(taps, 2).numpy()


def main():
    arrays = {}
    for name, config in CONFIGS.items():
        with tempfile.TemporaryDirectory() as directory:
            save(directory, config, weights(name))
            parts = transformers_results(directory, batch())
        for kind, x in zip(("logits", "hidden", "features"), parts, strict=True):
            arrays[f"{name}.{kind}"] = real(x)
    np.savez_compressed(Path(__file__).parent / "families.npz", **arrays)


if __name__ == "__main__":
    main()

"""Make eagle.npz: what speculators 0.9 computes for tiny EAGLE-3, 3.1 and P-EAGLE modules, float64, eager attention.

    cd tests && python -m golden.make_eagle        (torch, speculators 0.9, see parity/test_eagle_live.py; 10 s)

The target is make_families' Llama.  Weights and inputs are drawn here from fixed seeds, under speculators' names, so that tests
remake them without torch and the file holds only results.  Of each step of training-time test: what the vocabulary head reads
[T - j, D] and gives [T - j, n], of the rows whose token is known.  Of P-EAGLE the same in a row for each (anchor, depth) that
its conditional drop kept, and these.
"""

import tempfile
import zlib
from pathlib import Path

import numpy as np
from golden import make_families as families

T, STEPS = 10, 4
FILE = Path(__file__).parent / "eagle.npz"
TARGET = families.CONFIGS["llama"]
D, V = TARGET["hidden_size"], TARGET["vocab_size"]
TAPS = (0, 1)
IDS = tuple(range(1, V, 3))
LAYER = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
}
MASKED = {"speculators_model_type": "peagle", "mask_token_id": 7}
CASES = {  # what config.json says: of the layer, of the module; the ids that are drafted
    "eagle3": ({}, {}, IDS),
    "eagle3 normed": (
        {"attention_bias": True, "rope_scaling": families.LLAMA3},
        {"norm_before_residual": True, "norm_before_fc": True},
        None,
    ),
    "eagle3.1": ({"model_type": "qwen3"}, {"fc_norm": True, "norm_output": True}, IDS),
    "peagle": ({"num_hidden_layers": 3}, MASKED, IDS),
    "peagle normed": ({"model_type": "qwen3"}, {**MASKED, "fc_norm": True, "norm_before_residual": True}, None),
}


def config(name, verifier):
    """config.json of a case."""
    layer, own, ids = CASES[name]
    kind = own.get("speculators_model_type", "eagle3")
    proposal = {"proposal_type": "greedy", "speculative_tokens": STEPS, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["PEagleDraftModel" if kind == "peagle" else "Eagle3DraftModel"],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": str(verifier), "architectures": []},
        },
        "transformer_layer_config": {**LAYER, **layer},
        "draft_vocab_size": V if ids is None else len(ids),
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in TAPS],
        "tie_word_embeddings": False,
        **own,
    }


def shapes(name):
    """Published names and shapes of a case's tensors, but the ones that hold the draft vocabulary."""
    layer, own, ids = CASES[name]
    c, size = {**LAYER, **layer}, len(TAPS) * D
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    yield "fc.weight", (D, size)
    yield "norm.weight", (D,)
    yield "lm_head.weight", (V if ids is None else len(ids), D)
    yield from (("input_norm.weight", (size,)),) if own.get("norm_before_fc") else ()
    yield from ((f"fc_norm.{i}.weight", (D,)) for i in range(len(TAPS)) if own.get("fc_norm"))
    yield from (("mask_hidden", (1, 1, size)),) if "mask_token_id" in own else ()
    for i in range(c["num_hidden_layers"]):
        at, width = f"layers.{i}.", D if i else 2 * D
        for part, rows in (("q", q), ("k", kv), ("v", kv)):
            yield f"{at}self_attn.{part}_proj.weight", (rows, width)
            yield from ((f"{at}self_attn.{part}_proj.bias", (rows,)),) if c["attention_bias"] else ()
        yield f"{at}self_attn.o_proj.weight", (D, q)
        yield from ((f"{at}self_attn.{n}_norm.weight", (c["head_dim"],)) for n in "qk" if c["model_type"] == "qwen3")
        for norm in ("input_layernorm", "post_attention_layernorm", *(() if i else ("hidden_norm",))):
            yield f"{at}{norm}.weight", (D,)
        yield f"{at}mlp.gate_proj.weight", (c["intermediate_size"], D)
        yield f"{at}mlp.up_proj.weight", (c["intermediate_size"], D)
        yield f"{at}mlp.down_proj.weight", (D, c["intermediate_size"])


def weights(name):
    """Random weights of a case, float32, the same on every machine; P-EAGLE's embedding is its own."""
    (layer, own, ids), draw, found = CASES[name], np.random.default_rng(zlib.crc32(name.encode())), {}
    for key, shape in shapes(name):
        x = draw.standard_normal(shape)
        x = 0.3 * x + key.endswith("norm.weight") if len(shape) == 1 else x / shape[1] ** 0.5
        found[key] = x.astype(np.float32)
    embedding = families.weights("llama")["model.embed_tokens.weight"]
    found["embed_tokens.weight"] = draw.standard_normal((V, D)).astype(np.float32) if "mask_token_id" in own else embedding
    for i in range({**LAYER, **layer}["num_hidden_layers"] if layer.get("attention_bias") else 0):
        found[f"layers.{i}.self_attn.o_proj.bias"] = np.zeros(D, np.float32)
    if ids is not None:
        found |= {"d2t": np.asarray(ids) - np.arange(len(ids)), "t2d": np.isin(np.arange(V), ids)}
    return found


def inputs():
    """tokens [1, T + 1] and features [1, T + 1, M, D] of a text; speculators is given tokens from the second on."""
    draw = np.random.default_rng(8)
    return draw.integers(0, V, (1, T + 1)), draw.standard_normal((1, T + 1, len(TAPS), D)).astype(np.float32)


def save(directory, name, verifier):
    """A checkpoint directory as speculators writes it."""
    return families.save(directory, config(name, verifier), weights(name))


def results(directory, name):
    """What a case gives, by kind."""
    import speculators
    import torch
    from speculators.models.peagle import core

    masked, steps, kept = name.startswith("peagle"), [], []
    kinds = ("PEagleSpeculatorConfig", "PEagleDraftModel") if masked else ("Eagle3SpeculatorConfig", "Eagle3DraftModel")
    said, model = (getattr(speculators, kind) for kind in kinds)
    said = said.from_pretrained(directory)
    said.transformer_layer_config._attn_implementation = "eager"
    model = model.from_pretrained(directory, config=said).double().eval()
    model.lm_head.register_forward_hook(lambda _, given, out: steps.append((given[0][0].numpy(), out[0].numpy())))
    tokens, features = inputs()
    hidden = torch.from_numpy(features[:, :-1].reshape(1, T, -1)).double()
    given = (hidden, torch.from_numpy(tokens[:, 1:]), torch.zeros(1, T, dtype=torch.long))
    torch.manual_seed(0)
    with torch.no_grad():
        if not masked:
            model(*given, ttt_steps=STEPS)
            return {
                f"{kind} {j}": x[: T - j] for j, y in enumerate(steps) for kind, x in zip(("hidden", "logits"), y, strict=True)
            }
        real = core.generate_cod_sample_indices
        core.generate_cod_sample_indices = lambda **how: kept.append(real(**how)) or kept[-1]
        loss = speculators.losses.resolve_loss_config("kl_div", "eager")
        mask = torch.arange(T)[None] > 0  # the first token is a label of none, or an anchor would stand before it
        model(*given, loss_mask=mask, verifier_last_hidden_states=hidden[..., :D], num_depths=STEPS, loss_config=loss)
        core.generate_cod_sample_indices = real
    return {"places": np.stack([x.numpy() for x in kept[0]], 1), "hidden": steps[0][0], "logits": steps[0][1]}


def main():
    arrays = {}
    with tempfile.TemporaryDirectory() as directory:
        verifier = families.save(Path(directory) / "target", TARGET, families.weights("llama"))
        for name in CASES:
            found = results(save(Path(directory) / name, name, verifier), name)
            arrays |= {f"{name}.{kind}": x.astype(np.float32 if x.dtype.kind == "f" else np.int32) for kind, x in found.items()}
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    main()

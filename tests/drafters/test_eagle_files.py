"""Published EAGLE modules, written here by hand under every publisher's names, read back; what cannot be meant is refused."""

import json

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from specjax import load_drafter
from specjax.drafters import files
from specjax.drafters.eagle import drafter as eagle
from specjax.drafters.eagle import files as eagle_files
from specjax.drafters.eagle import head as eagle_head
from specjax.drafters.medusa import chain_paths
from specjax.drafters.siblings import SIBLINGS
from specjax.models.layers import RopeScaling
from specjax.models.load import LM
from specjax.models.transformer import language_model

K, D = 3, 16
IDS = (0, 2, 3, 5, 7, 8, 9, 11, 12, 13, 16)
DEEP = h.CONFIG._replace(layers=8, sliding=(), window=None)
TARGET_LM = LM(
    language_model(DEEP), h.target_params(), None, DEEP
)  # of its parameters, embedding and head are all that is read
EAGLE1 = eagle_head.eagle1(DEEP)
EAGLE3 = eagle_head.eagle3(DEEP, taps=(1, 3, 4))
AUX = "eagle_aux_hidden_state_layer_ids"
LLAMA = {
    **{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu", "hidden_size": D},
    **{"num_attention_heads": 4, "head_dim": 8, "rms_norm_eps": 1e-6, "vocab_size": h.V, "rope_scaling": None},
    **{"use_sliding_window": False, "sliding_window": 4096, "num_hidden_layers": 1, "draft_vocab_size": len(IDS)},
}
OLD = {name: x for name, x in LLAMA.items() if name not in ("head_dim", "draft_vocab_size")} | {"hidden_size": 32}
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 8192}


def layered(layer, **said):
    return {"speculators_model_type": "eagle3", "transformer_layer_config": layer, "draft_vocab_size": len(IDS), **said}


LAYOUTS = {  # method, config, ids, what stands before the layer's names, config.json, a change of the tensors
    "SafeAILab, EAGLE-1": ("eagle1", EAGLE1, None, "layers.0.", OLD, {"embed_tokens.weight": "own"}),
    "SafeAILab, no bias": ("eagle1", EAGLE1._replace(fc_bias=False), None, "layers.0.", LLAMA, {}),
    "SafeAILab, EAGLE-3": ("eagle3", EAGLE3, IDS, "midlayer.", LLAMA, {}),
    "SpecForge, 3.1": (
        "eagle3.1", EAGLE3._replace(taps=(0, 2, 5), fc_norm=True, norm_output=True), IDS, "midlayer.",
        {**LLAMA, "fc_norm": True, "norm_output": True, "eagle_config": {AUX: [0, 2, 5]}}, {},
    ),
    "speculators": (
        "eagle3", EAGLE3._replace(taps=(0, 7), qk_norm=True, norm_before_residual=True), IDS, "layers.0.",
        layered({**LLAMA, "model_type": "qwen3"}, norm_before_residual=True, **{AUX: [1, 8]}),
        {"embed_tokens.weight": "bfloat16", "verifier_norm.weight": np.ones(D, np.float32)},
    ),
    "speculators, the target's head": (
        "eagle3", EAGLE3._replace(norm_before_fc=True, own_head=False, rope_theta=5e5, rope_scaling=RopeScaling(8, 1, 4, 8192)),
        IDS, "model.layers.0.", layered({**LLAMA, "rope_parameters": {**LLAMA_3, "rope_theta": 5e5}}, norm_before_fc=True), {},
    ),
    "ModelOpt": (
        "eagle3", EAGLE3._replace(taps=(1, 2, 6), attention_bias=True), IDS, "layers.0.",
        {**LLAMA, "eagle_config": {AUX: [1, 2, 6], "use_aux_hidden_state": True, "parallel_draft_step": 1}},
        {"t2d": None, "layers.0.self_attn.o_proj.bias": np.zeros(D, np.float32)},
    ),
    "ModelOpt, last state": (
        "eagle3", EAGLE3._replace(taps=()), None, "layers.0.",
        {**LLAMA, "eagle_config": {"use_aux_hidden_state": False, "use_last_layernorm": True}}, {},
    ),
}  # fmt: skip
each_layout = pytest.mark.parametrize("name", LAYOUTS)


def params_of(config, ids):
    """A random module."""
    rng, like = np.random.default_rng(0), eagle_head.like(config, h.V if ids is None else len(ids))
    return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), like)


def by_hand(params, config, ids, layer):
    """Tensors under published names."""
    found = {}
    put = lambda name, x: found.update({name: np.array(x, order="C")})
    norms = {"input_norm": f"{layer}input_layernorm", "hidden_norm": f"{layer}hidden_norm", "norm": "norm"}
    norms |= {"mlp_norm": f"{layer}post_attention_layernorm", "fused_norm": "input_norm"}
    norms |= {f"fc_norm_{i}": f"fc_norm.{i}" for i in range(3)}
    for ours, theirs in norms.items():
        if ours in params:
            put(f"{theirs}.weight", params[ours]["scale"])
    own, mlp = params["attention"], params["mlp"]
    for kind, ending in (("kernel", "weight"), ("bias", "bias")):
        if kind in own["qkv"]:
            by_head = own["qkv"][kind].reshape(-1, 2, 4, 8)  # [in, KV heads, 2 query heads, k and v, head_dim]
            for part, x in (("q", by_head[:, :, :2]), ("k", by_head[:, :, 2]), ("v", by_head[:, :, 3])):
                x = x.reshape(len(by_head), -1)
                put(f"{layer}self_attn.{part}_proj.{ending}", x.T if kind == "kernel" else x[0])
        if kind in params.get("fc", {}):
            put(f"fc.{ending}", params["fc"][kind].T)
    for part in {"q_norm", "k_norm"} & set(own):
        put(f"{layer}self_attn.{part}.weight", own[part]["scale"])
    put(f"{layer}self_attn.o_proj.weight", own["out"]["kernel"].T)
    put(f"{layer}mlp.gate_proj.weight", mlp["gate_up"]["kernel"][:, :32].T)
    put(f"{layer}mlp.up_proj.weight", mlp["gate_up"]["kernel"][:, 32:].T)
    put(f"{layer}mlp.down_proj.weight", mlp["down"]["kernel"].T)
    if config.own_head:
        put("lm_head.weight", params["head"].T)
    if ids is not None:
        put("d2t", np.asarray([token - place for place, token in enumerate(ids)]))
        put("t2d", np.asarray([token in ids for token in range(h.V)]))
    return found


def layout(name):
    """(method, config, ids, params, config.json, tensors) of a layout."""
    method, config, ids, layer, said, change = LAYOUTS[name]
    params = params_of(config, ids)
    tensors = by_hand(params, config, ids, layer)
    embedding = np.asarray(h.target_params()["embedding"])
    for key, x in change.items():
        x = embedding.astype(jnp.bfloat16 if x == "bfloat16" else np.float32) if isinstance(x, str) else x
        tensors[key] = x
    return method, config, ids, params, said, {key: x for key, x in tensors.items() if x is not None}


def write(directory, said, tensors):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(said))
    save_file(tensors, directory / "model.safetensors")
    return directory


def load(directory, method="eagle3"):
    return load_drafter(method, TARGET_LM, num_draft=K, weights=str(directory))


def check_same(loaded, config, ids, params):
    """The same drafter, built once for its arguments, with the same parameters: the same drafts."""
    assert files.flat(loaded.params).keys() == files.flat(params).keys()
    for path, x in files.flat(params).items():
        np.testing.assert_array_equal(files.flat(loaded.params)[path], x, err_msg=path)
    build = dict(config=config, paths=chain_paths(K), siblings=SIBLINGS["iid"], vocabulary=ids)
    assert loaded.drafter is eagle.eagle(TARGET_LM.model, **build)


def refused(directory, message, method="eagle3"):
    with pytest.raises(ValueError, match=message) as error:
        load(directory, method)
    assert "\n" not in str(error.value)


@each_layout
def test_read_back(name, tmp_path):
    method, config, ids, params, said, tensors = layout(name)
    write(tmp_path, said, tensors)
    loaded = load(tmp_path, method)
    check_same(loaded, config, ids, params)
    assert loaded.card.method == method and loaded.card.extra_parameters == sum(x.size for x in files.flat(params).values())
    refused(tmp_path, f"of method '{method}' != ", "eagle1" if method != "eagle1" else "eagle3")


@each_layout
def test_every_tensor_is_needed(name, tmp_path):
    """Without any one of them, with one more, or with one of another shape: an error that names it."""
    method, _, ids, _, said, tensors = layout(name)
    optional = {"t2d", "fc.bias", "embed_tokens.weight", "verifier_norm.weight", "layers.0.self_attn.o_proj.bias"}
    optional |= {"d2t"} if "t2d" in tensors else set()
    for key in tensors.keys() - optional:
        if key == "lm_head.weight" and ("speculators_model_type" in said or method == "eagle1"):
            continue
        plain = key.replace("midlayer.", "layers.0.").removeprefix("model.")
        refused(
            write(tmp_path, said, {n: x for n, x in tensors.items() if n != key}), plain if key != "d2t" else "lm_head", method
        )
        wrong = np.concatenate([tensors[key]] * 2)
        with pytest.raises(ValueError):
            load(write(tmp_path, said, {**tensors, key: wrong}), method)
    refused(write(tmp_path, said, {**tensors, "fc2.weight": np.ones((D, D), np.float32)}), "1 not used: fc2.weight", method)


def test_a_copy_of_the_embedding_must_be_one(tmp_path):
    method, *_, said, tensors = layout("SafeAILab, EAGLE-1")
    own = tensors["embed_tokens.weight"]
    for other in (own + 0.02 * np.abs(own).max(), own[:-1], np.roll(own, 1, 0)):
        refused(write(tmp_path, said, {**tensors, "embed_tokens.weight": other}), "is not the target's embedding", method)


def test_a_scaled_embedding(tmp_path):
    """Where the target scales its embedding, a published module reads it before that: the same where a norm follows."""
    config = DEEP._replace(embed_scale=4.0)
    lm = TARGET_LM._replace(model=language_model(config), config=config)
    own = np.asarray(h.target_params()["embedding"])
    for name, x, fine in (
        ("SafeAILab, EAGLE-3", own, True),
        ("SafeAILab, EAGLE-3", 4 * own, False),
        ("SafeAILab, EAGLE-1", own, False),
        ("SafeAILab, EAGLE-1", 4 * own, True),
    ):
        method, *_, said, tensors = layout(name)
        path = write(tmp_path, said, {**tensors, "embed_tokens.weight": x})
        if fine:
            eagle_files.read(path, lm, method)
        else:
            with pytest.raises(ValueError, match="is not the target's embedding"):
                eagle_files.read(path, lm, method)
    eagle_files.save_speculators(tmp_path, params_of(EAGLE3, IDS), EAGLE3, lm, vocabulary=IDS)
    assert eagle_files.read(tmp_path, lm, "eagle3").config == EAGLE3


def test_a_draft_vocabulary(tmp_path):
    """From t2d where d2t is lacking, in any order, and none where all ids are in it."""
    _, config, _, params, said, tensors = layout("SafeAILab, EAGLE-3")
    check_same(load(write(tmp_path, said, {n: x for n, x in tensors.items() if n != "d2t"})), config, IDS, params)
    order = np.random.default_rng(0).permutation(len(IDS))
    moved = {"lm_head.weight": tensors["lm_head.weight"][order], "d2t": np.asarray(IDS)[order] - np.arange(len(IDS))}
    check_same(load(write(tmp_path, said, {**tensors, **moved})), config, IDS, params)
    every = params_of(config, None)
    whole = {**by_hand(every, config, None, "midlayer."), "d2t": np.zeros(h.V, np.int64), "t2d": np.ones(h.V, bool)}
    check_same(load(write(tmp_path, said, whole)), config, None, every)
    for name, x, message in (
        ("t2d", np.roll(tensors["t2d"], 1), "t2d has 11 ids and not the 11 of d2t"),
        ("t2d", tensors["t2d"][:-1], "vocab_size 16 != 17"),
        ("d2t", tensors["d2t"] + 1, "d2t: 11 ids of a draft vocabulary must ascend"),
        ("d2t", -np.arange(len(IDS)), "d2t: 11 ids of a draft vocabulary must ascend"),
    ):
        refused(write(tmp_path, said, {**tensors, name: x}), message)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


UNSUPPORTED = {
    "latent": ({}, {"midlayer.self_attn.kv_a_proj_with_mqa.weight": zeros(4, D)}, "multi-head latent attention"),
    "experts": ({}, {"midlayer.mlp.experts.0.up_proj.weight": zeros(4, D)}, "a mixture of experts"),
    "router": ({}, {"midlayer.mlp.gate.weight": zeros(4, D)}, "a mixture of experts"),
    "deep": ({}, {"layers.1.mlp.up_proj.weight": zeros(4, D)}, "a module of several layers"),
    "peagle": ({}, {"mask_hidden": zeros(1, 3 * D)}, "P-EAGLE"),
    "peagle by config": ({"mask_token_id": 0}, {}, r"P-EAGLE.*\(mask_token_id 0\)"),
    "architecture": ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, {}, "multi-head latent attention"),
    "parallel": ({"eagle_config": {"parallel_draft_step": 4}}, {}, "several tokens a pass"),
    "other norms": ({"eagle_config": {"use_mtp_layernorm": True}}, {}, "multi-token-prediction"),
    "int8": ({}, {"midlayer.mlp.up_proj.weight": zeros(32, D, dtype=np.int8)}, "in int8"),
    "scaled": ({}, {"midlayer.mlp.up_proj.weight_scale": zeros(1)}, "a quantised checkpoint"),
    "quantised": ({"quantization_config": {"quant_method": "awq"}}, {}, "a quantised checkpoint"),
    "gelu": ({"hidden_act": "gelu"}, {}, "another activation"),
    "window": ({"use_sliding_window": True}, {}, "a sliding window"),
    "layers": ({"layer_types": ["sliding_attention"]}, {}, "a sliding window"),
    "method": ({"speculators_model_type": "dflash"}, {}, "another method"),
    "longrope": ({"rope_scaling": {"rope_type": "longrope", "factor": 32}}, {}, "rotary scaling 'longrope'"),
    "flat yarn": ({"rope_theta": 1, "rope_scaling": {"rope_type": "yarn", "factor": 2}}, {}, "without a rope_theta above 1"),
    "half of yarn": ({"rope_scaling": {"rope_type": "yarn"}}, {}, "'yarn' without factor"),
    "part": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, {}, "of 0.5 of a head is not supported"),
    "out bias": ({}, {"midlayer.self_attn.o_proj.bias": np.ones(D, np.float32)}, "not used: layers.0.self_attn.o_proj.bias"),
    "twice": ({}, {"layers.0.mlp.up_proj.weight": zeros(32, D)}, "a second layers.0.mlp.up_proj.weight"),
    "heads": ({"num_attention_heads": 3}, {}, "num_attention_heads 3 and head_dim 8 do not fit 32 rows"),
    "head_dim": ({"num_attention_heads": None, "head_dim": 24}, {}, "head_dim 24 do not fit"),
    "no heads": ({"num_attention_heads": None, "head_dim": None}, {}, "neither num_attention_heads nor head_dim"),
    "vocab": ({"vocab_size": 18, "eagle_config": None}, {"t2d": None}, "vocab_size 18 != 17"),
    "fc_norm": ({"fc_norm": True}, {}, "3 missing: fc_norm.0.weight"),
    "fc": ({}, {"fc.weight": zeros(D, 2 * D)}, "fc reads 2 features"),
    "fewer ids": ({AUX: [2, 4]}, {}, r"fc.weight is \[16, 48\] but should be \[16, 32\]"),
    "the embedding": ({AUX: [0, 2, 4]}, {}, r"outputs of layers \[-1, 1, 3\]"),
    "too high": ({"eagle_config": {AUX: [1, 2, 8]}}, {}, r"outputs of layers \[1, 2, 8\] are read, of a target of 8"),
    "no order": ({AUX: [4, 2, 6]}, {}, "they must ascend"),
    "disagree": ({AUX: [1, 3, 4], "eagle_config": {AUX: [1, 3, 4]}}, {}, "which counts from 1, disagree"),
    "not ids": ({AUX: ["a"]}, {}, "is not a list of whole numbers"),
    "no flag": ({"norm_output": "yes"}, {}, "norm_output 'yes' is not true or false"),
    "no object": ({"eagle_config": 3}, {}, "no object"),
    "no rope": ({"rope_scaling": "yarn"}, {}, "no object"),
    "half a rope": ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, {}, "'llama3' without low_freq_factor, high"),
    "theta": ({"rope_theta": -1}, {}, "rope_theta '-1' is not a number above 0"),
    "scalar": ({}, {"fc.weight": zeros()}, "fc.weight of 0 dimensions"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_refused(name, tmp_path):
    change, more, message = UNSUPPORTED[name]
    *_, said, tensors = layout("SafeAILab, EAGLE-3")
    both = {key: x for key, x in {**tensors, **more}.items() if x is not None}
    refused(write(tmp_path, {**said, **change}, both), message)


@pytest.mark.parametrize("bias", [False, True])
def test_yarn(bias, tmp_path):
    """By hand: factor 4 and theta 100 on 4 frequencies 1, .316, .1, .0316 a token; scores x (.1 ln 4 + 1)^2.

    100 tokens are 15.9, 5.03, 1.59 and .503 turns: with beta_fast 10 and beta_slow 1 the first is kept (ramp from frequency
    .40, down to 0, up to 2.40, up to 3), and the last divided by 4.
    """
    _, config, _, params, said, tensors = layout("ModelOpt" if bias else "SafeAILab, EAGLE-3")
    rope = {"rope_type": "yarn", "factor": 4, "beta_fast": 10, "original_max_position_embeddings": 100, "rope_theta": 100}
    loaded = load(write(tmp_path, {**said, "rope_scaling": rope}, tensors))
    ramp, gain = np.arange(4) / 3, np.float32((0.1 * np.log(4) + 1) ** 2)
    config = eagle_files.read(tmp_path, TARGET_LM, "eagle3").config
    np.testing.assert_allclose(config.rope_scaling.factors, 1 / (1 - ramp + ramp / 4), rtol=1e-12)
    assert config.rope_theta == 100 and config.rope_scaling.factor == 1
    for kind in ("kernel", "bias")[: 1 + bias]:
        by_head, own = (np.asarray(p["attention"]["qkv"][kind]).reshape(-1, 2, 4, 8) for p in (loaded.params, params))
        np.testing.assert_allclose(by_head[:, :, :2], own[:, :, :2] * gain, rtol=1e-6)
        np.testing.assert_array_equal(by_head[:, :, 2:], own[:, :, 2:])


def test_no_module_at_all(tmp_path):
    method, *_, said, tensors = layout("SafeAILab, EAGLE-3")
    refused(write(tmp_path, said, {"lm_head.weight": tensors["lm_head.weight"]}), "not the weights of an EAGLE module")
    wider = LM(language_model(DEEP._replace(width=32)), h.target_params(), None, DEEP)
    with pytest.raises(ValueError, match="a module of width 16 != target 32"):
        load_drafter("eagle3", wider, num_draft=K, weights=str(write(tmp_path, said, tensors)))
    for text in ("[]", "{", "3"):
        (tmp_path / "config.json").write_text(text)
        refused(tmp_path, "no object|broken JSON")
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="weights without a config.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(said))
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    refused(tmp_path, "truncated or damaged")


def test_dtypes(tmp_path):
    """Matrices from bfloat16 or float16 are in the target's numbers, here float32; norms are float32 beside any target."""
    _, config, _, params, said, tensors = layout("SafeAILab, EAGLE-3")
    for dtype in (jnp.bfloat16, np.float16):
        small = {n: x if n in ("d2t", "t2d") else x.astype(dtype) for n, x in tensors.items()}
        loaded = load(write(tmp_path, said, small)).params
        assert loaded["attention"]["qkv"]["kernel"].dtype == loaded["head"].dtype == jnp.float32
        assert loaded["norm"]["scale"].dtype == jnp.float32
        np.testing.assert_array_equal(loaded["head"], params["head"].astype(dtype).astype(jnp.float32))


# Export.

WRITTEN = {
    "eagle3": (EAGLE3, IDS),
    "all ids": (EAGLE3._replace(taps=(0, 2), norm_before_residual=True, norm_before_fc=True), None),
    "eagle3.1": (EAGLE3._replace(fc_norm=True, norm_output=True, qk_norm=True, rope_scaling=RopeScaling(2.0)), IDS),
    "llama3": (EAGLE3._replace(attention_bias=True, rope_theta=5e5, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192)), IDS),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_written_for_speculators(name, tmp_path):
    config, ids = WRITTEN[name]
    params = params_of(config, ids)
    eagle_files.save_speculators(tmp_path, params, config, TARGET_LM, vocabulary=ids, verifier="some/target")
    check_same(load(tmp_path, "eagle3.1" if name == "eagle3.1" else "eagle3"), config, ids, params)
    written, said = files.read_tensors(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    np.testing.assert_array_equal(written["embed_tokens.weight"], h.target_params()["embedding"])
    assert ("d2t" in written) == ("t2d" in written) == (ids is not None)
    assert said[AUX] == [i + 1 for i in config.taps] and said["draft_vocab_size"] == (h.V if ids is None else len(ids))
    assert said["speculators_config"]["verifier"]["name_or_path"] == "some/target"


@pytest.mark.parametrize("ids", [None, IDS])
def test_a_shared_head_is_written_out(ids, tmp_path):
    config = EAGLE3._replace(own_head=False)
    params = params_of(config, ids)
    eagle_files.save_speculators(tmp_path, params, config, TARGET_LM, vocabulary=ids)
    head = np.asarray(h.target_params()["head"])
    check_same(load(tmp_path), EAGLE3, ids, {**params, "head": head if ids is None else head[:, list(ids)]})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EAGLE1, "wide False, fc_bias True, input_norm False, output_norm False, features of 0 layers"),
        (EAGLE3._replace(taps=(4,)), "features of 1 layers"),
        (EAGLE3._replace(fc_norm=True, norm_before_fc=True), "fc_norm beside norm_before_fc"),
        (EAGLE3._replace(rope_scaling=RopeScaling(1.0, factors=(1.0,) * 4)), "rotary scaling by given factors"),
    ],
)
def test_what_cannot_be_written(config, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        eagle_files.save_speculators(tmp_path, params_of(config, IDS), config, TARGET_LM, vocabulary=IDS)
    assert not list(tmp_path.iterdir())

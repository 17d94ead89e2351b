"""Published block drafters, written here by hand under every publisher's names, read back; what cannot be meant is refused."""

import json

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from blocks import IDS, K
from safetensors.numpy import save_file

from specjax import load_drafter
from specjax.drafters import files
from specjax.drafters.dflash import dflash2, dspark
from specjax.drafters.dflash import drafter as dflash
from specjax.drafters.dflash import facts as block_facts
from specjax.drafters.dflash import files as block_files
from specjax.drafters.dflash.config import dflash_config
from specjax.models.load import LM
from specjax.models.transformer import TransformerConfig, language_model

D, R = 16, 4
DEEP = h.CONFIG._replace(layers=8, sliding=(), window=None)
TARGET_LM = LM(
    language_model(DEEP), h.target_params(), None, DEEP
)  # of its parameters, embedding and head are all that is read
STATES = "aux_hidden_state_layer_ids"
PLAIN = dflash_config(DEEP, layers=2, taps=(1, 3, 5), mask_token=7, qk_norm=True)
FIRST = PLAIN._replace(anchor_first=True)
QWEN = {
    **{"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_act": "silu", "hidden_size": D, "vocab_size": h.V},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 32, "rms_norm_eps": 1e-6},
    **{"num_hidden_layers": 2, "num_target_layers": 8, "layer_types": ["full_attention"] * 2, "attention_bias": False},
    **{"sliding_window": None, "use_sliding_window": False, "rope_theta": 10000.0, "rope_scaling": None, "block_size": 4},
}
FLASH = {"mask_token_id": 7, "target_layer_ids": [1, 3, 5]}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "use_sliding_window": True}
SPARK = {"markov_rank": R, "markov_head_type": "vanilla", "enable_confidence_head": True, "confidence_head_with_markov": True}
COPIES = {"embed_tokens.weight": "embedding", "lm_head.weight": "head"}


def spoken(kind, **said):
    """speculators' config.json."""
    layer = {n: x for n, x in QWEN.items() if n not in ("block_size", "num_target_layers", "architectures")}
    said = {"mask_token_id": 7, STATES: [2, 4, 6], "block_size": 4, "draft_vocab_size": len(IDS), **said}
    layer |= said.pop("layer", {})
    return {"speculators_model_type": kind, "architectures": ["X"], "transformer_layer_config": layer, **said}


LAYOUTS = {  # method, config, head, ids, config.json, the option, what is added to tensors
    "z-lab": ("dflash", PLAIN, None, None, {**QWEN, "dflash_config": FLASH}, False, {}),
    "SpecForge, windows": (
        "dflash", PLAIN._replace(sliding=(True, False), window=6, rope_theta=1e7), None, None,
        {**QWEN, **SLIDING, "rope_theta": 10000000, "dflash_config": FLASH}, False, {},
    ),
    "DeepSpec, DFlash": (
        "dflash", FIRST, None, None, {**QWEN, "architectures": ["Qwen3DSparkModel"], "markov_rank": 0, **FLASH}, True, COPIES,
    ),
    "speculators, DFlash": (
        "dflash", PLAIN._replace(sliding=(True, False), window=6, causal=False), None, IDS,
        spoken("dflash", sample_from_anchor=False, sliding_window_non_causal=True, layer=SLIDING), None,
        {"lm_head.weight": "few", "verifier_norm.weight": np.ones(D, np.float32)},
    ),
    "DeepSpec": (
        "dspark", FIRST._replace(rope_theta=1e6), dspark.DSparkConfig(R), None,
        {**QWEN, "architectures": ["Qwen3DSparkModel"], "rope_parameters": {"rope_theta": 1e6}, **SPARK, **FLASH},
        None, COPIES,
    ),
    "SpecForge, DSpark": (
        "dspark", FIRST, dspark.DSparkConfig(R, "gated", True, False), None,
        {**QWEN, "dflash_config": {**FLASH, **SPARK, "markov_head_type": "gated", "projector_type": "dspark"}}, None, {},
    ),
    "speculators, DSpark": (
        "dspark", FIRST, dspark.DSparkConfig(R, "rnn", False), IDS,
        spoken("dspark", sample_from_anchor=True, **{**SPARK, "markov_head_type": "rnn"}), None, {"t2d": "ids"},
    ),
    "z-lab, DFlash 2": (
        "dflash2",
        PLAIN._replace(causal=False, conv_taps=2, conv_group=8, softcap=20.0, output_multiplier=0.2, embedding_scale=3.0),
        dflash2.SelectorConfig(R, 5), None,
        {
            **{n: x for n, x in QWEN.items() if n != "block_size"}, "architectures": ["DFlash2DraftModel"], "is_causal": False,
            "dflash_config": {
                **FLASH, "block_size": 4, "conv_group_size": 8, "conv_kernel_size": 2, "selector_rank": R, "selector_top_k": 5,
                "final_logit_softcapping": 20.0, "output_multiplier": 0.2, "input_embedding_scale": 3.0,
            },
        },
        None, {},
    ),
}  # fmt: skip
each_layout = pytest.mark.parametrize("name", LAYOUTS)


def params_of(config, head, ids):
    """A random drafter."""
    rng, like = np.random.default_rng(0), block_files.like(TARGET_LM.model, config, head, ids)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), like)


def by_hand(params, config, head, ids, nested=""):
    """Tensors under published names."""
    found = {}
    put = lambda name, x: found.update({name: np.array(x, order="C")})
    put("fc.weight", params["fc"]["kernel"].T)
    put("hidden_norm.weight", params["context_norm"]["scale"])
    put("norm.weight", params["norm"]["scale"])
    for i in range(config.layers):
        own, at = params[f"layer_{i}"], f"layers.{i}."
        put(f"{at}input_layernorm.weight", own["attention_norm"]["scale"])
        put(f"{at}post_attention_layernorm.weight", own["mlp_norm"]["scale"])
        for part in ("q_norm", "k_norm"):
            put(f"{at}self_attn.{part}.weight", own["attention"][part]["scale"])
        both = own["attention"]["kv"]["kernel"].reshape(D, 2, 2, 8)  # KV heads, k and v, head_dim
        put(f"{at}self_attn.q_proj.weight", own["attention"]["q"]["kernel"].T)
        put(f"{at}self_attn.k_proj.weight", both[:, :, 0].reshape(D, -1).T)
        put(f"{at}self_attn.v_proj.weight", both[:, :, 1].reshape(D, -1).T)
        put(f"{at}self_attn.o_proj.weight", own["attention"]["out"]["kernel"].T)
        put(f"{at}mlp.gate_proj.weight", own["mlp"]["gate_up"]["kernel"][:, :32].T)
        put(f"{at}mlp.up_proj.weight", own["mlp"]["gate_up"]["kernel"][:, 32:].T)
        put(f"{at}mlp.down_proj.weight", own["mlp"]["down"]["kernel"].T)
        for conv in ("attention_conv", "mlp_conv") if config.conv_taps else ():
            put(f"{at}{conv}.base_kernel", own[conv]["base"])
            put(f"{at}{conv}.kernel_projection.weight", own[conv]["dynamic"]["kernel"].T)
    if "heads" in params:
        own, mix = params["heads"], {"gated": "gate_proj", "rnn": "joint_proj"}.get(head.markov)
        put(f"{nested}markov_head.markov_w1.weight", own["before"])
        put(f"{nested}markov_head.markov_w2.weight", own["after"].T)
        for ours, theirs in (("mix", f"markov_head.{mix}"), ("sure", "confidence_head.proj")):
            if ours in own:
                put(f"{nested}{theirs}.weight", own[ours]["kernel"].T)
                put(f"{nested}{theirs}.bias", own[ours]["bias"])
    if "selector" in params:
        own = params["selector"]
        put("candidate_selector.predecessor_codebook", own["before"])
        put("candidate_selector.successor_codebook", own["after"])
        put("candidate_selector.hidden_projection.weight", own["project"]["kernel"].T)
    if ids is not None:
        put("d2t", np.asarray([token - place for place, token in enumerate(ids)]))
    return found


def layout(name):
    """(method, config, head, ids, params, config.json, option, tensors) of a layout."""
    method, config, head, ids, said, option, added = LAYOUTS[name]
    params = params_of(config, head, ids)
    tensors = by_hand(params, config, head, ids, "logit_head." if name == "SpecForge, DSpark" else "")
    vocabulary = np.asarray(h.target_params()["head"]).T
    known = {"embedding": np.asarray(h.target_params()["embedding"]).astype(jnp.bfloat16), "head": vocabulary}
    known |= {"few": vocabulary[list(IDS)], "ids": np.isin(np.arange(h.V), IDS)}
    tensors |= {key: np.array(known[x] if isinstance(x, str) else x, order="C") for key, x in added.items()}
    return method, config, head, ids, params, said, option, tensors


def write(directory, said, tensors):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(said))
    save_file(tensors, directory / "model.safetensors")
    return directory


def load(directory, method="dflash", option=False, num_draft=K):
    given = {} if option is None else {"anchor_first": option}
    return load_drafter(method, TARGET_LM, num_draft=num_draft, weights=str(directory), **given)


def check_same(loaded, config, head, ids, params):
    """The same drafter, built once for its arguments, with the same parameters: the same drafts."""
    assert files.flat(loaded.params).keys() == files.flat(params).keys()
    for path, x in files.flat(params).items():
        np.testing.assert_array_equal(files.flat(loaded.params)[path], x, err_msg=path)
    make = {dspark.DSparkConfig: dspark.recipe, dflash2.SelectorConfig: dflash2.recipe}.get(type(head), dflash.recipe)
    name = {dspark.DSparkConfig: "heads", dflash2.SelectorConfig: "selector"}.get(type(head))
    own = {} if name is None else {name: head}
    assert loaded.drafter is make(TARGET_LM.model, num_draft=K, config=config, vocabulary=ids, **own).drafter


def refused(directory, message, method="dflash", option=False, num_draft=K):
    with pytest.raises(ValueError, match=message) as error:
        load(directory, method, option, num_draft)
    assert "\n" not in str(error.value)


@each_layout
def test_read_back(name, tmp_path):
    method, config, head, ids, params, said, option, tensors = layout(name)
    write(tmp_path, said, tensors)
    loaded = load(tmp_path, method, option)
    check_same(loaded, config, head, ids, params)
    assert loaded.card.method == method and loaded.card.extra_parameters == sum(x.size for x in files.flat(params).values())
    point = load_drafter(method, TARGET_LM, num_draft=2, weights=str(tmp_path), anchor_first=option, children="point")
    assert (point.drafter.children, point.drafter.depth, point.rule) == ("point", 2, "rejection")
    most = 4 if config.anchor_first else 3
    refused(tmp_path, f"num_draft 9 > {most} tokens of the blocks", method, option, 9)
    refused(tmp_path, f"of method '{method}' != ", "dflash2" if method != "dflash2" else "dspark", option)


@each_layout
def test_every_tensor_is_needed(name, tmp_path):
    """Without any one of them, with one more, or with one of another shape: an error that names what is wrong."""
    method, *_, said, option, tensors = layout(name)
    optional = {"embed_tokens.weight", "lm_head.weight", "verifier_norm.weight", "t2d", "d2t" if "t2d" in tensors else "t2d"}
    for key in tensors.keys() - optional:
        if key.startswith("layers.1"):
            continue  # as those of layer 0
        stem = key.replace("logit_head.", "").replace("_codebook", "").rpartition(".")[0]
        wanted = "lm_head" if key == "d2t" else "_conv" if "_conv" in key else stem
        with pytest.raises(ValueError, match=wanted):
            load(write(tmp_path, said, {n: x for n, x in tensors.items() if n != key}), method, option)
        with pytest.raises(ValueError):
            load(write(tmp_path, said, {**tensors, key: np.concatenate([tensors[key]] * 2)}), method, option)
    less = {n: x for n, x in tensors.items() if n != "layers.1.self_attn.q_norm.weight"}
    refused(write(tmp_path, said, less), "1 missing: layers.1.self_attn.q_norm.weight", method, option)
    more = {**tensors, "fc2.weight": np.ones((D, D), np.float32)}
    refused(write(tmp_path, said, more), "1 not used: fc2.weight", method, option)


def test_the_anchors_row_is_asked_for(tmp_path):
    """Where no config says it, it is not guessed; where one does, another answer is an error."""
    for name in ("z-lab", "DeepSpec, DFlash"):
        *_, facts, option, tensors = layout(name)
        refused(write(tmp_path, facts, tensors), "does not say whether the anchor's row predicts", option=None)
        assert load(tmp_path, option=option).drafter is not load(tmp_path, option=not option).drafter
    for name, message in (
        ("DeepSpec", "anchor_first=false, and it is true"),
        ("z-lab, DFlash 2", "anchor_first=true, and it is false"),
        ("speculators, DFlash", "anchor_first=true, and it is false"),
    ):
        method, config, *_, facts, _, tensors = layout(name)
        refused(write(tmp_path, facts, tensors), message, method, not config.anchor_first)


def test_copies_must_be_copies(tmp_path):
    for name, key in (
        ("DeepSpec", "embed_tokens.weight"),
        ("DeepSpec", "lm_head.weight"),
        ("speculators, DFlash", "lm_head.weight"),
    ):
        method, *_, said, option, tensors = layout(name)
        own = tensors[key].astype(np.float32)
        for other in (own + 0.02 * np.abs(own).max(), own[:-1], np.roll(own, 1, 0)):
            changed = {**tensors, key: np.array(other, order="C")}
            refused(write(tmp_path, said, changed), f"{key} .* is not the target's", method, option)


def test_a_draft_vocabulary_in_any_order(tmp_path):
    """Rows for each id that is drafted are put in order: those of the Markov head, and the head's copy."""
    order = np.random.default_rng(0).permutation(len(IDS))
    for name, key in (("speculators, DSpark", "markov_head.markov_w2.weight"), ("speculators, DFlash", "lm_head.weight")):
        method, config, head, ids, params, said, option, tensors = layout(name)
        moved = {key: np.array(tensors[key][order]), "d2t": np.asarray(IDS)[order] - np.arange(len(IDS))}
        check_same(load(write(tmp_path, said, {**tensors, **moved}), method, option), config, head, ids, params)


def test_yarn(tmp_path):
    """Its factor on scores goes into the norm of queries."""
    *_, params, said, option, tensors = layout("z-lab")
    rope = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 3.0, "original_max_position_embeddings": 40}
    loaded = load(write(tmp_path, {**said, "rope_scaling": rope}, tensors), option=option)
    gain = (0.1 * np.log(4) + 1) ** 2
    for i in range(2):
        own, theirs = loaded.params[f"layer_{i}"]["attention"], params[f"layer_{i}"]["attention"]
        np.testing.assert_allclose(own["q_norm"]["scale"], theirs["q_norm"]["scale"] * gain, rtol=1e-6)
        np.testing.assert_array_equal(own["k_norm"]["scale"], theirs["k_norm"]["scale"])


def test_dtypes(tmp_path):
    """Matrices from bfloat16 or float16 are in the target's numbers; norms and biases are float32 beside any target."""
    *_, said, option, tensors = layout("DeepSpec")
    for dtype in (jnp.bfloat16, np.float16):
        small = {n: x.astype(dtype) for n, x in tensors.items() if n not in COPIES}
        loaded = load(write(tmp_path, said, small), "dspark", option).params
        assert loaded["fc"]["kernel"].dtype == loaded["heads"]["before"].dtype == jnp.float32
        assert loaded["norm"]["scale"].dtype == loaded["heads"]["sure"]["bias"].dtype == jnp.float32


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


WRONG = {
    "DeepSeek-V4": ({}, {"mtp.0.main_proj.weight": zeros(4, D)}, "a drafter within DeepSeek-V4's own files"),
    "Gemma 4": ({"architectures": ["Gemma4DSparkModel"]}, {}, "Gemma 4's layer"),
    "sandwich": ({}, {"layers.0.pre_feedforward_layernorm.weight": zeros(D)}, "Gemma 4's layer"),
    "gates": ({}, {"layers.0.self_attn.g_proj.weight": zeros(4, D)}, "a layer with gates"),
    "Domino": ({"dflash_config": {**FLASH, "projector_type": "domino"}}, {}, "another way to make tokens"),
    "Domino's": ({}, {"prefix_gru.weight_ih_l0": zeros(4, D)}, "Domino"),
    "shifted": ({"dflash_config": {**FLASH, "shift_label": True}}, {}, "labels that are shifted"),
    "experts": ({}, {"layers.0.mlp.experts.0.up_proj.weight": zeros(4, D)}, "a mixture of experts"),
    "quantised": ({"quantization_config": {"bits": 4}}, {}, "a quantised checkpoint"),
    "int8": ({}, {"fc.weight": zeros(D, 3 * D, dtype=np.int8)}, "fc.weight in int8"),
    "gelu": ({"hidden_act": "gelu"}, {}, "another activation"),
    "method": ({"speculators_model_type": "eagle3"}, {}, "another method"),
    "window by another name": ({"dflash_config": {**FLASH, "use_swa": True}}, {}, "a window by another name"),
    "no mask": ({"dflash_config": {"target_layer_ids": [1, 3, 5]}}, {}, "of a mask's token .* say nothing"),
    "mask outside": ({"dflash_config": {**FLASH, "mask_token_id": 17}}, {}, "one of the target's 17 tokens"),
    "vocabulary": ({"vocab_size": 18}, {}, "vocab_size 18 != 17"),
    "another target": ({"num_target_layers": 12}, {}, "made for a target of 12 layers != 8"),
    "fewer layers read": ({"dflash_config": {**FLASH, "target_layer_ids": [1, 3]}}, {}, "3 features that fc reads"),
    "the rule's": ({"dflash_config": {"mask_token_id": 7}}, {}, r"layers \[1, 5\] of a target of 8, and 3 features"),
    "too high": ({"dflash_config": {**FLASH, "target_layer_ids": [1, 3, 8]}}, {}, "of a target of 8"),
    "disagree": ({STATES: [1, 3, 5]}, {}, "which counts from 1, disagree"),
    "kinds": ({"layer_types": ["full_attention", "linear_attention"]}, {}, "layer_types .* are not one of"),
    "number of kinds": ({"layer_types": ["full_attention"]}, {}, "for each of 2 layers"),
    "no window": ({**SLIDING, "sliding_window": None}, {}, "layers slide, and no sliding_window"),
    "causal": ({"is_causal": True, "sliding_window_non_causal": True}, {}, "disagree whether a block is causal"),
    "heads": ({"num_attention_heads": 3}, {}, "do not fit"),
    "longrope": ({"rope_scaling": {"rope_type": "longrope", "factor": 32}}, {}, "rotary scaling 'longrope'"),
    "no flag": ({"is_causal": "no"}, {}, "is_causal 'no' is not true or false"),
    "no block": ({"block_size": 0}, {}, "block_size '0' is not a whole number from 1"),
    "no object": ({"dflash_config": 3}, {}, "no object"),
    "narrower": ({}, {"hidden_norm.weight": zeros(8)}, "a module of width 8 != target 16"),
    "out bias": ({}, {"layers.0.self_attn.o_proj.bias": np.ones(D, np.float32)}, "not used: layers.0.self_attn.o_proj.bias"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_meant(name, tmp_path):
    *_, said, option, tensors = layout("z-lab")
    change, more, message = WRONG[name]
    refused(write(tmp_path, {**said, **change}, {**tensors, **more}), message, option=option)


def test_heads_that_cannot_be_meant(tmp_path):
    for name, change, less, message in (
        ("DeepSpec", {"markov_head_type": "rnn"}, "", "markov_head_type 'rnn', and tensors of 'vanilla'"),
        ("DeepSpec", {}, "markov_head.", "without its Markov head is not supported"),
        ("z-lab, DFlash 2", {"dflash_config": FLASH}, "", "no selector_top_k"),
        ("z-lab, DFlash 2", {}, "candidate_selector.predecessor", "no candidate_selector.predecessor_codebook"),
    ):
        method, *_, said, option, tensors = layout(name)
        kept = {n: x for n, x in tensors.items() if not less or not n.startswith(less)}
        refused(write(tmp_path, {**said, **change}, kept), message, method, option)


def test_no_drafter_at_all(tmp_path):
    *_, said, option, tensors = layout("z-lab")
    refused(write(tmp_path, said, {"norm.weight": tensors["norm.weight"]}), "not the weights of a block drafter")
    for text in ("[]", "{", "3"):
        (tmp_path / "config.json").write_text(text)
        refused(tmp_path, "no object|broken JSON")
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="weights without a config.json"):
        load(tmp_path)


def real_size(said, method, layers):
    """The config of a published config.json, by shapes alone."""
    d, f, q, kv = (said[n] for n in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"))
    q, kv, n = q * 128, kv * 128, len(said["dflash_config"]["target_layer_ids"])
    shapes = {"fc": (d, n * d), "hidden_norm": (d,), "norm": (d,)}
    for i in range(said["num_hidden_layers"]):
        own = {"self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d), "self_attn.q_norm": (128,), "mlp.gate_proj": (f, d)}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in own.items()}
    tensors = {f"{name}.weight": np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}
    config = TransformerConfig(said["vocab_size"], d, layers, 32, 8, 128, f, 40960)
    lm = LM(language_model(config), None, None, config)
    flat = {**said, **said["dflash_config"]}
    return block_facts.config_of(h.Path("there"), flat, tensors, lm, method, False if method == "dflash" else None)


def test_real_configs():
    """SpecForge's for Qwen3.6-27B, four layers of which slide, and for Qwen3-4B."""
    large = {
        "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "num_hidden_layers": 5, "num_target_layers": 64, "vocab_size": 248320, "rope_theta": 10000000, "rms_norm_eps": 1e-06,
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": 2048, "use_sliding_window": True,
        "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    }  # fmt: skip
    c = real_size(large, "dflash", 64)
    assert (c.heads, c.kv_heads, c.head_dim, c.hidden, c.layers, c.window) == (32, 8, 128, 17408, 5, 2048)
    assert c.sliding == (True,) * 4 + (False,) and c.causal is None and not c.anchor_first and c.qk_norm
    assert (c.taps, c.mask_token, c.rope_theta) == ((1, 16, 31, 46, 61), 248070, 1e7)
    assert dflash_config(TransformerConfig(248320, 5120, 64, 32, 8, 128, 17408, 40960)).taps == c.taps
    small = {
        **large, "hidden_size": 2560, "intermediate_size": 9728, "num_target_layers": 36, "vocab_size": 151936,
        "layer_types": ["full_attention"] * 5, "sliding_window": None, "use_sliding_window": False, "rope_theta": 1000000,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33], "projector_type": "dspark", **SPARK},
    }  # fmt: skip
    c = real_size({n: x for n, x in small.items() if x is not None}, "dspark", 36)
    assert c.anchor_first and c.sliding == () and c.window is None and c.taps == (1, 9, 17, 25, 33) and c.rope_theta == 1e6

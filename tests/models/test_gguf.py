"""GGUF files: round trips of every family against transformers' numbers, every quantisation, named faults (L05, L07, L17)."""

import types
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import make_families as golden

from specjax.models.families import config_from_gguf
from specjax.models.gguf import read_gguf
from specjax.models.huggingface import read_directory
from specjax.models.layers import rope_frequencies
from specjax.models.transformer import language_model

Q = gguf.GGMLQuantizationType
ARCH = {
    "llama": "llama",
    "llama3": "llama",
    "llama_linear": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_old": "gemma3",
}
PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
}
NORMS = {"post_attention_layernorm": "ffn_norm"}
GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def permute(w, heads):
    """What llama.cpp's converter does to q and k of Llama (LlamaModel.permute in convert_hf_to_gguf.py)."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def llama3_factors(c):
    """What the converter stores in rope_freqs.weight: Llama 3's rule as a divisor of each frequency."""
    s, head = c["rope_scaling"], c["hidden_size"] // c["num_attention_heads"]
    waves = 2 * np.pi * c["rope_theta"] ** (np.arange(0, head, 2, dtype=np.float32) / head)
    smooth = (s["original_max_position_embeddings"] / waves - s["low_freq_factor"]) / (
        s["high_freq_factor"] - s["low_freq_factor"]
    )
    smooth = np.clip(smooth, 0, 1)
    return (1 / ((1 - smooth) / s["factor"] + smooth)).astype(np.float32)


def write(path, name, quantisation=Q.F32, tensors=None):
    """A GGUF file of a golden model as llama.cpp's converter would lay it out; matrices in `quantisation`."""
    c, arch = golden.CONFIGS[name], ARCH[name]
    out = gguf.GGUFWriter(path, arch)
    head = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    out.add_block_count(c["num_hidden_layers"])
    out.add_context_length(c["max_position_embeddings"])
    out.add_embedding_length(c["hidden_size"])
    out.add_feed_forward_length(c["intermediate_size"])
    out.add_head_count(c["num_attention_heads"])
    out.add_head_count_kv(c["num_key_value_heads"])
    out.add_key_length(head)
    out.add_rope_dimension_count(head)
    out.add_layer_norm_rms_eps(c["rms_norm_eps"])
    out.add_rope_freq_base((c.get("rope_parameters") or c)["rope_theta"])
    out.add_tokenizer_model("gpt2")
    scaling = c.get("rope_scaling") or {}
    if "linear" in scaling.values():
        out.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        out.add_rope_scaling_factor(scaling["factor"])
    if "llama3" in scaling.values():
        out.add_tensor("rope_freqs.weight", llama3_factors(c))
    if arch == "gemma3":
        out.add_sliding_window(c["sliding_window"])
        out.add_sliding_window_pattern(c["sliding_window_pattern"])
        out.add_float32("gemma3.rope.freq_base_swa", c["rope_local_base_freq"])
    for key, x in (tensors or published(name)).items():
        if x.ndim == 1:
            out.add_tensor(key, x)
        else:
            out.add_tensor(key, gguf.quants.quantize(x, quantisation), raw_dtype=quantisation)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def published(name, weights=None):
    """Tensors of a golden model under GGUF's names, as llama.cpp's converter lays them out."""
    c, arch, result = golden.CONFIGS[name], ARCH[name], {}
    parts = {**PARTS, **(GEMMA_NORMS if arch == "gemma3" else NORMS)}
    for key, x in (weights or golden.weights(name)).items():
        stem, _, kind = key.rpartition(".")
        if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            x = permute(x, c["num_attention_heads"] if stem.endswith("q_proj") else c["num_key_value_heads"])
        if arch == "gemma3" and x.ndim == 1:
            x = x + 1
        if stem.startswith("model.layers."):
            _, _, layer, rest = stem.split(".", 3)
            result[f"blk.{layer}.{parts[rest]}.{kind}"] = x
        else:
            result[f"{parts[stem]}.{kind}"] = x
    return result


def logits(config, params):
    model = language_model(config)
    run = jax.jit(model.apply, compiler_options={"xla_backend_optimization_level": 0})
    out, _ = run(params, jnp.asarray(golden.batch()), model.init_cache(2, 20))
    return golden.real(np.asarray(out.logits))


@pytest.mark.parametrize("name", ARCH)
def test_L07_every_family_gives_transformers_logits(tmp_path, name):
    """Written as the converter would, q and k permuted for Llama only; read back: the published tree and numbers."""
    config, params, _ = read_gguf(write(tmp_path / "x.gguf", name))
    _, published_config, published_params = read_directory(
        golden.save(tmp_path / "hf", golden.CONFIGS[name], golden.weights(name))
    )
    jax.tree.map(np.testing.assert_array_equal, params, published_params)
    assert config.tied == published_config.tied
    with np.load(Path(golden.__file__).parent / "families.npz") as file:
        np.testing.assert_allclose(logits(config, params), file[f"{name}.logits"], rtol=0, atol=2e-5)


def test_L05_rope_freqs_give_llama3_frequencies(tmp_path):
    config, _, _ = read_gguf(write(tmp_path / "x.gguf", "llama3"))
    _, published_config, _ = read_directory(golden.save(tmp_path / "hf", golden.CONFIGS["llama3"], golden.weights("llama3")))
    ours, theirs = (rope_frequencies(c.head_dim, c.rope_theta, c.rope_scaling) for c in (config, published_config))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert hash(config) is not None  # a static argument of jit


STEP = {Q.F16: 2e-3, Q.BF16: 1e-2, Q.Q8_0: 2e-2, Q.Q5_1: 0.1, Q.Q5_0: 0.1, Q.Q4_1: 0.2, Q.Q4_0: 0.3}


@pytest.mark.parametrize("quantisation", STEP, ids=lambda q: q.name)
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_L07_quantised_matrices(tmp_path, quantisation, name):
    """The tree is that of the de-quantised matrices, close to the originals as the step of the type allows."""
    _, params, _ = read_gguf(write(tmp_path / "x.gguf", name, quantisation))
    rounded = {
        key: x if x.ndim == 1 else gguf.quants.dequantize(gguf.quants.quantize(x, quantisation), quantisation)
        for key, x in golden.weights(name).items()
    }
    _, _, expected = read_directory(golden.save(tmp_path / "hf", golden.CONFIGS[name], rounded))
    _, _, exact = read_directory(golden.save(tmp_path / "exact", golden.CONFIGS[name], golden.weights(name)))
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=STEP[quantisation] * float(np.abs(b).max())), params, exact
    )


SCALES_AT = {Q.Q4_K: (0, 2), Q.Q5_K: (0, 2), Q.Q6_K: (208,)}  # bytes of a block where float16 scales stand


def k_blocks(draw, kind, rows, columns):
    """Random K-quant blocks [rows, bytes] with finite scales."""
    size, step = gguf.GGML_QUANT_SIZES[kind]
    blocks = draw.integers(0, 256, (rows, columns // size, step), dtype=np.uint8)
    for at in SCALES_AT[kind]:
        blocks[..., at : at + 2] = draw.uniform(0.01, 0.1, (rows, columns // size, 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", SCALES_AT, ids=lambda q: q.name)
def test_k_quants(tmp_path, kind):
    """Matrices of random K-quant blocks: embedding and kernels hold what the gguf package makes of them."""
    c = {**golden.BASE, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    draw, path = np.random.default_rng(0), tmp_path / "x.gguf"
    out = gguf.GGUFWriter(path, "qwen3")
    for key, value in (("block_count", 1), ("context_length", 64), ("embedding_length", 256), ("feed_forward_length", 256)):
        out.add_uint32(f"qwen3.{key}", value)
    out.add_head_count(4)
    out.add_head_count_kv(2)
    out.add_layer_norm_rms_eps(1e-6)
    blocks = {}
    for key, shape in golden.shapes({**c, "model_type": "qwen3", "tie_word_embeddings": True}):
        name = next(iter(published("qwen3", {key: np.zeros(shape)})))
        if len(shape) == 1:
            out.add_tensor(name, np.ones(shape, np.float32))
        else:
            blocks[name] = k_blocks(draw, kind, *shape)
            out.add_tensor(name, blocks[name], raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    _, params, _ = read_gguf(path)
    wanted = {name: gguf.quants.dequantize(x, kind) for name, x in blocks.items()}
    np.testing.assert_array_equal(params["embedding"], wanted["token_embd.weight"])
    np.testing.assert_array_equal(params["layer_0"]["mlp"]["down"]["kernel"], wanted["blk.0.ffn_down.weight"].T)
    q, k, v = (wanted[f"blk.0.attn_{part}.weight"] for part in "qkv")
    qkv = np.concatenate([q[:128], k[:64], v[:64], q[128:], k[64:], v[64:]])  # KV head 0 with its two query heads, then 1
    np.testing.assert_array_equal(params["layer_0"]["attention"]["qkv"]["kernel"], qkv.T)


def test_bfloat16_weights_and_tokenizer_extras(tmp_path):
    config, params, reader = read_gguf(write(tmp_path / "x.gguf", "qwen2"), dtype=jnp.bfloat16)
    assert params["embedding"].dtype == params["layer_0"]["mlp"]["down"]["kernel"].dtype == jnp.bfloat16
    assert params["norm"]["scale"].dtype == params["layer_0"]["attention"]["qkv"]["bias"].dtype == jnp.float32
    assert not config.tied and reader.get_field("tokenizer.ggml.model").contents() == "gpt2"


class Header:
    """A reader of nothing but a header."""

    def __init__(self, arch, width, heads, values):
        base = {"block_count": 2, "embedding_length": width, "context_length": 64, "feed_forward_length": 64}
        base |= {"attention.head_count": heads, "attention.layer_norm_rms_epsilon": 1e-6}
        self.values = {"general.architecture": arch} | {f"{arch}.{key}": x for key, x in {**base, **values}.items()}
        shape = np.asarray([width, 100], np.uint64)
        self.tensors = [gguf.ReaderTensor("token_embd.weight", Q.F32, shape, 0, 0, 0, None, None)]

    def get_field(self, key):
        return types.SimpleNamespace(contents=lambda: self.values[key]) if key in self.values else None


def test_gemma3_27b_scales_queries_by_width_over_heads():
    """Its query_pre_attn_scalar 168 is not in the header; llama.cpp knows the model by its 62 layers."""
    values = {"block_count": 62, "attention.head_count_kv": 16, "attention.key_length": 128}
    config = config_from_gguf(Header("gemma3", 5376, 32, values))
    assert config.query_scale == 168**-0.5 and config.head_dim == 128 and config.vocab_size == 100
    assert config_from_gguf(Header("gemma3", 5376, 32, {**values, "block_count": 48})).query_scale == 128**-0.5


def test_gemma3_window_pattern_as_number_list_or_default():
    for value, wanted in ((3, [1, 1, 0, 1]), ([True, False, False, True], [1, 0, 0, 1]), (None, [1, 1, 1, 1])):
        values = {"block_count": 4, "attention.key_length": 8, "attention.sliding_window": 9}
        values |= {} if value is None else {"attention.sliding_window_pattern": value}
        config = config_from_gguf(Header("gemma3", 32, 4, values))
        assert config.window == 9 and list(config.sliding) == wanted and config.rope_theta_sliding == 1e4


REFUSALS = {
    "architecture": ("mamba", {}, "GGUF architecture 'mamba' is not supported.*llama, qwen2, qwen3, gemma3"),
    "experts": ("llama", {"expert_count": 8}, "mixture of experts.*'llama'"),
    "rope scaling": ("llama", {"rope.scaling.type": "yarn"}, "rotary scaling 'yarn'.*linear"),
    "partial rotary": ("llama", {"rope.dimension_count": 4}, "rotates 4 of 8"),
    "layers of different sizes": ("llama", {"attention.head_count_kv": [2, 1]}, "head_count_kv differs between layers"),
    "a value that is absent": ("llama", {"context_length": None}, "no llama.context_length"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_supported_is_named_in_one_line(case):
    arch, values, message = REFUSALS[case]
    header = Header(arch, 32, 4, values)
    header.values = {key: x for key, x in header.values.items() if x is not None}
    with pytest.raises(ValueError, match=message) as caught:
        config_from_gguf(header)
    assert "\n" not in str(caught.value)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    tensors = published("llama")
    del tensors["blk.0.ffn_up.weight"]
    tensors |= {"blk.1.attn_q.bias": np.ones(32, np.float32), "blk.0.mystery.weight": np.ones(32, np.float32)}
    with pytest.raises(ValueError) as caught:
        read_gguf(write(tmp_path / "x.gguf", "llama", tensors=tensors))
    assert "1 missing: layers.0.mlp.up_proj.weight" in str(caught.value)
    assert "2 not used: layers.1.self_attn.q_proj.bias, blk.0.mystery.weight" in str(caught.value)


def test_unknown_quantisation(tmp_path):
    """One that the package knows but cannot undo, and a number that it does not know."""
    path = write(tmp_path / "x.gguf", "llama")
    reader = gguf.GGUFReader(path, "r+")
    kind = next(t for t in reader.tensors if t.name == "output.weight").field.parts[4]
    kind[0] = Q.I32
    reader.data.flush()
    with pytest.raises(ValueError, match="tensor output.weight: quantisation I32 is not supported: use one of F32.*Q6_K"):
        read_gguf(path)
    kind[0] = 250
    reader.data.flush()
    with pytest.raises(ValueError, match="x.gguf: truncated GGUF, or one the gguf package does not know .*250"):
        read_gguf(path)


class TestL17:
    @pytest.mark.parametrize("keep", [0, 3, 10, 100, 700, 3000, 0.5, -4])
    def test_truncated(self, tmp_path, keep):
        path = write(tmp_path / "x.gguf", "llama")
        whole = path.read_bytes()
        path.write_bytes(whole[: int(len(whole) * keep) if isinstance(keep, float) else keep])
        with pytest.raises(ValueError, match="x.gguf: (truncated|not a) GGUF.*download it again") as caught:
            read_gguf(path)
        assert "\n" not in str(caught.value)

    def test_git_lfs_pointer(self, tmp_path):
        path = tmp_path / "x.gguf"
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 98362432\n")
        with pytest.raises(ValueError, match="x.gguf: a git-lfs pointer.*git lfs pull"):
            read_gguf(path)

    def test_no_file(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="none.gguf: no such file"):
            read_gguf(tmp_path / "none.gguf")

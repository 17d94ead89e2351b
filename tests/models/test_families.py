"""config.json -> architecture, and every family's numbers against transformers (tests/golden/make_families.py)."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import make_families as golden

from specjax import cache as kv
from specjax.models.families import config_from_hf
from specjax.models.huggingface import read_directory
from specjax.models.layers import rope_frequencies
from specjax.models.transformer import language_model

CAPACITY = 26
QUICK = {"xla_backend_optimization_level": 0}  # compiles twice as fast
SAME_PASS = ("llama3_new", "llama_linear", "qwen2")  # differ from one tried in chunks by rotary table or mask alone
CLOSE = {"rtol": 0, "atol": 2e-5}


@pytest.fixture(scope="module")
def results():
    with np.load(Path(golden.__file__).parent / "families.npz") as file:
        return dict(file)


@pytest.fixture(scope="module", params=golden.CONFIGS)
def family(request, tmp_path_factory):
    """(name, model, params, jitted pass with every layer tapped) of a checkpoint directory."""
    directory = golden.save(tmp_path_factory.mktemp("hf"), golden.CONFIGS[request.param], golden.weights(request.param))
    _, config, params = read_directory(directory)
    model = language_model(config)
    every = functools.partial(model.apply, features=tuple(range(config.layers)))
    run = jax.jit(every, compiler_options=QUICK)
    return request.param, model, params, run


def expect(results, name, got):
    for kind, x in zip(("logits", "hidden", "features"), got, strict=True):
        np.testing.assert_allclose(x, results[f"{name}.{kind}"], **CLOSE, err_msg=f"{name} {kind}")


def forward(run, params, cache, tokens):
    out, cache = run(params, jnp.asarray(tokens), cache)
    return [np.asarray(x) for x in out], cache._replace(length=cache.length + tokens.shape[1])


def test_ragged_batch_in_one_pass_equals_transformers(family, results):
    name, model, params, run = family
    got, _ = forward(run, params, model.init_cache(2, CAPACITY), golden.batch())
    expect(results, name, [golden.real(x) for x in got])


def test_rows_of_a_batch_at_different_lengths_equal_transformers(family, results):
    """After a first pass, row 0 goes back to 6 tokens and row 1 to 3: each reads and writes at its own length."""
    name, model, params, run = family
    _, cache = forward(run, params, model.init_cache(2, CAPACITY), golden.batch())
    cache = kv.rewind(cache, jnp.asarray([6, 3], jnp.int32))
    rest = np.stack([np.roll(row, -start) for row, start in zip(golden.batch(), (6, 3), strict=True)])
    got, _ = forward(run, params, cache, rest)
    first, second = golden.LENGTHS
    wanted = {key: np.concatenate([x[6:first], x[first + 3 :]]) for key, x in results.items()}
    expect(wanted, name, [np.concatenate([x[0, : first - 6], x[1, : second - 3]]) for x in got])


@pytest.mark.parametrize("family", [name for name in golden.CONFIGS if name not in SAME_PASS], indirect=True)
def test_chunks_of_uneven_size_over_the_cache_equal_transformers(family, results):
    """Batch 1, the longer row: chunks of 6, 1, 6, 6, 1 tokens."""
    name, model, params, run = family
    cache, parts, at = model.init_cache(1, CAPACITY), [], 0
    for size in (6, 1, 6, 6, 1):
        part, cache = forward(run, params, cache, golden.batch()[:1, at : at + size])
        parts.append(part)
        at += size
    first = {key: x[: golden.LENGTHS[0]] for key, x in results.items()}
    expect(first, name, [np.concatenate([p[i] for p in parts], 1)[0] for i in range(3)])


@pytest.mark.parametrize("family", ["llama", "gemma3_new"], indirect=True)
def test_features_are_picked_by_layer_number_and_hidden_is_normed(family, results):
    """Layer numbers count outputs from 0, as transformers' hidden_states[i + 1]; any order may be asked for."""
    name, model, params, _ = family
    run = jax.jit(functools.partial(model.apply, features=(1, 0)), compiler_options=QUICK)
    out, _ = run(params, jnp.asarray(golden.batch()[:1]), model.init_cache(1, CAPACITY))
    np.testing.assert_allclose(out.features[0], results[f"{name}.features"][: golden.LENGTHS[0], [1, 0]], **CLOSE)
    np.testing.assert_allclose(model.unembed(params, out.hidden), out.logits, **CLOSE)


def llama3_angles(positions, theta, head_dim, factor, low, high, original):
    """Llama 3's rule as published, in float64: long waves are slowed down by `factor`, those between are blended."""
    frequency = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    result = []
    for f in frequency:
        wavelength = 2 * np.pi / f
        if wavelength < original / high:
            result.append(f)
        elif wavelength > original / low:
            result.append(f / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            result.append((1 - smooth) * f / factor + smooth * f)
    return np.asarray(positions)[:, None] * np.asarray(result)[None]


@pytest.mark.parametrize("layout", ["old", "new"])
def test_L05_rope_scaling_reaches_the_tables(layout):
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    base = {**golden.BASE, "model_type": "llama", "max_position_embeddings": 131_072, "head_dim": 128}
    rope = {"rope_type": "llama3", **scaling}
    parts = {"rope_theta": 5e5, "rope_scaling": rope} if layout == "old" else {"rope_parameters": {**rope, "rope_theta": 5e5}}
    config = config_from_hf({**base, **parts})
    got = np.asarray([0, 100, 9000])[:, None] * np.asarray(
        rope_frequencies(128, config.rope_theta, config.rope_scaling), np.float64
    )
    wanted = llama3_angles([0, 100, 9000], 5e5, 128, 8.0, 1.0, 4.0, 8192)
    for f in (np.cos, np.sin):
        np.testing.assert_allclose(f(got), f(wanted), atol=2e-3)
    plain = np.asarray([9000])[:, None] * np.asarray(rope_frequencies(128, 5e5), np.float64)
    assert np.abs(np.cos(plain) - np.cos(wanted[-1:])).max() > 0.1  # a lost field would show


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope"])
def test_L05_unknown_rope_scaling_is_named(kind):
    config = {**golden.BASE, "model_type": "llama", "rope_scaling": {"type": kind, "factor": 4.0}}
    with pytest.raises(ValueError, match=f"rotary scaling '{kind}' is not supported.*llama3"):
        config_from_hf(config)


def test_L09_head_dim_apart_from_width_over_heads():
    config = config_from_hf(golden.CONFIGS["qwen3"])
    assert (config.width, config.heads, config.head_dim) == (20, 4, 8)
    shapes = jax.eval_shape(language_model(config).init, jax.random.key(0))
    assert shapes["layer_0"]["attention"]["out"]["kernel"].shape == (32, 20)
    assert shapes["layer_0"]["attention"]["q_norm"]["scale"].shape == (8,)


PUBLISHED_GEMMA_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model"},
}


def test_gemma3_text_config_takes_the_family_defaults():
    """google/gemma-3-4b-it leaves most of its text_config out."""
    c = config_from_hf(PUBLISHED_GEMMA_4B)
    assert (c.vocab_size, c.heads, c.kv_heads, c.head_dim, c.window, c.max_length) == (262_208, 8, 4, 256, 1024, 131_072)
    assert [i for i, s in enumerate(c.sliding) if not s] == [5, 11, 17, 23, 29] and len(c.sliding) == 34
    assert c.rope_theta == 1e6 and c.rope_theta_sliding == 1e4 and c.rope_scaling.factor == 8.0
    assert c.tied and c.post_norms and c.qk_norm and c.gelu
    assert c.query_scale == 256**-0.5 and c.embed_scale == 2560**0.5


def test_mistral_without_a_window():
    assert config_from_hf({**golden.CONFIGS["mistral"], "sliding_window": None}).sliding == ()


def test_qwen2_layer_types_win_over_max_window_layers():
    c = config_from_hf({**golden.CONFIGS["qwen2_window"], "layer_types": ["sliding_attention", "full_attention"]})
    assert c.sliding == (True, False) and c.window == 5


REFUSALS = {
    "unknown family": ({"model_type": "mamba"}, "model_type 'mamba'.*llama, mistral, qwen2, qwen3, gemma3_text"),
    "latent attention": (
        {"model_type": "deepseek_v3", "kv_lora_rank": 512},
        "multi-head latent attention .*deepseek_v3.*llama",
    ),
    "experts": ({"model_type": "mixtral", "num_local_experts": 8}, "mixture of experts .num_local_experts = 8.*mixtral"),
    "quantised": ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantised checkpoint .*'awq'"),
    "activation": ({"hidden_act": "relu"}, "hidden_act 'relu'.*'silu'"),
    "bias on o_proj": ({"attention_bias": True}, "attention_bias = true.*o_proj"),
    "bias in mlp": ({"mlp_bias": True}, "mlp_bias"),
    "partial rotary": ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    "partial rotary, GPT-NeoX style": ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
    "missing size": ({"hidden_size": None}, "lacks hidden_size"),
    "uneven heads": ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
    "bad layer types": (
        {"model_type": "gemma3_text", "hidden_act": None, "layer_types": ["chunked_attention"] * 3},
        "chunked_attention",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_supported_is_named_in_one_line(case):
    change, message = REFUSALS[case]
    with pytest.raises(ValueError, match=message) as caught:
        config_from_hf({**golden.BASE, "model_type": "llama", **change})
    assert "\n" not in str(caught.value)

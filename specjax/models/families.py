"""Published descriptions of a model -> `TransformerConfig`: config.json (old and transformers-5 layouts) and GGUF headers.

Families: Llama, Mistral, Qwen2 and 2.5, Qwen3, Gemma 3 (text).  What would change the output and is not known here is an
error that names it: nothing is silently left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf

from specjax.models.layers import RopeScaling
from specjax.models.transformer import TransformerConfig

QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28}

DEFAULTS: dict[str, dict[str, Any]] = {  # what a config.json of the family means where it is silent, as in transformers
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": QWEN,
    "qwen3": {**QWEN, "head_dim": 128},
    "gemma3_text": {
        **{"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
        **{"max_position_embeddings": 131_072, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
        **{"query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6, "tie_word_embeddings": True},
    },
}

ACTIVATIONS = {"gemma3_text": ("gelu_pytorch_tanh",)}  # every other family: silu

REFUSED = {  # keys of a config.json that change the output when they are set
    "quantization_config": "a quantised checkpoint",
    "kv_lora_rank": "multi-head latent attention",
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "mlp_bias": "a bias in the feed-forward",
    "attn_logit_softcapping": "soft-capped attention",
    "final_logit_softcapping": "soft-capped logits",
    "use_bidirectional_attention": "attention to later tokens",
}

GGUF_FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")  # Mistral's files call themselves llama


def config_from_hf(config: Mapping[str, Any]) -> TransformerConfig:
    """What a published config.json says, as a `TransformerConfig`.

    Raises ValueError naming what is missing or not supported: family, activation, rotary scaling, quantisation, ...
    """
    inner = config.get("text_config")
    if config.get("model_type") == "gemma3" and inner:
        ties = {k: config[k] for k in ("tie_word_embeddings", "quantization_config") if k in config}
        config = {**ties, "model_type": "gemma3_text", **inner}
    family = _supported(config)
    c = {**DEFAULTS[family], **{key: x for key, x in config.items() if x is not None or key == "sliding_window"}}
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    lacking = [key for key in sizes if c.get(key) is None]
    if lacking:
        raise ValueError(f"config.json of model_type {family!r} lacks {', '.join(lacking)}: is it the whole file?")
    heads, gemma = c["num_attention_heads"], family == "gemma3_text"
    theta, scaling, theta_sliding = _rope(c, gemma)
    window, sliding = _window(c, family)
    return TransformerConfig(
        vocab_size=c["vocab_size"],
        width=c["hidden_size"],
        layers=c["num_hidden_layers"],
        heads=heads,
        kv_heads=_shared(heads, c.get("num_key_value_heads", heads)),
        head_dim=c.get("head_dim") or c["hidden_size"] // heads,
        hidden=c["intermediate_size"],
        max_length=c["max_position_embeddings"],
        norm_eps=c.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        rope_theta_sliding=theta_sliding,
        tied=bool(c.get("tie_word_embeddings", False)),
        attention_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "gemma3_text"),
        post_norms=gemma,
        gelu=gemma,
        embed_scale=c["hidden_size"] ** 0.5 if gemma else 1.0,
        query_scale=c["query_pre_attn_scalar"] ** -0.5 if gemma else None,
        window=window,
        sliding=sliding,
    )


def _supported(config: Mapping[str, Any]) -> str:
    """The family's name, or an error naming what this decoder cannot do."""
    family = config.get("model_type")
    advice = f"specjax reads {', '.join(DEFAULTS)} and gemma3"
    for key, what in REFUSED.items():
        if config.get(key):
            method = config[key].get("quant_method", config[key]) if isinstance(config[key], Mapping) else config[key]
            raise ValueError(f"{what} ({key} = {method!r}) in model_type {family!r} is not supported: {advice} without it")
    if family not in DEFAULTS:
        raise ValueError(f"model_type {family!r} ({config.get('architectures')}) is not supported: {advice}")
    if config.get("attention_bias") and family != "qwen2":
        raise ValueError(
            f"attention_bias = true in model_type {family!r} (a bias on o_proj) is not supported: {advice} without it"
        )
    active, known = config.get("hidden_activation") or config.get("hidden_act"), ACTIVATIONS.get(family, ("silu", "swish"))
    if active is not None and active not in known:
        raise ValueError(f"hidden_act {active!r} in model_type {family!r} is not supported: it must be {known[0]!r}")
    return family


def _rope(c: Mapping[str, Any], gemma: bool) -> tuple[float, RopeScaling | None, float | None]:
    """Rotary base, its scaling, and the base of the sliding layers where they have their own."""
    new = c.get("rope_parameters") or {}
    full = new.get("full_attention", {}) if gemma or "full_attention" in new else new
    full = {"partial_rotary_factor": c.get("partial_rotary_factor"), **(c.get("rope_scaling") or {}), **full}
    local = new.get("sliding_attention") or {}
    if _scaling(local, c["max_position_embeddings"]) is not None:
        raise ValueError(f"rotary scaling {local} on sliding layers is not supported: only full attention may be scaled")
    theta = full.get("rope_theta") or c.get("rope_theta") or 10_000.0
    base = local.get("rope_theta", c.get("rope_local_base_freq") if gemma else None)
    return float(theta), _scaling(full, c["max_position_embeddings"]), None if base is None else float(base)


def _scaling(rope: Mapping[str, Any], max_length: int) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError(f"partial_rotary_factor {rope['partial_rotary_factor']} is not supported: all of head_dim must rotate")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(float(rope["factor"]))
    if kind == "llama3":
        original = rope.get("original_max_position_embeddings") or max_length
        return RopeScaling(
            float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"]), int(original)
        )
    raise ValueError(f"rotary scaling {kind!r} is not supported: specjax knows default, linear and llama3")


def _window(c: Mapping[str, Any], family: str) -> tuple[int | None, tuple[bool, ...]]:
    """Sliding window in tokens, and which layers have it."""
    window, layers = c.get("sliding_window"), range(c["num_hidden_layers"])
    if family == "llama" or window is None or (family in ("qwen2", "qwen3") and not c.get("use_sliding_window")):
        return None, ()
    if family == "mistral":
        return int(window), tuple(True for _ in layers)
    kinds = c.get("layer_types")
    if kinds is not None:
        odd = sorted(set(kinds) - {"sliding_attention", "full_attention"})
        if odd or len(kinds) != len(layers):
            raise ValueError(
                f"layer_types {odd or len(kinds)} do not fit {len(layers)} layers of sliding_attention or full_attention"
            )
        return int(window), tuple(kind == "sliding_attention" for kind in kinds)
    if family == "gemma3_text":
        return int(window), tuple((i + 1) % c["sliding_window_pattern"] != 0 for i in layers)
    return int(window), tuple(i >= c["max_window_layers"] for i in layers)


def _shared(heads: int, kv_heads: int) -> int:
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads evenly: check num_key_value_heads")
    return kv_heads


def config_from_gguf(reader: gguf.GGUFReader) -> TransformerConfig:
    """What a GGUF header (and, for vocabulary, head and long-context factors, its tensor list) says.

    Raises ValueError naming what is missing or not supported.
    """
    arch = header(reader, "general.architecture")
    if arch not in GGUF_FAMILIES:
        raise ValueError(f"GGUF architecture {arch!r} is not supported: specjax reads {', '.join(GGUF_FAMILIES)}")
    if header(reader, f"{arch}.expert_count", 0):
        raise ValueError(f"a mixture of experts in GGUF architecture {arch!r} is not supported: specjax reads dense models")
    width, heads = _number(reader, f"{arch}.embedding_length"), _number(reader, f"{arch}.attention.head_count")
    layers, gemma = _number(reader, f"{arch}.block_count"), arch == "gemma3"
    head_dim = _number(reader, f"{arch}.attention.key_length", 256 if gemma else width // heads)
    shapes = {t.name: tuple(t.shape.tolist()) for t in reader.tensors}
    if "token_embd.weight" not in shapes:
        raise ValueError(f"GGUF of architecture {arch!r} has no tensor token_embd.weight: is it a vocabulary-only file?")
    window, sliding = _gguf_window(reader, layers) if gemma else (None, ())
    # 27B alone departs from head_dim: query_pre_attn_scalar = width / heads, known to readers by its 62 layers (llama.cpp)
    query_size = width // heads if gemma and layers == 62 else head_dim
    return TransformerConfig(
        vocab_size=shapes["token_embd.weight"][1],
        width=width,
        layers=layers,
        heads=heads,
        kv_heads=_shared(heads, _number(reader, f"{arch}.attention.head_count_kv", heads)),
        head_dim=head_dim,
        hidden=_number(reader, f"{arch}.feed_forward_length"),
        max_length=_number(reader, f"{arch}.context_length"),
        norm_eps=header(reader, f"{arch}.attention.layer_norm_rms_epsilon"),
        rope_theta=header(reader, f"{arch}.rope.freq_base", 1_000_000.0 if gemma else 10_000.0),
        rope_scaling=_gguf_scaling(reader, arch, head_dim),
        rope_theta_sliding=header(reader, f"{arch}.rope.freq_base_swa", 10_000.0) if gemma else None,
        tied="output.weight" not in shapes,
        attention_bias=arch == "qwen2",
        qk_norm=arch in ("qwen3", "gemma3"),
        post_norms=gemma,
        gelu=gemma,
        embed_scale=width**0.5 if gemma else 1.0,
        query_scale=query_size**-0.5,
        window=window,
        sliding=sliding,
    )


def header(reader: gguf.GGUFReader, key: str, *default: Any) -> Any:
    """One value of a GGUF header; without a default, ValueError naming the key that is absent."""
    field = reader.get_field(key)
    if field is None and not default:
        raise ValueError(f"GGUF header has no {key}: the file is incomplete or made for another reader")
    return default[0] if field is None else field.contents()


def _number(reader: gguf.GGUFReader, key: str, *default: int) -> int:
    """One int of a GGUF header; a list of one value a layer is accepted when the layers agree."""
    value = header(reader, key, *default)
    values = set(value) if isinstance(value, list) else {value}
    if len(values) != 1:
        raise ValueError(f"GGUF {key} differs between layers ({sorted(values)}): specjax reads models whose layers are alike")
    return int(values.pop())


def _gguf_window(reader: gguf.GGUFReader, layers: int) -> tuple[int | None, tuple[bool, ...]]:
    window = header(reader, "gemma3.attention.sliding_window", None)
    if not window:
        return None, ()
    pattern = header(reader, "gemma3.attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        return int(window), tuple(bool(x) for x in pattern[:layers])
    return int(window), tuple((i + 1) % pattern != 0 for i in range(layers))


def _gguf_scaling(reader: gguf.GGUFReader, arch: str, head_dim: int) -> RopeScaling | None:
    """Linear scaling from the header, or Llama 3's as the factors that the file stores in rope_freqs.weight."""
    rotated = _number(reader, f"{arch}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ValueError(f"GGUF rotates {rotated} of {head_dim} dimensions of a head, which is not supported: all must rotate")
    kind = header(reader, f"{arch}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ValueError(f"GGUF rotary scaling {kind!r} is not supported: specjax knows none, linear and rope_freqs.weight")
    factor = float(header(reader, f"{arch}.rope.scaling.factor", 1.0)) if kind == "linear" else 1.0
    stored = [t for t in reader.tensors if t.name == "rope_freqs.weight"]
    if stored:
        return RopeScaling(
            factor, factors=tuple(float(x) for x in gguf.quants.dequantize(stored[0].data, stored[0].tensor_type))
        )
    return RopeScaling(factor) if factor != 1.0 else None

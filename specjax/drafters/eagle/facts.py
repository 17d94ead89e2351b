"""What a published EAGLE module says of itself, in config.json and by the shapes of its tensors (see `files`)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.drafters import facts
from specjax.drafters.eagle.head import EagleConfig
from specjax.json_text import read_json
from specjax.models.layers import RopeScaling
from specjax.types import LanguageModel

Tensors = dict[str, np.ndarray]
IDS = "eagle_aux_hidden_state_layer_ids"
OUTPUTS = f"eagle_config.{IDS}"
ATTENTION = "layers.0.self_attn"
Q, K, GATE, AFTER = f"{ATTENTION}.q_proj", f"{ATTENTION}.k_proj", "layers.0.mlp.gate_proj", "layers.0.post_attention_layernorm"

LLAMA_3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

MASKS = ("mask_token_id", "pard_token", "ptd_token_id", "pard_token_id")
"""Where publishers say which token's embedding stands for one that is not known."""

P_EAGLE, DEEP = "P-EAGLE, which drafts in one pass (method peagle)", "a module of several layers"
OWN_TO = {"peagle": (P_EAGLE, DEEP)}
"""What is refused of all methods but one."""

REFUSED_TENSORS = {
    r"\.kv_a_proj|\.kv_b_proj|\.q_a_proj": "multi-head latent attention",
    r"\.mlp\.(experts|shared_experts?|router|gate)\.": "a mixture of experts",
    r"^mask_(hidden|embed)": P_EAGLE,
    r"^layers\.[1-9]": DEEP,
    r"^parallel_draft|medusa": "several tokens a pass",
    r"(_scale|_scale_inv|_packed|qweight|qzeros|absmax)$": "a quantised checkpoint",
}

REFUSED_FACTS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("speculators_model_type", lambda x: x == "peagle", P_EAGLE),
    ("speculators_model_type", lambda x: x not in ("eagle3", "peagle"), "another method"),
    ("architectures", lambda x: "PEagle" in str(x), P_EAGLE),
    ("architectures", lambda x: "Deepseek" in str(x), "multi-head latent attention"),
    ("quantization_config", bool, "a quantised checkpoint"),
    ("hidden_act", lambda x: x not in ("silu", "swish"), "another activation"),
    ("use_sliding_window", bool, "a sliding window"),
    ("layer_types", lambda x: "sliding" in str(x), "a sliding window"),
    *((name, lambda x: True, P_EAGLE) for name in MASKS),
    ("parallel_draft_step", lambda x: x != 1, "several tokens a pass"),
    ("use_mtp_layernorm", bool, "norms of a multi-token-prediction module"),
)


def read_facts(path: Path) -> dict[str, Any]:
    """config.json with the objects in it laid flat; layers by their outputs stand under `OUTPUTS`."""
    file = path / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{path}: weights without a config.json: download it too")
    said = read_json(file, "download it again")
    parts = [said] + [said.get(name) or {} for name in ("transformer_layer_config", "eagle_config") if isinstance(said, dict)]
    if not all(isinstance(part, dict) for part in parts):
        raise ValueError(f"{file}: it, transformer_layer_config or eagle_config is no object: download it again")
    outer = {name: x for name, x in parts[0].items() if name != IDS}
    flat = {**outer, **{name: x for part in parts[1:] for name, x in part.items() if name != IDS}}
    flat |= {IDS: parts[0].get(IDS), OUTPUTS: parts[-1].get(IDS) if len(parts) == 3 else None}
    return {name: x for name, x in flat.items() if x is not None}


def refuse(path: Path, said: Mapping[str, Any], tensors: Tensors, method: str) -> None:
    """ValueError, with the reason, for what a method does not support, and for what is no EAGLE module at all."""
    own = OWN_TO.get(method, ())
    found = [(what, n) for pattern, what in REFUSED_TENSORS.items() for n in tensors if re.search(pattern, n)]
    found += [(what, f"{n} {said[n]!r}") for n, bad, what in REFUSED_FACTS if n in said and bad(said[n])]
    faults = [f"{what} ({where})" for what, where in found if what not in own]
    sizes = {"float32", "float16", "bfloat16"}
    maps = ("d2t", "t2d")
    faults += [f"{n} of {x.ndim} dimensions" for n, x in tensors.items() if x.ndim not in (1, 2)]
    faults += [f"{n} in {x.dtype}" for n, x in tensors.items() if n not in maps and x.dtype.name not in sizes]
    if faults:
        known = "EAGLE-1, EAGLE-3 and 3.1 of one Llama-like layer, P-EAGLE of several"
        raise ValueError(f"{path}: {faults[0]} is not supported: specjax reads {known}")
    lacking = [f"{n}.weight" for n in (Q, K, GATE, AFTER) if f"{n}.weight" not in tensors]
    if lacking:
        raise ValueError(f"{path}: no {', '.join(lacking)}: these are not the weights of an EAGLE module")


def fact(path: Path, said: Mapping[str, Any], name: str, kind: facts.Kind, default: Any = None) -> Any:
    """One fact of config.json; ValueError where it is not of its kind."""
    fits, wanted = kind
    if name in said and not fits(said[name]):
        raise ValueError(f"{path / 'config.json'}: {name} {str(said[name])[:40]!r} is not {wanted}: mend it")
    return said.get(name, default)


def config_of(path: Path, said: Mapping[str, Any], tensors: Tensors, target: LanguageModel) -> EagleConfig:
    """What kind of module it is.

    `norm_before_residual` is false where it is not said, as speculators, and vLLM of the other layouts, take it.
    """
    rows, width = (lambda name: tensors[f"{name}.weight"].shape[0]), target.width
    if rows(AFTER) != width:
        raise ValueError(f"{path}: a module of width {rows(AFTER)} != target {width}: train one for this target")
    flag = lambda name, default=False: fact(path, said, name, facts.FLAG, default)
    there = lambda name: f"{name}.weight" in tensors
    wide = tensors[f"{Q}.weight"].shape[-1] != width
    heads, head_dim = heads_of(path, said, tensors)
    theta, scaling, _ = rope_of(path, said, head_dim)
    return EagleConfig(
        width=width,
        heads=heads,
        kv_heads=rows(K) // head_dim,
        head_dim=head_dim,
        hidden=rows(GATE),
        norm_eps=fact(path, said, "rms_norm_eps", facts.NUMBER, 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        attention_bias=any(f"{ATTENTION}.{n}_proj.bias" in tensors for n in "qkv"),
        qk_norm=any(there(f"{ATTENTION}.{n}_norm") for n in "qk"),
        taps=taps_of(path, said, tensors, target) if wide else (),
        wide=wide,
        fc_bias="fc.bias" in tensors,
        fc_norm=there("fc_norm.0") or flag("fc_norm") or flag("use_aux_norm"),
        norm_before_fc=there("input_norm") or flag("norm_before_fc"),
        input_norm=there("layers.0.input_layernorm") or (wide and flag("use_input_layernorm_in_first_layer", True)),
        norm_before_residual=flag("norm_before_residual"),
        output_norm=there("norm") or (wide and flag("use_last_layernorm", True)),
        norm_output=flag("norm_output"),
        # speculators takes the target's rows where there is no head; the others always have one in EAGLE-3
        own_head=there("lm_head") or (wide and "speculators_model_type" not in said),
        layers=1 + max((int(n.split(".")[1]) for n in tensors if re.match(r"layers\.\d+\.", n)), default=0),
        masked="mask_hidden" in tensors or any(name in said for name in MASKS),
    )


def mask_of(path: Path, said: Mapping[str, Any], target: LanguageModel) -> int:
    """The token whose embedding a mask has; ValueError where it is not said, or none of the target's."""
    ids = {fact(path, said, name, facts.TOKEN) for name in MASKS if name in said}
    if len(ids) != 1 or max(ids) >= target.vocab_size:
        found, wanted = sorted(ids) or "nothing", f"one of the target's {target.vocab_size} tokens"
        raise ValueError(f"{path / 'config.json'}: of a mask's token {', '.join(MASKS)} say {found}: {wanted} is needed")
    return ids.pop()


def heads_of(path: Path, said: Mapping[str, Any], tensors: Tensors) -> tuple[int, int]:
    """(heads, head_dim): the norm of q tells, or config.json."""
    q, k = (tensors[f"{name}.weight"].shape[0] for name in (Q, K))
    heads = fact(path, said, "num_attention_heads", facts.WHOLE)
    size = fact(path, said, "head_dim", facts.WHOLE, q // heads if heads else None)
    norm = tensors.get(f"{ATTENTION}.q_norm.weight")
    size = size if norm is None else norm.shape[0]
    if size is None:
        raise ValueError(f"{path / 'config.json'}: neither num_attention_heads nor head_dim: download the whole file")
    if not size or size % 2 or q % size or k % size or q % k or (heads and heads * size != q):
        shapes = f"num_attention_heads {heads} and head_dim {size} do not fit {q} rows of q_proj and {k} of k_proj"
        raise ValueError(f"{path}: {shapes}: weights and config.json of one module are needed")
    return q // size, size


def taps_of(path: Path, said: Mapping[str, Any], tensors: Tensors, target: LanguageModel) -> tuple[int, ...]:
    """The layers whose outputs are read; (): the last hidden state."""
    fc, layers = tensors.get("fc.weight"), target.num_layers
    if fc is None and fact(path, said, "use_aux_hidden_state", facts.FLAG, True) is False:
        return ()
    outputs, states = (fact(path, said, name, facts.IDS) for name in (OUTPUTS, IDS))
    shifted = None if states is None else [i - 1 for i in states]
    if outputs is not None and shifted is not None and outputs != shifted:
        raise ValueError(f"{path}: {OUTPUTS} {outputs} and {IDS} {states}, which counts from 1, disagree: mend config.json")
    taps = shifted if outputs is None else outputs
    if taps is None:
        count = 3 if fc is None else fc.shape[-1] // target.width
        if count != 3:
            raise ValueError(f"{path}: fc reads {count} features, and config.json does not say of which layers: add {IDS}")
        taps = [1, layers // 2 - 1, layers - 4]
    if not taps or min(taps) < 0 or max(taps) >= layers or sorted(set(taps)) != taps:
        raise ValueError(f"{path}: outputs of layers {taps} are read, of a target of {layers}: they must ascend within it")
    return tuple(taps)


def rope_of(path: Path, said: Mapping[str, Any], head_dim: int) -> tuple[float, RopeScaling | None, float]:
    """(rope_theta, scaling, what YaRN multiplies scores with), from either way of writing them."""
    parts = [said.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    if not all(isinstance(part, Mapping) for part in parts):
        raise ValueError(f"{path / 'config.json'}: rope_scaling or rope_parameters is no object: mend it")
    rope = {name: x for name, x in {**said, **parts[0], **parts[1]}.items() if x is not None}
    number = lambda name, default=None: fact(path, rope, name, facts.NUMBER, default)
    kind = parts[1].get("rope_type") or parts[0].get("rope_type") or parts[0].get("type") or "default"
    theta, part = float(number("rope_theta", 10_000.0)), number("partial_rotary_factor", 1)
    known = {"default": (), "linear": ("factor",), "llama3": LLAMA_3, "yarn": ("factor",)}
    if str(kind) not in known or part != 1 or rope.get("truncate") is False:
        raise ValueError(f"{path}: rotary scaling {kind!r} of {part} of a head is not supported: {', '.join(known)} are")
    lacking = [name for name in known[kind] if number(name) is None]
    if lacking or (kind == "yarn" and theta <= 1):
        lacking = lacking or ["a rope_theta above 1"]
        raise ValueError(f"{path / 'config.json'}: rotary scaling {kind!r} without {', '.join(lacking)}: mend it")
    if kind == "yarn":
        return theta, *yarn(number, theta, head_dim)
    return theta, RopeScaling(*(number(name) for name in known[kind])) if known[kind] else None, 1.0


def yarn(number: Callable[..., Any], theta: float, head_dim: int) -> tuple[RopeScaling, float]:
    """YaRN (Peng et al., arXiv 2309.00071) as factors, one a frequency, and what it multiplies scores with.

    Frequencies that turn more than `beta_fast` times within the original context are kept, below `beta_slow` times divided.
    """
    factor, context = number("factor"), number("original_max_position_embeddings") or number("max_position_embeddings", 2048)
    turning = lambda turns: head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))
    low = max(math.floor(turning(number("beta_fast", 32))), 0)
    high = min(math.ceil(turning(number("beta_slow", 1))), head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    size = lambda m: 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0
    both = number("mscale"), number("mscale_all_dim")
    gain = number("attention_factor") or (size(both[0]) / size(both[1]) if all(both) else size(1))
    return RopeScaling(1.0, factors=tuple((1 / (1 - ramp + ramp / factor)).tolist())), gain**2

"""What a published block drafter says of itself, in config.json and by its tensors (see `files`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specjax.drafters import facts
from specjax.drafters.dflash.config import DFlashConfig, spread_taps
from specjax.drafters.dflash.dflash2 import SelectorConfig
from specjax.drafters.dflash.dspark import DSparkConfig
from specjax.drafters.eagle.facts import Tensors, fact, heads_of, mask_of, rope_of
from specjax.json_text import read_json
from specjax.types import LanguageModel

STATES = "aux_hidden_state_layer_ids"

REFUSED_TENSORS = {
    r"^mtp\.": "a drafter within DeepSeek-V4's own files",
    r"\.v_norm\.|layer_scalar|(pre|post)_feedforward_layernorm": "Gemma 4's layer",
    r"\.qkv_proj\.|\.g_proj\.|^aux_hidden_norms": "a layer with gates",
    r"^(prefix_gru|embed_proj)\.": "Domino",
    r"\.mlp\.(experts|shared_experts?|router|gate)\.": "a mixture of experts",
    r"(_scale|_scale_inv|_packed|qweight|qzeros|absmax)$": "a quantised checkpoint",
}

REFUSED_FACTS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("speculators_model_type", lambda x: x not in ("dflash", "dspark", "dflash2"), "another method"),
    ("architectures", lambda x: "Gemma" in str(x), "Gemma 4's layer"),
    ("projector_type", lambda x: x not in ("dflash", "dspark"), "another way to make tokens of a block"),
    ("pure_draft_prefix_len", bool, "a prefix that is drafted otherwise"),
    ("shift_label", bool, "labels that are shifted otherwise"),
    ("use_swa", bool, "a window by another name"),
    ("quantization_config", bool, "a quantised checkpoint"),
    ("hidden_act", lambda x: x not in ("silu", "swish"), "another activation"),
)

OBJECTS = ("transformer_layer_config", "dflash_config")


def read_facts(path: Path) -> dict[str, Any]:
    """config.json with the objects in it laid flat, without what is null: what is said within counts."""
    file = path / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{path}: weights without a config.json: download it too")
    said = read_json(file, "download it again")
    parts = [said, *((said.get(name) or {}) if isinstance(said, dict) else None for name in OBJECTS)]
    if not all(isinstance(part, dict) for part in parts):
        raise ValueError(f"{file}: it, {' or '.join(OBJECTS)} is no object: download it again")
    known = {name: x for part in parts for name, x in part.items() if x is not None and name not in OBJECTS}
    names = said.get("architectures", known.get("architectures"))
    return known if names is None else {**known, "architectures": names}  # of the drafter, not of its layers


def refuse(path: Path, said: Mapping[str, Any], tensors: Tensors) -> None:
    """ValueError, with the reason, for what is known and not supported, and for what is no such drafter at all."""
    found = [f"{what} ({n})" for pattern, what in REFUSED_TENSORS.items() for n in tensors if re.search(pattern, n)]
    found += [f"{what} ({n} {said[n]!r})" for n, bad, what in REFUSED_FACTS if n in said and bad(said[n])]
    floats = {"float32", "float16", "bfloat16"}
    found += [f"{n} in {x.dtype}" for n, x in tensors.items() if n not in ("d2t", "t2d") and x.dtype.name not in floats]
    if found:
        raise ValueError(f"{path}: {found[0]} is not supported: specjax reads DFlash, DSpark and DFlash 2 of Qwen3-like layers")
    lacking = [n for n in ("fc.weight", "hidden_norm.weight", *NEEDED) if n not in tensors or tensors[n].ndim > 2]
    if lacking:
        raise ValueError(f"{path}: no {', '.join(lacking)}: these are not the weights of a block drafter")


NEEDED = tuple(f"layers.0.{name}.weight" for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj"))


def method_of(tensors: Tensors) -> str:
    """The method that the tensors are of."""
    if any(n.startswith("candidate_selector.") for n in tensors):
        return "dflash2"
    return "dspark" if any(n.startswith(("markov_head.", "confidence_head.")) for n in tensors) else "dflash"


def config_of(
    path: Path, said: Mapping[str, Any], tensors: Tensors, lm: Any, method: str, anchor_first: bool | None
) -> DFlashConfig:  # fmt: skip
    """What kind of backbone it is."""
    target, rows = lm.model, lambda name: tensors[f"layers.0.{name}.weight"].shape[0]
    if tensors["hidden_norm.weight"].shape[0] != target.width:
        width = tensors["hidden_norm.weight"].shape[0]
        raise ValueError(f"{path}: a module of width {width} != target {target.width}: train one for this target")
    heads, head_dim = heads_of(path, said, tensors)
    theta, scaling, _ = rope_of(path, said, head_dim)
    layers = 1 + max(int(found[1]) for n in tensors if (found := re.match(r"layers\.(\d+)\.", n)))
    sliding, window = windows_of(path, said, layers)
    number = lambda name, default: float(fact(path, said, name, facts.NUMBER, default))
    kernel = tensors.get("layers.0.attention_conv.base_kernel")
    group = fact(path, said, "conv_group_size", facts.WHOLE, 16)
    if kernel is not None and (kernel.ndim != 3 or target.width % group):
        raise ValueError(f"{path}: conv_group_size {group} does not fit base_kernel {list(kernel.shape)}: mend config.json")
    return DFlashConfig(
        width=target.width,
        heads=heads,
        kv_heads=rows("self_attn.k_proj") // head_dim,
        head_dim=head_dim,
        hidden=rows("mlp.gate_proj"),
        taps=taps_of(path, said, tensors, target, layers),
        mask_token=mask_of(path, said, target),
        norm_eps=fact(path, said, "rms_norm_eps", facts.NUMBER, 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        attention_bias=any(f"layers.0.self_attn.{n}_proj.bias" in tensors for n in "qkv"),
        qk_norm=any(f"layers.0.self_attn.{n}_norm.weight" in tensors for n in "qk"),
        layers=layers,
        sliding=sliding,
        window=window,
        causal=causal_of(path, said),
        anchor_first=anchor_of(path, said, method, anchor_first),
        embedding_scale=number("input_embedding_scale", 1.0) / getattr(lm.config, "embed_scale", 1.0),
        output_multiplier=number("output_multiplier", 1.0),
        softcap=fact(path, {n: x for n, x in said.items() if x != 0}, "final_logit_softcapping", facts.NUMBER),
        conv_taps=0 if kernel is None else kernel.shape[1],
        conv_group=group,
    )


def taps_of(
    path: Path, said: Mapping[str, Any], tensors: Tensors, target: LanguageModel, layers: int
) -> tuple[int, ...]:  # fmt: skip
    """The layers of the target that are read: by their numbers, by speculators' indices of states, or DFlash's rule."""
    count, has = tensors["fc.weight"].shape[-1] // target.width, fact(path, said, "num_target_layers", facts.WHOLE)
    if has not in (None, target.num_layers):
        raise ValueError(f"{path}: made for a target of {has} layers != {target.num_layers}: train one for this target")
    outputs, states = (fact(path, said, name, facts.IDS) for name in ("target_layer_ids", STATES))
    shifted = None if states is None else [i - 1 for i in states]
    if outputs is not None and shifted is not None and outputs != shifted:
        raise ValueError(f"{path}: target_layer_ids {outputs} and {STATES} {states}, which counts from 1, disagree: mend it")
    taps = shifted if outputs is None else outputs
    taps = list(spread_taps(target.num_layers, layers)) if taps is None else taps
    if len(taps) != count or min(taps) < 0 or max(taps) >= target.num_layers:
        raise ValueError(
            f"{path}: layers {taps} of a target of {target.num_layers}, and {count} features that fc reads: mend config.json"
        )
    return tuple(taps)


def windows_of(path: Path, said: Mapping[str, Any], layers: int) -> tuple[tuple[bool, ...], int | None]:
    """(which layers see a window only, its size)."""
    kinds = said.get("layer_types", ["full_attention"] * layers)
    known = {"full_attention": False, "sliding_attention": True}
    if not isinstance(kinds, list) or len(kinds) != layers or not all(x in known for x in kinds):
        raise ValueError(f"{path}: layer_types {str(kinds)[:60]} are not one of {', '.join(known)} for each of {layers} layers")
    if "sliding_attention" not in kinds:
        return (), None
    window = fact(path, said, "sliding_window", facts.WHOLE)
    if window is None:
        raise ValueError(f"{path / 'config.json'}: layers slide, and no sliding_window: add it")
    return tuple(known[x] for x in kinds), window


def causal_of(path: Path, said: Mapping[str, Any]) -> bool | None:
    """Whether rows see none after them; None: those of layers that slide do not."""
    flags = {name: fact(path, said, name, facts.FLAG) for name in ("is_causal", "causal")}
    if fact(path, said, "sliding_window_non_causal", facts.FLAG, False):
        flags["sliding_window_non_causal"] = False
    found = {x for x in flags.values() if x is not None}
    if len(found) > 1:
        raise ValueError(f"{path / 'config.json'}: {flags} disagree whether a block is causal: mend it")
    return found.pop() if found else None


def anchor_of(path: Path, said: Mapping[str, Any], method: str, asked: bool | None) -> bool:
    """Whether the anchor's row predicts too: speculators say it, the others do not, and DFlash is published either way."""
    usual = {"dspark": True, "dflash2": False}.get(method)
    found = fact(path, said, "sample_from_anchor", facts.FLAG, usual)
    found = False if found is None and "speculators_model_type" in said else found  # its default
    if found is None and asked is None:
        raise ValueError(
            f"{path}: config.json does not say whether the anchor's row predicts: give anchor_first=false (z-lab, SpecForge) or"
            " anchor_first=true (DeepSpec)"
        )
    if found is not None and asked is not None and found != asked:
        raise ValueError(f"{path}: anchor_first={str(asked).lower()}, and it is {str(found).lower()}: leave the option out")
    return bool(asked if found is None else found)


def heads_facts(path: Path, said: Mapping[str, Any], tensors: Tensors, width: int) -> DSparkConfig:
    """What kind of heads a DSpark drafter has."""
    lookup, sure = tensors.get("markov_head.markov_w1.weight"), tensors.get("confidence_head.proj.weight")
    if lookup is None or lookup.ndim != 2:
        raise ValueError(f"{path}: no markov_head.markov_w1.weight: a DSpark drafter without its Markov head is not supported")
    kind = "gated" if any("gate_proj" in n and n.startswith("markov_head.") for n in tensors) else "vanilla"
    kind = "rnn" if any(n.startswith("markov_head.joint_proj") for n in tensors) else kind
    named = str(said.get("markov_head_type", kind)).lower()
    if named != kind:
        raise ValueError(
            f"{path}: markov_head_type {named!r}, and tensors of {kind!r}: weights and config.json of one are needed"
        )
    return DSparkConfig(lookup.shape[1], kind, sure is not None, sure is None or sure.shape[-1] != width)


def selector_facts(path: Path, said: Mapping[str, Any], tensors: Tensors) -> SelectorConfig:
    """What kind of selector a DFlash 2 drafter has."""
    book = tensors.get("candidate_selector.predecessor_codebook.weight")
    if book is None or book.ndim != 2:
        raise ValueError(f"{path}: no candidate_selector.predecessor_codebook: download it again")
    count = fact(path, said, "selector_top_k", facts.WHOLE)
    if count is None:
        raise ValueError(f"{path / 'config.json'}: no selector_top_k: add it")
    return SelectorConfig(book.shape[1], count)

r"""EAGLE modules as they are published -> ours, and ours -> speculators' layout.

    SafeAILab    EAGLE-1 layers.0.*, EAGLE-3 midlayer.*; pytorch_model.bin        taps never said: the default
    SpecForge    midlayer.*; safetensors                                          eagle_config, numbered as ModelOpt's
    ModelOpt     layers.0.*; eagle_config                                         number of the layer whose output is read
    speculators  layers.0.*; speculators_model_type, transformer_layer_config     that number + 1: an index of hidden_states

Whatever tensors can tell is taken from them; config.json is asked for the rest.  The embedding is the target's own in all
of these: one in the file must be its copy, but of P-EAGLE, which trains it.  There one of its rows, mask_token_id (vLLM:
pard_token, ptd_token_id), is the mask's.  Offsets d2t, and t2d beside them, give the draft vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from specjax.drafters import facts, files
from specjax.drafters.eagle import head
from specjax.drafters.eagle.facts import (
    ATTENTION,
    IDS,
    Tensors,
    config_of,
    fact,
    mask_of,
    read_facts,
    refuse,
    rope_of,
)
from specjax.drafters.eagle.head import EagleConfig
from specjax.drafters.eagle.naming import MASK, join, split
from specjax.drafters.vocabulary import Ids, check, draft_size, offsets, seen_by
from specjax.types import LanguageModel


class Published(NamedTuple):
    """A module ready to be built."""

    config: EagleConfig
    vocabulary: Ids | None
    params: dict[str, Any]


LEFT_OUT = re.compile(r"(^|\.)inv_freq$|^verifier_(norm|lm_head)\.weight$")  # buffers, and copies that only training reads


def weight_files(path: Path) -> list[Path]:
    """The files of a published module in the directory `path`; none where `files.save` wrote it."""
    if not path.is_dir() or (path / files.WEIGHTS).is_file():
        return []
    return sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))


def read(path: Path, lm: Any, method: str) -> Published:
    """The module in the directory `path`, for the target `lm`.

    Raises:
      ValueError: a variant that is not supported; another method's; tensors that are missing, mis-shaped or not used; facts
        that contradict them or one another; an embedding that is not the target's.
      FileNotFoundError: no config.json.
    """
    said, tensors = read_facts(path), read_tensors(path)
    refuse(path, said, tensors, method)
    ids, order = vocabulary_of(path, tensors, said, lm.model)
    config = config_of(path, said, tensors, lm.model)
    if config.masked:
        config = with_mask(tensors, mask_of(path, said, lm.model), lm, config)
    elif "embed_tokens.weight" in tensors:
        check_embedding(path, tensors.pop("embed_tokens.weight"), lm, config)
    for name in [n for n, x in tensors.items() if n.endswith("self_attn.o_proj.bias") and not x.any()]:
        del tensors[name]  # what a config with attention_bias makes of one that has none
    tree = head.like(config, draft_size(lm.model, ids), lm.model.vocab_size)
    blank = lambda x: np.broadcast_to(np.float32(0), x.shape)
    parts = {own: split(config, own, blank(x)) for own, x in files.flat(tree).items()}
    files.check_tensors(path, {name: x.shape for part in parts.values() for name, x in part.items()}, tensors)
    tensors |= sharpened(tensors, rope_of(path, said, config.head_dim)[2])
    if config.own_head:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    leaves = [join(config, own, [tensors[name] for name in part]) for own, part in parts.items()]
    found = "eagle1" if not config.wide else "eagle3.1" if config.fc_norm or config.norm_output else "eagle3"
    found = "peagle" if config.masked else found
    if found != method:
        raise ValueError(f"{path} holds a drafter of method {found!r} != {method!r}: load it as what it is")
    return Published(config, ids, jax.tree.unflatten(jax.tree.structure(tree), [jnp.asarray(x) for x in leaves]))


def read_tensors(path: Path) -> Tensors:
    """Tensors of all files by speculators' names."""
    found: Tensors = {}
    for file in weight_files(path):
        for name, x in files.read_tensors(file).items():
            plain = re.sub(r"^midlayer\.", "layers.0.", re.sub(r"^model\.", "", name))
            if plain in found:
                raise ValueError(f"{file}: a second {plain}: remove the files that do not belong to the module")
            if not LEFT_OUT.search(plain):
                found[plain] = x.ravel() if plain == "mask_hidden" else x
    return found


def vocabulary_of(
    path: Path, tensors: Tensors, said: Mapping[str, Any], target: LanguageModel
) -> tuple[Ids | None, Any]:  # fmt: skip
    """(the ids that are drafted, ascending; the head's rows in that order), from d2t, or else t2d, which are taken out."""
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    size = fact(path, said, "vocab_size", facts.WHOLE, target.vocab_size)
    size = size if t2d is None else t2d.shape[0] if t2d.ndim == 1 else -1
    if size != target.vocab_size:
        raise ValueError(f"{path}: made for a target of vocab_size {size} != {target.vocab_size}: train one for this target")
    drafted = None if t2d is None else np.flatnonzero(t2d)
    ids = drafted if d2t is None else np.ravel(d2t).astype(np.int64) + np.arange(d2t.size)
    if ids is None:
        return None, slice(None)
    order = np.argsort(ids, kind="stable")
    found = tuple(ids[order].tolist())
    try:
        check(found, target.vocab_size)
    except ValueError as error:
        raise ValueError(f"{path}: d2t: {error}: download it again") from None
    if drafted is not None and drafted.tolist() != list(found):
        raise ValueError(f"{path}: t2d has {len(drafted)} ids and not the {len(found)} of d2t: download it again")
    return (None if len(found) == target.vocab_size else found), order


def check_embedding(path: Path, theirs: np.ndarray, lm: Any, config: EagleConfig) -> None:
    """ValueError for an embedding that is not the target's."""
    shape = [lm.model.vocab_size, lm.model.width]
    if list(theirs.shape) != shape or not same_rows(theirs, lm, config).all():
        raise ValueError(f"{path}: embed_tokens.weight {list(theirs.shape)} is not the target's embedding {shape}:"
                         " a drafter with an embedding of its own is not supported")  # fmt: skip


def same_rows(theirs: np.ndarray, lm: Any, config: EagleConfig) -> np.ndarray:
    """Which rows [V] of an embedding are the target's: within rounding, and where a norm follows, to a factor."""
    factor = np.float32(1 if config.wide and config.input_norm else getattr(lm.config, "embed_scale", 1.0))
    near = np.isclose(theirs.astype(np.float32), embedding(lm) * factor, rtol=2.0**-7, atol=1e-6)  # two roundings to bfloat16
    return near.min(-1)


def with_mask(tensors: Tensors, mask: int, lm: Any, config: EagleConfig) -> EagleConfig:
    """The config of a module with a mask, whose row is set apart; the other rows are left out if they are the target's."""
    theirs = tensors.get("embed_tokens.weight", embedding(lm))
    if theirs.shape != (lm.model.vocab_size, lm.model.width):
        return config._replace(own_embedding=True)  # which does not fit: `check_tensors` says so
    tensors[MASK] = theirs[mask]
    if np.delete(same_rows(theirs, lm, config), mask).all():
        tensors.pop("embed_tokens.weight", None)
        return config
    return config._replace(own_embedding=True)


def embedding(lm: Any) -> np.ndarray:
    """The target's, [V, D], as it is published: before any scale."""
    every = lm.model.embed(lm.params, jnp.arange(lm.model.vocab_size))
    return np.asarray(every, np.float32) / np.float32(getattr(lm.config, "embed_scale", 1.0))


def sharpened(tensors: Tensors, gain: float) -> Tensors:
    """What makes queries, in float32: with YaRN's factor on scores folded in."""
    kind = "q_norm" if f"{ATTENTION}.q_norm.weight" in tensors else "q_proj"
    names = [n for n in tensors if f".self_attn.{kind}." in n and gain != 1]
    return {n: tensors[n].astype(np.float32) * np.float32(gain) for n in names}


def save_speculators(
    directory: str | Path, params: Mapping[str, Any], config: EagleConfig, lm: Any, *, vocabulary: Ids | None = None,
    num_draft: int = 3, verifier: str | None = None, mask_token: int | None = None,
) -> None:  # fmt: skip
    """Write an EAGLE-3, 3.1 or P-EAGLE module so that speculators, and vLLM through it, can load it; `read` gives it back.

    What is the target's, its embedding and the columns of a shared vocabulary head, is written out: where they are missing,
    speculators 0.9 beside transformers 5.24 takes random ones.

    Args:
      directory: where; made if need be.
      params: the module's.
      config: its facts.
      lm: the target.
      vocabulary: the ids that are drafted; all unless given.
      num_draft: K, which the file suggests to its readers.
      verifier: the target's name or path as readers will find it.
      mask_token: of P-EAGLE, the token whose row of the embedding becomes the mask's: one that no text has.

    Raises:
      ValueError: a module that the layout cannot hold.
    """
    layer, kind = layer_facts(config, lm), "peagle" if config.masked else "eagle3"
    if config.masked != (mask_token is not None) or not 0 <= (mask_token or 0) < lm.model.vocab_size:
        wanted = f"one of the target's {lm.model.vocab_size} tokens" if config.masked else "None: it has no mask"
        raise ValueError(f"mask_token {mask_token} of a module of kind {kind}: give {wanted}")
    tensors = {
        name: x for path, leaf in files.flat(params).items() for name, x in split(config, path, np.asarray(leaf)).items()
    }
    if not config.own_head:
        source = seen_by(lm.model, vocabulary)
        tensors["lm_head.weight"] = np.asarray(source.unembed(lm.params, jnp.eye(config.width))).T
    rows = tensors.get("embed_tokens.weight", embedding(lm)).astype(tensors[f"{ATTENTION}.o_proj.weight"].dtype)
    if mask_token is not None:
        rows[mask_token] = tensors.pop(MASK)
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
    tensors["embed_tokens.weight"] = rows
    for i in range(config.layers if config.attention_bias else 0):
        tensors[f"layers.{i}.self_attn.o_proj.bias"] = np.zeros(config.width, np.float32)
    if vocabulary is not None:
        tensors |= {"d2t": offsets(vocabulary), "t2d": np.isin(np.arange(lm.model.vocab_size), vocabulary)}
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_draft, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    said = {
        "architectures": ["PEagleDraftModel" if config.masked else "Eagle3DraftModel"],
        "speculators_model_type": kind,
        **({"mask_token_id": mask_token} if config.masked else {}),
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": draft_size(lm.model, vocabulary),
        IDS: [i + 1 for i in config.taps],
        **{name: getattr(config, name) for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")},
        "embed_requires_grad": config.own_embedding,
        "tie_word_embeddings": False,
    }
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: np.array(x, order="C") for name, x in tensors.items()}, directory / "model.safetensors", {"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)
    (directory / "config.json").write_text(json.dumps(said, indent=1) + "\n", "utf-8")


def layer_facts(config: EagleConfig, lm: Any) -> dict[str, Any]:
    """transformer_layer_config of a module; ValueError for what the layout has no word for."""
    fixed = {"wide": True, "fc_bias": False, "input_norm": True, "output_norm": True}
    scaling, c = config.rope_scaling, config
    faults = [f"{name} {getattr(c, name)}" for name, x in fixed.items() if getattr(c, name) != x]
    faults += [f"features of {len(c.taps)} layers"] if len(c.taps) < 2 else []
    faults += [f"{c.layers} layers of a module without a mask"] if c.layers > 1 and not c.masked else []
    faults += ["an embedding of its own beside no mask"] if c.own_embedding and not c.masked else []
    faults += ["fc_norm beside norm_before_fc"] if c.fc_norm and c.norm_before_fc else []
    faults += ["rotary scaling by given factors"] if scaling is not None and scaling.factors is not None else []
    if faults:
        raise ValueError(f"{', '.join(faults)}: speculators' layout cannot hold it; keep the module as files.save writes it")
    rope = None if scaling is None else {"rope_type": "linear", "factor": scaling.factor}
    if scaling is not None and scaling.original is not None:
        rope = {"rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low}
        rope |= {"high_freq_factor": scaling.high, "original_max_position_embeddings": scaling.original}
    return {
        "model_type": "qwen3" if c.qk_norm else "llama",
        "vocab_size": lm.model.vocab_size,
        "hidden_size": c.width,
        "intermediate_size": c.hidden,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": lm.model.max_length,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": rope,
        "attention_bias": c.attention_bias,
        "tie_word_embeddings": False,
    }

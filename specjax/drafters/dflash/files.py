r"""Block drafters as they are published -> ours.

    z-lab, SpecForge   DFlash and DFlash 2: no embedding, no head; dflash_config            anchor's row: predicts nothing
    SpecForge          DSpark: heads in dflash_config, once under logit_head.*              predicts too
    DeepSpec           DSpark, and DFlash of the same code: copies of embedding and head    predicts too
    speculators        any: transformer_layer_config, a draft vocabulary by d2t             sample_from_anchor says it

Whatever tensors can tell is taken from them; config.json is asked for the rest.  No config of a DFlash in the first three
layouts says whether its anchor's row predicts, and read the wrong way it drafts next to nothing that is accepted: it is asked
for.  Embedding and head are the target's own: those in the file must be its copies.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters import facts, files
from specjax.drafters.dflash import dflash2, dspark, start
from specjax.drafters.dflash.config import DFlashConfig, block_rows, saved_config
from specjax.drafters.dflash.dflash2 import SelectorConfig
from specjax.drafters.dflash.dspark import DSparkConfig
from specjax.drafters.dflash.facts import config_of, heads_facts, method_of, read_facts, refuse, selector_facts
from specjax.drafters.dflash.naming import join, split
from specjax.drafters.eagle.facts import Tensors, fact, rope_of
from specjax.drafters.eagle.files import LEFT_OUT, embedding, vocabulary_of, weight_files
from specjax.drafters.vocabulary import Ids, seen_by
from specjax.types import LanguageModel


class Module(NamedTuple):
    """A block drafter ready to be built."""

    config: DFlashConfig
    head: DSparkConfig | SelectorConfig | None  # what its method has beside the backbone
    vocabulary: Ids | None
    params: dict[str, Any]
    most: int | None  # tokens of a block that it was trained with; None: nobody says


def read(path: Path, lm: Any, method: str, *, anchor_first: bool | None = None) -> Module:
    """The drafter in the directory `path`, of either kind, for the target `lm`.

    Raises:
      ValueError: a variant that is not supported; another method's; tensors that are missing, mis-shaped or not used; facts
        that contradict them, or that nobody says; an embedding or a head that is not the target's.
      FileNotFoundError: no config.json.
    """
    return read_published(path, lm, method, anchor_first) if weight_files(path) else read_saved(path, lm, method, anchor_first)


def read_saved(path: Path, lm: Any, method: str, anchor_first: bool | None) -> Module:
    """One that `files.save` wrote."""
    saved = files.read_config(path, method, lm.model)
    config, kind = saved_config(saved), {"dspark": DSparkConfig, "dflash2": SelectorConfig}.get(method)
    if config.width != lm.model.width:
        raise ValueError(f"{path}: a module of width {config.width} != target {lm.model.width}: train one for this target")
    if anchor_first not in (None, config.anchor_first):
        raise ValueError(
            f"{path}: anchor_first={str(anchor_first).lower()}, and it was trained otherwise: leave the option out"
        )
    head = None if kind is None else kind(**{n: saved[n] for n in kind._fields if n in saved})
    ids = None if saved.get("vocabulary") is None else tuple(saved["vocabulary"])
    params = files.read_params(path, lambda shapes: like(lm.model, config, head, ids))
    return Module(config, head, ids, params, saved.get("num_draft"))


def like(target: LanguageModel, config: DFlashConfig, head: Any, ids: Ids | None) -> dict[str, Any]:
    """Shapes of a drafter's parameters."""
    shapes = files.shapes(functools.partial(start.module_init, config))
    if isinstance(head, DSparkConfig):
        module = dspark.heads_of(target, head, ids)
        return {**shapes, "heads": files.shapes(functools.partial(dspark.module_init, module, config))}
    if isinstance(head, SelectorConfig):
        module = dflash2.selector_of(target, head, ids)
        return {**shapes, "selector": files.shapes(functools.partial(dflash2.module_init, module, config))}
    return shapes


def read_published(path: Path, lm: Any, method: str, anchor_first: bool | None) -> Module:
    """One of the layouts above."""
    said, tensors = read_facts(path), read_tensors(path)
    refuse(path, said, tensors)
    if method_of(tensors) != method:
        raise ValueError(f"{path} holds a drafter of method {method_of(tensors)!r} != {method!r}: load it as what it is")
    ids, order = vocabulary_of(path, tensors, said, lm.model)
    config = config_of(path, said, tensors, lm, method, anchor_first)
    head = heads_facts(path, said, tensors, config.width) if method == "dspark" else None
    head = selector_facts(path, said, tensors) if method == "dflash2" else head
    check_copies(path, tensors, lm, ids, order)
    for name in [n for n, x in tensors.items() if n.endswith("self_attn.o_proj.bias") and not x.any()]:
        del tensors[name]  # what a config with attention_bias makes of one that has none
    tree, markov = like(lm.model, config, head, ids), head.markov if isinstance(head, DSparkConfig) else ""
    blank = lambda x: np.broadcast_to(np.float32(0), x.shape)
    parts = {own: split(config, markov, own, blank(x)) for own, x in files.flat(tree).items()}
    files.check_tensors(path, {name: x.shape for part in parts.values() for name, x in part.items()}, tensors)
    tensors |= sharpened(tensors, rope_of(path, said, config.head_dim)[2])
    tensors |= {n: tensors[n][order] for n in ORDERED if n in tensors}
    leaves = [join(config, own, [tensors[name] for name in part]) for own, part in parts.items()]
    params = jax.tree.unflatten(jax.tree.structure(tree), [jnp.asarray(x) for x in leaves])
    return Module(config, head, ids, params, block_of(path, said, config))


ORDERED = ("markov_head.markov_w2.weight", "candidate_selector.successor_codebook.weight")
"""Tables with a row for each id that is drafted."""


def block_of(path: Path, said: Mapping[str, Any], config: DFlashConfig) -> int | None:
    """Tokens of a block that the drafter was trained with."""
    rows = fact(path, said, "block_size", facts.WHOLE)
    return None if rows is None else rows - block_rows(config, 0)


def read_tensors(path: Path) -> Tensors:
    """Tensors of all files, by the names of the newest code."""
    found: Tensors = {}
    for file in weight_files(path):
        for name, x in files.read_tensors(file).items():
            plain = re.sub(r"^(model|logit_head)\.", "", name)
            plain = re.sub(r"(_codebook)$", r"\1.weight", plain)
            if plain in found:
                raise ValueError(f"{file}: a second {plain}: remove the files that do not belong to the module")
            if not LEFT_OUT.search(plain):
                found[plain] = x
    return found


def check_copies(path: Path, tensors: Tensors, lm: Any, ids: Ids | None, order: Any) -> None:
    """ValueError for an embedding or a vocabulary head that is not the target's, within rounding; both are taken out."""
    source = seen_by(lm.model, ids)
    own = {
        "embed_tokens.weight": (lambda: embedding(lm), slice(None)),
        "lm_head.weight": (lambda: np.asarray(source.unembed(lm.params, jnp.eye(lm.model.width))).T, order),
    }
    for name, (make, rows) in own.items():
        if name in tensors:
            theirs, ours = tensors.pop(name), make()
            same = theirs.shape == ours.shape and np.allclose(theirs[rows].astype(np.float32), ours, rtol=2.0**-7, atol=1e-6)
            if not same:  # two roundings to bfloat16 lie within 2**-7
                raise ValueError(
                    f"{path}: {name} {list(theirs.shape)} is not the target's {list(ours.shape)}: a drafter with one of its own"
                    " is not supported"
                )


def sharpened(tensors: Tensors, gain: float) -> Tensors:
    """What makes queries of, in float32: with YaRN's factor on scores folded in."""
    if gain == 1:
        return {}
    normed = any(n.endswith("self_attn.q_norm.weight") for n in tensors)
    last = ("q_norm.weight",) if normed else ("q_proj.weight", "q_proj.bias")
    return {n: x.astype(np.float32) * np.float32(gain) for n, x in tensors.items() if n.endswith(last)}

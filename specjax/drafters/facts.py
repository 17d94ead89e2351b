"""Is config.json of a saved drafter what a loader may take it for?  It is edited by hand, and its numbers become shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from specjax.models.layers import RopeScaling
from specjax.types import LanguageModel


def is_whole(x: Any, least: int = 1) -> bool:
    """A whole number from `least` on that an array index can hold; true and false are none."""
    return isinstance(x, int) and not isinstance(x, bool) and least <= x < 1 << 31


def is_number(x: Any, above: float = 0.0) -> bool:
    """A finite number above `above`; true and false are none."""
    return isinstance(x, int | float) and not isinstance(x, bool) and above < x < math.inf


def are_ids(x: Any) -> bool:
    """A list of whole numbers from 0."""
    return isinstance(x, list) and all(is_whole(i, 0) for i in x)


def is_scaling(x: Any) -> bool:
    """The fields of a RopeScaling, in their order."""
    if x is None:
        return True
    if not isinstance(x, list) or not 1 <= len(x) <= len(RopeScaling._fields) or not is_number(x[0]):
        return False
    *numbers, factors = [*x[1:], *[None] * (len(RopeScaling._fields) - len(x))]
    rule = all(map(is_number, numbers)) or all(n is None for n in numbers)
    return rule and (factors is None or (isinstance(factors, list) and all(map(is_number, factors))))


Kind = tuple[Callable[[Any], bool], str]
WHOLE: Kind = is_whole, "a whole number from 1"
NUMBER: Kind = is_number, "a number above 0"
FLAG: Kind = lambda x: isinstance(x, bool), "true or false"
TOKEN: Kind = lambda x: is_whole(x, 0), "a whole number from 0"
IDS: Kind = are_ids, "a list of whole numbers from 0"

KINDS: dict[str, Kind] = {
    **dict.fromkeys(("width", "heads", "kv_heads", "head_dim", "hidden", "num_draft", "vocab_size", "layers"), WHOLE),
    **dict.fromkeys(("norm_eps", "rope_theta"), NUMBER),
    **dict.fromkeys(("attention_bias", "qk_norm", "embedding_first", "recycle_normed"), FLAG),
    **dict.fromkeys(("wide", "fc_bias", "fc_norm", "norm_before_fc", "input_norm", "norm_before_residual"), FLAG),
    **dict.fromkeys(("output_norm", "norm_output", "own_head", "masked", "own_embedding"), FLAG),
    **dict.fromkeys(("mask_token", "conv_taps"), TOKEN),
    **dict.fromkeys(("conv_group", "rank", "top_k"), WHOLE),
    **dict.fromkeys(("embedding_scale", "output_multiplier"), NUMBER),
    **dict.fromkeys(("anchor_first", "confidence", "confidence_markov"), FLAG),
    "causal": (lambda x: x is None or isinstance(x, bool), "true, false or null"),
    "window": (lambda x: x is None or is_whole(x), "a whole number from 1, or null"),
    "softcap": (lambda x: x is None or is_number(x), "a number above 0, or null"),
    "sliding": (lambda x: isinstance(x, list) and all(isinstance(i, bool) for i in x), "a list of true and false"),
    "markov": (lambda x: isinstance(x, str), "text"),
    "rope_scaling": (is_scaling, "null, or a list of a factor, three numbers or nulls, and a list of numbers or null"),
    "taps": IDS,
    "vocabulary": (lambda x: x is None or (are_ids(x) and x != []), "a list of token ids"),
    "tree": (lambda x: x is None or (isinstance(x, list) and all(map(are_ids, x))), "a list of rank paths"),
    "prefix": (lambda x: x is None or isinstance(x, bool | dict), "true, false or an object"),
}
"""What the facts that loaders read must be; others are for people."""


def check(source: Any, config: Any, target: LanguageModel | None = None) -> dict[str, Any]:
    """A drafter's config, without what is null and means nothing.

    Args:
      source: where it lies, for messages.
      config: what JSON gave.
      target: what it is loaded for; None: it is not known.

    Raises:
      ValueError: it is no object, a fact is not what it must be, or it was made for a target of another size.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"{source}: a {type(config).__name__} and no object: save the drafter again")
    for name, value in config.items():
        fits, wanted = KINDS.get(name, (lambda x: True, ""))
        if not fits(value):
            raise ValueError(f"{source}: {name} {str(value)[:40]!r} is not {wanted}: mend it, or save the drafter again")
    if isinstance(config.get("prefix"), Mapping):
        check(f"{source}, prefix", config["prefix"])
    for name, own in {} if target is None else {"vocab_size": target.vocab_size, "width": target.width}.items():
        if config.get(name, own) != own:
            raise ValueError(f"{source}: made for a target of {name} {config[name]} != {own}: train one for this target")
    empty = ("vocabulary", "tree", "prefix")
    return {name: value for name, value in config.items() if value is not None or name not in empty}

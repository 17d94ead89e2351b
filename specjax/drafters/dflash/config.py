"""Facts of a block drafter's backbone, and where they come from: the target's config, or a saved one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from specjax.drafters.layer import LayerConfig, config_of
from specjax.models.layers import RopeScaling


class DFlashConfig(NamedTuple):
    """Facts of a backbone.  Names are those of the target's config where that has the fact."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    taps: tuple[int, ...]  # layers of the target whose outputs are the features
    mask_token: int  # whose embedding, the target's, stands in every row but the anchor's; any id will do
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    qk_norm: bool = True
    layers: int = 5
    sliding: tuple[bool, ...] = ()  # which layers see a window only; () = none
    window: int | None = None  # in tokens
    causal: bool | None = None  # whether a row sees later rows of its block; None: only in layers that do not slide
    anchor_first: bool = False  # the anchor's row predicts too
    embedding_scale: float = 1.0  # of the target's embeddings
    output_multiplier: float = 1.0  # of logits
    softcap: float | None = None  # c of c tanh(logits / c), after the multiplier
    conv_taps: int = 0  # rows of the convolutions; 0: there are none
    conv_group: int = 16  # channels that share what is added to a kernel


def default_taps(layers: int, count: int = 5) -> tuple[int, ...]:
    """The layers that are read: `count` of them from 1 to L - 3, evenly, or the last ones where the target is shallow.

    >>> default_taps(36), default_taps(30), default_taps(4)
    ((1, 9, 17, 25, 33), (1, 8, 14, 20, 27), (0, 1, 2, 3))
    """
    if layers < count + 3:
        return tuple(range(max(layers - count, 0), layers))
    return spread_taps(layers, count)


def spread_taps(layers: int, count: int) -> tuple[int, ...]:
    """DFlash's rule for the layers that are read."""
    if count == 1:
        return (layers // 2,)
    return tuple(round(1 + i * (layers - 4) / (count - 1)) for i in range(count))


def dflash_config(target_config: Any, **flags) -> DFlashConfig:
    """DFlash's backbone, of 5 layers like the target's, or half as many as it has; `flags` replace fields.

    Raises:
      ValueError: a backbone that cannot be.
    """
    layer = config_of(target_config, **{n: x for n, x in flags.items() if n in LayerConfig._fields})
    rest: dict[str, Any] = {n: tuple(x) if isinstance(x, list) else x for n, x in flags.items() if n not in LayerConfig._fields}
    own = {"taps": default_taps(target_config.layers), "mask_token": target_config.vocab_size - 1}
    own["layers"] = max(min(5, target_config.layers // 2), 1)
    return checked(DFlashConfig(**{**layer._asdict(), **own, **rest}))


def checked(config: DFlashConfig) -> DFlashConfig:
    """The config; ValueError where no backbone can be built of it."""
    c = config
    if not c.taps:
        raise ValueError("no taps: name the layers of the target whose outputs are read")
    if c.sliding and len(c.sliding) != c.layers:
        raise ValueError(f"sliding has {len(c.sliding)} entries != {c.layers} layers: say it of each layer")
    if any(c.sliding) and c.window is None:
        raise ValueError("layers slide over a window of no size: set window")
    if c.conv_taps and c.width % c.conv_group:
        raise ValueError(f"width {c.width} is no multiple of {c.conv_group}, the channels of a group: set conv_group")
    return c


def block_rows(config: DFlashConfig, num_draft: int) -> int:
    """Rows that a block of `num_draft` tokens has."""
    return num_draft if config.anchor_first else num_draft + 1


def seen_by_layer(config: DFlashConfig, i: int) -> tuple[int | None, bool]:
    """(window of layer i, whether its rows see none after them)."""
    slides = bool(config.sliding) and config.sliding[i]
    return (config.window if slides else None), (slides if config.causal is None else config.causal)


def saved_config(saved: Mapping[str, Any]) -> DFlashConfig:
    """The config of a saved drafter from its config.json; ValueError where it is not whole."""
    facts: dict[str, Any] = {n: tuple(x) if isinstance(x, list) else x for n, x in saved.items() if n in DFlashConfig._fields}
    lacking = [n for n in DFlashConfig._fields if n not in {*facts, *DFlashConfig._field_defaults}]
    if lacking:
        raise ValueError(f"config.json does not say {', '.join(lacking)}: save the drafter again")
    if facts.get("rope_scaling") is not None:
        listed: Any = (tuple(x) if isinstance(x, list) else x for x in facts["rope_scaling"])
        facts["rope_scaling"] = RopeScaling(*listed)
    return checked(DFlashConfig(**facts))

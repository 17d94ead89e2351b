"""FLOPs, bytes and seconds of one pass of a model, from its shape alone.

    seconds = max(FLOPs / peak, bytes / bandwidth) + bytes sent / link + overhead

A pass over one token of one request reads every weight to do 2 FLOPs with it: about 1 FLOP per byte in bfloat16, where a
chip could do 200 to 600.  More tokens in the pass, of more requests or of a draft, are free until the two sides meet, and
cost their FLOPs from there on.  Counted are weights, keys and values, logits, and the collectives of tensor parallelism;
other activations stay on the chip.  Everything is for ONE of the chips that share the model.
"""

from __future__ import annotations

import bisect
from typing import Any, NamedTuple

from specjax.latency.hardware import Hardware

LOGIT = 4  # bytes: float32
ACTIVATION = 2  # bytes: what an all-reduce carries


class Shape(NamedTuple):
    """What a decoder with gated feed-forwards is made of; the names are those of `TransformerConfig`."""

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    tied: bool = False
    window: int | None = None
    sliding: tuple[bool, ...] = ()
    extra: int = 0  # weights of further products that every token goes through: a projection, heads of their own


class Placement(NamedTuple):
    """How a model is held."""

    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    parallel: int = 1  # chips that share it (tensor parallelism)


BFLOAT16 = Placement()
"""In bfloat16, on one chip."""


class Work(NamedTuple):
    """What one chip does in a pass."""

    flops: float
    weight_bytes: float
    kv_bytes: float
    logit_bytes: float
    link_bytes: float  # sent to other chips

    @property
    def bytes(self) -> float:
        """Memory traffic."""
        return self.weight_bytes + self.kv_bytes + self.logit_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte of memory traffic."""
        return self.flops / self.bytes


class Load(NamedTuple):
    """What is decoded."""

    batch: float  # requests
    context: float  # tokens in each one's cache


def shape_of(config: Any, **replaced) -> Shape:
    """The Shape of anything with these fields, such as `TransformerConfig`; `replaced` fields are taken as given."""
    taken = {f: getattr(config, f) for f in Shape._fields if f != "extra"}
    return Shape(**{**taken, **replaced})


def layer_weights(shape: Shape) -> int:
    """Weights of the products of one layer: q, k, v, o and the three of the feed-forward."""
    attention = shape.width * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    return attention + 3 * shape.width * shape.hidden


def head_weights(shape: Shape) -> int:
    """Weights of the product with the vocabulary."""
    return shape.width * shape.vocab_size


def num_parameters(shape: Shape) -> int:
    """All parameters, norms and the embedding included (biases and norms of queries and keys are not counted)."""
    norms = (2 * shape.layers + 1) * shape.width
    embeddings = head_weights(shape) * (1 if shape.tied else 2)
    return shape.layers * layer_weights(shape) + norms + embeddings + shape.extra


def kv_numbers(shape: Shape, context: float) -> float:
    """Keys and values that the layers hold of `context` tokens: those with a window of no more than that many."""
    slides = shape.sliding or (False,) * shape.layers
    seen = sum(min(context, shape.window) if s and shape.window else context for s in slides[: shape.layers])
    return 2 * shape.kv_heads * shape.head_dim * seen


def resident_bytes(shape: Shape, load: Load, placed: Placement = BFLOAT16) -> float:
    """Bytes that weights and caches take on one chip: more than `Hardware.memory` does not run."""
    weights = num_parameters(shape) * placed.weight_bytes / placed.parallel
    shared = min(placed.parallel, shape.kv_heads)  # past that, heads are held more than once
    return weights + load.batch * kv_numbers(shape, load.context) * placed.kv_bytes / shared


def work(shape: Shape, load: Load, new_tokens: float, placed: Placement = BFLOAT16, *, scored: float | None = None) -> Work:
    """One pass over `new_tokens` of every request, whose caches hold `load.context` before it.

    Args:
      shape: of the model.
      load: requests and their context.
      new_tokens: per request: k + 1 when k drafted tokens are verified; a mean where they differ.
      placed: how the model is held.
      scored: rows of logits per request; all new tokens unless given.
    """
    tokens, rows = load.batch * new_tokens, load.batch * (new_tokens if scored is None else scored)
    seen = kv_numbers(shape, load.context + (new_tokens + 1) / 2) / (2 * shape.kv_heads * shape.head_dim)  # layers times keys
    products = 2 * tokens * (shape.layers * layer_weights(shape) + shape.extra) + 2 * rows * head_weights(shape)
    attention = 4 * tokens * seen * shape.heads * shape.head_dim  # scores, and the values they weigh
    norms = (2 * shape.layers + 1) * shape.width
    weights = shape.layers * layer_weights(shape) + shape.extra + head_weights(shape) + norms + tokens * shape.width
    kv = load.batch * kv_numbers(shape, load.context) + tokens * kv_numbers(shape, 1)  # read, and written
    chips, shared = placed.parallel, min(placed.parallel, shape.kv_heads)
    reduced = 2 * 2 * shape.layers * tokens * shape.width * ACTIVATION  # two all-reduces a layer, each out and back
    gathered = rows * shape.vocab_size * LOGIT
    return Work(
        flops=(products + attention) / chips,
        weight_bytes=weights * placed.weight_bytes / chips,
        kv_bytes=kv * placed.kv_bytes / shared,
        logit_bytes=2 * rows * shape.vocab_size * LOGIT / chips,  # written, then read to choose a token
        link_bytes=(reduced + gathered) * (chips - 1) / chips,
    )


def seconds(work: Work, hardware: Hardware, overhead: float = 0.0) -> float:
    """Time of a pass: the larger of compute and memory, then what is sent, then `overhead` (launches, the host)."""
    bound = max(work.flops / hardware.flops, work.bytes / hardware.bandwidth)
    sent = work.link_bytes / hardware.link if work.link_bytes else 0.0  # a device by itself has no link
    return bound + sent + overhead


def turning_tokens(shape: Shape, hardware: Hardware, placed: Placement = BFLOAT16, *, context: float = 0.0) -> int:
    """Tokens in a pass, each of its own request, from which it is bound by compute; 0 where caches keep it from ever being."""

    def computes(tokens: int) -> bool:
        w = work(shape, Load(tokens, context), 1, placed)
        return w.flops / hardware.flops >= w.bytes / hardware.bandwidth

    most = 1 << 24
    return 1 + bisect.bisect_left(range(1, most), True, key=computes) if computes(most) else 0

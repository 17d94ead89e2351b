"""Sampling parameters and `warp`, the one function that defines the target's law p for plain and speculative decoding.

Order, always: repetition, frequency and presence penalties -> logit bias -> temperature -> top-k -> top-p (on what top-k
left, renormalised) -> min-p -> log-probabilities.  Temperature 0 is an exact one-hot on the largest logit (lowest id on a
tie), so greedy decoding is not a separate path, and a seed changes nothing there.  Tokens that tie at a cut all stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.types import Array


class SamplingParams(NamedTuple):
    """How a request is sampled.  `stack` turns requests into one of these with an array [B] a field.

    A field that is None is compiled out; the values of the others are data and never recompile anything.
    """

    temperature: Any = 0.0  # 0 = greedy
    top_k: Any = None  # keep the k most probable tokens
    top_p: Any = None  # keep the smallest set of probability top_p or more
    min_p: Any = None  # keep tokens of at least min_p times the largest probability
    logit_bias: Any = None  # {token id: added to its logit}
    repetition_penalty: Any = None  # > 1 discourages every token of prompt and output (Keskar et al. 2019)
    presence_penalty: Any = None  # subtracted once from the logit of each token of the output
    frequency_penalty: Any = None  # subtracted for each time it stands in the output


class Bias(NamedTuple):
    """`logit_bias` on the device."""

    ids: Array  # [B, M] int32, padded with the vocabulary's size, which is dropped
    values: Array  # [B, M]


class History(NamedTuple):
    """What penalties look at, for ONE sequence."""

    tokens: Array  # [S]
    length: Array  # []
    prompt_length: Array  # []
    drafted: Array  # [N] tokens of the block's rows 1..N
    seen: Array  # [N+1, N+1] ancestors, itself included


_NEUTRAL = {
    "temperature": 0.0,
    "top_k": np.iinfo(np.int32).max,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}

_RANGES = {
    "temperature": (lambda x: 0 <= x < math.inf, "0 (greedy) or a positive number"),
    "top_k": (lambda x: x >= 1 and x == int(x), "a whole number from 1, or None for no limit"),
    "top_p": (lambda x: 0 < x <= 1, "a number in (0, 1]"),
    "min_p": (lambda x: 0 <= x <= 1, "a number in [0, 1]"),
    "repetition_penalty": (lambda x: 0 < x < math.inf, "a positive number (1 = none)"),
    "presence_penalty": (math.isfinite, "a finite number (0 = none)"),
    "frequency_penalty": (math.isfinite, "a finite number (0 = none)"),
}


def check(params: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError naming the first field whose value makes no sense."""
    for field, (fits, wanted) in _RANGES.items():
        value = getattr(params, field)
        if value is None and field != "temperature":
            continue
        if not isinstance(value, int | float | np.number) or not fits(value):
            raise ValueError(f"{field}={value!r} is not {wanted}")
    for token, value in (params.logit_bias or {}).items():
        if not 0 <= token < vocab_size:
            raise ValueError(f"logit_bias names token {token}, but the vocabulary has ids 0 to {vocab_size - 1}")
        if not value <= float(np.finfo(np.float32).max):
            raise ValueError(f"logit_bias of token {token} is {value}: use a finite number, or -inf to forbid it")


def stack(params: Sequence[SamplingParams], vocab_size: int) -> SamplingParams:
    """One SamplingParams a request -> one with a [B] array for each field that any request uses.

    Raises:
      ValueError: a value out of range, by name.
    """
    for p in params:
        check(p, vocab_size)

    def column(field: str):
        values = [getattr(p, field) for p in params]
        if field != "temperature" and all(v is None for v in values):
            return None
        dtype = np.int32 if field == "top_k" else np.float32
        return jnp.asarray([min(_NEUTRAL[field] if v is None else v, _NEUTRAL["top_k"]) for v in values], dtype)

    biases = [p.logit_bias or {} for p in params]
    return SamplingParams(
        logit_bias=_stack_bias(biases, vocab_size) if any(biases) else None, **{f: column(f) for f in _NEUTRAL}
    )


def _stack_bias(biases: Sequence[Mapping[int, float]], vocab_size: int) -> Bias:
    width = 1 << (max(map(len, biases)) - 1).bit_length()  # a power of two, so that one more entry rarely recompiles
    ids = np.full((len(biases), width), vocab_size, np.int32)
    values = np.zeros((len(biases), width), np.float32)
    for row, bias in enumerate(biases):
        ids[row, : len(bias)], values[row, : len(bias)] = list(bias), list(bias.values())
    return Bias(jnp.asarray(ids), jnp.asarray(values))


def warp(sampling: SamplingParams, logits: Array, history: History) -> Array:
    """logits [R, V] of one sequence's verified rows -> log_p [R, V], normalised; a NaN row stays without support."""
    values = {f: getattr(sampling, f) for f in _RANGES if f != "top_k"}
    sampling = sampling._replace(**{f: v.astype(logits.dtype) for f, v in values.items() if v is not None})
    x = _penalised(sampling, logits, history)
    if sampling.logit_bias is not None:
        x = x.at[:, sampling.logit_bias.ids].add(sampling.logit_bias.values[None].astype(x.dtype), mode="drop")
    greedy = sampling.temperature <= 0
    y = (x - x.max(-1, keepdims=True)) / jnp.where(greedy, 1, sampling.temperature)  # a tiny temperature must not overflow
    kept = jnp.where(y >= _cut(sampling, y), y, -jnp.inf)
    return jnp.where(greedy, one_hot_log(first_argmax(x), x), jax.nn.log_softmax(kept, -1))


def tempered(logits: Array, temperature: Array) -> Array:
    """A drafter's law: logits [B, ..., V] at temperature [B] -> log_q, one-hot at 0.  q needs none of p's transforms."""
    t = temperature.reshape((-1,) + (1,) * (logits.ndim - 1)).astype(logits.dtype)
    soft = jax.nn.log_softmax(logits / jnp.where(t > 0, t, 1), -1)
    return jnp.where(t > 0, soft, one_hot_log(first_argmax(logits), logits))


def first_argmax(x: Array) -> Array:
    """argmax over the last axis, lowest index on a tie; len(axis) if it holds NaN or only -inf.  (XLA's is slow on CPU.)"""
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    return jnp.where((x == x.max(-1, keepdims=True)) & (x > -jnp.inf), index, x.shape[-1]).min(-1)


def one_hot_log(token: Array, like: Array) -> Array:
    """Log law of a point mass: 0 at `token` [...], -inf elsewhere; shape and dtype of `like` [..., V]."""
    index = jax.lax.broadcasted_iota(jnp.int32, like.shape, like.ndim - 1)
    return jnp.where(index == token[..., None], 0, -jnp.inf).astype(like.dtype)


def _penalised(sampling: SamplingParams, x: Array, history: History) -> Array:
    """Penalties; each row counts the drafted tokens on its own path as if they were output."""
    repetition, presence, frequency = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
    if repetition is None and presence is None and frequency is None:
        return x
    slot = jnp.arange(history.tokens.shape[0])
    rows = jnp.arange(x.shape[0])[:, None]

    def counts(start):
        base = (
            jnp.zeros(x.shape[-1], x.dtype).at[history.tokens].add(((slot >= start) & (slot < history.length)).astype(x.dtype))
        )
        return jnp.broadcast_to(base[None], x.shape).at[rows, history.drafted[None]].add(history.seen[:, 1:].astype(x.dtype))

    if repetition is not None:
        x = jnp.where(counts(0) > 0, jnp.where(x > 0, x / repetition, x * repetition), x)
    if presence is not None or frequency is not None:
        output = counts(history.prompt_length)
        x = x if frequency is None else x - frequency * output
        x = x if presence is None else x - jnp.where(output > 0, presence, 0)
    return x


def _cut(sampling: SamplingParams, y: Array) -> Array:
    """The smallest logit [R, 1] that top-k, top-p and min-p all keep."""
    cut = jnp.full((y.shape[0], 1), -jnp.inf, y.dtype)
    if sampling.top_k is not None:
        cut = threshold(y, jnp.ones_like(y), jnp.minimum(sampling.top_k, y.shape[-1]).astype(y.dtype))
    if sampling.top_p is not None:
        mass = jnp.where(y >= cut, jnp.exp(y - y.max(-1, keepdims=True)), 0)
        needed = jnp.maximum(sampling.top_p, jnp.finfo(y.dtype).tiny) * mass.sum(
            -1, keepdims=True
        )  # never 0: that keeps nothing
        nucleus = threshold(y, mass, needed)
        cut = jnp.where(sampling.top_p < 1, jnp.maximum(cut, nucleus), cut)  # 1 keeps all: rounding must not cut a tail
    if sampling.min_p is not None:
        cut = jnp.maximum(cut, y.max(-1, keepdims=True) + jnp.log(sampling.min_p))
    return cut


def threshold(y: Array, weight: Array, needed: Array) -> Array:
    """The largest t [R, 1] such that the weight of {y >= t} is at least `needed`: a cut without a sort.

    Bisection over the bit pattern of t, exact, 32 passes over y [R, V] (64 for float64); a sort of 9 rows of V = 49k costs
    14 times as much on CPU.
    """
    bits = jnp.finfo(y.dtype).bits
    unsigned = jnp.dtype(f"uint{bits}")
    top = jnp.array(1, unsigned) << (bits - 1)

    def ordered(f):  # floats -> unsigned integers in the same order
        i = jax.lax.bitcast_convert_type(f, unsigned)
        return jnp.where(i & top > 0, ~i, i | top)

    keys = ordered(y)

    def step(i, found):
        trial = found | (top >> i.astype(unsigned))
        enough = jnp.where(keys >= trial, weight, 0).sum(-1, keepdims=True) >= needed
        return jnp.where(enough, trial, found)

    found = jax.lax.fori_loop(0, bits, step, jnp.zeros((y.shape[0], 1), unsigned))
    back = jnp.where(found & top > 0, found ^ top, ~found)
    return jax.lax.bitcast_convert_type(back, y.dtype)

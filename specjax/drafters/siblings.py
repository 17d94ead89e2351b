"""How the children of tree nodes are drawn from a drafter's logits; every drafter of trees takes one of these four.

Without replacement is Kool et al.'s Gumbel-top-k (arXiv 1903.06059), drawn and verified in the same order as in RSD and
Sequoia (arXiv 2402.14160, 2402.12374); i.i.d. is SpecTr's and SpecInfer's (arXiv 2310.15141, 2305.09781); one sampled child
before the top K - 1 is Hu et al.'s (arXiv 2502.18779).  W is the number of parents, C of the children at each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.drafters.small import pick
from specjax.names import unknown
from specjax.sampling import one_hot_log, tempered
from specjax.types import Array


class Siblings(NamedTuple):
    """A way to draw the children of W nodes, C at each.

    `draw(logits [B,W,V], temperature [B], noise, depth, C) -> (tokens [B,W,C] int32, log_q [B,W,C,V] or None, exists [B,W,C])`.
    `noise` is the drafter's; `depth` that of the children.  Where logits hold NaN or nothing but -inf no child exists; a child
    that exists has a law without NaN, the one that it was really drawn from given its earlier siblings (None = point mass).
    """

    kind: str  # one of types.CHILDREN
    draw: Callable
    rule: str  # the rule that they are usually verified with, a key of RULES


def draw_iid(logits: Array, temperature: Array, noise: Callable, depth: int, count: int):
    """A row of noise for each child; at temperature 0 all are the argmax."""
    b, w, v = logits.shape
    log_q = tempered(logits, temperature)
    tokens = pick(log_q[:, :, None], noise(depth, w * count).reshape(b, w, count, v).astype(log_q.dtype))
    exists = jnp.broadcast_to(jnp.isfinite(log_q.max(-1))[..., None], tokens.shape)
    return tokens, jnp.broadcast_to(log_q[:, :, None], (b, w, count, v)), exists


def draw_without_replacement(logits: Array, temperature: Array, noise: Callable, depth: int, count: int):
    """The `count` largest of log_q + one row of noise a parent, largest first; at temperature 0 the largest logits.

    The law of each is q without its earlier siblings.  It is normalised anew from the logits, not divided by 1 - q of those
    that went before: with .9999999 of the mass gone that would be a quotient of rounding errors.
    """
    log_q = tempered(logits, temperature)
    hot = temperature[:, None, None] > 0
    scores = jnp.where(hot, log_q + noise(depth, logits.shape[1]).astype(log_q.dtype), logits)
    tokens, exists = top(scores, jnp.isfinite(log_q.max(-1)), count)
    laws = [log_q]
    for rank in range(1, count):
        laws.append(tempered(without(logits, tokens[..., :rank]), temperature))
    return tokens, jnp.stack(laws, 2), exists


def draw_point(logits: Array, temperature: Array, noise: Callable, depth: int, count: int):
    """The `count` largest logits at any temperature, without chance and so without a law."""
    del temperature, noise, depth
    tokens, exists = top(logits, jnp.isfinite(logits.max(-1)), count)
    return tokens, None, exists


def draw_sampled_then_top(logits: Array, temperature: Array, noise: Callable, depth: int, count: int):
    """One child from q without its `count - 1` most probable tokens, then these, the largest first."""
    sound = jnp.isfinite(logits.max(-1))  # looked at before the top is taken out: a NaN could leave with it
    tops, there = top(logits, sound, count - 1)
    rest = tempered(without(logits, tops), temperature)
    first = pick(rest, noise(depth, logits.shape[1]).astype(rest.dtype))
    points = one_hot_log(tops, jnp.broadcast_to(rest[:, :, None], (*tops.shape, rest.shape[-1])))
    exists = jnp.concatenate([(sound & jnp.isfinite(rest.max(-1)))[..., None], there], -1)
    return jnp.concatenate([first[..., None], tops], -1), jnp.concatenate([rest[:, :, None], points], 2), exists


def top(scores: Array, sound: Array, count: int) -> tuple[Array, Array]:
    """The `count` best tokens of scores [B,W,V] and whether each exists, [B,W,count]; none where a row is not `sound`."""
    best, tokens = jax.lax.top_k(jnp.where(sound[..., None], scores, -jnp.inf), count)  # NaN would count as the largest
    return tokens.astype(jnp.int32), best > -jnp.inf


def without(logits: Array, tokens: Array) -> Array:
    """logits [B,W,V] with -inf at tokens [B,W,J]."""
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    for j in range(tokens.shape[-1]):
        logits = jnp.where(index == tokens[..., j, None], -jnp.inf, logits)
    return logits


SIBLINGS: dict[str, Siblings] = {
    "iid": Siblings("iid", draw_iid, "recursive"),
    "without_replacement": Siblings("without_replacement", draw_without_replacement, "recursive"),
    "point": Siblings("point", draw_point, "target_match"),
    "sampled_then_top": Siblings("sampled_then_top", draw_sampled_then_top, "greedy_multi_draft"),
}


def find_siblings(kind: str) -> Siblings:
    """One of SIBLINGS by its kind; ValueError names the nearest."""
    if kind not in SIBLINGS:
        raise ValueError(unknown("way to draw children", kind, SIBLINGS))
    return SIBLINGS[kind]

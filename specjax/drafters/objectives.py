"""What drafters learn by: losses by row of logits, chunks that bound the memory of [B, T, V] logits, and how heads add up.

Cross-entropy learns from tokens; soft cross-entropy, KL and total variation learn from the target's whole law.  Forward
KL of target and drafter equals soft cross-entropy less the target's entropy, so both have the same gradient; 1 - TV is the
expected acceptance of one drafted token, which makes TV the loss of what decoding counts (cf. DistillSpec, 2310.08461).
TV teaches next to nothing while target and drafter hardly overlap; the LK losses of SpecForge and speculators do.

An objective is `(logits [R, V], labels [R], target_logits [R, V]) -> nats [R]`; what it does not read is never computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from specjax.types import Array

Objective = Callable[[Array, Array, Array], Array]
KEPT = "kept"


def hard(logits: Array, labels: Array, target_logits: Array | None = None) -> Array:
    """-log softmax(logits)[label]: cross-entropy to the tokens that follow; 0 for a label of -1, which is none."""
    picked = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[:, None], -1)[:, 0]
    return jnp.where(labels >= 0, jax.nn.logsumexp(logits, -1) - picked, 0)


def soft(logits: Array, labels: Array | None, target_logits: Array) -> Array:
    """-sum p log q, p = softmax(target_logits): the gradient of forward KL(p, q).  None of it reaches the target."""
    p = jax.nn.softmax(jax.lax.stop_gradient(target_logits), -1)
    return -(p * _finite(jax.nn.log_softmax(logits, -1), p)).sum(-1)


def kl(logits: Array, labels: Array | None, target_logits: Array) -> Array:
    """sum p (log p - log q): the forward divergence itself, zero where the drafter's law is the target's."""
    log_p = jax.nn.log_softmax(jax.lax.stop_gradient(target_logits), -1)
    p = jnp.exp(log_p)
    return (p * (_finite(log_p, p) - _finite(jax.nn.log_softmax(logits, -1), p))).sum(-1)


def total_variation(logits: Array, labels: Array | None, target_logits: Array) -> Array:
    """sum |p - q| / 2: the chance that one token drafted at temperature 1 is rejected."""
    p = jax.nn.softmax(jax.lax.stop_gradient(target_logits), -1)
    return 0.5 * jnp.abs(p - jax.nn.softmax(logits, -1)).sum(-1)


def log_acceptance(logits: Array, labels: Array | None, target_logits: Array) -> Array:
    """-log sum min(p, q): the acceptance of one drafted token, with a gradient that does not fade as it goes to 0."""
    log_p = jax.nn.log_softmax(jax.lax.stop_gradient(target_logits), -1)
    return -jax.nn.logsumexp(jnp.minimum(log_p, jax.nn.log_softmax(logits, -1)), -1)


def lk(logits: Array, labels: Array | None, target_logits: Array, *, eta: float = 3.0) -> Array:
    """w KL(p, q) + (1 - w) TV(p, q), w = exp(-eta (1 - TV)): KL far from the target, acceptance itself near to it.

    w is data: no gradient passes through it.
    """
    distance = total_variation(logits, labels, target_logits)
    w = jax.lax.stop_gradient(jnp.exp(-eta * (1 - distance)))
    return w * kl(logits, labels, target_logits) + (1 - w) * distance


def smooth_l1(given: Array, wanted: Array) -> Array:
    """[..., D], [..., D] -> [...]: the mean of x^2 / 2 up to |x| = 1 and of |x| - 1/2 past it.  No gradient to `wanted`."""
    size = jnp.abs(given - jax.lax.stop_gradient(wanted))
    return jnp.where(size < 1, 0.5 * size * size, size - 0.5).mean(-1)


def correct(logits: Array, labels: Array) -> Array:
    """1.0 where the largest logit is the label's: [R, V], [R] -> [R]."""
    return (logits.argmax(-1) == labels).astype(jnp.float32)


def mean(values: Array, weights: Array) -> Array:
    """sum(values * weights) / sum(weights); 0 where nothing has weight, so that such a batch teaches nothing."""
    return total(values, weights) / jnp.maximum(weights.sum(), 1)


def total(values: Array, weights: Array) -> Array:
    """sum(values * weights); what has no weight may be NaN."""
    return jnp.where(weights > 0, values, 0).astype(jnp.float32).ravel() @ weights.ravel()


def chunked(rows: Callable, inputs, *, size: int = 1024):
    """`rows` applied to `size` positions at a time, its work but for what is `kept` done again in the backward pass.

    Args:
      rows: (inputs [size, ...]) -> results [size]; unembed in here, so that only [size, V] logits exist at once.
      inputs: any tree of arrays [B, T, ...].
      size: positions a chunk; a multiple of it is made by padding with zeros.

    Returns:
      The results of `rows` as arrays [B, T].
    """
    leaves = jax.tree.leaves(inputs)
    shape, count = leaves[0].shape[:2], leaves[0].shape[0] * leaves[0].shape[1]
    size = min(size, count)
    pad = -count % size

    def cut(x: Array) -> Array:
        flat = x.reshape(count, *x.shape[2:])
        flat = jnp.pad(flat, ((0, pad),) + ((0, 0),) * (flat.ndim - 1))
        return flat.reshape(-1, size, *x.shape[2:])

    again = jax.checkpoint(rows, policy=jax.checkpoint_policies.save_only_these_names(KEPT))
    parts = jax.lax.map(again, jax.tree.map(cut, inputs))
    return jax.tree.map(lambda y: y.reshape(-1)[:count].reshape(shape), parts)


def kept(x: Array) -> Array:
    """x [size], which `chunked` keeps for the backward pass: a verdict that took logits of its own is not reached twice."""
    return checkpoint_name(x, KEPT)


def behind(x: Array, count: int) -> Array:
    """x [B, T, ...] moved so that position t holds what stood at t - count; zeros before the beginning."""
    stays = x[:, : max(x.shape[1] - count, 0)]
    return jnp.pad(stays, ((0, 0), (x.shape[1] - stays.shape[1], 0)) + ((0, 0),) * (x.ndim - 2))


def ahead(x: Array, count: int) -> Array:
    """x [B, T, ...] moved so that position t holds what stood at t + count; zeros past the end."""
    return jnp.pad(x[:, count:], ((0, 0), (0, min(count, x.shape[1]))) + ((0, 0),) * (x.ndim - 2))


class Scored(NamedTuple):
    """How one head, or one step of a recursion, did at every position."""

    nats: Array  # [B, T]
    hit: Array  # [B, T] 1.0 where its best token is the label
    weights: Array  # [B, T] 1.0 where there is a label


def score(
    logits_of: Callable, inputs, hidden: Array, labelled: tuple[Array, Array], unembed: Callable, objective: Objective
) -> Scored:  # fmt: skip
    """Score one head.

    Args:
      logits_of: (inputs [R, ...]) -> logits [R, V] of the head.
      inputs: what it reads, a tree of arrays [B, T, ...].
      hidden: [B, T, D] of the target at the positions that predict the same tokens.
      labelled: token ids and weights, both [B, T]; an id of -1 teaches nothing and is never hit.
      unembed: (hidden [R, D]) -> the target's logits [R, V].
      objective: what it is to learn.
    """
    goal, weights = labelled

    def rows(parts):
        inputs, hidden, goal = parts
        logits = logits_of(inputs)
        return jnp.where(goal >= 0, objective(logits, goal, unembed(hidden)), 0), correct(logits, goal)

    nats, hit = chunked(rows, (inputs, hidden, goal))
    return Scored(nats, hit, weights)


def pool(scored: Sequence[Scored], shares: Sequence[float]) -> tuple[Array, dict[str, Array]]:
    """sum_i shares[i] * (nats of head i summed over its labels) / W, W = the labels a head has on average, and metrics.

    W times the loss is a plain sum, so that how rows are split into batches changes nothing.  "accuracy_i" is head i's, from
    1; "tau" is 1 plus the heads that are right from the first one on, a mean over the positions where all have labels:
    what a greedy chain would emit a round if the text were the target's own.
    """
    weight = sum((s.weights.sum() for s in scored[1:]), scored[0].weights.sum()) / len(scored)
    sums = [share * total(s.nats, s.weights) for share, s in zip(shares, scored, strict=True)]
    right, run, whole = jnp.ones_like(scored[0].hit), jnp.zeros_like(scored[0].hit), jnp.ones_like(scored[0].hit)
    for s in scored:
        right, whole = right * s.hit, whole * s.weights
        run = run + right
    accuracy = {f"accuracy_{i}": mean(s.hit, s.weights) for i, s in enumerate(scored, 1)}
    return sum(sums[1:], sums[0]) / jnp.maximum(weight, 1), {"weight": weight, **accuracy, "tau": 1 + mean(run, whole)}


def _finite(log: Array, p: Array) -> Array:
    """log where p has mass: 0 * -inf is nothing, in value and in gradient."""
    return jnp.where(p > 0, log, 0)

"""What a block drafter learns by: blocks that begin at many tokens of a row, all in one pass, each blind to the others.

A block at anchor a sees what drafting would after a + 1 committed tokens: entries of its own document strictly before a, for
the target has not run the anchor yet, and its own rows.  Costs N R rows for N blocks beside the T entries of a row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import cache as kv
from specjax.drafters import objectives
from specjax.drafters.dflash import backbone
from specjax.drafters.dflash.config import DFlashConfig
from specjax.drafters.recipe import Batch, labels, layout
from specjax.drafters.vocabulary import Ids, places
from specjax.sampling import first_argmax
from specjax.types import Array, KVCache, LanguageModel, Params


class Blocks(NamedTuple):
    """Where blocks begin."""

    anchors: Array  # [B, N] places in their rows
    kept: Array  # [B, N] bool; what the others give is not learnt from


def drawn(key: Any, batch: Batch, num_draft: int, count: int) -> Blocks:
    """`count` blocks of each row, or as many as it has tokens, at random: a pure function of the key.

    A block must have context, and tokens to predict among its `num_draft`; those whose first is one come first.
    """
    weights = [labels(batch, k)[1] > 0 for k in range(1, num_draft + 1)]
    context, some = layout(batch.segments)[0] > 0, functools.reduce(jnp.logical_or, weights)
    each = jnp.broadcast_to(jnp.arange(some.shape[1])[None], some.shape)
    order = jax.random.permutation(key, each, axis=1, independent=True)
    rank = kv.take(jnp.where(context & weights[0], 0, jnp.where(context & some, 1, 2)), order)
    anchors = kv.take(order, jnp.argsort(rank, axis=1, stable=True))[:, :count]
    return Blocks(anchors, kv.take(context & some, anchors))


def shares(num_draft: int, decay: float | None) -> list[float]:
    """decay^(k-1) over their sum; exp(-(k-1) / g) as DFlash has it unless given: g is 4, 5 or 7 for blocks to 8, 10, 16."""
    gamma = 4 if num_draft < 9 else 5 if num_draft < 11 else 7
    decay = math.exp(-1 / gamma) if decay is None else decay
    return [decay**k / sum(decay**j for j in range(num_draft)) for k in range(num_draft)]


def given(
    target: LanguageModel, config: DFlashConfig, params: Params, batch: Batch, blocks: Blocks, *, num_draft: int
) -> Array:  # fmt: skip
    """What the blocks give, [B, N, K, D], as `backbone.run_blocks` has it, from the target's features in the batch."""
    positions, _ = layout(batch.segments)
    ks, vs = backbone.entries(config, params.drafter, batch.output.features, positions)
    ks, vs = tuple(jnp.moveaxis(k, 1, -1) for k in ks), tuple(jnp.moveaxis(v, 1, 2) for v in vs)
    index = jnp.arange(positions.shape[1])[None, None]
    segment = kv.take(batch.segments, blocks.anchors)[..., None]
    near = (batch.segments[:, None] == segment) & (index < blocks.anchors[..., None])
    starts = kv.take(batch.tokens, blocks.anchors), kv.take(positions, blocks.anchors)
    cache = KVCache(ks, vs, jnp.zeros(len(positions), jnp.int32))
    return backbone.run_blocks(target, config, params, *starts, cache, near, positions, num_draft=num_draft)


class Rows(NamedTuple):
    """What is judged of blocks, a chunk [C, K, ...] of them at a time."""

    hidden: Array  # [B, N, K, D] as the vocabulary head reads it
    states: Array  # [B, N, K, D] the target's last ones where it predicts the same tokens
    before: Array  # [B, N, K] the token before each
    goal: Array  # [B, N, K] the token, by its place in the draft vocabulary, -1 outside


def judged(
    judge: Callable, target: LanguageModel, batch: Batch, hidden: Array, blocks: Blocks, vocabulary: Ids | None
) -> list[tuple[objectives.Scored, Any]]:  # fmt: skip
    """How the k-th tokens of all blocks did, for each k, and what else was seen [B, N].

    Args:
      judge: (Rows of a chunk) -> (nats, hit, what else there is to see), all [C, K]; unembed in here.
      target: the model to draft for.
      batch: rows with the target's output.
      hidden: what `given` gives.
      blocks: where they begin.
      vocabulary: the ids that are scored; all unless given.
    """
    k, t = hidden.shape[2], batch.tokens.shape[1]
    ids = range(target.vocab_size) if vocabulary is None else vocabulary
    labelled = batch._replace(places=jnp.asarray(places(ids, target.vocab_size)))
    ahead = [[kv.take(x, blocks.anchors) for x in labels(labelled, i + 1)] for i in range(k)]
    at = jnp.minimum(blocks.anchors[..., None] + jnp.arange(k)[None, None], t - 1)
    gathered = lambda x: kv.take(x, at.reshape(len(at), -1)).reshape(*at.shape, *x.shape[2:])
    goal = jnp.stack([x for x, _ in ahead], -1)
    rows = Rows(hidden, gathered(batch.output.hidden), gathered(batch.tokens), goal)

    def apart(part: Rows):
        found = judge(part)
        return [jax.tree.map(lambda x, i=i: x[:, i], found) for i in range(k)]

    found = objectives.chunked(apart, rows, size=max(1024 // k, 1))
    weights = [jnp.where(blocks.kept, w, 0) for _, w in ahead]
    return [(objectives.Scored(nats, hit, w), seen) for (nats, hit, seen), w in zip(found, weights, strict=True)]


def scores(
    target: LanguageModel, config: DFlashConfig, params: Params, batch: Batch, blocks: Blocks, *, num_draft: int,
    vocabulary: Ids | None, objective: objectives.Objective,
) -> list[objectives.Scored]:  # fmt: skip
    """DFlash's: the objective of each row by itself.

    With a vocabulary the target's law is renormalised within, and a row teaches nothing where the target's best token of all
    lies outside.
    """

    def judge(part: Rows):
        logits = backbone.few_logits(target, config, vocabulary, params.target, part.hidden)
        full = target.unembed(params.target, part.states)
        nats, hit = by_law(objective, logits, full, part.goal, vocabulary, target.vocab_size)
        return nats, hit, ()

    hidden = given(target, config, params, batch, blocks, num_draft=num_draft)
    return [scored for scored, _ in judged(judge, target, batch, hidden, blocks, vocabulary)]


def by_law(
    objective: objectives.Objective, logits: Array, full: Array, goal: Array, vocabulary: Ids | None, vocab_size: int
) -> tuple[Array, Array]:  # fmt: skip
    """(nats, hit) [C, K] of logits [C, K, n], where the target's are full [C, K, V]; see `scores`."""
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    few = full if vocabulary is None else full[..., jnp.asarray(vocabulary, jnp.int32)]
    nats = objective(flat(logits), flat(goal), flat(few)).reshape(goal.shape)
    if vocabulary is not None:
        best = jnp.minimum(first_argmax(full), vocab_size - 1)
        nats = jnp.where(jnp.asarray(places(vocabulary, vocab_size))[best] >= 0, nats, 0)
    return nats, objectives.correct(flat(logits), flat(goal)).reshape(goal.shape)

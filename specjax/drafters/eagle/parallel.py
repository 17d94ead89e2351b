r"""EAGLE-3's module drafts K tokens in one pass: P-EAGLE (arXiv 2602.01469).  Lossless.

    entry t:  E(x_{t+1}), features at t ──► module ──► vocabulary head ──► x_{t+2}, the first drafted token
    mask j:   what is learnt for a token that is not known ──► module ──► x_{t+2+j}, whatever the tokens between are

A mask sees the text's entries and the masks before it, at the position of the entry that it stands for.  Costs one pass of 2 K
rows a round, which takes in true entries and puts the masks behind the last of them, and a cache of the module's layers; masks
are left behind `length`, so that the cache never holds a guess.  A chain with a true q at the request's temperature.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as kv
from specjax.drafters import objectives
from specjax.drafters.base import LoadedDrafter, card
from specjax.drafters.eagle import head as eagle_head
from specjax.drafters.eagle import loss as eagle_loss
from specjax.drafters.eagle import start as eagle_start
from specjax.drafters.eagle.drafter import read_module, takers
from specjax.drafters.eagle.head import EagleConfig, features_of
from specjax.drafters.layer import if_begun, no_columns
from specjax.drafters.recipe import Batch, Recipe, labels, layout
from specjax.drafters.small import chain_draft, pick
from specjax.drafters.vocabulary import Ids, check, drawing_within
from specjax.models.layers import Columns, visible
from specjax.sampling import tempered
from specjax.types import Array, Drafter, KVCache, LanguageModel, Params


class ParallelState(NamedTuple):
    """State of the drafter.

    Invariant: with n committed tokens the cache holds the entries 0..n-2, of true features; rows past them are free.
    """

    cache: KVCache
    normed: Array  # [B, K, D] what the vocabulary head reads: of entry n - 2 and K - 1 masks behind it; zeros where n = 1


@functools.cache  # the same drafter for the same arguments: a rebuilt closure would recompile
def peagle(target: LanguageModel, *, config: EagleConfig, num_draft: int, vocabulary: Ids | None = None) -> Drafter:
    """A chain of `num_draft` tokens, at the request's temperature.

    A prompt of one token has no entry yet: in its first round nothing is drafted.

    Args:
      target: the model to draft for.
      config: of the module.
      num_draft: K.
      vocabulary: the only ids that are proposed; all unless given.

    Raises:
      ValueError: a module without a mask; ids that are not the target's.
    """
    if not config.masked:
        raise ValueError("masked False: a module without a mask drafts one token a pass: use `eagle`, or one of P-EAGLE's")
    if vocabulary is not None:
        check(vocabulary, target.vocab_size)
    absorb, commit = takers(config, functools.partial(entered, target, config))

    def init(params, batch, capacity):
        normed = jnp.zeros((batch, num_draft, config.width))
        return ParallelState(eagle_head.empty_cache(config, batch, capacity), normed)

    def propose(noise, params, state, sequences):
        logits = eagle_head.few_logits(target, config, vocabulary, params, state.normed)
        laws = jnp.swapaxes(tempered(logits, sequences.sampling.temperature), 0, 1)
        draft = chain_draft(jnp.stack([pick(laws[i], noise(i + 1)[:, 0]) for i in range(num_draft)]), laws)
        return if_begun(draft, state.cache.length), state

    return Drafter(
        init=init,
        absorb=absorb,
        propose=drawing_within(target, vocabulary, propose),
        commit=commit,
        num_nodes=num_draft,
        depth=num_draft,
        children="iid",
        features=config.taps,
        vocab_size=target.vocab_size,
    )


def entered(
    target: LanguageModel, config: EagleConfig, params: Params, state: ParallelState, tokens: Array, features: Array,
    count: Array,
) -> ParallelState:  # fmt: skip
    """Take in the first `count` [B] of the entries (features [B, T, M, D], tokens [B, T]); what they and K - 1 masks give.

    The masks are written over the entries from `count` on, so that one causal pass serves rows of any count.
    """
    cache, own, masks = state.cache, params.drafter, state.normed.shape[1] - 1
    given = eagle_head.embed(target, config, params, tokens), eagle_head.fuse(config, own, features)

    def with_masks(x: Array, mask: Array) -> Array:
        room = jnp.pad(x, ((0, 0), (0, masks), (0, 0)))
        return kv.put(room, jnp.broadcast_to(mask[None, None], (len(x), masks, mask.shape[0])), count)

    embedded, hidden = (with_masks(x, mask) for x, mask in zip(given, eagle_head.mask(config, own), strict=True))
    positions = cache.length[:, None] + jnp.arange(embedded.shape[1])[None]
    seen = visible(cache.length, positions, cache.k[0].shape[-1], None)
    (_, normed), k, v = eagle_head.step(config, own, embedded, hidden, cache.k, cache.v, cache.length, positions, seen)
    drafting = jnp.maximum(count - 1, 0)[:, None] + jnp.arange(masks + 1)[None]
    normed = jnp.where((count > 0)[:, None, None], kv.take(normed, drafting), state.normed)
    return ParallelState(KVCache(k, v, cache.length + count), normed)


# Training.


def recipe(
    target: LanguageModel, *, num_draft: int, config: EagleConfig, vocabulary: Ids | None = None, share: float = 0.7,
    least: float = 0.2, decay: float = 1.0, objective: objectives.Objective = objectives.soft,
) -> Recipe:  # fmt: skip
    """The mean of decay^j x objective over the labels of depth j = 0..K-1 that are looked at; the target is frozen.

    Memory is bounded by conditional drop: of a row's positions max(share^j, least) are looked at in depth j, each of them in
    the depths before too, so that a mask sees those before it as it will in decoding.  Which ones is drawn anew each step,
    those with a label first.

    Args:
      target: the model to draft for.
      num_draft: K.
      config: of the module; `head.peagle(lm.config)` has the paper's four layers.
      vocabulary: the ids that the drafter proposes; all unless given.
      share: of the positions of one depth that are kept in the next; 1 looks at all.
      least: the smallest part of a row's positions that a depth looks at.
      decay: the weight of a depth relative to the one before.
      objective: one of `objectives`.
    """
    parts = [max(share**j, least) for j in range(1, num_draft)]

    def loss(trainable, target_params, batch: Batch, key):
        read = lambda x: eagle_head.few_logits(target, config, vocabulary, Params(target_params, trainable), x)
        judge = eagle_loss.judge(read, target, target_params, vocabulary=vocabulary, objective=objective)
        labelled = [labels(batch._replace(places=eagle_loss.placed(target, vocabulary)), j + 2) for j in range(num_draft)]
        order = drawn(key, jnp.stack([weights for _, weights in labelled]).any(0))
        anchors = [order[:, : max(int(part * order.shape[1]), 1)] for part in parts]
        tokens = eagle_head.embed(target, config, Params(target_params, trainable), objectives.ahead(batch.tokens, 1))
        given = unmasked(config, trainable, tokens, features_of(config, batch.output), batch.segments, anchors)
        found = scores(judge, given, anchors, batch.output.hidden, labelled)
        return objectives.pool(found, [decay**j / num_draft for j in range(num_draft)])

    drafter = peagle(target, config=config, num_draft=num_draft, vocabulary=vocabulary)
    return Recipe(functools.partial(eagle_start.params_init, target, config, vocabulary), loss, drafter, config.taps)


def drawn(key: Any, labelled: Array) -> Array:
    """Positions of each row [B, T] in random order, those that are `labelled` [B, T] first."""
    each = jnp.broadcast_to(jnp.arange(labelled.shape[1])[None], labelled.shape)
    order = jax.random.permutation(key, each, axis=1, independent=True)
    return kv.take(order, jnp.argsort(~kv.take(labelled, order), axis=1, stable=True))


def unmasked(
    config: EagleConfig, params, embedded: Array, features: Array, segments: Array, anchors: Sequence[Array]
) -> list[Array]:  # fmt: skip
    """What each depth gives after the last norm: [B, T, D] of all entries, then [B, n, D] of the j-th mask behind `anchors`.

    As in `loss.unrolled`, keys of the entries serve all depths, each depth adds one column of scores, and scores are made again
    in the backward pass.

    Args:
      config: of the module.
      params: its parameters.
      embedded: [B, T, D] of the token after each position.
      features: [B, T, M, D] of the target.
      segments: [B, T], as in Batch.
      anchors: for each depth from 1 positions [B, n], which begin those of the depth before.
    """
    b, t = segments.shape
    positions, causal = layout(segments)
    cache, at = eagle_head.empty_cache(config, b, t), jnp.zeros(b, jnp.int32)
    one = eagle_head.trained_step(config)
    hidden = eagle_head.fuse(config, params, features)
    (_, normed), k, v = one(params, embedded, hidden, cache.k, cache.v, at, positions, causal)
    results, own = [normed], (no_columns(config, b, t),) * config.layers
    for j, anchor in enumerate(anchors, 1):
        n = anchor.shape[1]
        masks = [jnp.broadcast_to(x[None, None], (b, n, len(x))) for x in eagle_head.mask(config, params)]
        own = jax.tree.map(lambda x, n=n: x[:, :n], own)
        where = kv.take(positions, anchor) + j, kv.take(causal, anchor)
        (_, normed), *new = one(params, *masks, k, v, at, *where, own)
        results, own = [*results, normed], tuple(map(Columns, *new))
    return results


def scores(
    judge: Any, given: list[Array], anchors: Sequence[Array], hidden: Array, labelled: list[tuple[Array, Array]]
) -> list[objectives.Scored]:  # fmt: skip
    """How each depth did at the positions that it looked at; elsewhere nothing has weight.

    Args:
      judge: what `loss.judge` gives.
      given: what `unmasked` gives.
      anchors: as there.
      hidden: [B, T, D] of the target.
      labelled: for each depth places and weights [B, T], as `recipe.labels` has them.
    """
    b, t, _ = hidden.shape
    every = [jnp.broadcast_to(jnp.arange(t)[None], (b, t)), *anchors]
    goals, weights = ([kv.take(x[i], at) for x, at in zip(labelled, every, strict=True)] for i in (0, 1))
    states = [kv.take(hidden, jnp.minimum(at + j + 1, t - 1)) for j, at in enumerate(every)]
    joined = ([jnp.concatenate(given, 1)], jnp.concatenate(states, 1), jnp.concatenate(goals, 1))
    [marks] = objectives.chunked(judge, joined, size=512)
    ends = np.cumsum([at.shape[1] for at in every])[:-1].tolist()
    columns = zip(*(jnp.split(x, ends, 1) for x in marks), weights, strict=True)  # nats, hits and weights of each depth
    back = lambda x, at: jnp.zeros((b, t)).at[jnp.arange(b)[:, None], at].set(x)
    return [objectives.Scored(*(back(x, at) for x in column)) for column, at in zip(columns, every, strict=True)]


def load(lm, *, num_draft: int, weights: str | None = None) -> LoadedDrafter:
    """Draft for `lm` with a module that `files.save` wrote to the directory `weights`, or one published there.

    Raises:
      ValueError: no weights, or weights that do not fit.
    """
    (config, vocabulary, params), _ = read_module(lm, weights, "peagle")
    drafter = peagle(lm.model, config=config, num_draft=num_draft, vocabulary=vocabulary)
    return LoadedDrafter(drafter, params, card("peagle", params, f"{config.layers} layers"))

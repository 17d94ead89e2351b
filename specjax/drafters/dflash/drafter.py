r"""A block of tokens in one pass of a few layers: DFlash (arXiv 2602.06036), and what its two successors share.  Lossless.

    features of tokens 0..n-2 ──► keys and values of every layer, in the cache
    [x_n, mask, .., mask] ──► one pass (see `backbone`) ──► logits of the next K tokens, each blind to the others

Costs one pass of K + 1 rows a round, K of them where the anchor's row predicts too, one product of K rows with the vocabulary,
and the keys and values of what was accepted.  A chain, each token from its own row's law at the request's temperature, with
its true q; or the best token of each row, which are point children.  A block may be shorter than those that were trained.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax import cache as kv
from specjax import trees
from specjax.drafters import objectives
from specjax.drafters.dflash import backbone, start
from specjax.drafters.dflash import loss as block_loss
from specjax.drafters.dflash.config import DFlashConfig
from specjax.drafters.layer import if_begun
from specjax.drafters.recipe import Batch, Recipe
from specjax.drafters.siblings import SIBLINGS, Siblings
from specjax.drafters.vocabulary import Ids, check, drawing_within, named
from specjax.types import Array, Draft, Drafter, KVCache, LanguageModel, Params


class DFlashState(NamedTuple):
    """State of the drafter.

    Invariant: with n committed tokens the cache holds what the target's features of tokens 0..n-2 give; rows past them are
    free.  Rows of a block never enter it.
    """

    cache: KVCache  # every layer


class Head(NamedTuple):
    """How the rows of a block become tokens, from left to right."""

    prepare: Callable  # (params, hidden [B, K, D]) -> what each token is made of, a tree of [K, B, ...]
    begin: Callable  # (batch) -> what is carried from token to token
    step: (
        Callable  # (params, carried, token before [B], what it is made of) -> (logits [B, n], confidence [B] or None, carried)
    )


def plain_head(target: LanguageModel, config: DFlashConfig, vocabulary: Ids | None) -> Head:
    """DFlash's: no token looks at those before it."""

    def prepare(params: Params, hidden: Array) -> Array:
        logits = backbone.few_logits(target, config, vocabulary, params.target, hidden)
        return jnp.swapaxes(logits, 0, 1)

    return Head(prepare, lambda batch: (), lambda params, carried, token, logits: (logits, None, carried))


@functools.cache  # the same drafter for the same arguments: a rebuilt closure would recompile
def dflash(
    target: LanguageModel, *, config: DFlashConfig, num_draft: int, siblings: Siblings = SIBLINGS["iid"],
    vocabulary: Ids | None = None,
) -> Drafter:  # fmt: skip
    """A chain of `num_draft` tokens from one pass.

    A prompt of one token has no context yet: in its first round nothing is drafted.

    Args:
      target: the model to draft for.
      config: of the backbone.
      num_draft: K.
      siblings: how a token is drawn from its law: "iid" at the request's temperature, "point" the best one.
      vocabulary: the only ids that are proposed; all unless given.

    Raises:
      ValueError: another way to draw, or ids that are not the target's.
    """
    head = plain_head(target, config, vocabulary)
    return built(target, config, head, num_draft=num_draft, siblings=siblings, vocabulary=vocabulary)


def built(
    target: LanguageModel, config: DFlashConfig, head: Head, *, num_draft: int, siblings: Siblings, vocabulary: Ids | None
) -> Drafter:  # fmt: skip
    """A drafter of this backbone and a head; errors as `dflash`."""
    if siblings.kind not in ("iid", "point"):
        raise ValueError(f"children {siblings.kind!r} of a chain: draw its tokens iid, or take the best, point")
    if vocabulary is not None:
        check(vocabulary, target.vocab_size)

    def propose(noise, params, state, sequences):
        n = state.cache.length
        places = jnp.broadcast_to(jnp.arange(state.cache.k[0].shape[-1])[None], (len(n), state.cache.k[0].shape[-1]))
        anchor = kv.take(sequences.tokens, n[:, None])
        near = (places < n[:, None])[:, None]
        inputs = (anchor, n[:, None], state.cache, near, places)
        hidden = backbone.run_blocks(target, config, params, *inputs, num_draft=num_draft)[:, 0]
        heat = sequences.sampling.temperature
        draft = left_to_right(head, siblings, params, noise, heat, hidden, anchor[:, 0], vocabulary)
        return if_begun(draft, n), state

    def commit(params, state, out, verdict):
        return entered(config, params, state, kv.take(out.features, verdict.path), verdict.num_accepted + 1)

    return Drafter(
        init=lambda params, batch, capacity: DFlashState(backbone.empty_cache(config, batch, capacity)),
        absorb=lambda params, state, sequences, out, count: entered(config, params, state, out.features, count),
        propose=drawing_within(target, vocabulary, propose),
        commit=commit,
        num_nodes=num_draft,
        depth=num_draft,
        children=siblings.kind,
        features=config.taps,
        vocab_size=target.vocab_size,
    )


def entered(config: DFlashConfig, params: Params, state: DFlashState, features: Array, count: Array) -> DFlashState:
    """Take in the first `count` [B] of true features [B, T, M, D]."""
    cache = state.cache
    positions = cache.length[:, None] + jnp.arange(features.shape[1])[None]
    new = zip(*backbone.entries(config, params.drafter, features, positions), strict=True)
    layers = zip(cache.k, cache.v, new, strict=True)
    ks, vs = zip(*(kv.write(k, v, *own, cache.length) for k, v, own in layers), strict=True)
    return DFlashState(KVCache(ks, vs, cache.length + count))


def left_to_right(
    head: Head, siblings: Siblings, params: Params, noise: Callable, temperature: Array, hidden: Array, anchor: Array,
    vocabulary: Ids | None,
) -> Draft:  # fmt: skip
    """A chain of K places of the vocabulary from hidden [B, K, D] and the target's token before, `anchor` [B].

    From the first law that is none (NaN, no mass) on, nodes are absent.
    """
    b, k = hidden.shape[:2]

    def step(carry, at):
        (carried, token), (depth, row) = carry, at
        logits, sure, carried = head.step(params, carried, token, row)
        drawn = siblings.draw(logits[:, None], temperature, noise, depth, 1)
        place, law, there = jax.tree.map(lambda x: x[:, 0, 0], drawn)
        return (carried, named(place, vocabulary)), (place, law, there, sure)

    depths = jnp.arange(1, k + 1)
    _, made = jax.lax.scan(step, (head.begin(b), anchor), (depths, head.prepare(params, hidden)))
    tokens, law, there, sure = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), made)
    sound = jnp.cumprod(there, 1, dtype=jnp.int32) > 0
    parents = jnp.where(sound, jnp.asarray(trees.chain(k))[None], -2).astype(jnp.int32)
    return Draft(tokens, parents, law, sure)


def recipe(
    target: LanguageModel, *, num_draft: int, config: DFlashConfig, vocabulary: Ids | None = None, decay: float | None = None,
    objective: objectives.Objective = objectives.hard, blocks: int = 64,
) -> Recipe:  # fmt: skip
    """sum_k decay^(k-1) objective of the token k after an anchor (weights sum to 1); the target is frozen.

    Args:
      target: the model to draft for.
      num_draft: K, tokens of a block that are learnt.
      config: of the backbone.
      vocabulary: the ids that the drafter proposes; all unless given.
      decay: the weight of a token relative to the one before; DFlash's for blocks of this size unless given.
      objective: one of `objectives`; the text itself as published.
      blocks: how many blocks of each row are learnt from, drawn at random.
    """
    shares = block_loss.shares(num_draft, decay)
    how: dict[str, Any] = dict(num_draft=num_draft, vocabulary=vocabulary, objective=objective)

    def loss(trainable, target_params, batch: Batch, key):
        params, chosen = Params(target_params, trainable), block_loss.drawn(key, batch, num_draft, blocks)
        return objectives.pool(block_loss.scores(target, config, params, batch, chosen, **how), shares)

    init = functools.partial(start.params_init, target, config)
    drafter = dflash(target, config=config, num_draft=num_draft, siblings=SIBLINGS["iid"], vocabulary=vocabulary)
    return Recipe(init, loss, drafter, config.taps)

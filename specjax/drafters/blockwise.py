r"""Blockwise parallel decoding: a feed-forward head for each token ahead (Stern et al., arXiv 1811.03115).  Lossless.

    h_t ──► target's head ──► x_{t+1}, which the round has just emitted
     ├────► head 0 ─────────► x_{t+2}, the first drafted token
     └────► head i ─────────► x_{t+2+i}, whatever the tokens before it are

h_t is the target's last hidden state at the row where the last round stopped: the last committed token itself has not been
run.  Costs 2 K products [D, F] and one with the vocabulary a round, no cache and no pass.  The draft is each head's best
token, at any temperature.  Against the paper: its p_1 is the target, which is frozen; no layer norm follows a head, for the
hidden state is normed already and the target's vocabulary head reads it at that scale; and a step takes the mean over all
heads, where the paper draws one of them to save memory (same expectation, less variance).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.cache import take
from specjax.drafters import files, objectives
from specjax.drafters.base import LoadedDrafter, card
from specjax.drafters.recipe import Batch, Recipe, labels
from specjax.drafters.siblings import top
from specjax.drafters.vocabulary import drawing_within, seen_by
from specjax.models.layers import matmul
from specjax.types import Array, Draft, Drafter, LanguageModel


@functools.cache  # the same drafter for the same arguments: a rebuilt closure would recompile
def blockwise(target: LanguageModel, *, num_draft: int) -> Drafter:
    """A chain of `num_draft` tokens, each the best of its head.

    State: [B, D] the hidden state at the row where the last round stopped; zeros before anything has run (a prompt of one
    token): its draft is legal, and worth nothing.
    """

    def propose(noise, params, state, sequences):
        heads = first_heads(params.drafter, num_draft)
        logits = head_logits(target, params.target, heads, state)
        tokens, exists = top(logits, jnp.isfinite(logits.max(-1)), 1)
        alive = jnp.cumprod(exists[..., 0], 1, dtype=jnp.int32) > 0
        parents = jnp.where(alive, jnp.asarray(trees.chain(num_draft))[None], -2)
        return Draft(tokens[..., 0], parents), state

    return head_drafter(target, drawing_within(target, target.vocabulary, propose), num_nodes=num_draft, depth=num_draft)


def head_drafter(
    target: LanguageModel, propose: Callable, *, num_nodes: int, depth: int, children: str = "point"
) -> Drafter:  # fmt: skip
    """A drafter whose state is the target's hidden state [B, D] at the row where the last round stopped."""

    def absorb(params, state, sequences, out, count):
        last = take(out.hidden, jnp.maximum(count - 1, 0)[:, None])[:, 0]
        return jnp.where((count > 0)[:, None], last, state)

    def commit(params, state, out, verdict):
        row = jnp.take_along_axis(verdict.path, verdict.num_accepted[:, None], 1)
        return take(out.hidden, row)[:, 0]

    return Drafter(
        init=lambda params, batch, capacity: jnp.zeros((batch, target.width)),
        absorb=absorb,
        propose=propose,
        commit=commit,
        num_nodes=num_nodes,
        depth=depth,
        children=children,
        chain=num_nodes == depth,
        vocab_size=target.vocab_size,
    )


# Heads: {"up": [K, D, F], "up_bias": [K, F], "down": [K, F, D], "down_bias": [K, D]}, stacked; they share the target's head.


def head_init(key, target: LanguageModel, *, num_draft: int, hidden: int) -> dict[str, Array]:
    """Heads that give the target's own logits: the second layer is zero."""
    up = jax.nn.initializers.lecun_normal(batch_axis=0)(key, (num_draft, target.width, hidden))
    zeros = {"up_bias": (hidden,), "down": (hidden, target.width), "down_bias": (target.width,)}
    return {"up": up, **{name: jnp.zeros((num_draft, *shape)) for name, shape in zeros.items()}}


def head_logits(target: LanguageModel, target_params, heads: dict[str, Array], hidden: Array) -> Array:
    """hidden [R, D] -> logits [R, K, V] of K heads: h + W2 relu(W1 h + b1) + b2, then the target's vocabulary head."""
    x = jnp.broadcast_to(hidden[:, None], (hidden.shape[0], heads["up"].shape[0], hidden.shape[1]))
    y = jax.nn.relu(each(x, heads["up"]) + heads["up_bias"][None].astype(jnp.float32))
    return target.unembed(target_params, x + each(y, heads["down"]) + heads["down_bias"][None].astype(jnp.float32))


def each(x: Array, kernels: Array) -> Array:
    """x [R, K, in] times kernels [K, in, out], each head by its own -> float32 [R, K, out].

    One product a head, for XLA for CPUs refuses the batched one of bfloat16 outside of a loop.
    """
    return jnp.stack([matmul(x[:, k], kernel) for k, kernel in enumerate(kernels)], 1)


def first_heads(heads: dict[str, Array], count: int) -> dict[str, Array]:
    """The first `count` of stacked heads."""
    return {name: x[:count] for name, x in heads.items()}


def parallel_loss(
    target: LanguageModel, head_logits: Callable, *, objective: objectives.Objective, shares: Sequence[float]
) -> Callable:  # fmt: skip
    """A recipe's loss for stacked heads that read h_t alone: sum_i shares[i] * mean of head i on x_{t+2+i}."""

    def loss(trainable, target_params, batch: Batch, key):
        return objectives.pool(parallel_scores(target, head_logits, trainable, target_params, batch, objective), shares)

    return loss


def parallel_scores(
    target: LanguageModel, head_logits: Callable, heads: dict[str, Array], target_params, batch: Batch,
    objective: objectives.Objective,
) -> list[objectives.Scored]:  # fmt: skip
    """How each of K stacked heads did: head i, from the target's h_t in `batch.output`, on x_{t+2+i}."""
    unembed, hidden, scored = functools.partial(target.unembed, target_params), batch.output.hidden, []
    for i in range(len(next(iter(heads.values())))):
        one = {name: x[i : i + 1] for name, x in heads.items()}
        logits_of = lambda h, one=one: head_logits(target, target_params, one, h)[:, 0]
        same = objectives.ahead(hidden, i + 1)
        scored.append(objectives.score(logits_of, hidden, same, labels(batch, i + 2), unembed, objective))
    return scored


def recipe(
    target: LanguageModel, *, num_draft: int, hidden: int | None = None, objective: objectives.Objective = objectives.hard
) -> Recipe:  # fmt: skip
    """The mean over heads of the CE of head i against the token i + 1 after the next; the target is frozen.

    Args:
      target: the model to draft for.
      num_draft: K.
      hidden: F, width of a head's first layer; D unless given.
      objective: one of `objectives`.
    """
    loss = parallel_loss(target, head_logits, objective=objective, shares=[1 / num_draft] * num_draft)
    init = lambda key, params: head_init(key, target, num_draft=num_draft, hidden=hidden or target.width)
    return Recipe(init, loss, blockwise(target, num_draft=num_draft))


def load(lm, *, num_draft: int, weights: str | None = None) -> LoadedDrafter:
    """Draft for `lm` with heads that `files.save` wrote to the directory `weights`; the first `num_draft` of them are used.

    Raises:
      ValueError: no weights, or weights of another target or of fewer heads.
    """
    target = seen_by(lm.model, files.read_config(weights, "blockwise", lm.model).get("vocabulary"))

    def like(shapes):
        count, _, hidden = (*shapes.get("up", ()), 0, 0, 0)[:3]
        return files.shapes(functools.partial(head_init, target=lm.model, num_draft=count, hidden=hidden))

    heads = files.read_params(weights, like)
    files.check_depth(num_draft, len(heads["up"]))
    params = first_heads(heads, num_draft)
    return LoadedDrafter(blockwise(target, num_draft=num_draft), params, card("blockwise", params, f"{num_draft} heads"))

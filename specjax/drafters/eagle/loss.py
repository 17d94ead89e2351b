"""Training-time test: J steps of the recursion on whole rows, and what they learn by (EAGLE-3, arXiv 2503.01840).

Step j at position t is what drafting does after t + 1 committed tokens: it is fed with what step j - 1 gave at t, and sees the
true entries 0..t and its own j before it.  The keys of step 0 serve all steps; each later step adds one column of scores, for
what it made at t only the steps at t may see.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from specjax.drafters import objectives
from specjax.drafters.eagle.head import EagleConfig, embed, empty_cache, features_of, fuse, trained_step
from specjax.drafters.layer import no_columns
from specjax.drafters.objectives import ahead, behind
from specjax.drafters.recipe import Batch, labels, layout
from specjax.drafters.vocabulary import Ids, places, seen_by
from specjax.models.layers import Columns
from specjax.sampling import first_argmax
from specjax.types import Array, LanguageModel, Params


def unrolled(config: EagleConfig, params, embedded: list[Array], features: Array, segments: Array) -> list[Array]:
    """What each step gives after its last norm, [B, T, D] at the position that it starts from.

    Memory grows with T: a step's scores [B, H, T, T] are made again in the backward pass.

    Args:
      config: of the module.
      params: its parameters.
      embedded: for each step j, [B, T, D] of the token j + 1 after each position.
      features: [B, T, M, D] of the target.
      segments: [B, T], as in Batch.
    """
    b, t = segments.shape
    positions, causal = layout(segments)
    cache, at = empty_cache(config, b, t), jnp.zeros(b, jnp.int32)
    one = trained_step(config)
    hidden = fuse(config, params, features)
    (hidden, normed), k, v = one(params, embedded[0], hidden, cache.k, cache.v, at, positions, causal)
    results, own = [normed], (no_columns(config, b, t),) * config.layers
    for j, x in enumerate(embedded[1:], 1):
        (hidden, normed), *new = one(params, x, hidden, k, v, at, positions + j, causal, own)
        results, own = [*results, normed], tuple(map(Columns, *new))
    return results


def scores(
    given: list[Array], read: Callable, target: LanguageModel, target_params, batch: Batch, *, vocabulary: Ids | None,
    objective: objectives.Objective, law: float, state: float,
) -> list[objectives.Scored]:  # fmt: skip
    """How each step did: law x objective(its logits) + state x SmoothL1(what it gave, the target's own state).

    Steps are laid side by side by the token that they predict, so that the target's law of it is made once for all of them.
    With a vocabulary the target's law is renormalised within, and a position teaches nothing where the target's best token
    of all lies outside.

    Args:
      given: what `unrolled` gives.
      read: (normed [R, D]) -> logits [R, n] of the vocabulary.
      target: the model to draft for.
      target_params: its parameters.
      batch: rows with the target's output.
      vocabulary: the ids that are scored; all unless given.
      objective: one of `objectives`.
      law: its weight.
      state: the weight of the distance to the target's hidden state.

    Raises:
      ValueError: a vocabulary for a target that has no head to narrow.
    """
    labelled = batch._replace(places=placed(target, vocabulary))
    rows = judge(read, target, target_params, vocabulary=vocabulary, objective=objective, law=law, state=state)
    moved = [behind(x, j + 1) for j, x in enumerate(given)]  # position s of each: what predicts token s + 1
    size = max(1024 // (len(given) + 1), 1)
    found = objectives.chunked(rows, (moved, batch.output.hidden, labels(labelled, 1)[0]), size=size)
    back = [(ahead(nats, j + 1), ahead(hit, j + 1)) for j, (nats, hit) in enumerate(found)]
    return [objectives.Scored(nats, hit, labels(labelled, j + 2)[1]) for j, (nats, hit) in enumerate(back)]


def placed(target: LanguageModel, vocabulary: Ids | None) -> Array:
    """[V] where each token stands in the vocabulary, -1 outside."""
    return jnp.asarray(places(range(target.vocab_size) if vocabulary is None else vocabulary, target.vocab_size))


def judge(
    read: Callable, target: LanguageModel, target_params, *, vocabulary: Ids | None, objective: objectives.Objective,
    law: float = 1.0, state: float = 0.0,
) -> Callable:  # fmt: skip
    """How predictions of the same tokens did, a function of a stretch of R rows; the arguments are those of `scores`.

    Returns:
      ((what each step gave [R, D], a list; the target's hidden state there [R, D]; places of the tokens [R])) -> for each
      step (nats [R], hit [R]).
    """
    place = placed(target, vocabulary)

    def rows(parts):
        given, hidden, goal = parts
        best = jnp.minimum(first_argmax(target.unembed(target_params, hidden)), target.vocab_size - 1)
        inside, few = objectives.kept(place[best] >= 0), seen_by(target, vocabulary).unembed(target_params, hidden)
        results = []
        for x in given:
            logits = read(x)
            nats = law * jnp.where(inside, objective(logits, goal, few), 0)
            nats = nats + state * objectives.smooth_l1(x, hidden) if state else nats
            results.append((nats, objectives.correct(logits, goal)))
        return results

    return rows


def loss(
    config: EagleConfig, params, read: Callable, target: LanguageModel, target_params, batch: Batch, *, steps: int,
    features: Array | None = None, **how,
) -> list[objectives.Scored]:  # fmt: skip
    """`scores` of `steps` steps from the target's features in `batch`, or from `features` in their place."""
    both = Params(target_params, params)
    embedded = [embed(target, config, both, ahead(batch.tokens, j + 1)) for j in range(steps)]
    features = features_of(config, batch.output) if features is None else features
    given = unrolled(config, params, embedded, features, batch.segments)
    return scores(given, read, target, target_params, batch, **how)

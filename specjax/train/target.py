"""Train a target itself: next-token cross-entropy of a language model.

The published initial scales are kept but for two: the embedding, which a tied head reads too, gets a standard deviation
of D^-0.5 so that the first logits are of order one, and what each layer adds is scaled down by the root of their number.
"""

from __future__ import annotations

import functools

import jax

from specjax.drafters.objectives import Objective, Scored, hard, mean, score
from specjax.drafters.recipe import Batch, Recipe, forward, labels
from specjax.types import Array, LanguageModel


def target_recipe(model: LanguageModel) -> Recipe:
    """A recipe whose trainable parameters are the model's own."""

    def loss(params, target_params, batch: Batch, key):
        own = next_token(model, params, forward(model, params, batch).hidden, batch)
        return mean(own.nats, own.weights), {"weight": own.weights.sum(), "accuracy": mean(own.hit, own.weights)}

    return Recipe(lambda key, target_params: target_init(model, key), loss)


def target_init(model: LanguageModel, key: Array):
    """Parameters that training starts from."""

    def scaled(path, x):
        names = [part.key for part in path]
        if names[-1] == "embedding":
            return x * model.width**-0.5
        return x * (2 * model.num_layers) ** -0.5 if {"out", "down"} & set(names) else x

    return jax.tree_util.tree_map_with_path(scaled, model.init(key))


def next_token(
    model: LanguageModel, params, hidden: Array, batch: Batch, objective: Objective = hard, teacher: tuple | None = None
) -> Scored:  # fmt: skip
    """How a model does on the token after each position.

    Args:
      model: the model.
      params: its parameters.
      hidden: [B, T, D] its last hidden states on the batch.
      batch: the tokens.
      objective: what it is to learn.
      teacher: parameters and hidden states [B, T, D] of the model whose law the objective reads; its own unless given.
    """
    teaching, taught = (params, hidden) if teacher is None else teacher
    unembed, law = (functools.partial(model.unembed, p) for p in (params, teaching))
    return score(unembed, hidden, taught, labels(batch), law, objective)

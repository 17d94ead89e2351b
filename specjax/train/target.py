"""Train a target itself: next-token cross-entropy of a language model.

The published initial scales are kept but for two: the embedding, which a tied head reads too, gets a standard deviation
of D^-0.5 so that the first logits are of order one, and what each layer adds is scaled down by the root of their number.
"""

from __future__ import annotations

import jax

from specjax.drafters.objectives import chunked, correct, hard, mean
from specjax.drafters.recipe import Batch, Recipe, forward, labels
from specjax.types import LanguageModel


def target_recipe(model: LanguageModel) -> Recipe:
    """A recipe whose trainable parameters are the model's own."""

    def init(key, target_params):
        return jax.tree_util.tree_map_with_path(scaled, model.init(key))

    def scaled(path, x):
        names = [part.key for part in path]
        if names[-1] == "embedding":
            return x * model.width**-0.5
        return x * (2 * model.num_layers) ** -0.5 if {"out", "down"} & set(names) else x

    def loss(params, target_params, batch: Batch, key):
        hidden = forward(model, params, batch).hidden
        goal, weights = labels(batch)

        def rows(inputs):
            hidden, goal = inputs
            logits = model.unembed(params, hidden)
            return hard(logits, goal), correct(logits, goal)

        nats, hit = chunked(rows, (hidden, goal))
        value = mean(nats, weights)
        return value, {"weight": weights.sum(), "accuracy": mean(hit, weights)}

    return Recipe(init, loss)

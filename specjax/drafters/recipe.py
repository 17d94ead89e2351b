"""What training asks of a method: a `Recipe`, the `Batch` that its loss sees, and the alignment of labels, in one place.

    corpus ──packing──► Batch(tokens, mask, segments)          rows hold pieces of one or several documents
                           │ the frozen target runs them once (stop_gradient), or features come from disk
                           ▼
    recipe.loss(trainable, target params, Batch(..., output), key) ─► loss, metrics ─► optax
                           │ every n steps
                           ▼
    recipe.assemble(trainable, target params) ─► decode.run with recipe.drafter ─► tau

Position t of a row holds token t; what a model computes there predicts token t + 1.  `labels` is the only place where
tokens, loss mask and document borders are shifted, and it shifts them together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.types import Array, Drafter, LanguageModel, Output, Params


class Batch(NamedTuple):
    """Rows of tokens to learn from."""

    tokens: Array  # [B, T] int32
    mask: Array  # [B, T] bool: this token is one to predict (an answer's, say); False in padding
    segments: Array  # [B, T] int32: which document of its row a token belongs to, counted from 0; -1 in padding
    output: Any = ()  # Output of the frozen target, without gradient; () when a target itself is trained
    places: Array | None = None  # [V] where each token stands in a draft vocabulary, -1 outside; None: there is none


class Recipe(NamedTuple):
    """How one thing is trained.  Metrics hold means over `metrics["weight"]` labels, so that batches can be pooled."""

    init: Callable  # (key, target params) -> trainable params
    loss: Callable  # (trainable, target params, Batch, key) -> (scalar mean over weighted labels, {"weight": n, ...})
    drafter: Drafter | None = None  # what decodes with the trained params, for tau; None: there is nothing to decode
    features: tuple[int, ...] = ()  # layers of the target that the loss reads
    assemble: Callable = lambda trainable, target: Params(target, trainable)  # what decoding runs with
    clean: Callable | None = None  # the loss without the noise that it adds to its inputs, to judge by; None: it adds none


def labels(batch: Batch, ahead: int = 1) -> tuple[Array, Array]:
    """What stands `ahead` tokens after each position: token ids [B, T] and weights [B, T], 1.0 or 0.0.

    A weight is 1 where that token exists, is one to predict and belongs to the same document.  With a draft vocabulary an id
    is its place in there, -1 outside.

    >>> one = Batch(jnp.asarray([[5, 6, 7, 8]]), jnp.asarray([[0, 0, 1, 1]], bool), jnp.asarray([[0, 0, 0, 1]]))
    >>> [x.tolist() for x in labels(one)]
    [[[6, 7, 8, 0]], [[0.0, 1.0, 0.0, 0.0]]]
    """

    def shifted(x: Array) -> Array:
        return jnp.pad(x[:, ahead:], ((0, 0), (0, min(ahead, x.shape[1]))))

    exists = jnp.arange(batch.tokens.shape[1])[None] < batch.tokens.shape[1] - ahead
    same = (shifted(batch.segments) == batch.segments) & (batch.segments >= 0)
    goal = shifted(batch.tokens) if batch.places is None else batch.places[shifted(batch.tokens)]
    return goal, (exists & same & shifted(batch.mask)).astype(jnp.float32)


def layout(segments: Array) -> tuple[Array, Array]:
    """Positions [B, T] counted from each document's beginning, and mask [B, T, T]: causal, within one document."""
    t = segments.shape[1]
    index = jnp.arange(t, dtype=jnp.int32)[None]
    first = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    start = jax.lax.cummax(jnp.where(first, index, 0), axis=1)
    return index - start, (segments[:, :, None] == segments[:, None]) & jnp.tril(jnp.ones((t, t), bool))[None]


def forward(model: LanguageModel, params, batch: Batch, features: tuple[int, ...] = ()) -> Output:
    """One pass of a model over whole rows, each document by itself."""
    positions, mask = layout(batch.segments)
    cache = model.init_cache(*batch.tokens.shape)
    return model.apply(params, batch.tokens, cache, positions=positions, mask=mask, features=features)[0]


def with_output(batch: Batch, target: LanguageModel | None, params, features: tuple[int, ...] = ()) -> Batch:
    """The batch with what the frozen target computes on it; as it is where it has that already, or there is no target."""
    if target is None or batch.output != ():
        return batch
    return batch._replace(output=jax.lax.stop_gradient(forward(target, params, batch, features)))

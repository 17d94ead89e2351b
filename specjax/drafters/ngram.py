"""n-gram drafting, or prompt lookup (Saxena 2023; LLMA, arXiv 2304.04487).  Lossless, training-free, no state.

The longest suffix of the text that occurred before, over prompt and output, gives the continuation that followed it then.
It costs two passes over the token ids; it pays on text that copies: extraction, correction, summaries, code.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.drafters.base import LoadedDrafter, card
from specjax.types import Array, Draft, Drafter


@functools.cache  # the same drafter for the same arguments: a rebuilt closure would recompile
def ngram(*, num_draft: int, min_order: int = 2, max_order: int = 8) -> Drafter:
    """Chain of up to `num_draft` tokens; nodes are absent where nothing matched or the match ran into the end.

    Args:
      num_draft: K, at least 1.
      min_order: the shortest match, in tokens, worth a draft.
      max_order: longer matches are not told apart; the latest one wins.

    Raises:
      ValueError: orders that make no sense.
    """
    if not 1 <= min_order <= max_order:
        raise ValueError(f"min_order={min_order} and max_order={max_order}: need 1 <= min_order <= max_order")

    def propose(noise, params, state, sequences):
        tokens, count = jax.vmap(lambda t, n: continuation(t, n, num_draft, min_order, max_order))(
            sequences.tokens, sequences.length
        )
        parents = jnp.where(jnp.arange(num_draft)[None] < count[:, None], jnp.asarray(trees.chain(num_draft))[None], -2)
        return Draft(tokens, parents), state

    return Drafter(
        init=lambda params, batch, capacity: (),
        absorb=lambda params, state, sequences, out, count: state,
        propose=propose,
        commit=lambda params, state, out, verdict: state,
        num_nodes=num_draft,
        depth=num_draft,
        widths=(1,),  # most rounds find nothing: they cost a plain pass
    )


def continuation(tokens: Array, length: Array, num_draft: int, min_order: int, max_order: int) -> tuple[Array, Array]:
    """tokens [S], length [] -> what followed the best earlier match [num_draft] and how many of it are known []."""
    slot = jnp.arange(tokens.shape[0])
    matching, order = jnp.ones(tokens.shape[0], bool), jnp.zeros(tokens.shape[0], jnp.int32)
    for back in range(max_order):  # a match of order m ends at slot e: tokens[e - i] == tokens[length - 1 - i] for i < m
        wanted = tokens[jnp.maximum(length - 1 - back, 0)]
        matching = matching & (jnp.roll(tokens, back) == wanted) & (slot >= back)
        order = order + matching.astype(jnp.int32)
    order = jnp.where(slot < length - 1, order, 0)
    best = jnp.argmax(order * tokens.shape[0] + slot)  # longest, then latest
    follows = best + 1 + jnp.arange(num_draft)
    count = jnp.where(order[best] >= min_order, jnp.minimum(length - 1 - best, num_draft), 0)
    return tokens[jnp.minimum(follows, tokens.shape[0] - 1)], count


def load(lm, *, num_draft: int, min_order: int = 2, max_order: int = 8) -> LoadedDrafter:
    """Nothing to load: the text itself is the drafter."""
    del lm
    return LoadedDrafter(ngram(num_draft=num_draft, min_order=min_order, max_order=max_order), (), card("ngram", ()))

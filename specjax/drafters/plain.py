"""Plain decoding: the drafter that proposes nothing.  Every round is one target pass and one token of its own."""

from __future__ import annotations

import functools

import jax.numpy as jnp

from specjax.drafters.base import LoadedDrafter, card
from specjax.types import Draft, Drafter


@functools.cache  # the same drafter every time: a rebuilt closure would recompile
def plain() -> Drafter:
    """A draft of no nodes."""

    def propose(noise, params, state, sequences):
        empty = jnp.zeros((sequences.length.shape[0], 0), jnp.int32)
        return Draft(empty, empty), state

    return Drafter(
        init=lambda params, batch, capacity: (),
        absorb=lambda params, state, sequences, out, count: state,
        propose=propose,
        commit=lambda params, state, out, verdict: state,
        num_nodes=0,
        depth=0,
    )


def load(lm, *, num_draft: int = 0) -> LoadedDrafter:
    """Nothing to load; `num_draft` is ignored, for there is no draft."""
    del lm, num_draft
    return LoadedDrafter(plain(), (), card("plain", ()))

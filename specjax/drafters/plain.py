"""Plain decoding: the drafter that proposes nothing.  Every round is one target pass and one token of its own."""

from __future__ import annotations

import jax.numpy as jnp

from specjax.drafters.base import LoadedDrafter, card
from specjax.types import Draft, Drafter


def plain() -> Drafter:
    """A draft of no nodes: always the same functions, so that every call of `generate` without a drafter compiles once."""
    return Drafter(init=_nothing, absorb=_unchanged, propose=_propose, commit=_unchanged, num_nodes=0, depth=0)


def _nothing(params, batch, capacity):
    return ()


def _unchanged(params, state, *rest):
    return state


def _propose(noise, params, state, sequences):
    empty = jnp.zeros((sequences.length.shape[0], 0), jnp.int32)
    return Draft(empty, empty), state


def load(lm, *, num_draft: int = 0) -> LoadedDrafter:
    """Nothing to load; `num_draft` is ignored, for there is no draft."""
    del lm, num_draft
    return LoadedDrafter(plain(), (), card("plain", ()))

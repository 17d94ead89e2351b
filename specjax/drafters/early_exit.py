"""The target's first layers with its own norm and head draft a chain (cf. Draft & Verify, arXiv 2309.08168).  Lossless.

A training-free baseline: a head that never saw such states agrees rarely, so expect a tau near 1.1.  It reads the target's
own cache and keeps only the K tokens it is drafting in a small window; a draft costs n/L of a target pass and one head.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from specjax.cache import rewind, take
from specjax.drafters.base import LoadedDrafter, card
from specjax.drafters.small import chain_draft, pick
from specjax.sampling import tempered
from specjax.types import Drafter, KVCache, LanguageModel


@functools.cache  # the same drafter for the same arguments: a rebuilt closure would recompile
def early_exit(target: LanguageModel, *, num_draft: int, layers: int) -> Drafter:
    """A chain of `num_draft` tokens from the first `layers` layers of the target.

    Raises:
      ValueError: `layers` outside 1..L.
    """
    model = target.truncate(layers)

    def propose(noise, params, state, sequences):
        context = KVCache(sequences.cache.k[:layers], sequences.cache.v[:layers], sequences.cache.length)
        first = take(sequences.tokens, sequences.length[:, None] - 1)[:, 0]

        def step(carry, depth):
            window, token = carry
            out, window = model.apply(params.target, token[:, None], window, context=context)
            log_q = tempered(out.logits[:, 0], sequences.sampling.temperature)
            token = pick(log_q, noise(depth)[:, 0])
            return (rewind(window, window.length + 1), token), (token, log_q)

        empty = model.init_cache(first.shape[0], num_draft)
        _, (tokens, laws) = jax.lax.scan(step, (empty, first), jnp.arange(1, num_draft + 1))
        return chain_draft(tokens, laws), state

    return Drafter(
        init=lambda params, batch, capacity: (),
        absorb=lambda params, state, sequences, out, count: state,
        propose=propose,
        commit=lambda params, state, out, verdict: state,
        num_nodes=num_draft,
        depth=num_draft,
        children="iid",
        vocab_size=target.vocab_size,
    )


def load(lm, *, num_draft: int, layers: int | None = None) -> LoadedDrafter:
    """The target's own layers, a quarter of them unless `layers` says otherwise."""
    layers = max(1, lm.model.num_layers // 4) if layers is None else layers
    drafter = early_exit(lm.model, num_draft=num_draft, layers=layers)
    return LoadedDrafter(drafter, (), card("early_exit", (), f"first {layers} of {lm.model.num_layers} layers"))

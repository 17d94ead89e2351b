"""A planted bias of known size: the control that shows what a report could have seen.

After the verdict, wherever the token about to be emitted is the most probable one of its row, it becomes the runner-up with
probability tv / p(top), and the path is cut there: the law of every emitted token is exactly `tv` away from the target's in
total variation, at any context where p(top) >= tv and a runner-up exists.
"""

from __future__ import annotations

import contextlib
import functools
from unittest import mock

import jax
import jax.numpy as jnp

from specjax import decode, keys
from specjax.lossless.subject import Subject
from specjax.sampling import first_argmax
from specjax.types import Verdict

STREAM = 17
"""Stream of the coins of the bias; decoding knows 0 to 3."""


def bias(subject: Subject, tv: float) -> Subject:
    """The subject with a bias of `tv` per emitted token."""
    return subject._replace(plant=_plant(tv))


@functools.cache  # the same plant for the same bias: a new one would recompile
def _plant(tv: float):
    decide = decode.decide

    def biased(state, draft, log_p, noise, *, rule, depth):
        verdict = decide(state, draft, log_p, noise, rule=rule, depth=depth)
        coins = keys.round_keys(state.key, STREAM, state.length)
        return jax.vmap(lambda key, row, law: spoil(key, row, law, tv))(coins, verdict, log_p)

    def plant() -> contextlib.AbstractContextManager:
        return mock.patch.object(decode, "decide", biased)

    return plant


def spoil(key, verdict: Verdict, log_p, tv: float) -> Verdict:
    """One sequence's verdict with the bias in it."""
    law = log_p[verdict.path]  # [K+1, V] row of each token of the verdict
    best = first_argmax(law)
    index = jax.lax.broadcasted_iota(jnp.int32, law.shape, 1)
    second = first_argmax(jnp.where(index == best[:, None], -jnp.inf, law))
    step = jnp.arange(verdict.tokens.shape[0], dtype=jnp.int32)
    top_p = jnp.exp(law.max(-1))
    struck = jax.random.uniform(key, step.shape) < tv / top_p
    struck = struck & (verdict.tokens == best) & (second < law.shape[-1]) & (step <= verdict.num_accepted)
    first = jnp.where(struck.any(), struck.argmax(), verdict.num_accepted).astype(jnp.int32)
    tokens = jnp.where(struck & (step == first), second, verdict.tokens)
    return Verdict(verdict.path, first, tokens.astype(jnp.int32))

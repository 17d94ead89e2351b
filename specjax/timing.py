"""What a round is made of, timed: the drafter's work, and verification, from the target's pass to the drawn verdict.

Each part is looped inside one program on a state halfway through a text, as decoding runs it: buffers are updated in place,
and what one turn gives goes into the next, so that nothing is hoisted.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode
from specjax.cache import rewind
from specjax.types import Array, Draft, Drafter, LanguageModel, Output, Params, Rule, Sequences, State, Verdict


class PassTimes(NamedTuple):
    """What a round is made of, in milliseconds."""

    draft_ms: float  # the drafter's work: propose and commit
    verify_ms: float  # one target pass of width N + 1, the law of each of its rows, and the verdict


def pass_times(params: Params, state: State, *, target: LanguageModel, drafter: Drafter, rule: Rule) -> PassTimes:
    """Time the two parts of a round from `state`, in which N nodes are verified whether or not as many were found."""
    static: dict[str, Any] = dict(target=target, drafter=drafter, rule=rule)
    held, zero = (params, state._replace(drafter=())), jnp.zeros((), jnp.int32)
    draft = lambda held, carry: draft_once(held[0], held[1], carry, **static)
    verify = lambda held, carry: verify_once(held[0], held[1], held[2], carry, **static)
    drafting = milliseconds(draft, held, (state.drafter, zero)) if drafter.num_nodes else 0.0
    found = jax.jit(lambda params, state: full(proposed(params, state, **static)[0]))(params, state)
    return PassTimes(drafting, milliseconds(verify, (*held, found), (state.cache, zero)))


def proposed(
    params: Params, state: State, *, target: LanguageModel, drafter: Drafter, rule: Rule
) -> tuple[Draft, Any]:  # fmt: skip
    """What the drafter proposes now, and its state after that."""
    sequences = Sequences(state.tokens, state.length, state.cache, state.sampling)
    return drafter.propose(decode.noise_source(state, rule, target.vocab_size), params, state.drafter, sequences)


def full(draft: Draft) -> Draft:
    """The draft with nodes in place of those that are absent: what the widest block costs does not depend on luck."""
    before = jnp.arange(draft.parents.shape[1], dtype=draft.parents.dtype)[None] - 1
    return draft._replace(parents=jnp.where(draft.parents < -1, before, draft.parents))


def verify_once(params: Params, state: State, draft: Draft, carry: tuple[Any, Array], *, target, drafter, rule):
    """(cache, a number of all that was emitted) -> the same after `draft` was verified.

    The last row's law decides about the emitted token alone: a number without it would leave the vocabulary head out.
    """
    cache, emitted = carry
    length, state = state.cache.length, unhoisted(state._replace(cache=cache), emitted)
    noise = decode.noise_source(state, rule, target.vocab_size)
    _, cache, verdict, *_ = decode.verify(params, state, draft, noise, target=target, drafter=drafter, rule=rule)
    return rewind(cache, length), verdict.tokens.sum(dtype=jnp.int32)


def draft_once(params: Params, state: State, carry: tuple[Any, Array], *, target, drafter, rule):
    """(drafter state, largest number drafted) -> the same after what the drafter does in a round that accepts nothing."""
    held, largest = carry
    state = unhoisted(state._replace(drafter=held), largest)
    draft, held = proposed(params, state, target=target, drafter=drafter, rule=rule)
    block = state.tokens[:, : drafter.num_nodes + 1]
    shapes = jax.eval_shape(lambda: target.apply(params.target, block, state.cache, features=drafter.features)[0])
    out: Output = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    path = jnp.zeros((block.shape[0], drafter.depth + 1), jnp.int32)
    held = drafter.commit(params, held, out, Verdict(path, path[:, 0], path))
    return held, jnp.maximum(draft.tokens.max(), draft.parents.max())


def unhoisted(state: State, number: Array) -> State:
    """The same state, of which XLA cannot know that: it depends on a number that is never below -2."""
    return state._replace(length=state.length + jnp.where(number < -2, 1, 0))


def milliseconds(step: Callable, held, carry, *, repeats: int = 8, calls: int = 5) -> float:
    """Median time of `carry = step(held, carry)`, looped inside one program so that buffers are updated in place."""
    loop = jax.jit(lambda held, carry: jax.lax.fori_loop(0, repeats, lambda _, c: step(held, c), carry), donate_argnums=1)
    carry, times = jax.tree.map(jnp.copy, carry), []
    for _ in range(calls + 1):  # the first one compiles
        begin = perf_counter()
        carry = jax.block_until_ready(loop(held, carry))
        times.append(perf_counter() - begin)
    return 1e3 * float(np.median(times[1:])) / repeats

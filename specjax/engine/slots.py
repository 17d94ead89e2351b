"""Slots on the device: a `decode.State` with a request in each row, and the programs that change it.

Each program is compiled once for a `Build`; which slot, prompt, sampling parameters, ends, budget and key is data.  A slot
is on the device what the host says it is: rows that it does not call active are carried through rounds unchanged, whether
they are free, being filled, or were cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, keys
from specjax.cache import take
from specjax.sampling import SamplingParams
from specjax.types import STOP, Array, Draft, Drafter, KVCache, LanguageModel, Output, Params, Rule, Sequences, State, Verdict


class Build(NamedTuple):
    """What is compiled in."""

    target: LanguageModel
    drafter: Drafter
    rule: Rule
    slots: int  # B
    capacity: int  # S, cache slots of a row
    chunk: int  # prompt tokens a pass of prefill takes
    stride: int  # rounds between two looks of the host
    max_eos: int  # E, ids that may end a request
    max_bias: int  # tokens whose logits a request may bias
    limit: Callable | None = None  # `decode.round`'s, and the next
    packs: tuple[int, ...] = ()


def checked(build: Build) -> Build:
    """The same, once its parts fit together; with a limit and neither widths nor packs, powers of two are the widths.

    Raises:
      ValueError: in one line.
    """
    decode.check(build.target, build.drafter, build.rule)
    least = dict(slots=1, capacity=decode.capacity_for(2, build.drafter), chunk=2, stride=1, max_eos=1, max_bias=1)
    for name, size in least.items():
        if getattr(build, name) < size:
            raise ValueError(f"{name}={getattr(build, name)}: with a draft of {build.drafter.num_nodes} give at least {size}")
    if build.limit is None or build.drafter.widths or build.packs:
        return build
    widths = tuple(1 << i for i in range(build.drafter.num_nodes.bit_length()))
    return build._replace(drafter=build.drafter._replace(widths=widths))


def plain(build: Build) -> tuple[Build, Build]:
    """The same without drafts, on the same state: with a drafter that keeps up, and with one that does nothing at all.

    A row that was filled by the second, or has been through rounds of it, must not be drafted for: tokens were missed.
    """
    of = lambda drafter: build._replace(drafter=drafter(build.drafter, build.target), limit=None)
    return of(keeping_up), of(left_behind)


@cache  # the same drafter for the same arguments: a rebuilt closure would recompile
def keeping_up(drafter: Drafter, target: LanguageModel) -> Drafter:
    """A drafter of the same state that proposes nothing, and takes in what the target ran, so that it can propose again.

    One that learns nothing from `commit` keeps up by proposing, which is then thrown away: it pays for its drafts.
    """

    def propose(noise, params, state, sequences):
        if takes_in(drafter, target, params, state, sequences.length.shape[0]):
            return no_draft(sequences), state
        return no_draft(sequences), drafter.propose(noise, params, state, sequences)[1]

    return drafter._replace(propose=propose, num_nodes=0, depth=0, children="point", chain=True, widths=())


@cache  # as above
def left_behind(drafter: Drafter, target: LanguageModel) -> Drafter:
    """A drafter of the same state that does nothing at all."""
    idle = keeping_up(drafter, target)._replace(features=())
    return idle._replace(
        absorb=lambda params, state, sequences, out, count: state,
        propose=lambda noise, params, state, sequences: (no_draft(sequences), state),
        commit=lambda params, state, out, verdict: state,
    )


def no_draft(sequences: Sequences) -> Draft:
    """A draft of no nodes."""
    none = jnp.zeros((sequences.length.shape[0], 0), jnp.int32)
    return Draft(none, none)


def takes_in(drafter: Drafter, target: LanguageModel, params: Params, state: Any, rows: int) -> bool:
    """Whether `commit` brings the state up to date by itself, or there is no state; else `propose` does."""
    features = jnp.zeros((rows, 1, len(drafter.features), target.width))
    out = Output(jnp.zeros((rows, 1, target.vocab_size)), jnp.zeros((rows, 1, target.width)), features)
    one, none = jnp.zeros((rows, 1), jnp.int32), jnp.zeros(rows, jnp.int32)
    return not jax.tree.leaves(state) or drafter.commit(params, state, out, Verdict(one, none, one)) is not state


class Ask(NamedTuple):
    """A request as the device knows it: the arguments of `decode.start` for one row."""

    tokens: Any  # [S] int32 the prompt, padded
    length: Any  # [] int32
    max_length: Any  # [] int32
    eos: Any  # [E] int32, padded with -1
    key: Any  # [] typed key
    sampling: SamplingParams  # one value a field, none of them None


class Stretch(NamedTuple):
    """What rounds brought, on the host; zero for rows that were not active."""

    tokens: np.ndarray  # [B, stride * (K+1)] new tokens, junk past what was emitted
    status: np.ndarray  # [B]
    counts: np.ndarray  # [B, 3, stride] drafted, accepted, emitted: a RoundInfo


UNUSED = tuple(field for field in SamplingParams._fields if field != "temperature")
"""Fields that `rounds` may leave out when no active row uses them: some cost passes over the vocabulary for every row."""


@jax.jit
def request_key(key: Array, number: Array) -> Array:
    """The key of a request that brings none."""
    return keys.request_keys(key, number[None])[0]


def warmed_up(
    params: Params, ask: Ask, schedule: Any, *, fills: Collection[Build], runs: Collection[Build], settled: Callable
) -> State:  # fmt: skip
    """A state of free slots, once every program has run on it with `ask`; the host calls none of its rows active.

    `settled` puts a state where the next program expects it, as the engine does between them.
    """
    build, slot = next(iter(fills)), np.int32(0)
    state = settled(idle(params, ask, copied(schedule), build=build))
    state = settled(admit(params, state, slot, ask, build=build))
    for build in fills:
        state = settled(fill(params, state, slot, build=build))
    for unused in ((), UNUSED):
        for build in runs:
            state = settled(rounds(params, state, np.zeros(build.slots, bool), build=build, unused=unused)[0])
    return state


@partial(jax.jit, static_argnames="build")
def idle(params: Params, ask: Ask, schedule, *, build: Build) -> State:
    """A state whose rows are all as `ask`, with nothing run; the host calls none of them active."""
    rows = jax.tree.map(lambda x: jnp.repeat(x[None], build.slots, 0), ask)
    return decode.start(params, *rows, target=build.target, drafter=build.drafter, schedule=schedule)


@partial(jax.jit, static_argnames="build", donate_argnames="state")
def admit(params: Params, state: State, slot: Array, ask: Ask, *, build: Build) -> State:
    """Row `slot` starts anew with a request.  K/V buffers stay: what lies in them at or past a row's length is never read."""
    new = decode.start(params, *jax.tree.map(lambda x: x[None], ask), target=build.target, drafter=build.drafter)

    def one(rows, row):
        if isinstance(rows, KVCache):
            return rows._replace(length=one(rows.length, row.length))
        return rows.at[slot].set(row[0])

    bare = state._replace(schedule=())
    return jax.tree.map(one, bare, new, is_leaf=lambda x: isinstance(x, KVCache))._replace(schedule=state.schedule)


@partial(jax.jit, static_argnames="build", donate_argnames="state")
def fill(params: Params, state: State, slot: Array, *, build: Build) -> State:
    """One chunk of prefill for row `slot` alone: it is cut out and put back, and no other row is touched.

    Costs a copy of the row's caches, where a pass over all rows would cost B times the arithmetic; none of the drafter's if
    that has done nothing.
    """
    row = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1), state._replace(schedule=()))
    read = decode.prefill_chunk(params, row, target=build.target, drafter=build.drafter, chunk=build.chunk)
    put = lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, slot, 0)
    drafter = state.drafter if read.drafter is row.drafter else jax.tree.map(put, state.drafter, read.drafter)
    return state._replace(cache=jax.tree.map(put, state.cache, read.cache), drafter=drafter)


@partial(jax.jit, static_argnames=("build", "unused"), donate_argnames="state")
def rounds(params: Params, state: State, active: Array, *, build: Build, unused: tuple[str, ...] = ()) -> tuple[State, Array]:
    """Up to `stride` rounds for the rows that are `active` [B]: the state, and what `stretch` reads, in one array.

    `unused` fields of sampling are compiled out: what such a field would have done to rows that do not use it is nothing,
    bit for bit.
    """
    sampling = state.sampling._replace(**dict.fromkeys(unused))
    held = state._replace(status=jnp.where(active, state.status, STOP), sampling=sampling)
    after, log = decode.run(
        params, held, jnp.asarray(build.stride), target=build.target, drafter=build.drafter, rule=build.rule,
        max_rounds=build.stride, limit=build.limit, packs=build.packs,
    )  # fmt: skip
    after = after._replace(status=jnp.where(active, after.status, state.status), sampling=state.sampling)
    new = jnp.arange(build.stride * (build.drafter.depth + 1))[None]
    tokens = take(after.tokens, jnp.minimum(state.length[:, None] + new, build.capacity - 1))
    return after, jnp.concatenate([log.drafted, log.accepted, log.emitted, after.status[:, None], tokens], 1)


def stretch(brought: Array, build: Build) -> Stretch:
    """What `rounds` brought: waits for it, and copies it to the host in one piece."""
    rows, r = np.asarray(brought), build.stride
    return Stretch(rows[:, 3 * r + 1 :], rows[:, 3 * r], rows[:, : 3 * r].reshape(-1, 3, r))


def copied(schedule: Any):
    """Arrays of the engine's own, since its state is donated; a plain number gets a type for good."""
    return jax.tree.map(lambda x: jnp.array(x, jnp.asarray(x).dtype), schedule)

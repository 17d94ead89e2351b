"""What is put on trial: a target, a drafter, a rule, sampling settings and prompts; and how tokens are taken from it.

    Subject ──sample──► Sample (tokens of many requests, each with its own key; what a probe saw)
       └─────laws────► log_p of every emitted token by an independent road: one full pass without cache, blocks or drafts

A subject may carry a planted fault: `plant` is entered whenever its speculative program is traced, never for the laws.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, keys, sampling
from specjax.drafters.base import LoadedDrafter
from specjax.drafters.plain import plain
from specjax.models.load import LM
from specjax.sampling import SamplingParams
from specjax.types import Array, Drafter, LanguageModel, Params, RoundInfo, Rule
from specjax.verify import RULES

EOS_WIDTH = 4
"""End-of-sequence ids a row has room for at least, so that other ends compile nothing new."""

LOGITS_AT_ONCE = 1 << 25
"""Numbers in the largest [B, T, V] of a full pass: 128 MB."""


class Names(NamedTuple):
    """How a report calls things."""

    target: str
    method: str
    rule: str  # a key of RULES; closed forms are looked up by it


class Subject(NamedTuple):
    """One thing to be tested."""

    target: LanguageModel
    params: Params
    drafter: Drafter
    rule: Rule
    sampling: SamplingParams  # of every request
    prompts: tuple[tuple[int, ...], ...]  # token ids; request i asks prompt i modulo their number
    names: Names
    eos: tuple[int, ...] = ()
    plant: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext  # a fault, for tests of the tests


class Sample(NamedTuple):
    """Requests that were decoded, on the host; R of them."""

    tokens: np.ndarray  # [R, S] prompt and new tokens, right-padded
    start: np.ndarray  # [R] length of the prompt
    length: np.ndarray  # [R] length of both
    status: np.ndarray  # [R]
    info: RoundInfo  # leaves [R, rounds, ...]

    def new(self, row: int) -> list[int]:
        """The tokens that a request was given."""
        return self.tokens[row, self.start[row] : self.length[row]].tolist()


def of_model(
    lm: LM, loaded: LoadedDrafter, prompts: Sequence[Sequence[int]], *, target: str, rule: str | None = None,
    sampling: SamplingParams = SamplingParams(temperature=1.0),
) -> Subject:  # fmt: skip
    """The subject of a model and a drafter as they are loaded.

    Args:
      lm: the target.
      loaded: the drafter with its parameters.
      prompts: token ids of each.
      target: what a report calls the target.
      rule: a key of RULES; None is the drafter's usual one.
      sampling: of every request.
    """
    chosen = loaded.rule if rule is None else rule
    return Subject(
        target=lm.model,
        params=Params(lm.params, loaded.params),
        drafter=loaded.drafter,
        rule=RULES[chosen],
        sampling=sampling,
        prompts=tuple(tuple(int(t) for t in p) for p in prompts),
        names=Names(target, loaded.card.method, chosen),
        eos=() if lm.tokenizer is None else tuple(lm.tokenizer.eos_ids),
    )


def without_drafts(subject: Subject) -> Subject:
    """The same target decoded plainly; under a coupled rule with the request's own noise."""
    name = "coupled" if subject.rule.coupled else "rejection"
    names = subject.names._replace(method="plain", rule=name)
    params = Params(subject.params.target, ())
    return subject._replace(drafter=plain(), params=params, rule=RULES[name], names=names, plant=contextlib.nullcontext)


def varied(subject: Subject, count: int) -> list[tuple[int, ...]]:
    """`count` prompts, as different as may be: when they run out, again with another last token."""
    size, some = subject.target.vocab_size, subject.prompts
    pick = lambda i: (*some[i % len(some)][:-1], (some[i % len(some)][-1] + i // len(some)) % size)
    return [pick(i) for i in range(count)]


@functools.lru_cache(maxsize=64)
def program(target: LanguageModel, drafter: Drafter, rule: Rule, plant: Callable, probe: Callable | None, static: tuple):
    """The whole of decoding, compiled: (params, tokens, lengths, ends, eos, keys, sampling, rounds) -> (State, RoundInfo).

    `static` is (chunk, most rounds).  Call it within `plant()`.
    """
    decode.check(target, drafter, rule)
    chunk, max_rounds = static

    def go(params, tokens, lengths, ends, eos, key, each, rounds):
        state = decode.start(params, tokens, lengths, ends, eos, key, each, target=target, drafter=drafter)
        state = decode.prefill(params, state, chunk=chunk, target=target, drafter=drafter)
        return decode.run(params, state, rounds, target=target, drafter=drafter, rule=rule, probe=probe, max_rounds=max_rounds)

    return jax.jit(go)


def decoded(
    subject: Subject, prompts: Sequence[Sequence[int]], *, key: Array, new: int, ids: Sequence[int] | np.ndarray | None = None,
    budgets=None, eos=None, probe: Callable | None = None, rounds: int = 1 << 20, longest: int | None = None,
):  # fmt: skip
    """One batch: (State, RoundInfo), on the device.

    Args:
      subject: what decodes.
      prompts: B of them.
      key: a typed key; request i of the batch has the key folded from it with ids[i].
      new: the most tokens a request may add; it fixes the shapes.
      ids: [B] numbers of the requests, 0..B-1 unless given.
      budgets: [B] new tokens a request may add, where fewer than `new`.
      eos: [B, E] ids that end each request, in place of the subject's.
      probe: an onlooker, see `decode.round`.
      rounds: stop after so many.
      longest: tokens of a request there is room for, which fixes the shapes too; the longest prompt and `new` unless given.
    """
    batch, longest = len(prompts), max(map(len, subject.prompts)) + new if longest is None else longest
    tokens = np.zeros((batch, decode.capacity_for(longest, subject.drafter)), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = np.asarray([len(p) for p in prompts], np.int32)
    ends = lengths + np.asarray(new if budgets is None else budgets, np.int32)
    eos = np.asarray([subject.eos] * batch, np.int32).reshape(batch, -1) if eos is None else np.asarray(eos, np.int32)
    eos = np.pad(eos, ((0, 0), (0, max(0, EOS_WIDTH - eos.shape[1]))), constant_values=-1)
    request = keys.request_keys(key, jnp.asarray(range(batch) if ids is None else ids, jnp.int32))
    each = sampling.stack([subject.sampling] * batch, subject.target.vocab_size)
    chunk = min(32, max(map(len, subject.prompts)))
    with subject.plant():
        run = program(subject.target, subject.drafter, subject.rule, subject.plant, probe, (chunk, new))
        host = (jnp.asarray(x) for x in (tokens, lengths, ends, eos))
        return run(subject.params, *host, request, each, jnp.asarray(rounds, jnp.int32))


def sample(
    subject: Subject, *, key: Array, rows: int, new: int, batch: int | None = None, probe: Callable | None = None
) -> Sample:
    """Decode `rows` requests, `batch` at a time, each with the key of its number; `new` tokens each, at most."""
    batch, parts = min(rows, batch or rows), []
    for first in range(0, rows, batch):
        ids = np.arange(first, first + batch)
        prompts = [subject.prompts[i % len(subject.prompts)] for i in ids]
        state, info = decoded(subject, prompts, key=key, new=new, ids=ids, probe=probe)
        host = (state.tokens, state.prompt_length, state.length, state.status, info)
        parts.append(jax.tree.map(np.asarray, host))
    return Sample(*jax.tree.map(lambda *x: np.concatenate(x)[:rows], *parts))


@functools.lru_cache(maxsize=64)
def _full_pass(target: LanguageModel, new: int, look: Callable):
    """Compiled: (params, sampling, tokens [B,S], start [B], extra) -> look(log_p [B,new,V], emitted [B,new], extra)."""

    def go(params, each, tokens, start, extra):
        batch, size = tokens.shape
        logits = target.apply(params, tokens, target.init_cache(batch, size))[0].logits
        return look(*row_laws(each, logits, tokens, start, new), *extra)

    return jax.jit(go)


def row_laws(each: SamplingParams, logits: Array, tokens: Array, start: Array, new: int) -> tuple[Array, Array]:
    """log_p [B,new,V] of each new token as plain decoding would have it, one at a time, and these tokens [B,new]."""
    size = tokens.shape[1]
    alone = jnp.ones((1, 1), bool)

    def position(params, logits, tokens, start, j):
        known = jnp.minimum(start + j, size)
        history = sampling.History(tokens, known, start, jnp.zeros(0, jnp.int32), alone)
        return sampling.warp(params, logits[known - 1][None], history)[0]

    steps = jnp.arange(new, dtype=jnp.int32)
    each_step = jax.vmap(position, (None, None, None, None, 0))
    log_p = jax.vmap(each_step, (0, 0, 0, 0, None))(each, logits, tokens, start, steps)
    emitted = jax.vmap(lambda row, n: row[jnp.minimum(n + steps, size - 1)])(tokens, start)
    return log_p, emitted


def laws(subject: Subject, tokens: np.ndarray, start: np.ndarray, new: int, *, look: Callable | None = None, extra=()):
    """The target's own law of tokens start .. start + new - 1 of each row, without drafts, cache or blocks.

    Args:
      subject: its target, parameters and sampling are used, nothing else.
      tokens: [R, S] rows that were decoded.
      start: [R] the first position asked for, at least 1.
      new: positions of a row.
      look: (log_p [B,new,V], tokens [B,new], *extra) -> arrays [B, ...], run on the device: keep one function, it is compiled.
      extra: arrays [R, ...] handed on to `look`.

    Returns:
      What `look` returns, on the host; log_p [R,new,V] without it.
    """
    rows, size = tokens.shape
    batch = min(rows, max(1, LOGITS_AT_ONCE // (size * subject.target.vocab_size)))
    each = sampling.stack([subject.sampling] * batch, subject.target.vocab_size)
    run, parts = _full_pass(subject.target, new, look or _as_it_is), []
    for first in range(0, rows, batch):
        index = np.minimum(np.arange(first, first + batch), rows - 1)
        part = (jnp.asarray(np.asarray(x)[index]) for x in (tokens, start))
        more = jax.tree.map(lambda x, i=index: jnp.asarray(np.asarray(x)[i]), tuple(extra))
        parts.append(jax.tree.map(np.asarray, run(subject.params.target, each, *part, more)))
    return jax.tree.map(lambda *x: np.concatenate(x)[:rows], *parts)


def _as_it_is(log_p, emitted):
    return log_p

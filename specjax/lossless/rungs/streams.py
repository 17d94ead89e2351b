"""Rungs: which randomness is used for what, and that a request's tokens are its own.

Keys are taken from the very functions that decoding runs, where they meet the coins and the noise: no two purposes, rounds,
depths or requests may share one.  Equal keys are a bias, not a matter of style: with the noise of the draft in the coins,
what was drafted and whether it is kept are no longer independent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, keys, sampling
from specjax.lossless.finding import Finding
from specjax.lossless.lab import Lab, exactly
from specjax.lossless.subject import Subject, decoded, varied
from specjax.types import RUNNING, Draft, KVCache, State, Verdict

REQUESTS, LENGTHS, DEPTHS = 3, range(4, 10), (1, 2, 3)


def streams(lab: Lab) -> Finding:
    """Every key that reaches a coin, an emitted token or a draft's noise, over requests, rounds and depths."""
    name = "random streams"
    looked = "keys of draft noise, coins and emitted tokens over requests, rounds and depths: all different"
    subject, used = lab.subject, []

    def note(what: str, key) -> None:
        used.append((what, tuple(np.asarray(key).ravel().tolist())))

    with subject.plant():
        run_round = jax.jit(lambda length: keys_of_round(subject, length, note))
        draw_noise = jax.jit(lambda length, depth: noise_of(subject, length, depth))
        for length in LENGTHS:
            jax.block_until_ready(run_round(jnp.int32(length)))
        jax.effects_barrier()
        noise = {(n, d): np.asarray(draw_noise(jnp.int32(n), jnp.int32(d))) for n in LENGTHS for d in DEPTHS}
    owner, faults = {}, []
    for what, key in used:
        if key in owner and not subject.rule.coupled:
            faults.append(f"two of {REQUESTS} requests and {len(LENGTHS)} rounds share a key: {owner[key]} and {what}")
        owner.setdefault(key, what)
    return exactly(name, looked, faults + bad_noise(subject, noise), f"{len(used)} keys, {len(noise)} draws of noise")


def state_of(subject: Subject, length) -> State:
    """A state of REQUESTS rows with as much in it as keys depend on."""
    rows = jnp.full(REQUESTS, length, jnp.int32)
    return State(
        tokens=jnp.zeros((REQUESTS, 16), jnp.int32), length=rows, prompt_length=rows - 1, max_length=rows + 9,
        eos=jnp.full((REQUESTS, 1), -1, jnp.int32), status=jnp.full(REQUESTS, RUNNING, jnp.int32),
        key=keys.request_keys(jax.random.key(11), jnp.arange(REQUESTS, dtype=jnp.int32)),
        sampling=sampling.stack([subject.sampling._replace(temperature=1.0)] * REQUESTS, subject.target.vocab_size),
        cache=KVCache((), (), rows - 1), drafter=(),
    )  # fmt: skip


def keys_of_round(subject: Subject, length, note: Callable) -> Verdict:
    """Decide a round that starts at `length` of a draft of one node, telling `note(purpose, key data)` of every key used."""
    state, size = state_of(subject, length), subject.target.vocab_size
    node = jnp.zeros((REQUESTS, 1), jnp.int32)
    draft = Draft(node, node - 1, jnp.full((REQUESTS, 1, size), -np.log(size), jnp.float32))
    tell = lambda what, key: jax.debug.callback(functools.partial(note, what), jax.random.key_data(key))
    own_draw, own_gumbel = decode.draw, keys.gumbel

    def draw(rule, key_accept, key_emit, *rest):
        tell("an acceptance coin", key_accept)
        tell("an emitted token", key_emit)
        return own_draw(rule, key_accept, key_emit, *rest)

    def gumbel(request, depth, shape):
        jax.vmap(lambda key: tell("draft noise", key))(request)
        return own_gumbel(request, depth, shape)

    noise = decode.noise_source(state, subject.rule, size)
    with mock.patch.object(decode, "draw", draw):
        verdict = decode.decide(state, draft, jnp.zeros((REQUESTS, 2, size)), noise, rule=subject.rule, depth=1)
    if not subject.rule.coupled:
        with mock.patch.object(keys, "gumbel", gumbel), mock.patch.object(jax.lax, "cond", lambda flag, yes, no: yes()):
            decode.noise_source(state, subject.rule, size)(1, 1)
    return verdict


def noise_of(subject: Subject, length, depth) -> jax.Array:
    """Draft noise [REQUESTS, 2, V]: two rows of one call."""
    return decode.noise_source(state_of(subject, length), subject.rule, subject.target.vocab_size)(depth, 2)


def bad_noise(subject: Subject, noise: dict[tuple[int, int], np.ndarray]) -> list[str]:
    """Noise that comes back where it should be new; under a coupled rule, noise that is not the position's own."""
    owner, faults = {}, []
    for (length, depth), x in noise.items():
        for i in range(REQUESTS):
            for row in range(1 if subject.rule.coupled else 2):
                here = f"noise of request {i}, length {length}, depth {depth}, row {row}"
                place = (i, length + depth) if subject.rule.coupled else (i, length, depth, row)
                before, there = owner.setdefault(x[i, row].tobytes(), (place, here))
                if before != place:
                    faults.append(f"{here} is the {there}")
    if subject.rule.coupled and len(owner) != REQUESTS * len({n + d for n, d in noise}):
        faults.append("noise of one position differs between rounds: drafter and target are not coupled")
    return faults


def batch_mates(lab: Lab) -> Finding:
    """The same requests in another order, and among other requests: the same tokens."""
    name, subject = "batch mates", lab.subject
    looked = "tokens of requests in another order and among other prompts, request by request"
    few, new = lab.how.few, lab.how.short
    order = np.random.default_rng(0).permutation(few)
    asked = varied(subject, few + 1)
    prompt = lambda i: asked[i]
    run = lambda ids, asked: rows_of(decoded(subject, asked, key=lab.key(3), new=new, ids=ids))
    first = run(np.arange(few), [prompt(i) for i in range(few)])
    shuffled = run(order, [prompt(i) for i in order])
    strangers = [i if i % 2 else i + 1000 for i in range(few)]
    mixed = run(strangers, [prompt(i) if i % 2 else prompt(i + 1) for i in range(few)])
    faults = [f"request {i} has other tokens in another order" for k, i in enumerate(order) if shuffled[k] != first[i]]
    faults += [f"request {i} has other tokens among other requests" for i in range(1, few, 2) if mixed[i] != first[i]]
    return exactly(name, looked, faults, f"{few} requests, {sum(map(len, first))} tokens: all the same")


def rows_of(result) -> list[list[int]]:
    """New tokens of each request of one decoded batch."""
    state = result[0]
    tokens, start, length = (np.asarray(x) for x in (state.tokens, state.prompt_length, state.length))
    return [tokens[i, start[i] : length[i]].tolist() for i in range(len(tokens))]

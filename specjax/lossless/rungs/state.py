"""Rung: after rounds of every acceptance count, what is cached is what a fresh prefill of the same tokens would cache.

A scripted drafter proposes plain decoding's own tokens with mistakes put in by hand, so that every count from 0 to K follows
every other; then the subject's own drafter runs, and its caches are held against a prefill too.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import trees
from specjax.lossless.finding import Finding
from specjax.lossless.lab import Lab, exactly
from specjax.lossless.rungs.greedy import tolerance
from specjax.lossless.rungs.streams import rows_of
from specjax.lossless.subject import Subject, decoded, varied, without_drafts
from specjax.types import Array, Draft, Drafter, KVCache, Params
from specjax.verify import RULES

DEPTH, ROUNDS, REQUESTS = 3, (1, 2, 3), 16
BINARY = (-1, -1, 0, 0, 1, 1, 2)
"""A tree whose accepted paths rarely lie side by side."""


class Script(NamedTuple):
    """What the scripted drafter proposes."""

    truth: Array  # [B, S] prompts and plain decoding's tokens
    wrong: Array  # [B, R, N] in round r: added to the truth at a node's depth, 0 = the right token


def scripted(parents: tuple[int, ...], depth: int, vocab_size: int) -> Drafter:
    """A drafter of a fixed tree that proposes what its parameters, a Script, say; its state counts rounds."""
    level = jnp.asarray(trees.ancestors(jnp.asarray(parents, jnp.int32)).sum(-1, dtype=jnp.int32)[1:] - 1)

    def propose(noise, params, state, sequences):
        script: Script = params.drafter
        wrong = jax.vmap(lambda rounds, i: rounds[jnp.minimum(i, rounds.shape[0] - 1)])(script.wrong, state)
        index = jnp.minimum(sequences.length[:, None] + level[None] - 1, script.truth.shape[1] - 1)
        tokens = (jnp.take_along_axis(script.truth, index, 1) + wrong) % vocab_size
        return Draft(tokens, jnp.broadcast_to(jnp.asarray(parents, jnp.int32)[None], tokens.shape)), state

    return Drafter(
        init=lambda params, batch, capacity: jnp.zeros(batch, jnp.int32),
        absorb=lambda params, state, sequences, out, count: state,
        propose=propose,
        commit=lambda params, state, out, verdict: state + 1,
        num_nodes=len(parents),
        depth=depth,
        chain=tuple(range(-1, len(parents) - 1)) == parents,
        vocab_size=vocab_size,
    )


def state(lab: Lab) -> Finding:
    """Forced acceptance counts, then the subject's own drafter."""
    name, looked = "cached state", "caches after rounds of forced acceptance counts, against a fresh prefill of the same tokens"
    cold = lab.subject._replace(sampling=lab.subject.sampling._replace(temperature=0.0), eos=())
    prompts = varied(cold, REQUESTS)
    new = (max(ROUNDS) + 1) * (DEPTH + 1)
    plain = without_drafts(cold)
    truth = [[*p, *t] for p, t in zip(prompts, rows_of(decoded(plain, prompts, key=lab.key(5), new=new)), strict=True)]
    faults, counts, gaps = [], set(), []
    trees_too = not cold.drafter.chain and not cold.rule.chain
    for parents in (tuple(trees.chain(DEPTH).tolist()), BINARY) if trees_too else (tuple(trees.chain(DEPTH).tolist()),):
        forced = force(cold, parents, truth)
        for rounds in ROUNDS:
            result, info = decoded(forced, prompts, key=lab.key(5), new=new, rounds=rounds)
            counts |= set(np.asarray(info.accepted)[:, rounds - 1].tolist())
            fault, gap = against_prefill(plain, result, prompts, lab.key(5), new, result.cache, 1)
            faults += [f"target, {'chain' if parents[1] == 0 else 'tree'}, after {rounds} rounds: {f}" for f in fault]
            gaps.append(gap)
    for rounds in (1, 4):
        fault, gap = own_drafter(cold, prompts, lab.key(5), new, rounds)
        faults += [f"after {rounds} rounds of {cold.names.method}: {f}" for f in fault]
        gaps.append(gap)
    saw = f"acceptance counts {sorted(counts)}, largest relative difference {max(gaps):.1e}"
    return exactly(name, looked, faults, saw, counts >= set(range(DEPTH + 1)))


def force(subject: Subject, parents: tuple[int, ...], truth: list[list[int]]) -> Subject:
    """The subject with the scripted drafter; its own rule where that takes drafts without a law."""
    rows = np.zeros((len(truth), max(map(len, truth))), np.int32)
    for i, line in enumerate(truth):
        rows[i, : len(line)] = line
    seen = np.asarray(trees.ancestors(jnp.asarray(parents, jnp.int32)))[1:, 1:]
    wrong = np.ones((len(truth), max(ROUNDS), len(parents)), np.int32)
    for i, r in np.ndindex(wrong.shape[:2]):  # the right tokens are those on the path to one node; count 0 has none
        count, turn = (i + r) % (DEPTH + 1), i // (DEPTH + 1) + r
        ends = np.flatnonzero(seen.sum(1) == count)
        if len(ends):
            wrong[i, r, seen[ends[-1 - turn % len(ends)]]] = 0
    rule = subject.rule if "point" in subject.rule.accepts else RULES["target_match"]
    drafter = scripted(parents, int(seen.sum(1).max()), subject.target.vocab_size)
    params = Params(subject.params.target, Script(jnp.asarray(rows), jnp.asarray(wrong)))
    return subject._replace(drafter=drafter, params=params, rule=rule)


def own_drafter(subject: Subject, prompts, key, new: int, rounds: int) -> tuple[list[str], float]:
    """The target's cache and every KVCache of the drafter's state, up to what the last round may have left unread."""
    result, _ = decoded(subject, prompts, key=key, new=new, rounds=rounds)
    faults, worst = against_prefill(without_drafts(subject), result, prompts, key, new, result.cache, 1)
    longer = [[*p, *t] for p, t in zip(prompts, rows_of((result,)), strict=True)]
    sound = subject._replace(plant=contextlib.nullcontext)
    fresh = decoded(sound, longer, key=key, new=new, rounds=0, longest=max(map(len, prompts)) + new)[0]
    is_cache = lambda x: isinstance(x, KVCache)
    both = (jax.tree.leaves(s.drafter, is_leaf=is_cache) for s in (result, fresh))
    for mine, theirs in zip(*both, strict=True):
        if is_cache(mine):
            more, gap = compare(mine, theirs, np.asarray(result.length) - 1 - subject.drafter.depth, subject)
            faults, worst = faults + [f"the drafter's {f}" for f in more], max(worst, gap)
    return faults, worst


def against_prefill(plain: Subject, result, prompts, key, new: int, cache: KVCache, behind: int) -> tuple[list[str], float]:
    """Compare the target's `cache` with a prefill of the tokens that were committed."""
    longer = [[*p, *t] for p, t in zip(prompts, rows_of((result,)), strict=True)]
    fresh = decoded(plain, longer, key=key, new=new, rounds=0, longest=max(map(len, prompts)) + new)[0]
    length = np.asarray(result.length) - behind
    held = np.asarray(cache.length)
    if (held != length).any():
        row = int((held != length).argmax())
        return [f"request {row} holds {held[row]} tokens of {length[row] + behind}, all but the last are due"], 0.0
    return compare(cache, fresh.cache, length, plain)


def compare(mine: KVCache, theirs: KVCache, length: np.ndarray, subject: Subject) -> tuple[list[str], float]:
    """Keys and values below `length` [B] of two caches: what differs, and the largest difference over the largest number."""
    worst, faults = 0.0, []
    for kind, axis, layers in (
        ("keys", 3, zip(mine.k, theirs.k, strict=True)),
        ("values", 2, zip(mine.v, theirs.v, strict=True)),
    ):
        for layer, (a, b) in enumerate(layers):
            slots = min(a.shape[axis], b.shape[axis])
            a, b = (np.moveaxis(np.asarray(x, np.float32), axis, 1)[:, :slots] for x in (a, b))
            used = (np.arange(slots)[None] < length[:, None]).reshape(*a.shape[:2], *[1] * (a.ndim - 2))
            gap = np.where(used, np.abs(a - b), 0)
            relative = float(gap.max() / max(np.abs(np.where(used, b, 0)).max(), 1e-30))
            worst = max(worst, relative)
            if not relative <= tolerance(subject):
                row, slot = np.unravel_index(gap.argmax(), gap.shape)[:2]
                faults.append(f"{kind} of layer {layer} differ by {gap.max():.3g} at request {row}, slot {slot}")
    return faults, worst

"""Another library's sampler on the bench: does what it emits have the target's law?

The audit knows the target p and the drafter q as tables, draws the drafts itself, hands the sampler what it would get in its
own library (a draft and the rows of both models), completes short outputs from the target, and tests the JOINT of all tokens
of a round against the truth.  Rows depend on the context, so that a row read from the wrong place is seen.

    def theirs(key, draft_tokens, p_rows, q_rows):  # [N], [N+1, V], [N, V]
        return their_sampler(p_rows, q_rows, draft_tokens, seed=int(jax.random.bits(key)))  # 1 to K+1 tokens

    audit(theirs, p=random_law(1, 4), q=iid(random_law(2, 4)), vocab_size=4, num_draws=20_000, key=jax.random.key(0))
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import trees
from specjax.lossless import law
from specjax.lossless.finding import FAIL, INCONCLUSIVE, PASS, Finding, Test
from specjax.lossless.law import Proposal, Target
from specjax.lossless.statistics import g_test
from specjax.types import Array, Draft, Rule
from specjax.verify import draw

Sampler = Callable[
    ..., Any
]  # (key, draft_tokens [N], p_rows [N+1, V], q_rows [N, V]) -> 1..K+1 tokens, or (tokens [K+1], how many)
MOST_DRAFTS = 100_000


class Audit(NamedTuple):
    """What a sampler does, beside what it should."""

    finding: Finding
    law_seen: np.ndarray  # [V] * (K+1) share of each sequence
    law_true: np.ndarray  # [V] * (K+1)
    tv: float  # between them; `noise` of it is expected of a sound sampler
    noise: float


class Table(NamedTuple):
    """Every draft there is: M = V^N of them."""

    weight: np.ndarray  # [M] probability of each
    tokens: np.ndarray  # [M, N]
    p: np.ndarray  # [M, N+1, V] the target's rows
    q: np.ndarray  # [M, N, V] what the sampler is told of each node's law


def audit(
    sampler: Sampler,
    *,
    p: Target,
    q: Proposal,
    vocab_size: int,
    num_draws: int,
    key: Array,
    parents: np.ndarray | None = None,
    told: Proposal | None = None,
    alpha: float = 1e-6,
    smallest: float = 0.02,
) -> Audit:
    """Call `sampler` on `num_draws` rounds and judge the joint of K+1 tokens (K the depth of the draft).

    Args:
      sampler: vmapped under one jit if it can be traced and gives (tokens [K+1], count), as for arrays of jax; else called
        in a loop on NumPy arrays and a key.  All its randomness must come from the key.
      p: the target: prefix -> p [V].
      q: what drafts are really drawn from, given the prefix and earlier siblings; see `drawn`.
      vocab_size: V; V^N drafts are listed, at most 100,000.
      num_draws: rounds.
      key: a typed key.
      parents: topology; a chain of 2 if None.  Row 0 of p_rows belongs to the context, row i + 1 to node i.
      told: what the sampler hears of q, where that is not the truth (to re-create a fault of reporting).
      alpha: P(FAIL | sound sampler).
      smallest: the TV that must be seen with probability .99, or else a pass is INCONCLUSIVE.

    Raises:
      ValueError: more drafts than can be listed.
    """
    parents = trees.chain(2) if parents is None else np.asarray(parents, np.int32)
    table = tabulate(parents, p, q, told or q, vocab_size)
    horizon = 1 + _depth(parents)
    key_draft, key_sampler, key_rest = jax.random.split(key, 3)
    seeds = [int(jax.random.bits(k)) for k in (key_draft, key_rest)]
    which = np.random.default_rng(seeds[0]).choice(len(table.weight), num_draws, p=table.weight)
    keys = jax.random.split(key_sampler, num_draws)
    tokens, count = run(sampler, keys, which, table, horizon)
    shown = np.arange(horizon)[None] < count[:, None]
    broken = (count < 1) | (count > horizon) | (shown & ((tokens < 0) | (tokens >= vocab_size))).any(1)
    true = law.truth(p, vocab_size, horizon)
    whole = complete(tokens[~broken], count[~broken], p, vocab_size, np.random.default_rng(seeds[1]))
    counts = np.bincount(np.ravel_multi_index(whole.T, true.shape), minlength=true.size).reshape(true.shape)
    test = g_test(counts, true, alpha=alpha) if len(whole) else Test(np.inf, 0.0, 0, np.inf, "TV of the joint")
    test = test._replace(p_value=0.0) if broken.any() else test
    seen = counts / num_draws
    tv = float(np.abs(seen - true).sum() / 2)
    noise = float(np.sqrt(true * (1 - true) * 2 / np.pi / num_draws).sum() / 2)  # mean absolute deviation of normal counts
    return Audit(judge(test, tv, noise, int(broken.sum()), alpha, smallest), seen, true, tv, noise)


def judge(test: Test, tv: float, noise: float, broken: int, alpha: float, smallest: float) -> Finding:
    """The verdict, with what was seen and what could have been."""
    sound = PASS if test.effect <= smallest else INCONCLUSIVE
    saw = f"TV {tv:.4f} where a sound sampler shows {noise:.4f}; p = {test.p_value:.2g}; finds TV {test.effect:.4f}"
    if broken:
        saw += f"; {broken} outputs with tokens outside the vocabulary, or none, or more than draft + 1"
    looked = f"joint of a round's tokens with the target's own, {test.samples} rounds"
    assert test.p_value is not None
    return Finding("audit", FAIL if test.p_value <= alpha else sound, looked, saw, alpha, test)


def tabulate(parents: np.ndarray, p: Target, q: Proposal, told: Proposal, vocab_size: int) -> Table:
    """List the drafts of positive probability, with the rows that go with each."""
    n = len(parents)
    if vocab_size**n > MOST_DRAFTS:
        raise ValueError(f"{vocab_size} ** {n} drafts are more than {MOST_DRAFTS}: use a smaller vocabulary or draft")
    rows = []
    for tokens in itertools.product(range(vocab_size), repeat=n):
        weight, prefixes, _ = law.draft_probability(tokens, parents, q)
        if weight > 0:
            reported = law.draft_probability(tokens, parents, told)[2]
            rows.append((weight, tokens, np.stack([p(prefix) for prefix in prefixes]), np.stack(reported)))
    weight, tokens, p_rows, q_rows = (np.array(x) for x in zip(*rows, strict=True))
    return Table(weight / weight.sum(), tokens.astype(np.int32), p_rows.astype(np.float32), q_rows.astype(np.float32))


def run(sampler: Sampler, keys: Array, which: np.ndarray, table: Table, horizon: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [n, K+1] and how many of them count [n], of the sampler on the drafts `which` [n]."""
    one = (jax.ShapeDtypeStruct((), keys.dtype), *(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in table[1:]))
    if _traceable(sampler, one, horizon):
        batch = jax.jit(jax.vmap(lambda key, i, rows: sampler(key, *(x[i] for x in rows)), (0, 0, None)))
        tokens, count = batch(keys, jnp.asarray(which, jnp.int32), [jnp.asarray(x) for x in table[1:]])
        return np.asarray(tokens), np.asarray(count)
    tokens, count = np.zeros((len(which), horizon), np.int64), np.zeros(len(which), np.int64)
    for row, (key, i) in enumerate(zip(keys, which, strict=True)):
        given = sampler(key, *(x[i] for x in table[1:]))
        emitted = np.asarray(given[0][: int(given[1])] if isinstance(given, tuple) and np.ndim(given[0]) else given).ravel()
        count[row] = len(emitted)
        tokens[row, : len(emitted)] = emitted[:horizon]
    return tokens, count


def _traceable(sampler: Sampler, arguments: tuple, horizon: int) -> bool:
    try:
        shapes = jax.eval_shape(sampler, *arguments)
    except Exception:  # code of another library fails on tracers in a way of its own; the loop will show real errors
        return False
    return isinstance(shapes, tuple) and [getattr(s, "shape", None) for s in shapes] == [(horizon,), ()]


def complete(tokens: np.ndarray, count: np.ndarray, p: Target, vocab_size: int, rng: np.random.Generator) -> np.ndarray:
    """tokens [n, K+1] with those past `count` drawn from the target."""
    tokens = tokens.copy()
    for depth in range(tokens.shape[1]):
        short = np.flatnonzero(count <= depth)
        for prefix in itertools.product(range(vocab_size), repeat=depth):
            here = short[(tokens[short, :depth] == np.array(prefix, int)[None]).all(1)]
            if len(here):
                tokens[here, depth] = rng.choice(vocab_size, len(here), p=p(prefix))
    return tokens


def rule_sampler(rule: Rule, parents: np.ndarray | None = None) -> Sampler:
    """One of our rules as a sampler for the bench, through the very `draw` that decoding uses."""

    def sampler(key, draft_tokens, p_rows, q_rows):
        topology = trees.chain(len(draft_tokens)) if parents is None else parents
        depth = _depth(topology)
        key_accept, key_emit, key_noise = jax.random.split(key, 3)
        noise = jax.random.gumbel(key_noise, (depth + 1, p_rows.shape[-1]), p_rows.dtype) if rule.coupled else None
        draft = Draft(draft_tokens, jnp.asarray(topology, jnp.int32), jnp.log(q_rows))
        verdict = draw.draw(rule, key_accept, key_emit, noise, draft, jnp.log(p_rows), depth)
        return verdict.tokens, verdict.num_accepted + 1

    return sampler


def _depth(parents: np.ndarray) -> int:
    """The longest path of a tree, in nodes."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else 1 + depths[parent])
    return max(depths, default=0)

"""One sample and one set of rows for all statistical rungs: what each emitted token was, and what it could have been.

An onlooker inside the round notes, from what the round itself holds, which token the draft pushes towards at each row (the
witness) and how often drafts are kept against how often they should be.  Afterwards every token is scored by its own row
of an independent full pass.  Witnesses depend on the emitted past alone, so that a bet on them is fair: what was drawn in a
round never chooses its own test.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import trees
from specjax.lossless.subject import Sample, Subject, laws
from specjax.sampling import first_argmax
from specjax.types import Array, Draft, Verdict
from specjax.verify.common import draft_law, parent_rows, residual

MOST_RANKS = 8
"""Classes of a token for bets: its rank among the most probable ones, the last class holds the rest."""


class Watch(NamedTuple):
    """What the onlooker notes of a round."""

    witness: Array  # [B, K+1] token that the draft pushes towards at each row of the path; -1 where nothing was drafted
    tested: Array  # [B, N] bool: the round came to this node
    surplus: Array  # [B, N] 1[accepted] - P(accepted | tested)
    variance: Array  # [B, N] of it


class Evidence(NamedTuple):
    """n emitted tokens in the order in which they came, a request after the other."""

    y: Any  # [n] the token
    p: Any  # [n] its probability
    above: Any  # [n] probability of all more probable tokens (lower ids first on a tie)
    top_p: Any  # [n] the largest probability
    is_top: Any  # [n] y has it
    witness: Any  # [n] -1 where there is none
    witness_p: Any  # [n]
    witness_before: Any  # [n] the witness stands before y in that order
    rank: Any  # [n] class of y, by rank
    ranks: Any  # [n, C] law of the classes


def expected_acceptance(name: str, draft: Draft, log_p: Array) -> Array:
    """P(node accepted | the round came to it) [N], for drafts not yet drawn there; rules that decide from the root down.

    Rejection of any kind keeps sum min(r, q) of what is left of p, r <- norm(max(r - q, 0)) after a refusal, which is 1 - TV
    at a first attempt; matching the target's own sample keeps sum r q, r <- r without the refused token.
    """
    rows = parent_rows(draft)

    def attempt(left, node):
        r, q = left[rows[node]], draft_law(draft, node, left[rows[node]])
        if name == "target_match":
            kept = (r * q).sum()
            rest = jnp.where(jnp.arange(r.shape[0], dtype=jnp.int32) == draft.tokens[node], 0, r)
            after = jnp.where(rest.sum() > 0, rest / jnp.where(rest.sum() > 0, rest.sum(), 1), r)
        else:
            kept, after = jnp.minimum(r, q).sum(), residual(r, q)
        after = jnp.where(draft.parents[node] >= -1, after, r)
        return jax.lax.dynamic_update_index_in_dim(left, after, rows[node], 0), kept

    nodes = jnp.arange(draft.tokens.shape[0], dtype=jnp.int32)
    return jnp.clip(jax.lax.scan(attempt, jnp.exp(log_p), nodes)[1], 0, 1)


def has_closed_form(subject: Subject) -> bool:
    """Whether `expected_acceptance` is known for a subject's rule and drafts."""
    name = subject.names.rule
    return name in ("rejection", "recursive", "greedy_multi_draft", "target_match") or (
        name == "k_seq" and subject.drafter.chain  # one child: its threshold is 1
    )


@functools.cache  # one function a rule: it is compiled into the program
def onlooker(name: str) -> Callable:
    """A `probe` for `decode.run` that gives a Watch."""

    def one(draft: Draft, log_p: Array, verdict: Verdict) -> Watch:
        n = draft.tokens.shape[0]
        if n == 0:
            none = jnp.zeros(0)
            return Watch(jnp.full(verdict.path.shape, -1, jnp.int32), none.astype(bool), none, none)
        first = trees.links(draft.parents)[0]

        def push(row):  # the token on which q exceeds p most
            gap = draft_law(draft, jnp.minimum(first[row], n - 1), log_p[row]) - jnp.exp(log_p[row])
            return jnp.where(first[row] < n, first_argmax(gap), -1)

        step = jnp.arange(verdict.path.shape[0] - 1, dtype=jnp.int32)
        on_path = jnp.arange(verdict.path.shape[0], dtype=jnp.int32) <= verdict.num_accepted
        rows, node = parent_rows(draft), jnp.arange(n, dtype=jnp.int32)
        child = jnp.where(step < verdict.num_accepted, verdict.path[1:] - 1, n)
        taken = (
            jnp.full(n + 1, -1, jnp.int32).at[jnp.where(on_path, verdict.path, n + 1)].set(jnp.append(child, n), mode="drop")
        )
        tested = (draft.parents >= -1) & (node <= taken[rows])
        kept = expected_acceptance(name, draft, log_p)
        surplus = (node == taken[rows]).astype(kept.dtype) - kept
        nothing = jnp.zeros_like(kept)
        return Watch(
            jax.lax.map(push, verdict.path).astype(jnp.int32), tested, jnp.where(tested, surplus, nothing),
            jnp.where(tested, kept * (1 - kept), nothing),
        )  # fmt: skip

    return jax.vmap(one)


def score(log_p: Array, emitted: Array, witness: Array) -> Evidence:
    """Evidence [B, new] of tokens under their rows; run on the device."""
    p = jnp.exp(log_p)
    index = jax.lax.broadcasted_iota(jnp.int32, p.shape, 2)
    at = lambda token: jnp.take_along_axis(p, jnp.maximum(token, 0)[..., None], -1)[..., 0]
    p_y, p_w, top = at(emitted), at(witness), first_argmax(log_p)
    before = (p > p_y[..., None]) | ((p == p_y[..., None]) & (index < emitted[..., None]))
    count = min(MOST_RANKS, p.shape[-1])
    best = jax.lax.top_k(p, count - 1)[0]
    return Evidence(
        y=emitted,
        p=p_y,
        above=jnp.where(before, p, 0).sum(-1),
        top_p=p.max(-1),
        is_top=emitted == top,
        witness=witness,
        witness_p=jnp.where(witness >= 0, p_w, 0),
        witness_before=(p_w > p_y) | ((p_w == p_y) & (witness < emitted)),
        rank=jnp.minimum(before.sum(-1, dtype=jnp.int32), count - 1),
        ranks=jnp.concatenate([best, jnp.maximum(1 - best.sum(-1, keepdims=True), 0)], -1),
    )


def gather(subject: Subject, taken: Sample) -> Evidence:
    """Score every token of a sample that was taken with `onlooker`."""
    new = int((taken.length - taken.start).max())
    found = laws(subject, taken.tokens, taken.start, new, look=score, extra=(witnesses(taken, new),))
    real = np.arange(new)[None] < (taken.length - taken.start)[:, None]
    return Evidence(*(np.asarray(x)[real] for x in found))


def witnesses(taken: Sample, new: int) -> np.ndarray:
    """[R, new] the witness of each new token, from the round that emitted it."""
    found = np.full((len(taken.start), new), -1, np.int32)
    emitted, seen = taken.info.emitted, taken.info.probed.witness  # [R, rounds], [R, rounds, K+1]
    first = np.cumsum(emitted, 1) - emitted
    for j in range(seen.shape[2]):
        row, r = np.nonzero(emitted > j)
        found[row, first[row, r] + j] = seen[row, r, j]
    return found

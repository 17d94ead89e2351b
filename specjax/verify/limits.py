"""Ceilings: what no lossless rule can exceed.  Acceptance above one of them is a bug, by proof.

Each is a function of the rows that a round has anyway, written for one row; vmap outside.  `ceiling` sums them over the
rows that a round of ONE sequence has reached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.types import Array, Draft, Verdict
from specjax.verify.common import at_tokens, parent_rows

LOG_TIMES = (-14.0, 80.0, 0.25)
"""First and last of the log times at which clocks are read, and their distance.  Before the first one two clocks of rate 1
ring with probability 1e-12; the last one waits for tokens of probability 1e-34 and still fits float32."""

FAINT = 1e-30
"""A q below this is lost among the clocks."""


def one_draft(p: Array, q: Array) -> Array:
    """1 - TV(p, q) = sum min(p, q): one token drawn from q [V] (maximal coupling)."""
    return jnp.minimum(p, q).sum()


def fixed_set(p: Array, tokens: Array) -> Array:
    """p of a set of candidates chosen without chance: `tokens` [K], repeats counted once."""
    return jnp.where(jnp.zeros(p.shape, bool).at[tokens].set(True), p, 0).sum()


def iid_drafts(p: Array, q: Array, num_drafts: int | Array) -> Array:
    """Optimal transport from K >= 1 i.i.d. draws: 1 + min over prefixes H of P(H) - q(H)^K, tokens sorted by p/q.

    O(V log V); the minimum over all sets is attained at such a prefix (verification facts, A5 d).
    """
    p, q = _by_ratio(p, q)
    return 1 + jnp.minimum(0, (jnp.cumsum(p) - jnp.cumsum(q) ** jnp.asarray(num_drafts, p.dtype)).min())


def without_replacement_drafts(p: Array, q: Array, num_drafts: int | Array, *, most: int | None = None) -> Array:
    """The same for K >= 1 draws without replacement: Q(H) = P(all K draws lie in H).

    A q of fewer than K tokens is exhausted by fewer draws: then Q(H) is 1 where H holds them all and else 0, and the ceiling
    is the target's mass on them.  O(V K) times the 377 nodes of `_all_within`: V = 49,152 and K = 4 take .15 s on one core.

    Args:
      p: [V] the target's law at the row.
      q: [V] the law of the first draw.
      num_drafts: K; may be traced, given `most`.
      most: the largest K that may come.
    """
    p, q = _by_ratio(p, q)
    draws = jnp.minimum(num_drafts, (q > 0).sum(dtype=jnp.int32))
    return 1 + jnp.minimum(0, (jnp.cumsum(p) - _all_within(q, draws, int(num_drafts) if most is None else most)).min())


def _all_within(q: Array, draws: Array, most: int) -> Array:
    """P(all draws lie among the tokens 0..i) for every i [V], of `draws` <= `most` draws without replacement.

    Draws without replacement arrive like independent exponential clocks of rates q.  With o the rate outside H = 0..i,
    Q(H) = integral of o exp(-o t) P(at least `draws` clocks of H rang by t) dt.  In u = log t the trapezoid rule is
    exponentially accurate; one pass over the tokens carries P(exactly 0..most-1 rang) at all its nodes, for every H in turn.
    """
    start, stop, step = LOG_TIMES
    time = jnp.exp(jnp.arange(start, stop + step, step, dtype=q.dtype))
    outside = jnp.append(jnp.cumsum(q[::-1])[::-1][1:], 0)
    short = jnp.arange(most, dtype=jnp.int32)[:, None] < draws

    def prefix(carry, token):
        counts, lost = carry  # [most, nodes] and, for float32, what its additions have rounded away (Kahan)
        rate, rest = token
        fewer = jnp.concatenate([jnp.zeros_like(counts[:1]), counts[:-1]])
        change = (counts - fewer) * jnp.expm1(-rate * time)[None] - lost
        new = counts + change
        rang = 1 - jnp.where(short, new, 0).sum(0)
        density = rest * time * jnp.exp(-rest * time)
        within = step * (density * rang).sum() + jnp.exp(-rest * time[-1]) * rang[-1]
        return (new, (new - counts) - change), within

    counts = jnp.zeros((most, time.shape[0]), q.dtype).at[0].set(1)
    within = jax.lax.scan(prefix, (counts, jnp.zeros_like(counts)), (q, outside))[1]
    return jnp.where(outside > 0, jnp.minimum(within, 1), 1)


def sampled_then_top_drafts(p: Array, q: Array, top: Array) -> Array:
    """p(H) + sum outside H of min(p, q): one draw from q [V], zero on H, and the tokens `top` [V] bool of H (A5 e)."""
    return jnp.where(top, p, jnp.minimum(p, q)).sum()


def path_sum(draft: Draft, log_p: Array) -> Array:
    """Expected accepted tokens of a tree fixed without chance: the sum of its nodes' path probabilities.

    Any lossless rule has this expectation or less, and `target_match` attains it.  log_p [N+1, V] of one sequence; a twin
    of an earlier sibling adds nothing.
    """
    twin = trees.twins(draft.tokens, draft.parents)
    p_x = jnp.where((draft.parents >= -1) & ~twin, at_tokens(log_p, parent_rows(draft), draft.tokens), 0)
    path = trees.ancestors(draft.parents)[1:, 1:]
    return jnp.where(draft.parents >= -1, jnp.where(path, p_x[None], 1).prod(-1), 0).sum()


def ideal_block(p_paths: Array, q_paths: Array) -> Array:
    """sum over prefixes of min(p(prefix), q(prefix)): what no rule on one sampled path can exceed (Sun et al. 2024).

    Probabilities of whole prefixes, of every length from 1 to L, in any order but the same in both.
    """
    return jnp.minimum(p_paths, q_paths).sum()


def drawn_block(draft: Draft, log_p: Array) -> Array:
    """sum_i min(1, prod_{j<=i} p(x_j)/q(x_j)) on the chain that was drawn: `ideal_block` in expectation over drafts."""
    if draft.log_q is None:
        return path_sum(draft, log_p)
    node = jnp.arange(draft.tokens.shape[0], dtype=jnp.int32)
    log_q = draft.log_q.astype(log_p.dtype)[node, draft.tokens]
    lawful = (draft.parents >= -1) & jnp.isfinite(log_q)
    log_ratio = jnp.where(lawful, log_p[node, draft.tokens] - jnp.where(lawful, log_q, 0), -jnp.inf)
    return jnp.exp(jnp.minimum(0, jnp.cumsum(log_ratio))).sum()


def _where_it_resolves(row: Children, most: int) -> Array:
    """`without_replacement_drafts`, or 1 where later siblings were drawn from what floats hold of q: never too low."""
    lost = (row.q > FAINT).sum(dtype=jnp.int32) < jnp.minimum(row.count, row.support)
    return jnp.where(lost, 1, without_replacement_drafts(row.p, row.q, row.count, most=most))


class Children(NamedTuple):
    """One row of the verified block and what was drafted below it."""

    p: Array  # [V] the target's law
    q: Array  # [V] what the first child was drawn from
    support: Array  # [] tokens that it could be, those too whose q is below what a float holds
    count: Array  # [] children that exist
    later: Array  # [V] bool: tokens of the children after the first


ROW_CEILINGS: dict[str, Callable[[Children, int], Array]] = {
    "iid": lambda row, most: iid_drafts(row.p, row.q, row.count),
    "without_replacement": lambda row, most: _where_it_resolves(row, most),
    "sampled_then_top": lambda row, most: sampled_then_top_drafts(row.p, row.q, row.later),
}
"""P(a child is accepted) at most, by how siblings were drawn.  Nothing is known for siblings from laws of their own."""


def ceiling(
    draft: Draft, log_p: Array, verdict: Verdict, *, children: str, chain: bool, top_down: bool, most: int | None = None
) -> Array:
    """What no lossless rule of a kind can exceed in accepted tokens of a round, in expectation over rounds.

    A deterministic draft: its path sum, for any rule.  A rule that decides from the root down: the ceilings of the rows that
    it reached.  Any other rule on a chain: the ideal block, estimated from the tokens drawn.

    One sequence's Draft of N nodes, its laws log_p [N+1, V] and its Verdict; `children` and `chain` are the `Drafter`'s,
    `top_down` is the `Rule`'s.  No node has more than `most` children (N at first), which saves work without replacement.

    Raises:
      ValueError: no formula is known for such drafts under such rules.
    """
    if draft.log_q is None or children == "point":
        return path_sum(draft, log_p)
    if chain and not top_down:
        return drawn_block(draft, log_p)
    if not top_down or (not chain and children not in ROW_CEILINGS):
        raise ValueError(
            f"no ceiling is known for a tree of children {children!r} under a rule with top_down={top_down}: "
            f"known are a chain, point children, and {', '.join(ROW_CEILINGS)} under a rule with top_down=True"
        )
    log_q, node = draft.log_q, jnp.arange(draft.tokens.shape[0], dtype=jnp.int32)
    bound = (lambda row, most: one_draft(row.p, row.q)) if chain else ROW_CEILINGS[children]

    def at(row):
        child = draft.parents == row - 1
        first = jnp.argmax(child).astype(jnp.int32)
        later = jnp.zeros(log_p.shape[-1], bool).at[draft.tokens].max(child & (node != first))
        q = jnp.exp(log_q[first].astype(log_p.dtype))
        support = (log_q[first] > -jnp.inf).sum(dtype=jnp.int32)
        below = Children(jnp.exp(log_p[row]), q, support, child.sum(dtype=jnp.int32), later)
        allowed = jnp.minimum(bound(below, len(node) if most is None else most), 1)
        certain = jnp.where(later.at[draft.tokens[first]].set(True), below.p, 0).sum()  # at temperature 0 no child is drawn
        return jnp.where(child.any(), jnp.where(support == 1, certain, allowed), 0)

    reached = jnp.arange(verdict.path.shape[0], dtype=jnp.int32) <= verdict.num_accepted
    return jnp.where(reached, jax.lax.map(at, verdict.path), 0).sum()


def _by_ratio(p: Array, q: Array) -> tuple[Array, Array]:
    """Both laws in ascending order of p/q; tokens that q never draws come last."""
    order = jnp.argsort(jnp.where(q > 0, p / jnp.where(q > 0, q, 1), jnp.inf))
    return p[order], q[order]

"""The walk and the only coins.  Everything here is for ONE sequence.

A rule's `plan` holds probabilities; here they meet randomness, from streams that never mix: acceptance coins from one key,
the emitted token from another, and the drafts' noise from a third that this file never sees.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.sampling import first_argmax
from specjax.types import Array, Draft, Plan, Rule, Verdict
from specjax.verify.common import parent_rows


def draw(rule: Rule, key_accept: Array, key_emit: Array, noise, draft: Draft, log_p: Array, depth: int) -> Verdict:
    """Throw the coins of one round.

    Args:
      rule: the verification rule.
      key_accept: key of the acceptance coins.
      key_emit: key of the emitted token.
      noise: [depth+1, V] the request's own noise by depth, for coupled rules; None for the others.
      draft: one sequence's Draft of N nodes.
      log_p: [N+1, V] the target's law at each row of the block.
      depth: the longest path, in tokens.
    """
    n = draft.tokens.shape[0]
    seen = trees.ancestors(draft.parents)
    if rule.coupled:
        level = jnp.minimum(seen.sum(-1, dtype=jnp.int32) - 1, depth)
        y = first_argmax(log_p + noise[level])
        hit = (draft.tokens == y[parent_rows(draft)]) & (draft.parents >= -1)
        plan = rule.plan(draft, log_p)
        row = walk(jnp.where(hit, plan.if_accept, plan.if_reject))
        return verdict(draft, seen, row, y[row], depth)
    if n == 0:
        return verdict(draft, seen, jnp.zeros((), jnp.int32), sample(key_emit, log_p[0]), depth)
    plan = rule.plan(draft, log_p)
    row = walk(follow(plan, jax.random.uniform(key_accept, (n,), log_p.dtype)))
    return verdict(draft, seen, row, sample(key_emit, plan.correction(row)), depth)


def follow(plan: Plan, coins: Array) -> Array:
    """Where each decision leads [N].  Strictly below: a coin of 0 accepts nothing of probability 0."""
    return jnp.where(coins < plan.accept, plan.if_accept, plan.if_reject)


def walk(taken: Array) -> Array:
    """taken [N]: where each decision leads -> the block row where the round stops, by pointer doubling."""
    n = taken.shape[0]
    target = jnp.concatenate([taken, n + jnp.arange(n + 1, dtype=jnp.int32)]).astype(jnp.int32)
    for _ in range(math.ceil(math.log2(n + 1))):
        target = target[target]
    return target[0] - n


def verdict(draft: Draft, seen: Array, row: Array, emitted: Array, depth: int) -> Verdict:
    """The path to `row` and its tokens, then the emitted one."""
    path = trees.path_to(row, seen, depth)
    num_accepted = seen[row].sum(dtype=jnp.int32) - 1
    accepted = jnp.append(draft.tokens, 0)[path[1:] - 1]  # row 0 past the path's end reads the appended 0
    tokens = jnp.append(accepted, 0).at[num_accepted].set(emitted)
    return Verdict(path, num_accepted.astype(jnp.int32), tokens.astype(jnp.int32))


def sample(key: Array, log_law: Array) -> Array:
    """One token from a log law [V], by inverting the distribution function in two stages of about sqrt(V).

    Costs one pass over V (Gumbel noise for a vocabulary of 49k costs 30 times as much); never a token of probability 0.
    """
    size = log_law.shape[-1]
    width = 1 << math.ceil(math.log2(size) / 2)
    law = jnp.pad(jnp.exp(log_law - log_law.max()), (0, -size % width)).reshape(-1, width)
    key_block, key_within = jax.random.split(key)
    block = invert(law.sum(-1), jax.random.uniform(key_block, (), law.dtype))
    return block * width + invert(law[block], jax.random.uniform(key_within, (), law.dtype))


def invert(weights: Array, u: Array) -> Array:
    """The first index [] of positive weight whose cumulative weight exceeds u times the total; the last one if none does."""
    total = jnp.cumsum(weights)
    index = jnp.arange(weights.shape[0], dtype=jnp.int32)
    reached = (weights > 0) & (total > u * total[-1])  # a prefix sum may round up at a weight of 0: look at both
    first = jnp.where(reached, index, weights.shape[0]).min()
    last = jnp.where(weights > 0, index, 0).max()
    return jnp.minimum(first, last).astype(jnp.int32)

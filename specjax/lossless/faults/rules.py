"""Planted faults of acceptance, residual and bonus: plans that are wrong in one place.  Everything is for ONE sequence."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.lossless.faults.planting import Mutant, in_module, in_rule
from specjax.types import Plan
from specjax.verify import draw
from specjax.verify import rejection as token
from specjax.verify.common import at_tokens, draft_law, normalised, parent_rows, ratio, residual, top_down


def laws_of(draft, log_p):
    """p and q of the drafted tokens [N]."""
    node = jnp.arange(draft.tokens.shape[0], dtype=jnp.int32)
    q = (
        jnp.ones(node.shape, log_p.dtype)
        if draft.log_q is None
        else at_tokens(draft.log_q.astype(log_p.dtype), node, draft.tokens)
    )
    return at_tokens(log_p, parent_rows(draft), draft.tokens), q


def accepting(threshold):
    """threshold(p_x, q_x, log_p rows of the parents) -> accept [N], everything else as it was."""

    def change(plan, draft, log_p):
        p, q = laws_of(draft, log_p)
        here = draft.parents >= -1
        accept = threshold(p, q, draft.tokens, log_p[parent_rows(draft)])
        return plan(draft, log_p)._replace(accept=jnp.where(here, accept, 0).astype(log_p.dtype))

    return in_rule(change)


def correcting(law):
    """law(p, q) -> the weights that a refused row's token is drawn from, in place of max(p - q, 0)."""

    def change(plan, draft, log_p):
        n, drafted = draft.tokens.shape[0], (draft.parents >= -1).sum(dtype=jnp.int32)

        def correction(row):
            p = jnp.exp(log_p[row])
            q = draft_law(draft, jnp.minimum(row, n - 1), p)
            return jnp.log(jnp.where(row < drafted, normalised(law(p, q), p), p))

        return plan(draft, log_p)._replace(correction=correction)

    return in_rule(change)


def own_token_removed(plan, draft, log_p):
    """The refused token is zeroed in p, as a point mass would have it, although q was soft."""
    n, drafted = draft.tokens.shape[0], (draft.parents >= -1).sum(dtype=jnp.int32)

    def correction(row):
        p = jnp.exp(log_p[row])
        without = p.at[draft.tokens[jnp.minimum(row, n - 1)]].set(0)
        return jnp.log(jnp.where(row < drafted, normalised(without, p), p))

    return plan(draft, log_p)._replace(correction=correction)


def row_shifted(shift, last_only):
    """Corrections from another row; `last_only`: after full acceptance alone."""

    def change(plan, draft, log_p):
        right, n = plan(draft, log_p), draft.tokens.shape[0]

        def correction(row):
            other = jnp.clip(row + shift, 0, n)
            if last_only:
                return jnp.where(row == n, log_p[other], right.correction(row))
            return jnp.where(row == n, log_p[row], right.correction(jnp.minimum(other, n - 1)))

        return right._replace(correction=correction)

    return in_rule(change)


def sharp_bonus(plan, draft, log_p):
    """The bonus token is the most probable one."""
    right, n = plan(draft, log_p), draft.tokens.shape[0]
    best = jax.nn.one_hot(log_p.argmax(-1), log_p.shape[-1], dtype=log_p.dtype)
    return right._replace(correction=lambda row: jnp.where(row == n, jnp.log(best[row]), right.correction(row)))


def unscaled(plan, draft, log_p):
    """Thresholds of block verification, residual of token verification."""
    return plan(draft, log_p)._replace(correction=token.plan(draft, log_p).correction)


def first_failure(plan, draft, log_p):
    """Block verification's thresholds, tried from the root, stopping at the first refusal."""
    right, n = plan(draft, log_p), draft.tokens.shape[0]
    node = jnp.arange(n, dtype=jnp.int32)
    return Plan(right.accept[::-1], jnp.where(node == n - 1, 2 * n, node + 1), n + node, right.correction)


def stale_target(plan, draft, log_p):
    """Later siblings are tested against p itself, not against what the refused ones have left of it."""
    p, q = laws_of(draft, log_p)
    return plan(draft, log_p)._replace(accept=jnp.where(draft.parents >= -1, ratio(p, q), 0))


def stale_residual(plan, draft, log_p):
    """After all siblings failed the token comes from the residual of the last one against p, earlier ones forgotten."""
    right = plan(draft, log_p)

    def correction(row):
        p, child = jnp.exp(log_p[row]), draft.parents == row - 1
        last = jnp.where(child, jnp.arange(child.shape[0], dtype=jnp.int32), 0).max()
        return jnp.log(jnp.where(child.any(), residual(p, draft_law(draft, last, p)), p))

    return right._replace(correction=correction)


def softmax_on_point(plan, draft, log_p):
    """A deterministic draft is verified with q(x) = .5 instead of 1."""
    right = plan(draft, log_p)
    return right._replace(accept=jnp.where(draft.parents >= -1, ratio(right.accept, jnp.full_like(right.accept, 0.5)), 0))


def kept_in_residual(plan, draft, log_p):
    """A refused deterministic draft stays in the law that the correction is drawn from."""
    return top_down(draft, plan(draft, log_p).accept, lambda row: log_p[row])


def twins_tested_twice(plan, draft, log_p):
    """Matching a tree whose siblings repeat: a twin of a refused token gets another chance."""
    right, (p, _) = plan(draft, log_p), laws_of(draft, log_p)
    return right._replace(accept=jnp.where(trees.twins(draft.tokens, draft.parents), p, right.accept))


def in_bf16(x):
    """x rounded to bfloat16."""
    return x.astype(jnp.bfloat16).astype(x.dtype)


def inclusive(follow):
    """A coin equal to the threshold accepts."""
    return lambda plan, coins: jnp.where(coins <= plan.accept, plan.if_accept, plan.if_reject)


def changed(name, family, story, subject, change):
    """A mutant of a plan."""
    return Mutant(name, family, story, subject, in_rule(change))


MUTANTS = (
    Mutant("u <= ratio", "acceptance", "a coin of 0 accepts probability 0 (SGLang #35771)", "chain",
           in_module(draw, "follow", inclusive)),
    Mutant("ratio upside down", "acceptance", "min(1, q/p)", "chain", accepting(lambda p, q, x, row: ratio(q, p))),
    Mutant("p(x) instead of p/q", "acceptance", "the draft's law is left out", "chain", accepting(lambda p, q, x, row: p)),
    Mutant("accept iff p >= q", "acceptance", "no coin where the ratio is below 1", "chain",
           accepting(lambda p, q, x, row: p >= q)),
    Mutant("double acceptance", "acceptance", "a refused token gets a second coin (rtp-llm #1295)", "chain",
           accepting(lambda p, q, x, row: 1 - (1 - ratio(p, q)) ** 2)),
    Mutant("always accept", "acceptance", "u hard-coded to 0 (vllm-ascend #13730)", "chain",
           accepting(lambda p, q, x, row: jnp.ones_like(p))),
    Mutant("argmax acceptance", "acceptance", "requests at T > 0 verified by argmax (SGLang #39253)", "chain",
           accepting(lambda p, q, x, row: x == row.argmax(-1))),
    Mutant("one coin a round", "acceptance", "all nodes share a coin (flashinfer #425)", "chain",
           in_module(draw, "follow", lambda f: lambda plan, coins: f(plan, jnp.broadcast_to(coins[0], coins.shape)))),
    changed("softmax on a point mass", "acceptance", "an n-gram draft with q < 1 (rtp-llm #1311)", "ngram", softmax_on_point),
    Mutant("residual = p", "residual", "after a refusal draw from p", "chain", correcting(lambda p, q: p)),
    Mutant("residual = |p - q|", "residual", "abs in place of max", "chain", correcting(lambda p, q: jnp.abs(p - q))),
    Mutant("residual = q", "residual", "after a refusal draw from the drafter", "chain", correcting(lambda p, q: q)),
    Mutant("argmax of the residual", "residual", "the correction is not drawn; invisible with one positive entry", "chain",
           correcting(lambda p, q: jax.nn.one_hot((p - q).argmax(), p.shape[0], dtype=p.dtype))),
    changed("p without the token", "residual", "a soft q treated as a point mass after a refusal", "chain", own_token_removed),
    Mutant("residual of the next row", "residual", "off by one", "chain", row_shifted(1, False)),
    changed("block, unscaled residual", "residual", "max(p - q, 0) without P (vllm-ascend #7807); invisible for V = 2", "block",
            unscaled),
    changed("block, first failure", "acceptance", "stops at the first refusal, not after the last yes", "block", first_failure),
    changed("refused draft not removed", "residual", "a point mass leaves p as it was", "ngram", kept_in_residual),
    changed("siblings against p", "tree", "p is not updated between siblings", "tree", stale_target),
    changed("residual of the last sibling", "tree", "earlier siblings are forgotten", "tree", stale_residual),
    Mutant("bonus of the row before", "bonus", "the last row is never read", "chain", row_shifted(-1, True)),
    changed("bonus = argmax", "bonus", "the bonus token is not drawn", "chain", sharp_bonus),
    Mutant("ratio in bfloat16", "float", "thresholds with 8 bits", "chain",
           accepting(lambda p, q, x, row: in_bf16(ratio(p, q)))),
    Mutant("p / (q + 1e-9)", "float", "a guard against division by zero (tpu-inference)", "chain",
           accepting(lambda p, q, x, row: jnp.minimum(1, p / (q + 1e-9)))),
    changed("twins tested again", "tree", "a repeated sibling has its own chance against p", "iid match", twins_tested_twice),
)  # fmt: skip

"""Planted faults of the engine: shared noise, trees, caches, endings, schedules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decode, keys, trees
from specjax.cache import rewind
from specjax.drafters import small
from specjax.lossless.faults.planting import Mutant, in_draft, in_module, in_pass
from specjax.sampling import first_argmax
from specjax.types import EOS, LENGTH, RUNNING
from specjax.verify.draw import draw

DRAFT, ACCEPT, EMIT = 1, 2, 3  # streams by number: their names in `keys` have one user each, which is tested


def streams_mixed(change):
    """change(stream, keys, length) -> (stream, keys, length) that are used."""
    return in_module(keys, "round_keys", lambda f: lambda k, stream, length: f(*change(k, stream, length)))


def noise_by_position(noise_source):
    """Draft noise belongs to a position: a round that looks past its stopping point meets the same noise again."""

    def source(state, rule, vocab_size):
        def noise(depth, width=1, ids=None):
            own = keys.round_keys(state.key, DRAFT, state.length + depth)
            return keys.gumbel(own, 0, (width, vocab_size if ids is None else len(ids)))

        return noise

    return source


def emit_with_draft_noise(decide):
    """The emitted token is drawn with the Gumbel noise that drew the draft at that depth."""

    def shared(state, draft, log_p, noise, *, rule, depth):
        gumbel = jnp.concatenate([noise(d) for d in range(1, depth + 2)], 1)
        accept, emit = (keys.round_keys(state.key, s, state.length) for s in (ACCEPT, EMIT))

        def one(key_accept, key_emit, g, draft, log_p):
            v = draw(rule, key_accept, key_emit, None, draft, log_p, depth)
            law = rule.plan(draft, log_p).correction(v.path[v.num_accepted])
            return v._replace(tokens=v.tokens.at[v.num_accepted].set(first_argmax(law + g[v.num_accepted])))

        return jax.vmap(one)(accept, emit, gumbel, draft, log_p)

    return shared


def emit_refused(decide):
    """After a refusal the refused token goes out."""

    def faulty(state, draft, log_p, noise, **rest):
        v = decide(state, draft, log_p, noise, **rest)
        n, step = draft.tokens.shape[1], jnp.arange(v.tokens.shape[1], dtype=jnp.int32)
        refused = jnp.take_along_axis(draft.tokens, jnp.minimum(v.num_accepted, n - 1)[:, None], 1)
        wrong = (step[None] == v.num_accepted[:, None]) & (v.num_accepted < n)[:, None]
        return v._replace(tokens=jnp.where(wrong, refused, v.tokens))

    return faulty


def without_twins(draft):
    """Siblings with the same token become one attempt."""
    twin = jax.vmap(trees.twins)(draft.tokens, draft.parents)
    return draft._replace(parents=jnp.where(twin, -2, draft.parents))


def first_law_for_all(draft):
    """Every sibling reports the law of the first."""

    def one(parents, log_q):
        same = parents[None] == parents[:, None]
        return log_q[same.argmax(1)]

    return draft._replace(log_q=jax.vmap(one)(draft.parents, draft.log_q))


def siblings_reversed(draft):
    """Each level in reverse order: the last drawn is tested first, with the law it had."""
    order, begin = [], 0
    for level in (2, 4, 4):  # the tree of the subject "tree": expansion 2, 2, 1
        order += range(begin + level - 1, begin - 1, -1)
        begin += level
    order = np.asarray(order, np.int32)  # its own inverse
    parents = draft.parents[:, order]
    moved = jnp.where(parents >= 0, jnp.asarray(order)[jnp.maximum(parents, 0)], parents)
    return draft._replace(tokens=draft.tokens[:, order], parents=moved, log_q=draft.log_q[:, order])


def by_index(apply):
    """Positions count nodes, not depth."""

    def faulty(params, tokens, cache, *, positions=None, **rest):
        index = cache.length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        return apply(params, tokens, cache, positions=index, **rest)

    return faulty


def all_earlier(apply):
    """A node sees every node before it."""

    def faulty(params, tokens, cache, *, mask, **rest):
        size = tokens.shape[1]
        return apply(params, tokens, cache, mask=jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool)), mask.shape), **rest)

    return faulty


def committing(change):
    """change(commit, state, draft, cache, verdict, sound) in place of `commit`."""
    return in_module(decode, "commit", lambda f: lambda *args: change(f, *args))


def rewound(offset):
    """The target's cache is rewound to another length."""

    def change(commit, state, draft, *rest):
        after, info = commit(state, draft, *rest)
        live = state.status == RUNNING
        length = after.cache.length + (offset if offset < 0 else (draft.tokens.shape[1] + 1 - info.emitted))
        return after._replace(cache=rewind(after.cache, jnp.where(live, jnp.maximum(length, 0), after.cache.length))), info

    return committing(change)


def past_the_end(commit, state, draft, cache, verdict, sound, *, last_only=False):
    """End tokens are looked for after the block was appended: it goes out whole; or only its last token is looked at."""
    after, info = commit(state._replace(eos=jnp.full_like(state.eos, -1)), draft, cache, verdict, sound)
    slot = jnp.arange(after.tokens.shape[1], dtype=jnp.int32)[None]
    begin = after.length - 1 if last_only else state.length
    new = (slot >= begin[:, None]) & (slot < after.length[:, None]) & (info.emitted > 0)[:, None]
    ended = ((after.tokens[:, :, None] == state.eos[:, None]).any(-1) & new).any(1) & (state.status == RUNNING)
    return after._replace(eos=state.eos, status=jnp.where(ended, EOS, after.status)), info


def over_budget(commit, state, *rest):
    """The budget is looked at after the block was appended."""
    after, info = commit(state._replace(max_length=state.max_length + 2), *rest)
    over = (after.length >= state.max_length) & (after.status == RUNNING)
    return after._replace(max_length=state.max_length, status=jnp.where(over, LENGTH, after.status)), info


def peeking(decode_round):
    """A scheduler drops the first node whose own token its drafter found unlikely, and all after it."""

    def limit(draft, state):
        if draft.log_q is None:
            return draft.tokens.shape[1]
        own = jnp.take_along_axis(draft.log_q, draft.tokens[..., None], -1)[..., 0]
        return jnp.cumprod((own > np.log(0.3)).astype(jnp.int32), 1).sum(1)

    return lambda params, state, **rest: decode_round(params, state, **{**rest, "limit": limit})


MUTANTS = (
    Mutant("refused token emitted", "bonus", "the correction is thrown away", "chain",
           in_module(decode, "decide", emit_refused)),
    Mutant("draft noise by position", "noise", "the next round meets noise it has conditioned on", "chain",
           in_module(decode, "noise_source", noise_by_position)),
    Mutant("coins = draft noise", "noise", "one key for both", "chain",
           streams_mixed(lambda k, s, n: (k, DRAFT if s == ACCEPT else s, n))),
    Mutant("coins = emitted token", "noise", "one key for both (SGLang #7207)", "chain",
           streams_mixed(lambda k, s, n: (k, ACCEPT if s == EMIT else s, n))),
    Mutant("emitted with draft noise", "noise", "Philox offset shared (vLLM #47386)", "chain",
           in_module(decode, "decide", emit_with_draft_noise)),
    Mutant("one key for all requests", "noise", "a batch shares its coins", "chain",
           streams_mixed(lambda k, s, n: (jnp.broadcast_to(k[:1], k.shape), s, n))),
    Mutant("same coins every round", "noise", "a seed that never moves", "chain",
           streams_mixed(lambda k, s, n: (k, s, jnp.zeros_like(n)))),
    Mutant("duplicates merged", "tree", "two draws of one token are one attempt", "iid tree", in_draft(without_twins)),
    Mutant("original q for siblings", "tree", "drawn without replacement, verified as if with", "tree",
           in_draft(first_law_for_all)),
    Mutant("siblings reversed", "tree", "tested in another order than drawn", "tree", in_draft(siblings_reversed)),
    Mutant("positions by index", "tree", "siblings stand one behind the other", "tiny tree", in_pass(by_index)),
    Mutant("mask without ancestors", "tree", "a node sees its uncles", "tiny tree", in_pass(all_earlier)),
    Mutant("path not compacted", "cache", "accepted nodes stay where they were (SGLang #15360)", "tiny tree",
           in_module(decode, "keep_path", lambda f: lambda cache, path: cache)),
    Mutant("cache not rewound", "cache", "rejected drafts stay (mlx-lm #846)", "tiny", rewound(1)),
    Mutant("rewound one too far", "cache", "a committed token is overwritten (mlxcel #994)", "tiny", rewound(-1)),
    Mutant("stale drafter cache", "cache", "the token after a whole draft is never run: acceptance falls (vLLM #9730)", "tiny",
           in_module(small, "catch_up", lambda f: lambda model, params, cache, s, width: f(model, params, cache, s, 1))),
    Mutant("tokens after the end", "endings", "the block goes out whole (koboldcpp #1276)", "chain", committing(past_the_end)),
    Mutant("end inside a block missed", "endings", "only the last token is looked at (transformers #47912)", "chain",
           committing(lambda *args: past_the_end(*args, last_only=True))),
    Mutant("budget ignored", "endings", "checked after the block", "chain", committing(over_budget)),
    Mutant("a limit that peeks", "schedule", "a node is dropped for the token drawn there", "chain",
           in_module(decode, "round", peeking)),
)  # fmt: skip

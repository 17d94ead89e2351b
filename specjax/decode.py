"""The heart: prefill, round, run.  It knows types and `verify.draw`, never a concrete model, drafter or rule.

Plain decoding is the same code with the drafter that proposes nothing (`drafters.plain`), so there is one p, one set of
coins and one place where a row ends.  Nothing here is jitted: the edges (`api.py`, scripts, tests) compile `prefill` and
`run`, whose shapes depend on batch and capacity alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax import keys, sampling, trees
from specjax.cache import keep_path, put, rewind, take
from specjax.loops import freeze, padded, when
from specjax.types import (
    EOS,
    ERROR,
    LENGTH,
    RUNNING,
    Array,
    Draft,
    Drafter,
    KVCache,
    LanguageModel,
    Params,
    RoundInfo,
    Rule,
    Sequences,
    State,
    Verdict,
)
from specjax.verify.draw import draw


def check(target: LanguageModel, drafter: Drafter, rule: Rule) -> None:
    """Raise ValueError where target, drafter and rule do not belong together; called when decoding is built."""
    if rule.chain and not drafter.chain:
        raise ValueError("this rule verifies chains only, and the drafter proposes a tree: choose a tree rule")
    if drafter.children not in rule.accepts:
        raise ValueError(
            f"this rule is exact for children drawn as {rule.accepts}, the drafter draws them as {drafter.children!r}"
        )
    if drafter.vocab_size not in (None, target.vocab_size):
        raise ValueError(
            f"drafter vocabulary {drafter.vocab_size} != target {target.vocab_size}: use a drafter made for this target"
        )
    bad = [i for i in drafter.features if not 0 <= i < target.num_layers]
    if bad:
        raise ValueError(f"the drafter wants layers {bad}, but the target has {target.num_layers}")


def capacity_for(longest: int, drafter: Drafter) -> int:
    """Cache slots that rows of up to `longest` tokens need: the last round may look a whole draft past the end."""
    return longest + drafter.num_nodes + 1


def start(
    params: Params, tokens: Array, lengths: Array, max_length: Array, eos: Array, key: Array, params_of_sampling, *,
    target: LanguageModel, drafter: Drafter, schedule=(),
) -> State:  # fmt: skip
    """The state before anything has run.

    Args:
      params: of target and drafter.
      tokens: [B, S] prompts, right-padded to the capacity S of the caches.
      lengths: [B] prompt lengths, at least 1.
      max_length: [B] a row ends with this many tokens at the latest, at most S - num_nodes - 1.
      eos: [B, E] ids that end a row, padded with -1.
      key: [B] typed keys, one a request (`keys.request_keys`).
      params_of_sampling: `sampling.stack`ed parameters.
      target: the model whose law is kept.
      drafter: what will propose; its caches are allocated here.
      schedule: data of a scheduler's `limit`.
    """
    batch, capacity = tokens.shape
    return State(
        tokens=tokens,
        length=lengths,
        prompt_length=lengths + 0,  # a buffer of its own: two leaves that share one cannot be donated
        max_length=max_length,
        eos=eos,
        status=jnp.where(lengths >= max_length, LENGTH, RUNNING).astype(jnp.int32),
        key=key,
        sampling=params_of_sampling,
        cache=target.init_cache(batch, capacity),
        drafter=drafter.init(params, batch, capacity),
        schedule=schedule,
    )


def prefill(params: Params, state: State, *, target: LanguageModel, drafter: Drafter, chunk: int) -> State:
    """Run every prompt token but the last through the target, `chunk` tokens a pass, and let the drafter absorb each chunk.

    One compiled body serves prompts of any length; rows that are through wait, and what they write is never read.
    """
    body = functools.partial(prefill_chunk, params, target=target, drafter=drafter, chunk=chunk)
    return jax.lax.while_loop(lambda s: (s.cache.length < s.length - 1).any(), body, state)


def prefill_chunk(params: Params, state: State, *, target: LanguageModel, drafter: Drafter, chunk: int) -> State:
    """One pass of `prefill`, over the next `chunk` tokens of each prompt."""
    done = state.cache.length
    count = jnp.clip(state.length - 1 - done, 0, chunk)
    tokens = take(state.tokens, jnp.minimum(done[:, None] + jnp.arange(chunk)[None], state.tokens.shape[1] - 1))
    out, cache = target.apply(params.target, tokens, state.cache, features=drafter.features)
    sequences = Sequences(state.tokens, state.length, rewind(cache, done + count), state.sampling)
    return state._replace(cache=sequences.cache, drafter=drafter.absorb(params, state.drafter, sequences, out, count))


def run(
    params: Params, state: State, num_rounds: Array, *, target: LanguageModel, drafter: Drafter, rule: Rule, max_rounds: int,
    limit: Callable | None = None, packs: tuple[int, ...] = (), probe: Callable | None = None,
) -> tuple[State, RoundInfo]:  # fmt: skip
    """Rounds until every row is done or `num_rounds` have run: the whole generation, or a stretch of a stream.

    Returns the state and a RoundInfo of [B, max_rounds, ...] arrays, zero past the last round.
    """
    step = functools.partial(round, target=target, drafter=drafter, rule=rule, limit=limit, packs=packs, probe=probe)
    count = jnp.zeros((state.length.shape[0], max_rounds), jnp.int32)
    probed = () if probe is None else jax.eval_shape(lambda p, s: step(p, s)[1].probed, params, state)
    log = RoundInfo(
        count, count, count, jax.tree.map(lambda x: jnp.zeros((x.shape[0], max_rounds, *x.shape[1:]), x.dtype), probed)
    )

    def body(carry):
        s, log, i = carry
        s, info = step(params, s)
        return s, jax.tree.map(lambda x, y: x.at[:, i].set(y, mode="drop"), log, info), i + 1

    def more(carry):
        s, _, i = carry
        return (s.status == RUNNING).any() & (i < num_rounds)

    state, log, _ = jax.lax.while_loop(more, body, (state, log, jnp.zeros((), jnp.int32)))
    return state, log


def round(
    params: Params, state: State, *, target: LanguageModel, drafter: Drafter, rule: Rule, limit: Callable | None = None,
    packs: tuple[int, ...] = (), probe: Callable | None = None,
) -> tuple[State, RoundInfo]:  # fmt: skip
    """Propose, verify in one target pass, commit.  Rows that are done are carried along unchanged.

    `limit(draft, state) -> [B]` says how many nodes of each row to verify; what it needs lies in `state.schedule`.  Whether
    node i is verified may depend on nodes before it, never on itself or later ones (their tokens, laws or confidences):
    dropping a node because of what was drawn there biases the output.

    `packs` are numbers of tokens, each compiled: where one holds what all rows verify together, the target's dense layers
    run so many, and not every row's whole block.

    `probe(draft, log_p [B,N+1,V], verdict) -> leaves [B, ...]` is an onlooker, for ceilings and tests: what it returns goes
    into RoundInfo, zero for rows that are done, and into nothing else.  Its verdict may still be cut by an end or a budget.
    """
    live = state.status == RUNNING
    noise = noise_source(state, rule, target.vocab_size)
    sequences = Sequences(state.tokens, state.length, state.cache, state.sampling)
    draft, proposed = drafter.propose(noise, params, state.drafter, sequences)
    allowed = drafter.num_nodes if limit is None else limit(draft, state)
    draft = keep_nodes(draft, jnp.where(live, allowed, 0))
    checked = verify(params, state, draft, noise, target=target, drafter=drafter, rule=rule, packs=packs, probe=probe)
    out, cache, verdict, sound, probed = checked
    kept = freeze(live, drafter.commit(params, proposed, out, verdict), state.drafter)
    after, info = commit(state._replace(drafter=kept), draft, cache, verdict, sound)
    return after, info._replace(probed=freeze(live, probed, jax.tree.map(jnp.zeros_like, probed)))


def noise_source(state: State, rule: Rule, vocab_size: int) -> Callable:
    """`noise(depth, width, ids) -> [B, width, V]` for one round; the request's own noise when the rule is coupled.

    With `ids` [n] it is that of these tokens alone, [B, width, n]: most of a small drafter's time would go into the others'.
    Nobody reads noise at temperature 0, so a batch that is all greedy does not pay for it.
    """
    draft_keys = keys.round_keys(state.key, keys.DRAFT, state.length)
    hot = (state.sampling.temperature > 0).any()

    def noise(depth: int | Array, width: int = 1, ids: Array | None = None) -> Array:
        shape = (state.length.shape[0], width, vocab_size if ids is None else len(ids))

        def real():
            if not rule.coupled:
                return keys.gumbel(draft_keys, depth, shape[1:])
            own = keys.gumbel_at(state.key, state.length + depth - 1, vocab_size)
            return jnp.broadcast_to((own if ids is None else own[:, ids])[:, None], shape)

        return jax.lax.cond(hot, real, lambda: jnp.zeros(shape))

    return noise


def keep_nodes(draft: Draft, count: Array) -> Draft:
    """Nodes at or past count[b] cease to exist; parents stand before children, so what stays is a tree."""
    keep = jnp.arange(draft.tokens.shape[1])[None] < count[:, None]
    return draft._replace(parents=jnp.where(keep, draft.parents, -2))


def verify(params: Params, state: State, draft: Draft, noise: Callable, *, target, drafter, rule, packs=(), probe=None):
    """One target pass over last token + draft, then the verdict: (Output, cache, Verdict, sound [B, K+1], probed).

    Of the blocks that hold every live node the one of fewest tokens is run: the drafter's `widths`, whole or in `packs`.  A
    pass costs by its tokens, whether or not there was anything to verify.
    """
    batch, full = draft.tokens.shape[0], drafter.num_nodes + 1
    widths = sorted({w for w in drafter.widths if w < full} | {full})
    blocks = [(batch * w, w, None) for w in widths] + [(size, full, size) for size in packs if size < batch * full]
    blocks = sorted(blocks, key=lambda block: block[:2])
    real = jnp.concatenate([(state.status == RUNNING)[:, None], draft.parents >= -1], 1)  # [B, N+1] tokens of the block

    def run_block(width: int, size: int | None, cache: KVCache):
        part = jax.tree.map(lambda x: x[:, : width - 1], draft)
        pack = None if size is None else jnp.nonzero(real.reshape(-1), size=size, fill_value=batch * full)[0]
        how = dict(target=target, drafter=drafter, rule=rule, pack=pack, probe=probe)
        return verify_block(params, state._replace(cache=cache), part, noise, **how)

    if len(blocks) == 1:
        return run_block(full, None, state.cache)
    last = jnp.where(real, jnp.arange(1, full + 1)[None], 0).max()  # the last live token of any row
    fits = [(last <= width) & (real.sum() <= (size or batch * full)) for _, width, size in blocks]
    choice = jnp.argmax(jnp.stack(fits))
    shapes = jax.eval_shape(lambda cache: run_block(full, None, cache), state.cache)
    result = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    result = (result[0], state.cache, *result[2:])
    for i, (_, width, size) in enumerate(blocks):
        result = when(choice == i, lambda r, w=width, p=size: padded(run_block(w, p, r[1]), shapes), result)
    return result


def verify_block(params: Params, state: State, draft: Draft, noise: Callable, *, target, drafter, rule, pack=None, probe=None):
    """`verify` for a draft of the width that is run; `pack` [P] as `LanguageModel.apply` takes it."""
    depth = min(drafter.depth, draft.tokens.shape[1])
    seen = jax.vmap(trees.ancestors)(draft.parents)
    block = jnp.concatenate([take(state.tokens, state.length[:, None] - 1), draft.tokens], 1)
    positions = state.cache.length[:, None] + seen.sum(-1) - 1
    how = dict(positions=positions, mask=seen, features=drafter.features, pack=pack)
    out, cache = target.apply(params.target, block, state.cache, **how)
    log_p = log_probs(state, draft, seen, out.logits)
    verdict = decide(state, draft, log_p, noise, rule=rule, depth=depth)
    cache = cache if drafter.chain else keep_path(cache, verdict.path)
    probed = () if probe is None else probe(draft, log_p, verdict)
    return out, cache, verdict, is_sound(out.logits, log_p, verdict), probed


def log_probs(state: State, draft: Draft, seen: Array, logits: Array) -> Array:
    """log_p [B, N+1, V]: the one law, of every verified row and the bonus row alike."""

    def one(params, row_logits, tokens, length, prompt_length, drafted, seen):
        return sampling.warp(params, row_logits, sampling.History(tokens, length, prompt_length, drafted, seen))

    return jax.vmap(one)(state.sampling, logits, state.tokens, state.length, state.prompt_length, draft.tokens, seen)


def decide(state: State, draft: Draft, log_p: Array, noise: Callable, *, rule: Rule, depth: int) -> Verdict:
    """Draw the verdict of every row from its own keys."""
    shared = jnp.concatenate([noise(d) for d in range(1, depth + 2)], 1) if rule.coupled else None
    accept = keys.round_keys(state.key, keys.ACCEPT, state.length)
    emit = keys.round_keys(state.key, keys.EMIT, state.length)

    def one(key_accept, key_emit, noise, draft, log_p):
        return draw(rule, key_accept, key_emit, noise, draft, log_p, depth)

    return jax.vmap(one)(accept, emit, shared, draft, log_p)


def is_sound(logits: Array, log_p: Array, verdict: Verdict) -> Array:
    """Whether each row on the path [B, K+1] has a law: NaN, +inf, or nothing but -inf is no token, before `warp` or after."""
    return take(jnp.isfinite(logits.max(-1)) & jnp.isfinite(log_p.max(-1)), verdict.path)


def commit(state: State, draft: Draft, cache: KVCache, verdict: Verdict, sound: Array) -> tuple[State, RoundInfo]:
    """Append what a row may still take: up to its first end-of-sequence token, its budget, or a row without a law."""
    live = state.status == RUNNING
    step = jnp.arange(verdict.tokens.shape[1])[None]
    ends = (verdict.tokens[:, :, None] == state.eos[:, None]).any(-1) & (step <= verdict.num_accepted[:, None])
    wanted = jnp.where(ends.any(1), ends.argmax(1), verdict.num_accepted).astype(jnp.int32) + 1
    allowed = jnp.minimum(wanted, state.max_length - state.length)
    broken = ~sound & (step < allowed[:, None])  # past an end it does not matter: plain decoding never gets there
    emitted = jnp.where(live, jnp.where(broken.any(1), broken.argmax(1).astype(jnp.int32), allowed), 0)
    length = state.length + emitted
    status = jnp.where(length >= state.max_length, LENGTH, RUNNING)
    status = jnp.where((ends & (step < emitted[:, None])).any(1), EOS, status)
    status = jnp.where(live, jnp.where(broken.any(1), ERROR, status), state.status)
    info = RoundInfo(
        drafted=jnp.where(live, (draft.parents >= -1).sum(1, dtype=jnp.int32), 0),
        accepted=jnp.minimum(emitted, verdict.num_accepted),
        emitted=emitted,
    )
    tokens = put(state.tokens, jnp.where(step < emitted[:, None], verdict.tokens, 0), state.length)
    cache = rewind(cache, jnp.where(live, length - 1, cache.length))
    return state._replace(tokens=tokens, length=length, status=status.astype(jnp.int32), cache=cache), info

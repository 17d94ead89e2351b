r"""A multi-token-prediction module, applied to its own output (DeepSeek-V3, arXiv 2412.19437; FastMTP, 2509.18362).  Lossless.

    entry t:  E(x_{t+1}) ─norm─┐
              h_t ───────norm──┴─► proj ─► attention + feed-forward ─┬─norm─► target's head ──► x_{t+2}
                                                                     └─ recycled as h_{t+1} of the next entry

h_t is the target's last hidden state; in what is drafted beyond the first token, the module's own output stands in its
place.  Costs K - 1 passes of one layer a round, one more of K + 1 tokens once the true states are known, and a cache of one
layer.  A chain, drawn at the request's temperature, with its true q.  Flags are those by which published modules differ:
which half of the concatenation comes first, and whether the recycled state is taken before or after the norm.  Zero-centred
norms (1 + w) are folded into `scale` when weights are read.  `recipe` trains a module after the target, which is frozen;
`train.joint.joint_mtp` trains both at once, as DeepSeek-V3 was.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from specjax import cache as kv
from specjax.drafters import files, objectives
from specjax.drafters.base import LoadedDrafter, card
from specjax.drafters.layer import block, filled, if_begun, no_columns, taken_over, tokens_after
from specjax.drafters.recipe import Batch, Recipe, labels, layout
from specjax.drafters.small import chain_draft, pick
from specjax.drafters.vocabulary import drawing_within, named, seen_by
from specjax.models.layers import Columns, Linear, RMSNorm, RopeScaling, visible
from specjax.sampling import tempered
from specjax.types import Array, Drafter, KVCache, LanguageModel


class MTPConfig(NamedTuple):
    """Facts of a module.  The names are those of the target's config."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    qk_norm: bool = False
    embedding_first: bool = True  # DeepSeek, Qwen; MiMo puts the hidden state first
    recycle_normed: bool = True  # what is recycled: after the last norm (DeepSeek, Qwen, MiMo), or before it (ERNIE)


class MTPState(NamedTuple):
    """State of the drafter.

    Invariant: with n committed tokens the cache holds the entries 0..n-2, of true states; rows past them are free.
    """

    cache: KVCache  # one layer
    recycled: Array  # [B, D] what the module gave at entry n - 2, as it goes into the next; zeros where n = 1
    normed: Array  # [B, D] the same after its last norm, as the vocabulary head reads it


@functools.cache  # the same drafter for the same arguments: a rebuilt closure would recompile
def mtp(target: LanguageModel, *, num_draft: int, config: MTPConfig) -> Drafter:
    """A chain of `num_draft` tokens, at the request's temperature.

    A prompt of one token has no entry yet: in its first round nothing is drafted.
    """
    enter = functools.partial(entered, target, config)

    def absorb(params, state, sequences, out, count):
        tokens = tokens_after(sequences, state.cache.length, out.hidden.shape[1])
        return enter(params, state, tokens, out.hidden, count)

    def propose(noise, params, state, sequences):
        def draw(normed, depth):
            log_q = tempered(target.unembed(params.target, normed), sequences.sampling.temperature)
            return pick(log_q, noise(depth)[:, 0]), log_q

        def step(held: MTPState, depth):
            token, log_q = draw(held.normed, depth)
            drafted = named(token[:, None], target.vocabulary)
            return enter(params, held, drafted, held.recycled[:, None], jnp.ones_like(token)), (token, log_q)

        held, (tokens, laws) = jax.lax.scan(step, state, jnp.arange(1, num_draft))
        token, log_q = draw(held.normed, num_draft)
        drafted = held.cache._replace(length=state.cache.length)  # `commit` writes over what was drafted
        draft = chain_draft(jnp.append(tokens, token[None], 0), jnp.append(laws, log_q[None], 0))
        return if_begun(draft, state.cache.length), state._replace(cache=drafted)

    def commit(params, state, out, verdict):
        return enter(params, state, verdict.tokens, kv.take(out.hidden, verdict.path), verdict.num_accepted + 1)

    return Drafter(
        init=functools.partial(empty, config),
        absorb=absorb,
        propose=drawing_within(target, target.vocabulary, propose),
        commit=commit,
        num_nodes=num_draft,
        depth=num_draft,
        children="iid",
        vocab_size=target.vocab_size,
    )


class MTP(nn.Module):
    """embedded, hidden [B, T, D] -> ((recycled, normed) [B, T, D], k, v).  Names within are those of a target's layer."""

    config: MTPConfig

    @nn.compact
    def __call__(self, embedded, hidden, k, v, at, positions, seen, columns=None):
        c, norm = self.config, functools.partial(RMSNorm, self.config.norm_eps)
        both = norm(name="embed_norm")(embedded), norm(name="hidden_norm")(hidden)
        x = Linear((c.width,), name="proj")(jnp.concatenate(both if c.embedding_first else both[::-1], -1))
        x, k, v = block(c, x, k, v, at, positions, seen, columns)
        normed = norm(name="norm")(x)
        return (normed if c.recycle_normed else x, normed), k, v


def apply(config: MTPConfig, params, *inputs: Any) -> tuple[tuple[Array, Array], Array, Array]:
    """The module as a function."""
    return cast(Any, MTP(config).apply({"params": params}, *inputs))


def run(config: MTPConfig, params, embedded: Array, hidden: Array, cache: KVCache) -> tuple[tuple[Array, Array], KVCache]:
    """New entries [B, T] after those of the cache, each seeing itself and all before it; `length` is not moved."""
    positions = cache.length[:, None] + jnp.arange(embedded.shape[1])[None]
    seen = visible(cache.length, positions, cache.k[0].shape[-1], None)
    given, k, v = apply(config, params, embedded, hidden, cache.k[0], cache.v[0], cache.length, positions, seen)
    return given, KVCache((k,), (v,), cache.length)


def entered(
    target: LanguageModel, config: MTPConfig, params, state: MTPState, tokens: Array, hidden: Array, count: Array
) -> MTPState:  # fmt: skip
    """Take in the first `count` [B] of the entries (hidden [B, T, D], tokens [B, T]); what they give at the last of them."""
    given, cache = run(config, params.drafter, target.embed(params.target, tokens), hidden, state.cache)
    last = jnp.maximum(count - 1, 0)[:, None]
    keep = lambda new, old: jnp.where((count > 0)[:, None], kv.take(new, last)[:, 0], old)
    after = kv.rewind(cache, cache.length + count)
    return MTPState(after, keep(given[0], state.recycled), keep(given[1], state.normed))


def empty(config: MTPConfig, params, batch: int, capacity: int) -> MTPState:
    """The state before anything has run."""
    cache = kv.allocate(layers=1, batch=batch, kv_heads=config.kv_heads, head_dim=config.head_dim, capacity=capacity)
    return MTPState(cache, *(jnp.zeros((batch, config.width)) for _ in range(2)))


def config_of(target_config: Any, **flags) -> MTPConfig:
    """A module shaped like one layer of the target, given its config; `flags` replace fields."""
    return filled(MTPConfig, target_config, flags)


def module_init(config: MTPConfig, key, target_params: Mapping[str, Any] = {}, last: int = -1) -> dict[str, Any]:
    """A module that starts as the target's layer `last` and norm, where their shapes are its own, on the sum of its inputs."""
    one, d = jnp.zeros((1, 1, config.width)), config.width
    cache, at = empty(config, (), 1, 1).cache, jnp.zeros((1, 1), jnp.int32)
    own = MTP(config).init(key, one, one, cache.k[0], cache.v[0], at[0], at, at[:, None] == 0)["params"]
    donor = {**target_params.get(f"layer_{last}", {}), **{n: target_params[n] for n in ("norm",) if n in target_params}}
    return {**taken_over(own, donor), "proj": {"kernel": jnp.concatenate([jnp.eye(d)] * 2)}}


def recipe(
    target: LanguageModel, *, num_draft: int, config: MTPConfig, steps: int | None = None, decay: float = 0.6,
    objective: objectives.Objective = objectives.hard,
) -> Recipe:  # fmt: skip
    """sum_j decay^j CE of step j (weights sum to 1), each fed with what the step before gave; the target is frozen.

    Step j at position t sees what `propose` would: the entries 0..t of true states, and its own j - 1 before it.

    Args:
      target: the model to draft for.
      num_draft: K of the drafter that tau is measured with.
      config: of the module; `config_of(lm.config)` is shaped like the target's layers.
      steps: J, how often the module is applied; K unless given.
      decay: the weight of a step relative to the one before (FastMTP's beta).
      objective: one of `objectives`.
    """
    steps = num_draft if steps is None else steps
    shares = [decay**j / sum(decay**i for i in range(steps)) for j in range(steps)]

    def loss(trainable, target_params, batch: Batch, key):
        scored = unrolled_scores(config, trainable, target, target_params, batch, steps, objective)
        return objectives.pool(scored, shares)

    init = lambda key, params: module_init(config, key, params, target.num_layers - 1)
    return Recipe(init, loss, mtp(target, num_draft=num_draft, config=config))


def unrolled_scores(
    config: MTPConfig, params, target: LanguageModel, target_params, batch: Batch, steps: int, objective: objectives.Objective
) -> list[objectives.Scored]:  # fmt: skip
    """How each step of the module did, from the target's states in `batch.output`: step j on x_{t+2+j}."""
    unembed, hidden, scored = functools.partial(target.unembed, target_params), batch.output.hidden, []
    for j, normed in enumerate(unrolled(config, params, target, target_params, batch, steps)):
        same, labelled = objectives.ahead(hidden, j + 1), labels(batch, j + 2)
        scored.append(objectives.score(unembed, normed, same, labelled, unembed, objective))
    return scored


def unrolled(config: MTPConfig, params, target: LanguageModel, target_params, batch: Batch, steps: int) -> list[Array]:
    """What the module gives after its last norm, [B, T, D] for each step: step j at position t predicts token t + j + 2.

    The keys of step 0 serve all steps, and each later one adds a column: what it made at t only the steps at t may see.
    """
    positions, causal = layout(batch.segments)
    cache, at = empty(config, (), *batch.tokens.shape).cache, jnp.zeros(len(batch.tokens), jnp.int32)
    embedded = [target.embed(target_params, objectives.ahead(batch.tokens, j + 1)) for j in range(steps)]
    first = embedded[0], batch.output.hidden, cache.k[0], cache.v[0], at, positions, causal
    (recycled, normed), k, v = apply(config, params, *first)
    results, own = [normed], no_columns(config, *batch.tokens.shape)
    for j, x in enumerate(embedded[1:], 1):
        (recycled, normed), *new = apply(config, params, x, recycled, k, v, at, positions + j, causal, own)
        results, own = [*results, normed], Columns(*new)
    return results


def load(lm, *, num_draft: int, weights: str | None = None) -> LoadedDrafter:
    """Draft for `lm` with a module that `files.save` wrote to the directory `weights`, or with the one published there.

    Published are MiMo's, and those under DeepSeek-V3's and Qwen3-Next's names whose layer is like the target's own.

    Raises:
      ValueError: no weights, or weights of another target.
    """
    published, target = files.find_naming(files.given(weights, "mtp"), lm.model.num_layers), lm.model
    if published is not None:
        config = config_of(lm.config, embedding_first=published[0].embedding_first)
        params = files.mtp_params(files.given(weights, "mtp"), *published, config)
    else:
        saved = files.read_config(weights, "mtp", target)
        target = seen_by(target, saved.get("vocabulary"))
        config = config_of(lm.config, **{n: saved[n] for n in MTPConfig._fields if n in saved})
        params = files.read_params(weights, lambda shapes: files.shapes(functools.partial(module_init, config)))
    if config.width != lm.model.width:
        raise ValueError(f"{weights}: a module of width {config.width} != target {lm.model.width}: train one for this target")
    return LoadedDrafter(mtp(target, num_draft=num_draft, config=config), params, card("mtp", params))

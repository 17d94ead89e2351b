"""A smaller language model of the same vocabulary drafts a chain (Leviathan et al., arXiv 2211.17192).  Lossless.

Costs K passes of the small model a round and a cache of its own.  The first pass is two tokens wide: after a round whose
drafts were all accepted, the last of them has never been run, and re-running one that has been changes nothing.

The model may be one by itself, or a `trunk`: the target's first layers, trained on, between the target's own embedding and
vocabulary head, which are then stored once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.cache import rewind, take
from specjax.drafters import files, objectives
from specjax.drafters.base import LoadedDrafter, card
from specjax.drafters.recipe import Batch, Recipe, forward, labels
from specjax.drafters.vocabulary import drawing_within, named, seen_by
from specjax.sampling import first_argmax, tempered
from specjax.types import Array, Draft, Drafter, KVCache, LanguageModel, Output, Params, Sequences


def alone(params: Params) -> Any:
    """Parameters of a model by itself."""
    return params.drafter


def beside(params: Params) -> Any:
    """Parameters of a `trunk`: what it does not have is the target's."""
    return {**params.target, **params.drafter}


@functools.cache  # the same drafter for the same arguments: a rebuilt closure would recompile
def small(
    model: LanguageModel, *, num_draft: int, vocab_size: int | None = None, used: int | None = None,
    own: Callable[[Params], Any] = alone,
) -> Drafter:  # fmt: skip
    """A chain of `num_draft` tokens from `model`, at the request's temperature.

    State: the model's cache.  Invariant: it holds every committed token but the last two, at least.

    Args:
      model: the small language model.
      num_draft: K, at least 1.
      vocab_size: the target's, where padding rows make it differ from the model's.
      used: ids below this stand for a token; the others are never proposed.
      own: where its parameters are found, `alone` or `beside` the target's.
    """
    vocab_size = vocab_size or model.vocab_size

    def absorb(params, state, sequences, out, count):
        return absorb_chunk(model, own(params), state, sequences, out, count)

    def propose(noise, params, state, sequences):
        root, cache = catch_up(model, own(params), state, sequences, 2)

        def draw(logits, depth):
            fitted = logits if model.vocabulary is not None else fit_vocabulary(logits, vocab_size, used or vocab_size)
            log_q = tempered(fitted, sequences.sampling.temperature)
            return pick(log_q, noise(depth)[:, 0]), log_q

        def step(carry: tuple[KVCache, Array], depth):
            cache, logits = carry
            token, log_q = draw(logits, depth)
            out, cache = model.apply(own(params), named(token[:, None], model.vocabulary), cache)
            return (rewind(cache, cache.length + 1), out.logits[:, 0]), (token, log_q)

        (cache, logits), (tokens, laws) = jax.lax.scan(step, (cache, root), jnp.arange(1, num_draft))
        token, log_q = draw(logits, num_draft)
        draft = chain_draft(jnp.append(tokens, token[None], 0), jnp.append(laws, log_q[None], 0))
        return draft, rewind(cache, sequences.length - 1)

    return Drafter(
        init=lambda params, batch, capacity: model.init_cache(batch, capacity),
        absorb=absorb,
        propose=drawing_within(model, model.vocabulary, propose),
        commit=lambda params, state, out, verdict: state,  # `propose` starts from the committed length
        num_nodes=num_draft,
        depth=num_draft,
        children="iid",
        vocab_size=vocab_size,
    )


def absorb_chunk(
    model: LanguageModel, params, cache: KVCache, sequences: Sequences, out: Output, count: Array
) -> KVCache:  # fmt: skip
    """The cache of a drafting model once it has run the chunk of prompt that the target just ran, `count` [B] tokens of it."""
    tokens = take(sequences.tokens, cache.length[:, None] + jnp.arange(out.hidden.shape[1], dtype=jnp.int32)[None])
    _, after = model.apply(params, tokens, cache)
    return rewind(after, cache.length + count)


def catch_up(
    model: LanguageModel, params, cache: KVCache, sequences: Sequences, width: int
) -> tuple[Array, KVCache]:  # fmt: skip
    """Run the last `width` tokens of the text: logits [B, V'] of what follows it, and a cache that holds all of it.

    What the cache holds there is written anew, so that it may be wrong or missing: a rejected draft, or one never run.
    """
    start = jnp.maximum(sequences.length - width, 0)
    window = take(sequences.tokens, start[:, None] + jnp.arange(width, dtype=jnp.int32)[None])
    out, cache = model.apply(params, window, rewind(cache, start))
    root = take(out.logits, (sequences.length - 1 - start)[:, None])[:, 0]
    return root, rewind(cache, sequences.length)


def fit_vocabulary(logits: Array, size: int, used: int) -> Array:
    """logits [..., V'] cut or padded to [..., size]; ids at or past `used`, or that the model lacks, get no probability."""
    logits = logits[..., :size]
    missing = size - logits.shape[-1]
    logits = jnp.pad(logits, ((0, 0),) * (logits.ndim - 1) + ((0, missing),), constant_values=-jnp.inf)
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return logits if used >= size else jnp.where(index < used, logits, -jnp.inf)


def pick(log_q: Array, noise: Array) -> Array:
    """The token [B] that Gumbel noise [B, V] draws from log_q [B, V]; 0 where log_q holds NaN."""
    token = first_argmax(log_q + noise)
    return jnp.where(token < log_q.shape[-1], token, 0)


def chain_draft(tokens: Array, log_q: Array) -> Draft:
    """tokens [K, B], log_q [K, B, V] -> Draft.  From the first law that is none (NaN, no mass) on, nodes are absent."""
    sound = jnp.cumprod(jnp.isfinite(log_q.max(-1)), 0, dtype=jnp.int32).astype(bool)
    parents = jnp.where(sound, jnp.asarray(trees.chain(tokens.shape[0]))[:, None], -2)
    return Draft(tokens.T, parents.T.astype(jnp.int32), jnp.swapaxes(log_q, 0, 1))


@functools.cache  # as above
def trunk(target: LanguageModel, layers: int) -> LanguageModel:
    """The target's first `layers` layers with its embedding and head, which may be those of a draft vocabulary."""
    model = target.truncate(layers)

    def apply(params, tokens, cache, **how):
        out, cache = model.apply(params, tokens, cache, **how)
        return out._replace(logits=target.unembed(params, out.hidden)), cache

    return model._replace(apply=apply, unembed=target.unembed, vocabulary=target.vocabulary)


def of_trunk(target_params: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """What a trunk has for itself, as the target has it: its layers and the norm after them."""
    return {name: target_params[name] for name in (*(f"layer_{i}" for i in range(layers)), "norm")}


def load(lm, *, num_draft: int, model: Any = None, weights: str | None = None) -> LoadedDrafter:
    """Draft for `lm` with a smaller model.

    Args:
      lm: the target.
      num_draft: K.
      model: a language model (an LM as `specjax.load` returns it); or
      weights: the directory of a trunk.

    Raises:
      ValueError: neither or both are given, the two do not share a vocabulary, or the weights are of another target.
    """
    if (model is None) == (weights is None):
        raise ValueError(
            "method 'small' drafts with `model`, a language model, or `weights`, a trained trunk: give one of them"
        )
    if weights is not None:
        return load_trunk(lm, num_draft, weights)
    used = shared_ids(lm, model)
    drafter = small(model.model, num_draft=num_draft, vocab_size=lm.model.vocab_size, used=used)
    return LoadedDrafter(drafter, model.params, card("small", model.params))


def load_trunk(lm, num_draft: int, weights: str) -> LoadedDrafter:
    """Draft with a trunk that `files.save` wrote to the directory `weights`."""
    saved = files.read_config(weights, "small", lm.model)
    layers = saved.get("layers")
    if not isinstance(layers, int):
        raise ValueError(f"{weights}: config.json says no `layers`: is this a language model? Then give it as `model`")
    model = trunk(seen_by(lm.model, saved.get("vocabulary")), layers)
    params = files.read_params(weights, lambda shapes: files.shapes(lambda key: of_trunk(lm.model.init(key), layers)))
    drafter = small(model, num_draft=num_draft, vocab_size=lm.model.vocab_size, own=beside)
    return LoadedDrafter(drafter, params, card("small", params, f"{layers} layers between the target's embedding and head"))


def shared_ids(lm, model) -> int:
    """How many token ids target and drafter have in common; padding rows of either embedding do not count.

    Raises:
      ValueError: they are of different vocabularies.
    """
    sizes = f"drafter vocabulary {model.model.vocab_size} != target {lm.model.vocab_size}"
    if lm.tokenizer is None or model.tokenizer is None:
        if lm.model.vocab_size != model.model.vocab_size:
            raise ValueError(f"{sizes}, and without both tokenizers they cannot be matched: load both with their tokenizers")
        return lm.model.vocab_size
    if lm.tokenizer.backend.get_vocab() != model.tokenizer.backend.get_vocab():
        raise ValueError(f"the drafter's tokenizer is not the target's ({sizes}): use a model of the same family")
    return min(lm.tokenizer.vocab_size, lm.model.vocab_size, model.model.vocab_size)


def recipe(
    target: LanguageModel, model: LanguageModel, *, num_draft: int, objective: objectives.Objective = objectives.soft,
    init: Callable | None = None,
) -> Recipe:  # fmt: skip
    """Distil the target into `model`: forward KL from the target's rows, less their entropy (DistillSpec, arXiv 2310.08461).

    What the two have of one name and shape (the embedding and the first layers, if the width is the same) starts as the
    target's; the rest as `init(key)` makes it, `model.init` unless given.  Metrics are those of a chain: its step i is right
    where the model is, i - 1 tokens on.

    Args:
      target: the model to draft for.
      model: of its family, smaller.
      num_draft: K of the drafter that tau is measured with.
      objective: one of `objectives`: `total_variation` is the rate of rejection itself, `hard` learns from the text alone.
      init: how the model starts where the target has nothing for it.
    """

    def loss(params, target_params, batch: Batch, key):
        unembed = functools.partial(target.unembed, target_params)
        return distilled(model, params, unembed, batch, num_draft, objective)

    def start(key, target_params):
        donor = dict(jax.tree_util.tree_leaves_with_path(target_params))
        same = lambda path, x: path in donor and donor[path].shape == x.shape
        take_over = lambda path, x: donor[path].astype(x.dtype) if same(path, x) else x
        return jax.tree_util.tree_map_with_path(take_over, (init or model.init)(key))

    drafter = small(model, num_draft=num_draft, vocab_size=target.vocab_size)
    return Recipe(start, loss, drafter)


def distilled(
    model: LanguageModel, params, unembed: Callable, batch: Batch, num_draft: int, objective: objectives.Objective
) -> tuple[Array, dict[str, Array]]:  # fmt: skip
    """Loss and metrics of a model's rows against the target's, which are `unembed` of its states in `batch.output`."""
    hidden, logits_of = forward(model, params, batch).hidden, functools.partial(model.unembed, params)
    scored = objectives.score(logits_of, hidden, batch.output.hidden, labels(batch), unembed, objective)
    value, metrics = objectives.pool([scored], [1.0])
    steps = [objectives.Scored(*(objectives.ahead(x, i) for x in scored)) for i in range(num_draft)]
    return value, {**objectives.pool(steps, [1.0] * num_draft)[1], "weight": metrics["weight"]}


def trunk_recipe(
    target: LanguageModel, *, num_draft: int, layers: int, objective: objectives.Objective = objectives.soft
) -> Recipe:
    """The same for a `trunk`, whose layers and norm start as the target's own and are trained; the rest stays as it is.

    Args:
      target: the model to draft for.
      num_draft: K of the drafter that tau is measured with.
      layers: of the target's, from the first.
      objective: one of `objectives`.
    """
    model = trunk(target, layers)

    def loss(params, target_params, batch: Batch, key):
        whole = beside(Params(jax.lax.stop_gradient(target_params), params))
        return distilled(model, whole, functools.partial(target.unembed, target_params), batch, num_draft, objective)

    def init(key, target_params):
        return jax.tree.map(lambda x: x.astype(jnp.float32), of_trunk(target_params, layers))

    return Recipe(init, loss, small(model, num_draft=num_draft, vocab_size=target.vocab_size, own=beside))

r"""One layer that extrapolates the target's features: EAGLE, EAGLE-2, EAGLE-3, EAGLE 3.1.  Lossless.

    entry t:  E(x_{t+1}), features at t ──► module ─┬─► vocabulary head ──► x_{t+2}
                                                    └─ recycled as the feature of entry t + 1 while drafting

EAGLE-1 (Li et al., arXiv 2401.15077) reads the target's last hidden state, EAGLE-3 (2503.01840) the outputs of three layers;
`head` has the module and its flags.  Costs K - 1 passes of one layer a round, as wide as the tree, one more of K + 1
tokens once the true features are known, and a cache of one layer: what the module had made up is written over, so that the
cache never holds a guess.  Chains and static trees have a true q at the request's temperature; EAGLE-2's dynamic trees
(2406.16858, see `tree`) are point children.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from specjax import cache as kv
from specjax.drafters import files, objectives
from specjax.drafters.base import LoadedDrafter, card
from specjax.drafters.eagle import files as eagle_files
from specjax.drafters.eagle import head as eagle_head
from specjax.drafters.eagle import loss as eagle_loss
from specjax.drafters.eagle import start as eagle_start
from specjax.drafters.eagle import tree as eagle_tree
from specjax.drafters.eagle.head import EagleConfig, features_of
from specjax.drafters.layer import if_begun, tokens_after
from specjax.drafters.medusa import Paths, chain_paths, choose_tree, static_tree
from specjax.drafters.recipe import Batch, Recipe
from specjax.drafters.siblings import SIBLINGS, Siblings, find_siblings
from specjax.drafters.vocabulary import Ids, check, draft_size, drawing_within, named
from specjax.models.layers import visible
from specjax.types import Array, Draft, Drafter, KVCache, LanguageModel, Params


class EagleState(NamedTuple):
    """State of the drafter.

    Invariant: with n committed tokens the cache holds the entries 0..n-2, of true features; rows past them are free.
    """

    cache: KVCache
    recycled: Array  # [B, D] what the module gave at entry n - 2, as it goes into the next; zeros where n = 1
    normed: Array  # [B, D] the same as the vocabulary head reads it


@functools.cache  # the same drafter for the same arguments: a rebuilt closure would recompile
def eagle(
    target: LanguageModel, *, config: EagleConfig, paths: Paths, siblings: Siblings = SIBLINGS["without_replacement"],
    vocabulary: Ids | None = None,
) -> Drafter:  # fmt: skip
    """A tree of the given rank paths, as deep as the longest; its children are drawn at the request's temperature.

    A prompt of one token has no entry yet: in its first round nothing is drafted.

    Args:
      target: the model to draft for.
      config: of the module.
      paths: the tree; `medusa.chain_paths(K)` with `SIBLINGS["iid"]` for a chain.
      siblings: how children are drawn.
      vocabulary: the only ids that are proposed; all unless given.

    Raises:
      ValueError: paths that are no tree, or that skip a rank which `siblings` draw; ids that are not the target's.
    """
    tree = static_tree(paths, siblings, draft_size(target, vocabulary))

    def propose(noise, params, state, sequences):
        read, run = readers(target, config, vocabulary, params)
        heat = sequences.sampling.temperature
        return eagle_tree.static(tree, siblings, heat, noise, read, run, eagle_tree.root(*state))

    depth = int(tree.depths.max())
    return built(
        target, config, vocabulary, propose, num_nodes=len(paths), depth=depth, children=siblings.kind,
        chain=len(paths) == depth, num_run=eagle_tree.num_run(tree),
    )  # fmt: skip


@functools.cache  # as above
def eagle2(
    target: LanguageModel, *, config: EagleConfig, num_draft: int, top_k: int = 10, nodes: int = 59,
    vocabulary: Ids | None = None,
) -> Drafter:  # fmt: skip
    """EAGLE-2's dynamic tree: `num_draft` levels, the `top_k` best of each expanded, the best `nodes` of all verified.

    The paper's 60 tokens count the last committed one.  Otherwise as `eagle`.

    Raises:
      ValueError: sizes that no such tree has; ids that are not the target's.
    """
    eagle_tree.check_dynamic(depth=num_draft, width=top_k, num_nodes=nodes, vocab_size=draft_size(target, vocabulary))

    def propose(noise, params, state, sequences):
        read, run = readers(target, config, vocabulary, params)
        how = dict(batch=len(state.recycled), depth=num_draft, width=top_k, num_nodes=nodes)
        (tokens, parents, scores), last = eagle_tree.dynamic(read, run, eagle_tree.root(*state), **how)
        return Draft(tokens, parents, confidence=eagle_tree.confidence(parents, scores)), last

    return built(
        target, config, vocabulary, propose, num_nodes=nodes, depth=num_draft, children="point", chain=top_k == 1,
        num_run=(num_draft - 1) * top_k,
    )  # fmt: skip


def readers(
    target: LanguageModel, config: EagleConfig, vocabulary: Ids | None, params: Params
) -> tuple[Callable, Callable]:  # fmt: skip
    """`read` and `run` of `tree`, among places of the draft vocabulary where there is one."""
    read = lambda level: eagle_head.few_logits(target, config, vocabulary, params, level.normed)
    run = lambda level, tokens, *rest: eagle_tree.below(target, config, params, level, named(tokens, vocabulary), *rest)
    return read, run


def built(
    target: LanguageModel, config: EagleConfig, vocabulary: Ids | None, propose: Callable, *, num_nodes: int, depth: int,
    children: str, chain: bool, num_run: int,
) -> Drafter:  # fmt: skip
    """A drafter of `propose(noise, params, state, sequences) -> (Draft, the last Level)`, which runs `num_run` nodes."""
    if vocabulary is not None:
        check(vocabulary, target.vocab_size)
    absorb, commit = takers(config, functools.partial(entered, target, config))

    def init(params, batch, capacity):
        return empty(config, batch, capacity + max(0, num_run - num_nodes))  # room for a tree at the end of the text

    def drafted(noise, params, state, sequences):
        draft, last = propose(noise, params, state, sequences)
        draft = if_begun(draft, state.cache.length)
        return draft, state._replace(cache=last.cache)  # `commit` writes over what was drafted

    return Drafter(
        init=init,
        absorb=absorb,
        propose=drawing_within(target, vocabulary, drafted),
        commit=commit,
        num_nodes=num_nodes,
        depth=depth,
        children=children,
        chain=chain,
        features=config.taps,
        vocab_size=target.vocab_size,
    )


def takers(config: EagleConfig, enter: Callable) -> tuple[Callable, Callable]:
    """absorb and commit of `enter(params, state, tokens [B, T], features [B, T, M, D], count [B])`: true features."""

    def absorb(params, state, sequences, out, count):
        tokens = tokens_after(sequences, state.cache.length, out.hidden.shape[1])
        return enter(params, state, tokens, features_of(config, out), count)

    def commit(params, state, out, verdict):
        true = kv.take(features_of(config, out), verdict.path)
        return enter(params, state, verdict.tokens, true, verdict.num_accepted + 1)

    return absorb, commit


def empty(config: EagleConfig, batch: int, capacity: int) -> EagleState:
    """The state before anything has run."""
    nothing = (jnp.zeros((batch, config.width)) for _ in range(2))
    return EagleState(eagle_head.empty_cache(config, batch, capacity), *nothing)


def entered(
    target: LanguageModel, config: EagleConfig, params: Params, state: EagleState, tokens: Array, features: Array, count: Array
) -> EagleState:  # fmt: skip
    """Take in the first `count` [B] of the entries (features [B, T, M, D], tokens [B, T]); what they give at the last."""
    cache, own = state.cache, params.drafter
    positions = cache.length[:, None] + jnp.arange(tokens.shape[1])[None]
    seen = visible(cache.length, positions, cache.k[0].shape[-1], None)
    embedded, hidden = eagle_head.embed(target, config, params, tokens), eagle_head.fuse(config, own, features)
    given, k, v = eagle_head.step(config, own, embedded, hidden, cache.k, cache.v, cache.length, positions, seen)
    last = jnp.maximum(count - 1, 0)[:, None]
    keep = lambda new, old: jnp.where((count > 0)[:, None], kv.take(new, last)[:, 0], old)
    after = KVCache(k, v, cache.length + count)
    return EagleState(after, keep(given[0], state.recycled), keep(given[1], state.normed))


def as_they_are(key: Any, features: Array) -> Array:
    """No noise."""
    return features


def recipe(
    target: LanguageModel, *, num_draft: int, config: EagleConfig, vocabulary: Ids | None = None, paths: Paths | None = None,
    steps: int | None = None, decay: float = 0.8, objective: objectives.Objective = objectives.soft, law: float = 1.0,
    state: float = 0.0, noise: Callable[[Any, Array], Array] = as_they_are,
) -> Recipe:  # fmt: skip
    """sum_j decay^j (law x objective of step j + state x its distance to the target's state); the target is frozen.

    EAGLE-3 learns from the target's law in J steps of training-time test (see `loss`); EAGLE-1 in one, with state 1,
    law 0.1 and noise on its features.

    Args:
      target: the model to draft for.
      num_draft: K of the drafter that tau is measured with.
      config: of the module, of `head`'s presets say.
      vocabulary: the ids that the drafter proposes; all unless given.
      paths: the tree that tau is measured with, drawn without replacement; a chain unless given.
      steps: J, how often the module is applied; K unless given.
      decay: the weight of a step relative to the one before.
      objective: one of `objectives`.
      law: the weight of the objective.
      state: the weight of SmoothL1 between what the module gives and the target's last hidden state.
      noise: (key, features [B, T, M, D]) -> what the module is given in their place.

    Raises:
      ValueError: state beside features of other layers, which it would have to be compared with.
    """
    if state and (config.taps or config.output_norm):
        raise ValueError(f"state {state} compares with the last hidden state, and the module gives none: use EAGLE-1's, or 0")
    steps = num_draft if steps is None else steps
    how = dict(vocabulary=vocabulary, objective=objective, law=law, state=state)

    def loss(trainable, target_params, batch: Batch, key):
        read = lambda x: eagle_head.few_logits(target, config, vocabulary, Params(target_params, trainable), x)
        given = noise(key, features_of(config, batch.output))
        found = eagle_loss.loss(config, trainable, read, target, target_params, batch, steps=steps, features=given, **how)
        return objectives.pool(found, [decay**j for j in range(steps)])

    drawn = SIBLINGS["iid" if paths is None else "without_replacement"]
    drafter = eagle(target, config=config, paths=paths or chain_paths(num_draft), siblings=drawn, vocabulary=vocabulary)
    init = functools.partial(eagle_start.params_init, target, config, vocabulary)
    return Recipe(init, loss, drafter, config.taps)


def loader(method: str) -> Callable[..., LoadedDrafter]:
    """The `load` of one of the methods that are this module with other flags."""

    def load(
        lm, *, num_draft: int, weights: str | None = None, tree: str | None = None, children: str | None = None,
        top_k: int = 10, nodes: int = 59,
    ) -> LoadedDrafter:  # fmt: skip
        """Draft for `lm` with a module that `files.save` wrote to the directory `weights`, or one published there.

        Args:
          lm: the target.
          num_draft: K, the depth of the tree.
          weights: the directory; see `files` for the published layouts.
          tree: "chain"; "dynamic", EAGLE-2's; "static", EAGLE-1's of 25 nodes; or a JSON file for `trees.read_paths`.
            Otherwise what config.json lists as "tree", or a chain.
          children: of a static tree, how they are drawn, a key of `siblings.SIBLINGS`; without replacement unless given, and
            those of a chain iid.
          top_k: of a dynamic tree, how many nodes of each level are expanded, and how many children each has.
          nodes: of a dynamic tree, how many are verified.

        Raises:
          ValueError: no weights, weights that do not fit, or a tree that cannot be.
        """
        (config, vocabulary, params), saved = read_module(lm, weights, method)
        if tree == "dynamic":
            if children not in (None, "point"):
                raise ValueError(f"children {children!r} of a dynamic tree: it takes the best, point children; leave it out")
            sizes = dict(num_draft=num_draft, top_k=top_k, nodes=nodes)
            drafter = eagle2(lm.model, config=config, **sizes, vocabulary=vocabulary)
            note = f"a dynamic tree of {num_draft} levels, top {top_k}, {nodes} nodes"
            return LoadedDrafter(drafter, params, card(method, params, note), "target_match")
        listed = eagle_tree.TREE_25 if tree == "static" else saved.get("tree", ())
        paths = choose_tree(None if tree == "static" else tree, listed, num_draft)
        chain = len(paths) == num_draft
        drawn = find_siblings(children or ("iid" if chain else "without_replacement"))
        drafter = eagle(lm.model, config=config, paths=paths, siblings=drawn, vocabulary=vocabulary)
        note = f"{len(paths)} nodes, children {drawn.kind}"
        return LoadedDrafter(drafter, params, card(method, params, note), "rejection" if chain else drawn.rule)

    return load


def read_module(lm, weights: str | None, method: str) -> tuple[eagle_files.Published, dict[str, Any]]:
    """A module from a directory of either kind, and the config.json of one that `files.save` wrote."""
    path = files.given(weights, method)
    if eagle_files.weight_files(path):
        return eagle_files.read(path, lm, method), {}
    saved = files.read_config(weights, method, lm.model)
    config, vocabulary = eagle_head.saved_config(saved), saved.get("vocabulary")
    vocabulary = None if vocabulary is None else tuple(vocabulary)
    if config.width != lm.model.width:
        raise ValueError(f"{weights}: a module of width {config.width} != target {lm.model.width}: train one for this target")
    sizes = draft_size(lm.model, vocabulary), lm.model.vocab_size
    params = files.read_params(path, lambda shapes: eagle_head.like(config, *sizes))
    return eagle_files.Published(config, vocabulary, params), saved

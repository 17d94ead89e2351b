r"""Parallel heads, each a layer of its own on the target's last states (Gloeckle et al., arXiv 2404.19737).  Lossless.

    h_0 .. h_t ──► target's head ────────────────────► x_{t+1}, which the round has just emitted
            ├────► layer 0 ──► target's head ────────► x_{t+2}, the first drafted token
            └────► layer i ──► target's head ────────► x_{t+2+i}, whatever the tokens before it are

Costs K passes of one layer and K + 1 tokens a round, once the true states are known, and a cache of K layers; drafting itself
runs none.  A head does not see its parent, so a node of depth j and rank r is the r-th candidate of head j - 1 below any
parent, as in Medusa; a chain of point children is the paper's self-speculative decoding, at any temperature.  Against the
paper: the trunk is the whole target, which is frozen and keeps predicting the next token, so that what it was is what is
kept; heads read its states after the last norm, and no norm follows them, for the vocabulary head reads h_t at that scale.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from specjax.drafters import files, objectives
from specjax.drafters.base import LoadedDrafter, card
from specjax.drafters.layer import LayerConfig, if_begun, layer_drafter, layer_init, over_rows, saved_config
from specjax.drafters.medusa import Paths, chain_paths, choose_tree, grow, static_tree
from specjax.drafters.recipe import Batch, Recipe, labels
from specjax.drafters.siblings import SIBLINGS, Siblings, find_siblings
from specjax.drafters.vocabulary import draft_size, drawing_within, seen_by
from specjax.types import Drafter, LanguageModel


@functools.cache  # the same drafter for the same arguments: a rebuilt closure would recompile
def parallel_heads(
    target: LanguageModel, *, config: LayerConfig, paths: Paths, siblings: Siblings = SIBLINGS["point"]
) -> Drafter:  # fmt: skip
    """A tree of the given rank paths, as deep as the longest; its children are drawn at the request's temperature.

    State: LayerState of the heads.  A prompt of one token has no entry yet: in its first round nothing is drafted.

    Raises:
      ValueError: paths that are no tree, or that skip a rank which `siblings` draw.
    """
    tree = static_tree(paths, siblings, draft_size(target, target.vocabulary))
    depth = int(tree.depths.max())

    def propose(noise, params, state, sequences):
        logits = target.unembed(params.target, state.last)

        def look(level, path):  # point children are the same at every node of a level, drawn ones are drawn for each
            nodes = 1 if siblings.kind == "point" else path.shape[1]
            return jnp.repeat(logits[:, level - 1 : level], nodes, 1)

        draft = grow(tree, siblings, sequences.sampling.temperature, noise, look)
        return if_begun(draft, state.cache.length), state

    names = tuple(f"head_{i}" for i in range(depth))
    propose = drawing_within(target, target.vocabulary, propose)
    return layer_drafter(target, config, names, propose, num_nodes=len(paths), depth=depth, children=siblings.kind)


# Heads: {"head_0": a layer, "head_1": .., ..}; they share the target's vocabulary head.


def head_init(config: LayerConfig, key, target_params=(), *, num_draft: int, last: int = -1) -> dict[str, Any]:
    """Heads that give the target's own logits: its layer `last`, but that nothing comes out of it yet."""
    return {f"head_{i}": layer_init(config, key, target_params, last) for i in range(num_draft)}


def recipe(
    target: LanguageModel, *, num_draft: int, config: LayerConfig, paths: Paths | None = None,
    objective: objectives.Objective = objectives.hard,
) -> Recipe:  # fmt: skip
    """The mean over heads of the CE of head i against the token i + 1 after the next; the target is frozen.

    The logits of one stretch of positions of one head exist at a time, for which the paper runs its heads in turn.

    Args:
      target: the model to draft for.
      num_draft: K.
      config: of a head; `layer.config_of(lm.config)` is shaped like the target's layers.
      paths: the tree that tau is measured with; a chain unless given.
      objective: one of `objectives`.
    """

    def loss(trainable, target_params, batch: Batch, key):
        unembed, hidden, scored = functools.partial(target.unembed, target_params), batch.output.hidden, []
        for i in range(num_draft):
            given = over_rows(config, trainable[f"head_{i}"], hidden, batch.segments)
            same = objectives.ahead(hidden, i + 1)
            scored.append(objectives.score(unembed, given, same, labels(batch, i + 2), unembed, objective))
        return objectives.pool(scored, [1 / num_draft] * num_draft)

    init = lambda key, params: head_init(config, key, params, num_draft=num_draft, last=target.num_layers - 1)
    return Recipe(init, loss, parallel_heads(target, config=config, paths=paths or chain_paths(num_draft)))


def load(
    lm, *, num_draft: int, weights: str | None = None, tree: str | None = None, children: str = "point"
) -> LoadedDrafter:  # fmt: skip
    """Draft for `lm` with heads that `files.save` wrote to the directory `weights`; the first `num_draft` are used.

    Args:
      lm: the target.
      num_draft: K, the depth of the tree.
      weights: the directory; its config.json says in what the layers differ from the target's, if they do.
      tree: "chain", or a JSON file for `trees.read_paths`; otherwise what config.json lists as "tree", or a chain.
      children: how they are drawn, a key of `siblings.SIBLINGS`.

    Raises:
      ValueError: no weights, weights that do not fit, or a tree that cannot be.
    """
    saved, drawn = files.read_config(weights, "parallel_heads", lm.model), find_siblings(children)
    config = saved_config(lm, saved, weights)

    def like(shapes):
        count = len({name.partition("/")[0] for name in shapes if name.startswith("head_")})
        return files.shapes(functools.partial(head_init, config, num_draft=count))

    heads = files.read_params(weights, like)
    files.check_depth(num_draft, len(heads))
    params, paths = (
        {f"head_{i}": heads[f"head_{i}"] for i in range(num_draft)},
        choose_tree(tree, saved.get("tree", ()), num_draft),
    )
    drafter = parallel_heads(seen_by(lm.model, saved.get("vocabulary")), config=config, paths=paths, siblings=drawn)
    note = f"{num_draft} heads, {len(paths)} nodes, children {children}"
    return LoadedDrafter(drafter, params, card("parallel_heads", params, note), "rejection" if drafter.chain else drawn.rule)

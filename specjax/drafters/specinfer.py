r"""Trees of one or several smaller models, merged (SpecInfer, Miao et al., arXiv 2305.09781).  Lossless.

    model 1:   a      model 2:   a      merged:   a     a
              / \                |              / | \         a path stands once; the second a stays, without
             b   c               b             b  c  b        children, as an attempt of its own

Each model grows a tree of its own by the expansion (k_1, ..., k_K): every node of level d - 1 gets k_d children.  Costs K
passes of each model a round, K + 1 tokens wide, then as wide as each level but the last; and a cache a model.  What was
accepted is run again in the first pass instead of being moved: a tree's slots hold levels, not paths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from specjax import trees
from specjax.cache import rewind
from specjax.drafters.base import LoadedDrafter, card
from specjax.drafters.siblings import Siblings, find_siblings
from specjax.drafters.small import absorb_chunk, catch_up, fit_vocabulary, shared_ids
from specjax.types import Array, Draft, Drafter, KVCache, LanguageModel, Sequences


@functools.cache  # the same drafter for the same arguments: a rebuilt closure would recompile
def specinfer(
    models: tuple[LanguageModel, ...], *, expansion: tuple[int, ...], siblings: Siblings, vocab_size: int | None = None,
    used: int | None = None,
) -> Drafter:  # fmt: skip
    """A tree of depth len(expansion) from each of `models`, at the request's temperature.

    State: the models' caches.  Invariant: each holds every committed token but the last depth + 1, at least.

    Args:
      models: the smaller language models; params.drafter is the tuple of their parameters.
      expansion: [K] children of each node by level.
      siblings: how these are drawn, one of `siblings.SIBLINGS`.
      vocab_size: the target's, where padding rows make it differ from a model's.
      used: ids below this stand for a token; the others are never proposed.

    Raises:
      ValueError: an expansion that cannot be, or siblings that several models cannot share.
    """
    size = vocab_size or models[0].vocab_size
    parents = check(models, expansion, siblings, used or size)

    def absorb(params, state, sequences, out, count):
        caches = zip(models, params.drafter, state, strict=True)
        return tuple(absorb_chunk(model, own, cache, sequences, out, count) for model, own, cache in caches)

    def propose(noise, params, state, sequences):
        def draw(share, logits, depth, count):
            fitted = fit_vocabulary(logits, size, used or size)
            drawn = siblings.draw(fitted, sequences.sampling.temperature, share, depth, count)
            return jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), drawn)  # [B, W * count, ...]

        grown, caches = [], []
        for model, own, cache, share in zip(models, params.drafter, state, shares(noise, len(models)), strict=True):
            tree, cache = grow(model, own, cache, sequences, functools.partial(draw, share), expansion)
            grown.append(tree)
            caches.append(cache)
        return join(parents, grown), tuple(caches)

    return Drafter(
        init=lambda params, batch, capacity: tuple(model.init_cache(batch, capacity) for model in models),
        absorb=absorb,
        propose=propose,
        commit=lambda params, state, out, verdict: state,  # `propose` starts from the committed length
        num_nodes=len(parents),
        depth=len(expansion),
        children="independent" if len(models) > 1 and siblings.kind != "point" else siblings.kind,  # laws differ, tokens repeat
        chain=len(parents) == len(expansion),
        vocab_size=size,
    )


def check(models: tuple[LanguageModel, ...], expansion: tuple[int, ...], siblings: Siblings, vocab_size: int) -> np.ndarray:
    """Parents [N] of all models' trees side by side, -1 for the last committed token; ValueError where they cannot be."""
    own = trees.k_ary(expansion)
    if max(expansion) > vocab_size:
        raise ValueError(f"expansion {expansion} wants {max(expansion)} children at a node of {vocab_size} tokens: use fewer")
    if len(models) > 1 and siblings.kind == "sampled_then_top":
        raise ValueError(
            f"{len(models)} models draft sampled_then_top: the sampled child has to come first among all siblings, which only "
            "one can: use one model, or draw children without_replacement"
        )
    return np.concatenate([np.where(own >= 0, own + i * len(own), -1) for i in range(len(models))]).astype(np.int32)


def shares(noise: Callable, parts: int) -> list[Callable]:
    """Noise for each of `parts` models: rows of one call, for a second call at the same depth would give the same noise."""
    once = functools.cache(noise)

    def share(i: int, depth: int, width: int) -> Array:
        return once(depth, parts * width)[:, i * width : (i + 1) * width]

    return [functools.partial(share, i) for i in range(parts)]


def grow(
    model: LanguageModel, params, cache: KVCache, sequences: Sequences, draw: Callable, expansion: tuple[int, ...]
) -> tuple[tuple[Array, Array | None, Array], KVCache]:  # fmt: skip
    """One model's tree: (tokens [B,N], log_q [B,N,V] or None, exists [B,N]) and its cache, rewound to the text.

    A level runs at one position; its nodes see the text and their own ancestors, never each other.
    """
    seen = lineage(trees.k_ary(expansion))
    root, cache = catch_up(model, params, cache, sequences, len(expansion) + 1)
    logits, alive, written, levels = root[:, None], jnp.ones((root.shape[0], 1), bool), 0, []
    for depth, count in enumerate(expansion, 1):
        tokens, log_q, exists = draw(logits, depth, count)
        alive = exists & jnp.repeat(alive, count, 1)
        levels.append((tokens, log_q, alive))
        if depth == len(expansion):
            break
        width = tokens.shape[1]
        mask = jnp.asarray(seen[written : written + width, : written + width])
        positions = jnp.broadcast_to(sequences.length[:, None] - 1 + depth, tokens.shape)
        out, cache = model.apply(params, tokens, cache, positions=positions, mask=mask)
        cache, written, logits = rewind(cache, cache.length + width), written + width, out.logits
    return jax.tree.map(lambda *x: jnp.concatenate(x, 1), *levels), rewind(cache, sequences.length - 1)


def lineage(parents: np.ndarray) -> np.ndarray:
    """Parents [N] -> [N, N] bool: node i is node j or lies below it."""
    seen = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        seen[node] |= seen[parent] if parent >= 0 else False
    return seen


def join(parents: np.ndarray, grown: list) -> Draft:
    """The draft of all trees [B, N]: absent below what is absent, a twin's children at its first copy."""
    tokens, log_q, exists = jax.tree.map(lambda *x: jnp.concatenate(x, 1), *grown)
    placed = jnp.where(exists, jnp.asarray(parents)[None], -2)
    return Draft(tokens, jax.vmap(trees.merge)(tokens, placed), log_q)


def load(
    lm, *, num_draft: int, models, expansion: tuple[int, ...] | None = None, children: str = "without_replacement"
) -> LoadedDrafter:  # fmt: skip
    """Draft for `lm` with one or several smaller language models (LMs as `specjax.load` returns them).

    Args:
      lm: the target.
      num_draft: K, the depth of the tree.
      models: an LM, or a list of them; each grows a tree of its own.
      expansion: [K] children of a node by level; 3 at the third (or last) level and 1 elsewhere unless given.
      children: how they are drawn, a key of `siblings.SIBLINGS`.

    Raises:
      ValueError: a model of another vocabulary, or a tree that cannot be.
    """
    models = (models,) if hasattr(models, "model") else tuple(models)  # an LM is a tuple itself
    if not models:
        raise ValueError("specinfer got 0 models: give at least one smaller language model of the target's vocabulary")
    if expansion is None:
        expansion = tuple(3 if level == min(3, num_draft) else 1 for level in range(1, num_draft + 1))
    if len(expansion) != num_draft:
        raise ValueError(f"expansion {tuple(expansion)} has {len(expansion)} levels != num_draft {num_draft}: make them equal")
    drawn = find_siblings(children)
    used = min(shared_ids(lm, model) for model in models)
    drafter = specinfer(
        tuple(model.model for model in models), expansion=tuple(expansion), siblings=drawn, vocab_size=lm.model.vocab_size,
        used=used,
    )  # fmt: skip
    params = tuple(model.params for model in models)
    note = f"{len(models)} trees of expansion {','.join(map(str, expansion))}, children {children}"
    return LoadedDrafter(drafter, params, card("specinfer", params, note), drawn.rule)

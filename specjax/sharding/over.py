"""Models, drafters and what was loaded, over a mesh: the same functions, with a word on where their results lie."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from specjax.sharding.mesh import ROWS, as_mesh, fitted, mesh_of
from specjax.sharding.placing import held, place
from specjax.sharding.rules import heads_of
from specjax.types import Drafter, LanguageModel, Output, Params


@functools.cache  # the same functions for the same model: rebuilt closures would recompile
def model_over(model: LanguageModel, mesh: Mesh) -> LanguageModel:
    """A model on a mesh: its caches are cut by row and KV head, its logits by row and vocabulary, its states by row alone.

    Were that not said of states, the partitioner would cut them as what reads them likes best, through all layers.
    """

    def apply(params, tokens, cache, **how):
        out, cache = model.apply(params, tokens, cache, **how)
        axes = fitted((ROWS, None, "model"), out.logits.shape, mesh)
        logits = jax.lax.with_sharding_constraint(out.logits, NamedSharding(mesh, axes))
        return Output(logits, held(out.hidden, mesh), held(out.features, mesh)), held(cache, mesh)

    return model._replace(
        apply=apply,
        init_cache=lambda batch, capacity: held(model.init_cache(batch, capacity), mesh),
        truncate=lambda layers: model_over(model.truncate(layers), mesh),
    )


@functools.cache  # as above
def drafter_over(drafter: Drafter, mesh: Mesh) -> Drafter:
    """A drafter on a mesh: its state is cut as the target's is."""
    return drafter._replace(
        init=lambda params, batch, capacity: held(drafter.init(params, batch, capacity), mesh),
        absorb=lambda params, state, *rest: held(drafter.absorb(params, state, *rest), mesh),
        commit=lambda params, state, *rest: held(drafter.commit(params, state, *rest), mesh),
    )


def loaded_over(loaded: Any, mesh: Mesh | None, target_params: Any = ()) -> Any:
    """A `LoadedDrafter` on a mesh, with the notes of its placement; as it is where there is no mesh."""
    if mesh is None or mesh_of(loaded.params) == mesh:
        return loaded
    state = jax.eval_shape(lambda both: loaded.drafter.init(both, 1, 1), Params(target_params, loaded.params))
    params, notes = place(loaded.params, mesh, kv_heads=heads_of(state))
    return loaded._replace(drafter=drafter_over(loaded.drafter, mesh), params=params, notes=notes)


def lm_over(lm: Any, mesh: str | Mesh | None) -> Any:
    """An `LM` on a mesh, or on that which a text names; as it is where none is given, or it lies there already.

    Raises:
      ValueError: it lies on another mesh.
    """
    mesh, there = as_mesh(mesh), mesh_of(lm.params)
    if mesh is None or there == mesh:
        return lm
    if there is not None:
        raise ValueError(f"the model lies on the mesh {dict(there.shape)}, not {dict(mesh.shape)}: load it again for this one")
    return spread(lm, mesh)


def spread(lm: Any, mesh: Mesh) -> Any:
    """An `LM` over a mesh; parameters that were read into their places stay there."""
    params, notes = place(lm.params, mesh, kv_heads=heads_of(jax.eval_shape(lambda: lm.model.init_cache(1, 1))))
    return lm._replace(model=model_over(lm.model, mesh), params=params, notes=notes)

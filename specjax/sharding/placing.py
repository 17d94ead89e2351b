"""Arrays to their places on a mesh, and back to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from specjax.sharding.mesh import ROWS, fitted
from specjax.sharding.rules import RULES, Rule, parted, placement
from specjax.types import KVCache


def place(
    params: Any, mesh: Mesh, *, kv_heads: Sequence[int] = (), rules: Sequence[Rule] = RULES
) -> tuple[Any, tuple[str, ...]]:
    """Parameters on a mesh, `parted`, and the notes of their placement."""
    params = parted(params)
    placed = placement(params, mesh, kv_heads=kv_heads, rules=rules)
    return jax.device_put(params, placed.shardings), placed.notes


def abstract(shapes: Any, shardings: Any) -> Any:
    """Shapes with the places where such arrays are to lie."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def held(tree: Any, mesh: Mesh, put: Callable = jax.lax.with_sharding_constraint) -> Any:
    """A state with its rows over ROWS and the KV heads of its caches over `model`: said to the compiler, or as `put` does."""

    def one(x):
        if isinstance(x, KVCache):
            by_head = lambda y: at(y, (ROWS, "model"))
            return KVCache(tuple(map(by_head, x.k)), tuple(map(by_head, x.v)), at(x.length, (ROWS,)))
        return at(x, (ROWS,))

    def at(x, axes):
        return put(x, NamedSharding(mesh, fitted(axes, x.shape, mesh)))

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, KVCache))


def settled(state: Any, mesh: Mesh | None) -> Any:
    """A state whose arrays lie where `held` says, whatever a compiled function chose: the next one then compiles once."""
    return state if mesh is None else held(state, mesh, moved)


def moved(x: jax.Array, place: NamedSharding) -> jax.Array:
    """An array at a place, whoever's devices hold it."""
    if x.sharding == place or x.is_fully_addressable:
        return jax.device_put(x, place)
    return _move(x, place)  # of several hosts: only a compiled program moves what others hold


_move = jax.jit(jax.lax.with_sharding_constraint, static_argnums=1)


def fed(parts: Any, mesh: Mesh) -> Any:
    """Batches [A, B, ...] with their rows over ROWS; of several hosts, each puts its own rows where they belong."""

    def one(x):
        x, places = np.asarray(x), NamedSharding(mesh, fitted((None, ROWS), x.shape, mesh))
        return jax.make_array_from_callback(x.shape, places, lambda index: x[index])

    return jax.tree.map(one, parts)


def fetch(x: jax.Array) -> np.ndarray:
    """An array on this host, whole also where parts of it lie on others."""
    if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))

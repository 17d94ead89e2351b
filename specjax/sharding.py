"""Where arrays lie on a mesh of devices: rules from a parameter's path to the axes that cut it.  Nothing is computed here.

    axis     cuts
    data     rows of a batch: tokens, caches, states
    fsdp     rows too, and the side of every matrix that faces the width: no device holds a whole one (ZeRO-3)
    model    KV heads with the query heads they serve, the feed-forward's hidden units, the vocabulary; caches by KV head

Placement changes no function: a model or drafter `over` a mesh is the same one, with a word to the compiler on where caches
and logits lie.  A layer then ends attention and feed-forward in one sum over `model` each, and no weight is gathered.  What
an axis does not divide (2 KV heads over 8 devices) is whole on every device of that axis, and `Placement.notes` says so.
Axes are Auto: XLA's partitioner fills in the rest, and what it fills in is never wrong, only slower.
"""

from __future__ import annotations

import collections
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specjax.types import Drafter, KVCache, LanguageModel, Output, Params

AXES = ("data", "fsdp", "model")
ROWS = ("data", "fsdp")
"""The axes that rows of a batch are spread over."""

PRESETS = {
    "h100x8": "model=8",
    "v5e-4": "model=4",
    "v5e-8": "model=8",
    "v5e-16": "data=2,model=8",
    "v5p-8": "model=4",  # counted in cores, two of which are one device
    "v5p-16": "model=8",
    "v6e-4": "model=4",
    "v6e-8": "model=8",
    "v6e-16": "data=2,model=8",
}
"""Meshes by the name of a machine or slice: heads over the chips with the fastest links, at most 8, rows over the rest."""

Cut = str | tuple[str, ...] | None


class Rule(NamedTuple):
    """How leaves are cut whose path ends so.  A rule speaks of leaves with as many axes as it names."""

    path: str  # a regular expression
    axes: tuple[Cut, ...]  # mesh axis of each axis of the leaf
    by_head: bool = False  # `model` counts KV heads here, which it has to divide


RULES = (
    Rule(r"attention/qkv/kernel$", ("fsdp", "model"), by_head=True),  # columns lie by KV head: its queries, then k, then v
    Rule(r"attention/(q|kv)/kernel$", ("fsdp", "model"), by_head=True),  # of DFlash, which has them apart
    Rule(r"attention/(qkv|q|kv)/bias$", ("model",), by_head=True),
    Rule(r"attention/out/kernel$", ("model", "fsdp"), by_head=True),
    Rule(r"mlp/gate_up/kernel$", ("fsdp", None, "model")),  # as `parted` leaves it
    Rule(r"mlp/down/kernel$", ("model", "fsdp")),
    Rule(r"(^|/)embedding$", ("model", "fsdp")),
    Rule(r"(^|/)head$", ("fsdp", "model")),
    Rule(r"(^|/)fc/kernel$", ("model", "fsdp")),  # of EAGLE and DFlash: from several features to the width
    Rule(r"heads/before$", ("model", "fsdp")),  # of DSpark: from and to the vocabulary
    Rule(r"heads/after$", ("fsdp", "model")),
    Rule(r"", ("fsdp", None)),  # any other matrix
    Rule(r"(kernel|weight)$", (None, "fsdp", None)),  # matrices that are stacked
)
"""The first that speaks of a leaf holds; what none speaks of (norms, biases) is whole on every device."""

TRAINED = RULES[-2:]
"""Of what is trained, and its optimizer: fully sharded data parallelism alone."""


class Placement(NamedTuple):
    """Where the leaves of a tree go."""

    shardings: Any  # the tree, with a NamedSharding for each leaf
    notes: tuple[str, ...]  # one line on every kind of leaf that is whole along an axis because it does not divide


def parse_sizes(text: str) -> dict[str, int]:
    """The size of every axis from "data=2,model=4", where one that is not named is 1, or from a key of PRESETS.

    Raises:
      ValueError: an axis that does not exist, or a size that is no number from 1.
    """
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    for part in PRESETS.get(text, text).split(","):
        name, equals, size = part.strip().partition("=")
        if name not in AXES:
            known = f"{', '.join(AXES)}, or one of {', '.join(PRESETS)}"
            raise ValueError(f"mesh {text!r}: no axis {name!r}: write data=2,model=4 with the axes {known}")
        if not (equals and size.isascii() and size.isdecimal() and int(size) > 0):
            raise ValueError(f"mesh {text!r}: {name} has the size {size!r}: write a whole number from 1, as in {name}=2")
        sizes[name] = int(size)
    return sizes


def parse_mesh(text: str, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of all AXES from a text as `parse_sizes` takes it.

    Args:
      text: sizes by axis.
      devices: those to use, all of them; jax.devices() unless given.

    Raises:
      ValueError: what `parse_sizes` refuses, or another number of devices.
    """
    devices, sizes = jax.devices() if devices is None else list(devices), parse_sizes(text)
    count = math.prod(sizes.values())
    if count != len(devices):
        kind = f"{len(devices)} {devices[0].platform} device{'s' * (len(devices) > 1)}"
        raise ValueError(f"mesh {text!r} is of {count} devices, and there are {kind}: choose sizes whose product is that")
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def as_mesh(mesh: str | Mesh | None) -> Mesh | None:
    """A mesh, or that which a text names."""
    return parse_mesh(mesh) if isinstance(mesh, str) else mesh


def parted(params: Any) -> Any:
    """Parameters as a mesh takes them: gate and up [D, 2 F] stand apart, [D, 2, F], so that one device has the same units of
    both.  Joined as they are, either half of a mesh would have all of one, and the other's were gathered in every pass.
    `whole` is the way back.  Arrays, or their shapes.
    """
    return _reshaped(params, lambda shape: (shape[0], 2, shape[1] // 2) if len(shape) == 2 else shape)


def whole(params: Any) -> Any:
    """Parameters as models make them and files hold them, from what `parted` made."""
    return _reshaped(params, lambda shape: (shape[0], math.prod(shape[1:])))


def _reshaped(params: Any, shape_of) -> Any:
    def one(path, x):
        shape = shape_of(x.shape) if name_of(path).endswith("mlp/gate_up/kernel") else x.shape
        if shape == x.shape:
            return x
        return jax.ShapeDtypeStruct(shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x.reshape(shape)

    return jax.tree_util.tree_map_with_path(one, params)


def placement(params: Any, mesh: Mesh, *, kv_heads: Sequence[int] = (), rules: Sequence[Rule] = RULES) -> Placement:
    """Where parameters go, arrays or their shapes, as `parted` left them.

    Args:
      params: of a target, or of a drafter: layers like a target's are found by their names, the rest is whole.
      mesh: with AXES.
      kv_heads: numbers of KV heads that attention may have there (`heads_of`).
      rules: from path to axes.
    """
    undivided: collections.Counter[str] = collections.Counter()

    def one(path, x):
        name = name_of(path)
        rule = next((r for r in rules if len(r.axes) == len(x.shape) and re.search(r.path, name)), None)
        axes = (None,) * len(x.shape) if rule is None else rule.axes
        size = mesh.shape["model"]
        odd = [n for n in kv_heads if n % size] if rule is not None and rule.by_head else []
        if odd and "model" in axes:
            undivided[f"{odd[0]} KV heads do not divide by model={size}: {_kind(name)} is whole on each of these"] += 1
            axes = tuple(None if axis == "model" else axis for axis in axes)
        for axis, length in zip(axes, x.shape, strict=True):
            if length % _size(mesh, axis):
                undivided[
                    f"{length} does not divide by {axis}={_size(mesh, axis)}: {_kind(name)} is whole on each of these"
                ] += 1
        return NamedSharding(mesh, fitted(axes, x.shape, mesh))

    shardings = jax.tree_util.tree_map_with_path(one, params)
    return Placement(shardings, tuple(f"{said} ({n} of them)" if n > 1 else said for said, n in undivided.items()))


def place(
    params: Any, mesh: Mesh, *, kv_heads: Sequence[int] = (), rules: Sequence[Rule] = RULES
) -> tuple[Any, tuple[str, ...]]:
    """Parameters on a mesh, `parted`, and the notes of their placement."""
    params = parted(params)
    placed = placement(params, mesh, kv_heads=kv_heads, rules=rules)
    return jax.device_put(params, placed.shardings), placed.notes


def fitted(axes: Sequence[Cut], shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """A spec of `axes`, the first ones of an array's, without those that do not divide its lengths."""
    return PartitionSpec(*(a if n % _size(mesh, a) == 0 else None for a, n in zip(axes, shape, strict=False)))


def _size(mesh: Mesh, axis: Cut) -> int:
    return math.prod(mesh.shape[a] for a in ((axis,) if isinstance(axis, str) else axis or ()))


def name_of(path: tuple) -> str:
    """A leaf's path, "layer_0/mlp/down/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _kind(name: str) -> str:
    """A path without the number of its layer."""
    return re.sub(r"^(\d+/)?layer_\d+/", "", name)


def heads_of(caches: Any) -> tuple[int, ...]:
    """The numbers of KV heads of all caches in a tree."""
    found = jax.tree.leaves(caches, is_leaf=lambda x: isinstance(x, KVCache))
    return tuple(sorted({k.shape[1] for x in found if isinstance(x, KVCache) for k in x.k}))


def mesh_of(params: Any) -> Mesh | None:
    """The mesh that parameters were placed on; None where they were not."""
    leaves = [x.sharding for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    return next((s.mesh for s in leaves if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh)), None)


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


def abstract(shapes: Any, shardings: Any) -> Any:
    """Shapes with the places where such arrays are to lie."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


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

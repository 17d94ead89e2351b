"""Rules from a leaf's path to the axes that cut it, for parameters as a mesh takes them."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from specjax.sharding.mesh import Cut, fitted, size_of
from specjax.types import KVCache


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
            if length % size_of(mesh, axis):
                undivided[
                    f"{length} does not divide by {axis}={size_of(mesh, axis)}: {_kind(name)} is whole on each of these"
                ] += 1
        return NamedSharding(mesh, fitted(axes, x.shape, mesh))

    shardings = jax.tree_util.tree_map_with_path(one, params)
    return Placement(shardings, tuple(f"{said} ({n} of them)" if n > 1 else said for said, n in undivided.items()))


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

"""Low-rank adapters: a target tuned by a product of two thin matrices beside each of its own (LoRA, arXiv 2106.09685).

    W + alpha / rank * A B        W [in, out] frozen, A [in, rank] drawn, B [rank, out] zero: training starts at the target

Every kernel of the layers gets a pair: attention's qkv and out, the feed-forward's gate_up and down; embedding, head, norms
and biases are the target's.  Kernels are matrices here, whatever parts their output axis has, so q, k and v read one A, and
so do gate and up.  Adapters are merged before the model runs, which no model needs to know of; a backward pass then holds a
gradient as large as the kernels.  Dropout on what A reads would need the model's help: there is none.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specjax.types import Array

Adapters = dict[str, Any]
"""The tree of the layers, with {"a": [in, rank], "b": [rank, out]} where parameters have {"kernel": [in, out]}."""


def init(key: Array, params, *, rank: int) -> Adapters:
    """Adapters under which a model is still itself: A uniform within in^-0.5, B zero; both float32.

    Args:
      key: consumed.
      params: of a `models.transformer` language model.
      rank: columns of A.

    Raises:
      ValueError: the rank is not positive, or the model has no layers.
    """
    kernels = [(path, x.shape) for path, x in jax.tree_util.tree_leaves_with_path(params) if adapted(path)]
    if rank < 1 or not kernels:
        raise ValueError(f"rank {rank}, {len(kernels)} kernels in layers: adapters need a rank of 1 or more and a transformer")
    adapters: Adapters = {}
    for one, (path, (size, out)) in zip(jax.random.split(key, len(kernels)), kernels, strict=True):
        place = adapters
        for part in path[:-1]:
            place = place.setdefault(part.key, {})
        place["a"] = jax.random.uniform(one, (size, rank), minval=-(size**-0.5), maxval=size**-0.5)
        place["b"] = jnp.zeros((rank, out))
    return adapters


def adapted(path: tuple) -> bool:
    """Whether the leaf at `path` is a kernel of a layer."""
    return len(path) > 1 and path[0].key.startswith("layer_") and path[-1].key == "kernel"


def merge(params, adapters: Adapters, *, alpha: float):
    """The tuned parameters W + alpha / rank * A B, in the dtypes of `params`; a pure function, which gradients pass.

    Sums are float32 and rounded once, so that training sees the very matrices that are served.
    """
    if "a" in adapters:
        a, b = adapters["a"], adapters["b"]
        product = jnp.matmul(a, b, preferred_element_type=jnp.float32) * (alpha / a.shape[1])
        kernel = params["kernel"]  # its output axis in parts, where a mesh has them
        return {**params, "kernel": (kernel.astype(jnp.float32) + product.reshape(kernel.shape)).astype(kernel.dtype)}
    return {**params, **{name: merge(params[name], part, alpha=alpha) for name, part in adapters.items()}}

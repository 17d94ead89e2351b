"""In-block dynamic depthwise convolution (DFlash 2): rows of one pass learn of the rows before them, within their block."""

from __future__ import annotations

import jax.numpy as jnp
from flax import linen as nn

from specjax.models.layers import Linear
from specjax.types import Array


def identity(key, shape: tuple[int, ...], dtype=jnp.float32) -> Array:
    """base [2, J, D]: each row as it is, nothing of those before it."""
    del key
    return jnp.zeros(shape, dtype).at[:, 0].set(1)


class Kernels(nn.Module):
    """u [..., D] -> [..., 2, J, D]: the kernels of each row before a sublayer and after it, both made from what enters it.

    base + what a linear map of u adds, which is one number for `group` channels.
    """

    taps: int  # J: a row itself and J - 1 before it
    group: int

    @nn.compact
    def __call__(self, u: Array) -> Array:
        base = self.param("base", identity, (2, self.taps, u.shape[-1]))
        added = Linear((2, self.taps, u.shape[-1] // self.group), name="dynamic")(u)
        base = base.astype(jnp.float32).reshape((1,) * (u.ndim - 1) + base.shape)
        return base + jnp.repeat(added, self.group, -1)


def convolved(kernel: Array, x: Array) -> Array:
    """kernel [B, N, R, J, D], x [B, N, R, D]: y_t = sum_j kernel[t, j] * x[t - j], where rows before the block are zero."""
    rows = x.shape[2]
    behind = lambda j: jnp.pad(x[:, :, : max(rows - j, 0)], ((0, 0), (0, 0), (min(j, rows), 0), (0, 0)))
    return sum((kernel[..., j, :] * behind(j) for j in range(1, kernel.shape[3])), kernel[..., 0, :] * x)

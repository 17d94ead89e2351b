"""What do a few rows cost more than one, by the numbers of the kernels and by the way they lie?

Question: milliseconds of the matrix products of some decoder layers of SmolLM2-135M's shapes on 1, 2, 3, 4, 5, 8 and 16 rows,
in float32 and bfloat16, with kernels [in, out], as this library keeps them, and [out, in], as PyTorch's files do.  Verifying
pays by exactly this ratio.  A single row of bfloat16 falls on a slow kernel of XLA's for CPUs, so the library computes two.

Command:    python experiments/few_rows.py
Run time:   20 seconds on 2 cores.
Expected:   float32 alike but for noise and 8 rows; bfloat16 takes a sixth to two fifths less with kernels [out, in], two rows
            most of all.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

SHAPES = [(576, 960), (576, 576), (576, 3072), (1536, 576)]  # queries, keys and values; output; gate and up; down
ROWS = (1, 2, 3, 4, 5, 8, 16)


def product(x, kernel, axis):
    """x [rows, in] times a kernel whose `axis` is in."""
    dims = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(x.astype(kernel.dtype), kernel, dims, preferred_element_type=jnp.float32)


def layers(x, kernels, axis):
    """The products of all layers, one after another."""
    for first, second, third, fourth in kernels:
        x = x + jnp.tanh(product(jnp.tanh(product(x, first, axis)[:, :576]), second, axis))
        x = x + jnp.tanh(product(jnp.tanh(product(x, third, axis)[:, :1536]), fourth, axis))
    return x


def milliseconds(kernels, axis, rows, repeats):
    """The median of some calls."""
    run, x, found = jax.jit(lambda x, k: layers(x, k, axis)), jnp.ones((rows, 576)), []
    run(x, kernels).block_until_ready()
    for _ in range(repeats):
        begin = time.perf_counter()
        run(x, kernels).block_until_ready()
        found.append(1e3 * (time.perf_counter() - begin))
    return float(np.median(found))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    whole = [[rng.standard_normal(shape, np.float32) * 0.04 for shape in SHAPES] for _ in range(args.layers)]
    print("| numbers | kernels | " + " | ".join(f"{n} rows" for n in ROWS) + " |\n" + "|---" * (2 + len(ROWS)) + "|")
    for dtype in ("float32", "bfloat16"):
        for axis, name in ((0, "[in, out]"), (1, "[out, in]")):
            kernels = [[jnp.asarray(np.ascontiguousarray(k.T if axis else k), dtype) for k in layer] for layer in whole]
            times = [milliseconds(kernels, axis, rows, args.repeats) for rows in ROWS]
            print(f"| {dtype} | {name} | " + " | ".join(f"{t:.1f}" for t in times) + " |", flush=True)


if __name__ == "__main__":
    main()

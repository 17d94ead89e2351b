"""Does a target over 1, 2, 4 and 8 devices hold and send what the roofline says?  Asked of the compiler, without weights.

Question: of a pass that verifies a draft, compiled ahead of time from shapes alone: are the bytes of its arguments on each
device, and those that a layer sends, the ones that `latency/roofline.py` counts?

Command:    python experiments/sharded_scaling.py [--targets Llama-3.3-70B] [--layers 2]
Run time:   ten seconds a target
Expected:   bytes held within 0.02 %; twice the bytes sent, since layers sum in float32 and the roofline counts 2 bytes for each
            number.
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # before jax is imported
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"

import argparse
from typing import NamedTuple

import jax
import jax.numpy as jnp
from sharded_sizes import BATCH, CAPACITY, CONFIGS, KINDS, NUM_DRAFT, Collective, collectives, configured, layer_of

from specjax import sharding
from specjax.latency.hardware import find_hardware
from specjax.latency.roofline import Load, Placement, resident_bytes, seconds, shape_of, work
from specjax.models.transformer import language_model

DEVICES, CONTEXT, CHIP = (1, 2, 4, 8), 1024, "h100"


class Scaled(NamedTuple):
    """One target's pass over a number of devices; bytes and seconds are of each device."""

    target: str
    layers: int
    devices: int
    resident: float  # bytes of weights and caches, by the roofline
    compiled: int  # of arguments
    link: float  # bytes sent in a layer, by the roofline
    compiled_link: float  # round a ring
    kinds: dict[str, int]  # collectives in all these layers
    dtypes: list[str]  # of what they carry
    whole: float  # resident bytes of all the target's layers
    seconds: float  # of a pass through all of them, by the roofline


def sent(one: Collective, devices: int) -> float:
    """Bytes that a device sends of it, round a ring."""
    rounds = {"all-reduce": 2 * (devices - 1) / devices, "reduce-scatter": devices - 1, "collective-permute": 1}
    return one.bytes * rounds.get(one.kind, (devices - 1) / devices)


def compiled_pass(name: str, layers: int, mesh):
    """(compiled program, the target's config) of one pass over a block that verifies NUM_DRAFT tokens."""
    config = configured(name, layers)
    alone = language_model(config, dtype=jnp.bfloat16, cache_dtype=jnp.bfloat16)
    shapes = sharding.parted(jax.eval_shape(alone.init, jax.random.key(0)))
    params = sharding.abstract(shapes, sharding.placement(shapes, mesh, kv_heads=(config.kv_heads,)).shardings)
    given = jax.ShapeDtypeStruct((BATCH, NUM_DRAFT + 1), jnp.int32), jax.eval_shape(lambda: alone.init_cache(BATCH, CAPACITY))
    given = sharding.held(given, mesh, lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place))
    step = lambda params, tokens, cache: sharding.model_over(alone, mesh).apply(params, tokens, cache)
    return jax.jit(step, donate_argnums=2).lower(params, *given).compile(), config


def scaling(name: str, layers: int) -> list[Scaled]:
    """A target's pass over more and more devices: by the roofline, and as compiled."""
    rows = []
    for n in DEVICES:
        program, config = compiled_pass(name, layers, sharding.parse_mesh(f"model={n}", jax.devices()[:n]))
        placed, load, whole = Placement(parallel=n), Load(BATCH, CONTEXT), shape_of(configured(name, 0))
        run = lambda shape, placed=placed, load=load: work(shape, load, NUM_DRAFT + 1, placed)
        found = [c for c in collectives(program.as_text()) if layer_of(c) is not None]
        rows.append(
            Scaled(
                name, config.layers, n, resident_bytes(shape_of(config), Load(BATCH, CAPACITY), placed),
                program.memory_analysis().argument_size_in_bytes,
                run(whole._replace(layers=2)).link_bytes - run(whole._replace(layers=1)).link_bytes,
                sum(sent(c, n) for c in found) / config.layers,
                {kind: sum(c.kind == kind for c in found) for kind in KINDS if any(c.kind == kind for c in found)},
                sorted({c.dtype for c in found}), resident_bytes(whole, Load(BATCH, CAPACITY), placed),
                seconds(run(whole), find_hardware(CHIP)),
            )
        )  # fmt: skip
    return rows


def table(rows: list[Scaled]) -> str:
    """As people read it, in Markdown."""
    first = rows[0]
    whole = configured(first.target, 0).layers
    lines = [
        f"{first.target}: {first.layers} of {whole} layers compiled, batch {BATCH}, {NUM_DRAFT + 1} tokens, bfloat16, "
        f"caches of {CAPACITY} slots with {CONTEXT} tokens\n",
        f"| devices | GB a device: roofline, compiled | collectives | MB sent in a layer: roofline, compiled | "
        f"all {whole} layers by the roofline: GB a device, ms on {CHIP} |",
        "|---|---|---|---|---|",
    ]
    for r in rows:
        kinds = ", ".join(f"{n} {kind}" for kind, n in r.kinds.items()) or "none"
        held, link = f"{r.resident / 1e9:.3f}, {r.compiled / 1e9:.3f}", f"{r.link / 1e6:.2f}, {r.compiled_link / 1e6:.2f}"
        lines.append(f"| {r.devices} | {held} | {kinds} | {link} | {r.whole / 1e9:.1f}, {1e3 * r.seconds:.1f} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2, help="of the target; 0 is all")
    parser.add_argument("--targets", nargs="*", default=list(CONFIGS), choices=list(CONFIGS))
    asked = parser.parse_args()
    print(*(table(scaling(name, asked.layers)) for name in asked.targets), sep="\n\n")


if __name__ == "__main__":
    main()

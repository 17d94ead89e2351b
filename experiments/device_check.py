"""What does one accelerator make of it?  Passes against its memory's bandwidth, plain and speculative tokens/s, compile times.

Question: does a target's pass take what the roofline says, over width and batch, so that drafted tokens are verified nearly
free?  And what is left of that in tokens/s, with the packaged target and its own drafters?

Command:    python experiments/device_check.py --json device.json        on an accelerator: a model of Llama-3.1-8B's shape with
                                                                         drawn bfloat16 weights, and the packaged testbed
            python experiments/device_check.py --small                   on a CPU: a model of four small layers
Run time:   under 8 minutes: what is not measured when --seconds (420) are over is left out, and the JSON says so.  --small: one
            minute on 2 cores.
Expected:   on an accelerator width 1, batch 1 at 60 to 90 % of the bandwidth limit, and width 8 within 1.3 times of it.  The
            testbed has 2 million parameters: its tokens/s tell the cost of a round besides its passes, not of a real target.

No figures are in README.md until a run on an accelerator has made them.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import jax
import jax.numpy as jnp

import specjax
from specjax import bench, zoo
from specjax.cache import rewind
from specjax.latency.calibrate import measure_device, median_seconds
from specjax.latency.hardware import HARDWARE, Hardware
from specjax.latency.roofline import Load, Placement, num_parameters, seconds, shape_of, work
from specjax.models.transformer import TransformerConfig, language_model


class Settings(NamedTuple):
    """Sizes of one check."""

    config: TransformerConfig
    dtype: type
    widths: tuple[int, ...]
    batches: tuple[int, ...]
    context: int
    calls: int  # of each pass
    matrix: int  # that bandwidth and FLOP/s are measured with
    methods: tuple[str, ...]
    decoded: tuple[int, ...]  # batch sizes
    new_tokens: int


LLAMA_8B = TransformerConfig(128_256, 4096, 32, 32, 8, 128, 14_336, 131_072, rope_theta=500_000.0)
METHODS = ("ngram", "medusa", "hydra", "mtp", "eagle3", "dspark")
LARGE = Settings(LLAMA_8B, jnp.bfloat16, (1, 2, 4, 8, 16, 32), (1, 4, 16), 1024, 20, 8192, METHODS, (1, 8), 128)
SMALL_CONFIG = TransformerConfig(512, 256, 4, 8, 4, 32, 768, 1024)
SMALL = Settings(SMALL_CONFIG, jnp.float32, (1, 4), (1, 2), 64, 3, 1024, ("ngram", "mtp"), (1,), 16)
PROMPTS = ("def read(path):\n    ", "import os\n\n\nclass ", "for name in sorted(", '"""Return the number of ')


def known_hardware(kind: str) -> Hardware | None:
    """The maker's figures for a device, by JAX's name for it.

    >>> known_hardware("NVIDIA H200").name, known_hardware("TPU v5 lite").name, known_hardware("cpu")
    ('NVIDIA H200 SXM', 'TPU v5e', None)
    """
    names = {"v5 lite": "tpu-v5e", "v6 lite": "tpu-v6e", "v5p": "tpu-v5p", "v5": "tpu-v5p", "v4": "tpu-v4", "v7": "tpu-v7"}
    names |= {chip: chip for chip in ("a100", "h100", "h200", "b200")}
    return next((HARDWARE[name] for part, name in names.items() if part in kind.lower()), None)


def facts() -> dict:
    """What ran."""
    device = jax.devices()[0]
    own = {"device": device.device_kind, "platform": device.platform, "devices": jax.device_count()}
    return {**own, "jax": jax.__version__, "python": platform.python_version(), "specjax": version("specjax")}


def passes(how: Settings, measured: Hardware, more: Callable[[], bool]) -> list[dict]:
    """A pass for each batch and width beside its limits; stops when there is no time left."""
    target = language_model(how.config, dtype=how.dtype, cache_dtype=how.dtype)
    params = jax.block_until_ready(jax.jit(target.init)(jax.random.key(0)))
    size, rows = jnp.dtype(how.dtype).itemsize, []
    placed, shape = Placement(size, size), shape_of(how.config)

    def step(params, tokens, cache):
        out, cache = target.apply(params, tokens, cache)
        return jnp.argmax(out.logits, -1), cache

    for batch in how.batches:
        cache = target.init_cache(batch, how.context + max(how.widths))
        held = [rewind(cache, jnp.full(batch, how.context, jnp.int32))]
        for width in how.widths:
            if not more():
                return rows
            tokens, begin = jnp.zeros((batch, width), jnp.int32), perf_counter()
            run = jax.jit(step, donate_argnums=2).lower(params, tokens, held[0]).compile()
            compiled = perf_counter() - begin

            def call(run=run, tokens=tokens, held=held):
                found, held[0] = run(params, tokens, held[0])  # the cache is written in place
                return found

            took = median_seconds(call, calls=how.calls)
            load = work(shape, Load(batch, how.context), width, placed)
            least = (load.weight_bytes + load.kv_bytes) / measured.bandwidth
            rows.append(
                {"batch": batch, "width": width, "ms": 1e3 * took, "compile_seconds": compiled,
                 "bandwidth_limit_ms": 1e3 * least, "share_of_limit": least / took,
                 "roofline_ms": 1e3 * seconds(load, measured), "gb": load.bytes / 1e9, "tflop": load.flops / 1e12}
            )  # fmt: skip
            print(
                f"batch {batch:3}, width {width:3}: {1e3 * took:8.2f} ms, {least / took:4.0%} of the bandwidth limit",
                flush=True,
            )
    return rows


def tokens_per_second(how: Settings, more: Callable[[], bool]) -> list[dict]:
    """Plain decoding and the packaged drafters on the packaged target, by `bench`."""
    lm, rows = specjax.load("testbed"), []
    for batch in how.decoded:
        for method in how.methods:
            if not more() or (method != "ngram" and zoo.drafter("testbed", method) is None):
                continue
            begin, loaded = perf_counter(), specjax.load_drafter(method, lm, num_draft=4)
            job = bench.Work(PROMPTS * 2, jax.random.key(0), how.new_tokens, specjax.SamplingParams(), batch_size=batch)
            plain, found = bench.compare(lm, [bench.Contender(method, loaded, loaded.rule)], job)
            both = {"batch": batch, "plain_tokens_per_second": plain.tokens_per_second, "seconds": perf_counter() - begin}
            rows.append({**both, **bench.record(found)})
            tau, rate = found.tau.mean, found.tokens_per_second
            print(
                f"batch {batch:3}, {method:8}: tau {tau:.2f}, {rate:7.0f} tokens/s, plain {plain.tokens_per_second:7.0f}",
                flush=True,
            )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--seconds", type=float, default=420, help="begin nothing after so many")
    parser.add_argument("--json", help="write results here, as they come")
    asked, begin = parser.parse_args(), perf_counter()
    how = SMALL if asked.small else LARGE
    left = lambda: asked.seconds - (perf_counter() - begin)
    results = facts()

    def keep(**found):
        results.update(found, seconds=perf_counter() - begin, complete=left() > 0)
        if asked.json:
            Path(asked.json).write_text(json.dumps(results, indent=1) + "\n", "utf-8")

    measured, made = measure_device(size=how.matrix, dtype=how.dtype), known_hardware(results["device"])
    keep(measured=measured._asdict(), stated=made and made._asdict(), parameters=num_parameters(shape_of(how.config)))
    print(f"{results['device']}: {measured.bandwidth / 1e9:.0f} GB/s, {measured.flops / 1e12:.2f} TFLOP/s measured", flush=True)
    keep(decoding=tokens_per_second(how, lambda: left() > asked.seconds / 2))  # first: it is small, and never goes without
    keep(passes=passes(how, made or measured, lambda: left() > 0))


if __name__ == "__main__":
    main()

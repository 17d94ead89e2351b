"""What would a 70B target take on eight devices, and what would they send each other?  Asked of the compiler, without weights.

Question: a round of speculative decoding (propose, verify, commit) is compiled ahead of time for Llama-3.3-70B, Qwen3-32B and
Gemma-3-27B with an EAGLE-3 and a DSpark head, from shapes alone, on eight simulated devices.  Do the bytes of its arguments on
each device agree with the sizes worked out by hand, and does a layer cost two sums over the devices and nothing else?

Command:    python experiments/sharded_sizes.py [--layers 2] [--mesh model=8] [--json FILE]
Run time:   a minute on 2 cores for 2 layers; at full depth (--layers 0) one a target and drafter.
Expected:   bytes within 5 % of the prediction (found: within 0.1 %); 2 all-reduces a layer of the target, no weight ever
            gathered: the one gather is of the law [B, V] that each row's last token is drawn from.  A CPU's temporary bytes are
            not an accelerator's and are not shown.
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # before jax is imported
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"

import argparse
import functools
import json
import math
import re
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax import decode, keys, sampling, sharding
from specjax.drafters.dflash import dspark
from specjax.drafters.dflash.config import dflash_config
from specjax.drafters.eagle import drafter as eagle
from specjax.drafters.eagle import head as eagle_head
from specjax.drafters.medusa import chain_paths
from specjax.drafters.siblings import SIBLINGS
from specjax.latency.roofline import head_weights, layer_weights, shape_of
from specjax.models.families import config_from_hf
from specjax.models.transformer import language_model
from specjax.sampling import SamplingParams
from specjax.types import Params
from specjax.verify import RULES

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS = {  # as published, without what is a default of the family
    "Llama-3.3-70B": dict(
        model_type="llama", vocab_size=128_256, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=131_072, rms_norm_eps=1e-5, rope_theta=500_000.0,
        rope_scaling={**LLAMA3, "original_max_position_embeddings": 8192}, hidden_act="silu", tie_word_embeddings=False,
    ),
    "Qwen3-32B": dict(
        model_type="qwen3", vocab_size=151_936, hidden_size=5120, intermediate_size=25_600, num_hidden_layers=64,
        num_attention_heads=64, num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960, rope_theta=1_000_000.0,
        hidden_act="silu", tie_word_embeddings=False,
    ),
    "Gemma-3-27B": dict(
        model_type="gemma3_text", vocab_size=262_208, hidden_size=5376, intermediate_size=21_504, num_hidden_layers=62,
        num_attention_heads=32, num_key_value_heads=16, head_dim=128, query_pre_attn_scalar=168, sliding_window=1024,
        max_position_embeddings=131_072, rope_scaling={"rope_type": "linear", "factor": 8.0},
        hidden_activation="gelu_pytorch_tanh",
    ),
}  # fmt: skip
DRAFTERS = ("eagle3", "dspark")
NUM_DRAFT, BATCH, CAPACITY = 4, 8, 2048
KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}


class Collective(NamedTuple):
    """One exchange between devices, as the compiled program has it."""

    kind: str  # one of KINDS
    dtype: str
    shape: tuple[int, ...]  # of its result on one device
    where: str  # the operation that it serves

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * SIZES.get(self.dtype, 4)


class Row(NamedTuple):
    """One target with one drafter."""

    target: str
    drafter: str
    layers: int
    predicted: float  # bytes of arguments on each device
    compiled: int
    per_layer: dict[str, list[int]]  # of each kind, how many each of the target's layers has
    others: dict[str, int]  # of each kind, outside the target's layers
    largest_gather: int  # bytes of the largest all-gather's result
    smallest_weight: int  # bytes of the smallest matrix of a layer, whole
    notes: tuple[str, ...]


def configured(name: str, layers: int):
    """A target's config with its first layers (0: all)."""
    config = config_from_hf(CONFIGS[name])
    return config._replace(layers=layers, sliding=config.sliding[:layers]) if layers else config


def drafting(method: str, target, config):
    """(drafter, shapes of its parameters, its matrices by hand (whole, whole ones that a mesh cuts))."""
    c, v, d = config, config.vocab_size, config.width
    if method == "eagle3":
        own = eagle_head.eagle3(c, qk_norm=False)
        made = eagle.eagle(target, config=own, paths=chain_paths(NUM_DRAFT), siblings=SIBLINGS["iid"])
        attention = 2 * d * c.head_dim * (c.heads + 2 * c.kv_heads) + c.heads * c.head_dim * d  # its input is twice as wide
        return made, eagle_head.like(own, v), attention + 3 * d * c.hidden + len(own.taps) * d * d + d * v, 1
    own, heads = dflash_config(c, layers=5), dspark.DSparkConfig()
    made = dspark.dspark(target, config=own, heads=heads, num_draft=NUM_DRAFT)
    shapes = jax.eval_shape(target.init, jax.random.key(0))
    like = jax.eval_shape(dspark.recipe(target, num_draft=NUM_DRAFT, config=own, heads=heads).init, jax.random.key(0), shapes)
    return made, like, own.layers * layer_weights(shape_of(c)) + len(own.taps) * d * d + 2 * v * heads.rank, own.layers


def predicted_bytes(config, matrices: float, cached_layers: int, devices: int) -> float:
    """Of a target in bfloat16 with its cache, and a drafter in float32 with its own, on each device; vectors are left out."""
    shape = shape_of(config)
    weights = config.layers * layer_weights(shape) + head_weights(shape) * (1 if config.tied else 2)
    kv = 2 * BATCH * CAPACITY * config.kv_heads * config.head_dim
    return (2 * weights + 2 * config.layers * kv + 4 * matrices + 4 * cached_layers * kv) / devices


def collectives(program: str) -> list[Collective]:
    """All exchanges in a compiled program's text; one that carries several arrays counts once for each."""
    found = []
    for line in program.splitlines():
        match = re.search(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(", line)
        if match:
            where = re.search(r'op_name="([^"]*)"', line)
            for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", match.group(1)):
                sizes = tuple(int(n) for n in shape.split(",") if n)
                found.append(Collective(match.group(2), dtype, sizes, where.group(1) if where else ""))
    return found


def layer_of(one: Collective) -> int | None:
    """The target's layer that an exchange belongs to; None outside of them."""
    match = re.search(r"Transformer/layer_(\d+)/", one.where)
    return int(match.group(1)) if match else None


def compiled_round(name: str, method: str, layers: int, mesh):
    """(compiled program, the target's config, (matrices, cached layers) of the drafter, notes)."""
    config = configured(name, layers)
    alone = language_model(config, dtype=jnp.bfloat16, cache_dtype=jnp.bfloat16)
    target = sharding.model_over(alone, mesh)
    drafter, like, *by_hand = drafting(method, target, config)
    drafter = sharding.drafter_over(drafter, mesh)
    both = Params(sharding.parted(jax.eval_shape(alone.init, jax.random.key(0))), sharding.parted(like))
    placed = sharding.placement(both, mesh, kv_heads=(config.kv_heads,))
    params = sharding.abstract(both, placed.shardings)
    row = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    law = jax.eval_shape(lambda: sampling.stack([SamplingParams(1.0)] * BATCH, config.vocab_size))
    key = jax.eval_shape(lambda: keys.request_keys(jax.random.key(0), jnp.arange(BATCH)))
    tokens, eos = (jax.ShapeDtypeStruct((BATCH, n), jnp.int32) for n in (CAPACITY, 2))
    begun = functools.partial(decode.start, target=alone, drafter=drafting(method, alone, config)[0])
    state = jax.eval_shape(begun, both, tokens, row, row, eos, key, law)
    state = sharding.held(state, mesh, lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place))
    step = functools.partial(decode.round, target=target, drafter=drafter, rule=RULES["rejection"])
    return jax.jit(step, donate_argnums=1).lower(params, state).compile(), config, by_hand, placed.notes


def measured(name: str, method: str, layers: int, mesh) -> Row:
    """A row of the table."""
    program, config, (matrices, cached), notes = compiled_round(name, method, layers, mesh)
    found = collectives(program.as_text())
    per_layer = {k: [sum(layer_of(c) == i and c.kind == k for c in found) for i in range(config.layers)] for k in KINDS}
    smallest = 2 * config.width * config.heads * config.head_dim  # attention's output
    return Row(
        name, method, config.layers, predicted_bytes(config, matrices, cached, mesh.shape["model"]),
        program.memory_analysis().argument_size_in_bytes,
        {k: n for k, n in per_layer.items() if any(n)},
        {k: sum(layer_of(c) is None and c.kind == k for c in found) for k in KINDS},
        max((c.bytes for c in found if c.kind == "all-gather"), default=0), smallest, notes,
    )  # fmt: skip


def table(rows: list[Row]) -> str:
    """As people read it."""
    lines = ["target         drafter  layers  GB a device: by hand  compiled    off   in each layer       elsewhere"]
    for r in rows:
        each = ", ".join(f"{n[0] if len(set(n)) == 1 else sorted(set(n))} {k}" for k, n in r.per_layer.items()) or "none"
        rest = ", ".join(f"{n} {k}" for k, n in r.others.items() if n)
        off = f"{r.compiled / r.predicted - 1:+.1%}"
        sizes = f"{r.predicted / 1e9:21.3f} {r.compiled / 1e9:9.3f} {off:>6}"
        lines.append(
            f"{r.target:14} {r.drafter:8} {r.layers:6} {sizes}   {each:18}  {rest}; largest gather {r.largest_gather:,} B"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2, help="of the target; 0 is all")
    parser.add_argument("--mesh", default="model=8")
    parser.add_argument("--targets", nargs="*", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--drafters", nargs="*", default=list(DRAFTERS), choices=DRAFTERS)
    parser.add_argument("--json", help="write rows here; - is stdout, instead of the table")
    asked = parser.parse_args()
    mesh, rows = sharding.parse_mesh(asked.mesh), []
    for name in asked.targets:
        for method in asked.drafters:
            rows.append(measured(name, method, asked.layers, mesh))
            print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    if asked.json:
        text = json.dumps([row._asdict() for row in rows])
        print(text) if asked.json == "-" else open(asked.json, "w").write(text)
    if asked.json != "-":
        print(table(rows))


if __name__ == "__main__":
    main()

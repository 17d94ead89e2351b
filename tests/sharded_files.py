"""Files read into the parts of eight simulated devices: what lies where, and what the host holds meanwhile."""

import sys
import tempfile
import tracemalloc
from pathlib import Path
from unittest import mock

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from golden import make_families as golden
from meshes import FULLY, mesh
from models import test_gguf

from specjax import sharding
from specjax.models.gguf import read_gguf
from specjax.models.huggingface import read_directory

WIDE = dict(vocab_size=64, num_attention_heads=16, num_key_value_heads=8, head_dim=4, intermediate_size=64, hidden_size=32)
LARGE = dict(vocab_size=8192, hidden_size=128, head_dim=8, intermediate_size=1024)
LARGEST = 8192 * 128 * 4  # bytes: the embedding


def directory(folder, family, **sizes):
    """A checkpoint directory of a family, of sizes that eight devices divide."""
    config = {**golden.CONFIGS[family], **WIDE, **sizes}
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in golden.shapes(config)}
    return golden.save(Path(folder) / "model", config, tensors)


def gguf_file(folder, family, quantisation, **sizes):
    """The same as a GGUF file."""
    with mock.patch.dict(golden.CONFIGS, {family: {**golden.CONFIGS[family], **WIDE, **sizes}}):
        return test_gguf.write(Path(folder) / "model.gguf", family, quantisation)


def same_parts(read, where=("1x8", FULLY, "2x4")):
    """`read(mesh=)` gives what `read()` gives and `place` then places: (config, parameters)."""
    config, params = read()
    for name in where:
        _, found = read(mesh=mesh(name))
        wanted, _ = sharding.place(params, mesh(name), kv_heads=(config.kv_heads,))
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
        assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding == y.sharding, found, wanted))


def reads(family, **sizes):
    with tempfile.TemporaryDirectory() as folder:
        path = directory(folder, family, **sizes)
        same_parts(lambda **how: read_directory(path, dtype=jnp.bfloat16, **how)[1:])


def reads_gguf(family, quantisation, **sizes):
    """Blocks of 32 columns, of which a device has 8, 16 or 32; rows of q and k that llama.cpp turned."""
    with tempfile.TemporaryDirectory() as folder:
        path = gguf_file(folder, family, gguf.GGMLQuantizationType[quantisation], **sizes)
        same_parts(lambda **how: read_gguf(path, dtype=jnp.bfloat16, **how)[:2])


def host_peak(where):
    """While a model is read for a mesh the host never holds more than its largest tensor and one part of it.

    `tracemalloc` sees NumPy's arrays and not the devices'.  Large arrays must not become a CPU device's own memory, which they
    do where they happen to be aligned: see MALLOC_MMAP_THRESHOLD_ in test_sharding.py.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = directory(folder, "llama", **LARGE)
        bounded(lambda: read_directory(path, mesh=mesh(where))[2], where)


def host_peak_gguf(where):
    with tempfile.TemporaryDirectory() as folder:
        path = gguf_file(folder, "llama", gguf.GGMLQuantizationType.Q8_0, **LARGE)
        bounded(lambda: read_gguf(path, mesh=mesh(where))[1], where)


def bounded(read, where):
    read()  # whatever is made once
    tracemalloc.start()
    params = read()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    print(f"host peak {peak / 1e6:.2f} MB of {size / 1e6:.2f} MB, largest tensor {LARGEST / 1e6:.2f} MB", file=sys.stderr)
    assert size > 2 * LARGEST and peak <= LARGEST * (1 + 1 / mesh(where).shape["model"]), (peak, LARGEST, size)

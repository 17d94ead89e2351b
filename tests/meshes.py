"""What checks on eight simulated devices share: meshes, a target whose every axis eight devices divide, prompts, batches."""

import functools
import types
from pathlib import Path

import helpers
import jax
import jax.numpy as jnp
import numpy as np

from specjax import sharding
from specjax.drafters.recipe import Batch

MESHES = {"1x8": "model=8", "2x4": "data=2,model=4", "4x2": "data=4,model=2", "8x1": "data=8"}
FULLY = "data=2,fsdp=2,model=2"
PROMPTS = [*helpers.PROMPTS[:4]] * 2
HEAT = [helpers.GREEDY] * 4 + [helpers.HOT] * 4


@functools.cache
def mesh(name):
    """A mesh by its shape, or of as many devices as a text asks for."""
    text = MESHES.get(name, name)
    count = int(np.prod(list(sharding.parse_sizes(text).values())))
    return sharding.parse_mesh(text, jax.devices()[:count])


@functools.cache
def table():
    """tests/helpers.py with a target of which eight devices divide every axis: 8 KV heads, 24 tokens."""
    source = Path(helpers.__file__).read_text()
    for old, new in {"V = 17\n": "V = 24\n", "(V, 16, 2, 4, 2, 8, 32, 64,": "(V, 16, 2, 16, 8, 8, 32, 64,"}.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    module = types.ModuleType("wide_helpers")
    exec(compile(source, helpers.__file__, "exec"), module.__dict__)
    return module


@functools.cache
def placed(name):
    """(The table's target on a mesh, its parameters there, notes.)"""
    t = table()
    own, notes = sharding.place(t.target_params(), mesh(name), kv_heads=(t.CONFIG.kv_heads,))
    return sharding.model_over(t.TARGET, mesh(name)), own, notes


def batch(rows=8, step=0):
    """Rows to train on, four of five tokens supervised."""
    rng = np.random.default_rng(step)
    tokens = jnp.asarray(rng.integers(0, table().V, (rows, 12)), jnp.int32)
    mask = jnp.asarray(rng.random((rows, 12)) < 0.8)
    return Batch(tokens, mask, jnp.asarray(np.repeat([[0] * 7 + [1] * 5], rows, 0), jnp.int32))

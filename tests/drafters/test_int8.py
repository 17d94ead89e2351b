"""Matrices in 8 bits on disk: half a step off at most, a quarter of the bytes, and never read without their scales."""

import json
from pathlib import Path

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from specjax import load_drafter
from specjax.drafters import files
from specjax.models.load import LM
from specjax.types import Params

LM_OF_TARGET = LM(h.TARGET, h.target_params(), None, h.CONFIG)
RNG = np.random.default_rng(0)
MATRICES = {
    "one": RNG.normal(size=(24, 40)) * np.geomspace(1e-6, 1e6, 40)[None],
    "stacked": RNG.normal(size=(3, 2, 16, 8)) * np.asarray([1, 1e-3, 1e3])[:, None, None, None],
}
TREE = {
    **jax.tree.map(lambda x: x.astype(np.float32), MATRICES),
    "bias": np.ones((3, 8), np.float32),
    "norm": {"scale": np.ones(4, np.float32)},
}
TREE["one"][:, 5] = 0
CONFIG = {"method": "mtp"}
like = lambda shapes: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), TREE)


@pytest.mark.parametrize("dtype", [jnp.int8, "int8"])
def test_round_trip(dtype, tmp_path):
    """A scale for each head and output channel; what is no matrix is kept as it is, stacked biases too."""
    files.save(tmp_path, TREE, CONFIG, dtype=dtype)
    disk = files.read_tensors(tmp_path / files.WEIGHTS)
    assert {n for n, x in disk.items() if x.dtype == np.int8} == {"one", "stacked"}
    assert {n: x.shape for n, x in disk.items() if n.endswith(".scale")} == {"one.scale": (40,), "stacked.scale": (3, 2, 8)}
    again = files.read_params(tmp_path, like)
    for name in MATRICES:
        step = disk[f"{name}.scale"][..., None, :]
        np.testing.assert_allclose(step * 127, np.abs(TREE[name]).max(-2, keepdims=True), rtol=1e-6)
        assert again[name].dtype == jnp.float32 and (np.abs(again[name] - TREE[name]) <= 0.5001 * step).all()
        assert (np.abs(disk[name]).max(-2) == 127)[step[..., 0, :] > 0].all()
    assert (np.asarray(again["one"])[:, 5] == 0).all()
    np.testing.assert_array_equal(again["bias"], TREE["bias"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_the_bytes(dtype, tmp_path):
    """The same leaves that 8 bits are for: a stacked bias is a vector."""
    files.save(tmp_path, {**TREE, "one": np.tanh(TREE["one"]), "up_bias": TREE["bias"] / 3}, CONFIG, dtype=jnp.dtype(dtype))
    disk = files.read_tensors(tmp_path / files.WEIGHTS)
    assert {n for n, x in disk.items() if x.dtype == dtype} == {"one", "stacked"}
    np.testing.assert_array_equal(disk["up_bias"], TREE["bias"] / 3)


def test_a_quarter_of_the_bytes(tmp_path):
    wide = {"kernel": RNG.normal(size=(256, 512)).astype(np.float32)}
    sizes = []
    for dtype in (None, jnp.bfloat16, jnp.int8):
        files.save(tmp_path, wide, CONFIG, dtype=dtype)
        sizes.append((tmp_path / files.WEIGHTS).stat().st_size)
    assert sizes[2] < 0.26 * sizes[0] and sizes[2] < 0.52 * sizes[1]


DAMAGED = {
    "1 of int8 without scales: one": lambda t: t.pop("one.scale"),
    "1 with scales and not of int8: one": lambda t: t.update(one=TREE["one"]),
    "1 with scales and not of int8: other": lambda t: t.update({"other.scale": np.ones(3, np.float32)}),
    "1 with scales of another shape or dtype: stacked": lambda t: t.update({"stacked.scale": np.ones((3, 8), np.float32)}),
    "1 with scales of another shape or dtype: one": lambda t: t.update({"one.scale": np.ones(40, np.float16)}),
    "1 with scales that are not finite: one": lambda t: t["one.scale"].fill(np.nan),
    "1 missing: stacked": lambda t: [t.pop("stacked"), t.pop("stacked.scale")],
    "1 of int8 without scales: bias": lambda t: t.update(bias=np.ones((3, 8), np.int8)),
    "of another shape: norm/scale": lambda t: t.update({"norm/scale": np.ones((), np.float32)}),
    "with scales of another shape or dtype: bias": lambda t: t.update(
        bias=np.ones((), np.int8), **{"bias.scale": np.ones((), np.float32)}
    ),
}


@pytest.mark.parametrize("message", DAMAGED)
def test_a_damaged_file_is_refused(message, tmp_path):
    files.save(tmp_path, TREE, CONFIG, dtype=jnp.int8)
    tensors = files.read_tensors(tmp_path / files.WEIGHTS)
    DAMAGED[message](tensors)
    save_file(tensors, tmp_path / files.WEIGHTS)
    with pytest.raises(ValueError, match=message) as error:
        files.read_params(tmp_path, like)
    assert "\n" not in str(error.value)


def test_what_cannot_be_kept_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be kept as int32: choose"):
        files.save(tmp_path, TREE, CONFIG, dtype=jnp.int32)
    for value in (np.nan, np.inf):
        with pytest.raises(ValueError, match="one holds NaN or inf"):
            files.save(tmp_path, {"one": np.full((2, 2), value, np.float32)}, CONFIG, dtype=jnp.int8)
    for dtype, value in (("float16", 7e4), ("float16", np.nan), ("bfloat16", np.inf)):
        with pytest.raises(ValueError, match=f"one holds NaN or what {dtype} cannot"):
            files.save(tmp_path, {"one": np.full((2, 2), value, np.float32)}, CONFIG, dtype=jnp.dtype(dtype))
    assert not list(tmp_path.iterdir())


RULES = {"blockwise": "rejection", "medusa": "target_match", "hydra": "recursive", "mtp": "rejection"}


@pytest.mark.parametrize("name", RULES)
def test_every_trained_drafter_drafts_from_8_bits(name, tmp_path):
    """Its tokens are the target's, and some drafts are accepted."""
    config = json.loads((Path(h.saved(name)) / "config.json").read_text())
    files.save(tmp_path, h.trained(name), config, dtype=jnp.int8)
    loaded = load_drafter(name, LM_OF_TARGET, num_draft=3, weights=str(tmp_path))
    for path, x in files.flat(loaded.params).items():
        before = np.asarray(files.flat(h.trained(name))[path])
        assert x.dtype == before.dtype and np.abs(x - before).max() <= np.abs(before).max() / 250
    result = h.generate(
        h.drafter(name), RULES[name], h.MIXED, params=Params(h.target_params(), loaded.params), temperature=h.MIXED_HEAT
    )
    assert result.tokens[:5] == h.reference().tokens[:5] and result.accepted.sum() > 0

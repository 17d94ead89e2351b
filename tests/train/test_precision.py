"""Products in bfloat16: gradients within its resolution, everything that is kept in float32, and resumed bit for bit."""

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import checkpoint
from specjax.drafters.precision import lowered
from specjax.drafters.recipe import Batch, with_output
from specjax.train.loop import begin, fit, train_step
from specjax.train.packing import Batches
from specjax.train.settings import Settings

SETTINGS = Settings(steps=4, peak=1e-2, warmup=1, log_every=1, evaluate_every=99, save_seconds=0.0, compute="bfloat16")
RECIPES = {name: h.RECIPES[name](2) for name in ("medusa", "mtp")}


def rows(step):
    tokens = jnp.asarray(np.random.default_rng(step).integers(0, h.V, (2, 12)), jnp.int32)
    return Batch(tokens, jnp.ones((2, 12), bool), jnp.zeros((2, 12), jnp.int32))


ROWS = Batches(rows, lambda step: np.arange(2), str, 2)


def gradient(recipe, compute):
    frozen = lowered(h.target_params(), compute)

    def loss(params):
        batch = with_output(rows(0), h.TARGET, frozen)
        return recipe.loss(lowered(params, compute), frozen, batch, jax.random.key(0))[0]

    return jax.jit(jax.value_and_grad(loss))


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_within_the_resolution_of_bfloat16(name):
    """8 bits: they differ from float32's, by some 2^-8 of their size, and are float32 themselves."""
    recipe = RECIPES[name]
    params = jax.jit(recipe.init)(jax.random.key(0), h.target_params())
    (a, exact), (b, coarse) = (gradient(recipe, compute)(params) for compute in ("float32", "bfloat16"))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(coarse))
    flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
    error = np.linalg.norm(flat(exact) - flat(coarse)) / np.linalg.norm(flat(exact))
    assert 2**-11 < error < 2**-4 and 0 < abs(float(a) - float(b)) < 2**-6 * float(a)


def test_what_is_kept_is_float32_and_resumed_bit_for_bit(tmp_path):
    recipe, how = RECIPES["medusa"], {"target": h.TARGET, "target_params": h.target_params()}
    whole = fit(recipe, ROWS, SETTINGS, tmp_path / "whole", **how)

    def kill(report):
        if report.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(recipe, ROWS, SETTINGS, tmp_path / "cut", progress=kill, **how)
    assert checkpoint.steps(tmp_path / "cut" / "checkpoints") == [1, 2]
    again = fit(recipe, ROWS, SETTINGS, tmp_path / "cut", **how)
    state = begin(recipe, h.target_params(), SETTINGS, tmp_path / "cut")
    assert {str(x.dtype) for x in jax.tree.leaves(state)} == {"float32", "int32"}
    for a, b, c in zip(*(jax.tree.leaves(x) for x in (whole, again, state.params)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes() == np.asarray(c).tobytes()
    full = fit(recipe, ROWS, SETTINGS._replace(compute="float32"), tmp_path / "full", **how)
    assert not np.array_equal(full["kernel"], whole["kernel"])


def test_what_is_lowered():
    """float32 matrices alone: vectors, stacked ones too, ids and what was stored in fewer bits stay as they are."""
    tree = {
        "m": jnp.ones((2, 2)),
        "v": jnp.ones(2),
        "up_bias": jnp.ones((2, 2)),
        "i": jnp.ones((2, 2), jnp.int32),
        "h": jnp.ones((2, 2), jnp.float16),
    }
    kinds = {name: str(x.dtype) for name, x in lowered(tree, "bfloat16").items()}
    assert kinds == {"m": "bfloat16", "v": "float32", "up_bias": "float32", "i": "int32", "h": "float16"}
    assert jax.tree.map(lambda x: x.dtype, lowered(tree, "float32")) == jax.tree.map(lambda x: x.dtype, tree)
    with pytest.raises(ValueError, match="compute 'float16' is not supported: train in float32 or bfloat16"):
        train_step(None, tree, None, None, recipe=RECIPES["mtp"], target=None, optimizer=None, compute="float16")

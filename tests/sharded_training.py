"""Training on eight simulated devices: gradients, checkpoints on other meshes, a run that goes on on another one."""

import functools
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from meshes import batch, mesh, placed, table

from specjax import checkpoint, sharding
from specjax.train import loop
from specjax.train.packing import Batches


def parts():
    """Two parts of eight rows.  In the first one the first four rows have no label but one, and two of the rest have none: a
    mean by device, of equal weight, is another number (R19).
    """
    made = jax.tree.map(lambda x: x.reshape(2, 8, *x.shape[1:]), batch(16))
    mask = made.mask.at[0, :4].set(False).at[0, 0, 5].set(True).at[0, 6:].set(False)
    return made._replace(mask=mask)


@functools.cache
def stepping(recipe, where=None):
    """(compiled step, state, target's parameters): gradients are what `optax.trace` keeps."""
    t, keep = table(), optax.trace(0.0)
    target, target_params, _ = (t.TARGET, t.target_params(), ()) if where is None else placed(where)
    fresh = lambda params: loop.Train(params, keep.init(params), jnp.zeros((), jnp.int32))
    state, places = fresh(t.trained(recipe)), None
    if where is not None:
        places = sharding.placement(state, mesh(where), rules=sharding.TRAINED).shardings
        state, places = jax.device_put(state, places), (places, None)
    step = functools.partial(loop.train_step, recipe=t.RECIPES[recipe](3), target=target, optimizer=keep)
    return jax.jit(step, out_shardings=places), state, target_params


@functools.cache
def gradients_alone(recipe):
    step, state, target_params = stepping(recipe)
    return step(state, target_params, parts(), jax.random.key(5))


def gradients(recipe, where):
    step, state, target_params = stepping(recipe, where)
    fed = sharding.fed(parts(), mesh(where))
    assert fed.tokens.sharding.shard_shape(fed.tokens.shape)[1] == 8 // (mesh(where).shape["data"] * mesh(where).shape["fsdp"])
    found, metrics = step(state, target_params, fed, jax.random.key(5))
    wanted, expected = gradients_alone(recipe)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(wanted.optimizer.trace), jax.tree.leaves(found.optimizer.trace), strict=True
    )
    for (path, x), y in pairs:
        scale = np.abs(x).max() or 1.0
        np.testing.assert_allclose(y / scale, x / scale, atol=1e-5, err_msg=jax.tree_util.keystr(path))


def restores(where, goals):
    """A checkpoint saved on one mesh lies as asked on others, of as many devices or fewer, or on one, with the same parameters,
    moments and count (D03, D07).
    """
    t = table()
    how, numbers = t.RECIPES["medusa"](3), loop.Settings(4)
    with tempfile.TemporaryDirectory() as folder:
        saved = jax.tree.map(lambda x: x + 1, loop.begin(how, placed(where)[1], numbers, Path(folder), mesh(where)))
        checkpoint.save(Path(folder) / "checkpoints", 1, saved)
        for goal in goals:
            one = goal == "1x1"
            params = t.target_params() if one else placed(goal)[1]
            found = loop.begin(how, params, numbers, Path(folder), None if one else mesh(goal))
            jax.tree.map(np.testing.assert_array_equal, found, saved)
            devices = {len(x.sharding.device_set) for x in jax.tree.leaves(found)}
            assert devices == {1 if one else mesh(goal).size}, f"restored on {devices} devices for {goal}"
            if not one:
                places = sharding.placement(found, mesh(goal), rules=sharding.TRAINED).shardings
                jax.tree.map(lambda x, place: np.testing.assert_equal(x.sharding, place), found, places)


def goes_on(recipe, places):
    """A run that is stopped and goes on, on another mesh each time, ends with the parameters of one that was not."""
    t = table()
    how = t.RECIPES[recipe](3)
    numbers = loop.Settings(len(places) + 1, peak=0.01, warmup=1, log_every=1, save_seconds=0.0)
    rows = Batches(lambda n: batch(step=n), lambda n: np.arange(8), lambda n: f"batch {n}", 8)
    fit = functools.partial(loop.fit, how, rows, numbers)

    class Stop(Exception):
        pass

    def stopped(after, report):  # the step before was saved
        if report.step == after + 2 and report.step <= len(places):
            raise Stop

    with tempfile.TemporaryDirectory() as folder:
        alone = fit(Path(folder) / "alone", target=t.TARGET, target_params=t.target_params())
        for done, where in enumerate(places):
            target, params, _ = placed(where)
            progress = functools.partial(stopped, done)
            try:
                found = fit(
                    Path(folder) / "meshes", target=target, target_params=params, mesh=mesh(where), progress=progress
                )  # fmt: skip
            except Stop:
                continue
        assert checkpoint.steps(Path(folder) / "meshes" / "checkpoints")[-1] == numbers.steps
    for x, y in zip(jax.tree.leaves(alone), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)

"""Checkpoints: bit for bit, whole or absent, the newest few."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax import checkpoint


class Pair(NamedTuple):
    weights: dict
    step: jax.Array


def tree(scale=1.0):
    weights = {"a": scale * jnp.arange(6.0).reshape(2, 3) / 7, "b": {"c": jnp.full(3, scale, jnp.bfloat16)}}
    return {"pair": Pair(weights, jnp.asarray(3, jnp.int32)), "optimizer": optax.adamw(1e-3).init(weights)}


def equal(a, b):
    same = jax.tree.map(lambda x, y: x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(jax.tree.leaves(same))


def test_round_trip_and_keep(tmp_path):
    for step in (1, 5, 20, 100):
        checkpoint.save(tmp_path, step, tree(step), keep=2)
    assert checkpoint.steps(tmp_path) == [20, 100]
    assert equal(checkpoint.restore(tmp_path, jax.eval_shape(tree)), tree(100))
    assert equal(checkpoint.restore(tmp_path, tree(), step=20), tree(20))


def test_saved_again(tmp_path):
    checkpoint.save(tmp_path, 1, tree(1.0))
    checkpoint.save(tmp_path, 1, tree(2.0))
    assert equal(checkpoint.restore(tmp_path, tree()), tree(2.0))


def test_nothing_there(tmp_path):
    assert checkpoint.steps(tmp_path / "none") == []
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        checkpoint.restore(tmp_path, tree())
    checkpoint.save(tmp_path, 1, tree())
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 2 \(found: \[1\]\)"):
        checkpoint.restore(tmp_path, tree(), step=2)


def test_an_unfinished_one_does_not_count(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, tree())
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
    assert checkpoint.steps(tmp_path) == [1]
    monkeypatch.setattr(checkpoint.ocp, "save", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 3, tree(), keep=1)
    assert checkpoint.steps(tmp_path) == [1]


def test_another_tree_is_named(tmp_path):
    """D07: never a silent mismatch."""
    checkpoint.save(tmp_path, 1, {"a": jnp.zeros((2, 3)), "b": jnp.zeros(1)})
    with pytest.raises(ValueError, match="1 missing: c; 1 not used: b"):
        checkpoint.restore(tmp_path, {"a": jnp.zeros((2, 3)), "c": jnp.zeros(1)})
    with pytest.raises(ValueError, match=r"a is \(\(2, 3\), 'float32'\) but should be \(\(3, 2\)"):
        checkpoint.restore(tmp_path, {"a": jnp.zeros((3, 2)), "b": jnp.zeros(1)})

"""The table as a model: its law is its table, through caches, masks and trees."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import trees
from specjax.models.table import table

V = 3


def context(line, order):
    """Index of the table for the last `order` tokens of `line`; V stands before the first."""
    return tuple(([V] * order + list(line))[-order:])


@pytest.mark.parametrize("order", [1, 2, 3])
def test_every_row_reads_its_context(order):
    model = table(V, order=order)
    params = model.init(jax.random.key(0))
    lines = np.asarray(list(itertools.product(range(V), repeat=3)), np.int32)
    out, cache = model.apply(params, jnp.asarray(lines), model.init_cache(len(lines), 8))
    assert cache.length.tolist() == [0] * len(lines), "`apply` does not move the length"
    for row, line in enumerate(lines):
        for t in range(3):
            np.testing.assert_array_equal(out.logits[row, t], params[context(line[: t + 1], order)])
    np.testing.assert_allclose(np.exp(np.asarray(out.logits)).sum(-1), 1, atol=1e-6)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_chunks_at_ragged_lengths_equal_one_pass(order):
    """Rows of 1 to 5 committed tokens, with junk in the free slots, then two more tokens."""
    model = table(V, order=order)
    params = model.init(jax.random.key(1))
    rng = np.random.default_rng(0)
    lines = rng.integers(0, V, (5, 8))
    _, cache = model.apply(params, jnp.asarray(lines, jnp.int32), model.init_cache(5, 8))
    length = np.arange(1, 6)
    new = rng.integers(0, V, (5, 2))
    out, _ = model.apply(params, jnp.asarray(new, jnp.int32), cache._replace(length=jnp.asarray(length)))
    for b, n in enumerate(length):
        for t in range(2):
            np.testing.assert_array_equal(out.logits[b, t], params[context([*lines[b, :n], *new[b, : t + 1]], order)])


@pytest.mark.parametrize("order", [1, 2, 3])
def test_a_tree_sees_its_paths(order):
    model = table(V, order=order)
    params = model.init(jax.random.key(2))
    parents = jnp.asarray([-1, -1, 0, 1, 1, 3], jnp.int32)
    seen = trees.ancestors(parents)
    tokens = np.array([[2, 0, 1, 1, 0, 2, 1]])
    _, cache = model.apply(params, jnp.asarray([[0, 1, 0, 0]], jnp.int32), model.init_cache(1, 16))
    out, _ = model.apply(params, jnp.asarray(tokens, jnp.int32), cache._replace(length=jnp.array([2])), mask=seen)
    for row, path in enumerate([[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 5], [0, 2, 4, 6]]):
        np.testing.assert_array_equal(out.logits[0, row], params[context([0, 1, *tokens[0, path]], order)])


def test_a_mask_wider_than_the_new_tokens():
    """Level by level: the second pass of a tree sees slots of the first through the mask."""
    model = table(V, order=2)
    params = model.init(jax.random.key(3))
    _, cache = model.apply(params, jnp.asarray([[1, 2, 0]], jnp.int32), model.init_cache(1, 16))  # 1, then nodes 2 and 0
    mask = jnp.asarray([[True, False, True, False], [False, True, False, True]])  # two new ones, under node 2 and under node 0
    out, _ = model.apply(params, jnp.asarray([[1, 1]], jnp.int32), cache._replace(length=jnp.array([3])), mask=mask)
    np.testing.assert_array_equal(out.logits[0, 0], params[2, 1])
    np.testing.assert_array_equal(out.logits[0, 1], params[0, 1])


def test_what_a_table_has_not_is_refused():
    model = table(V)
    params, cache = model.init(jax.random.key(0)), model.init_cache(1, 4)
    with pytest.raises(ValueError, match="no layers"):
        model.apply(params, jnp.zeros((1, 1), jnp.int32), cache, features=(0,))
    with pytest.raises(ValueError, match="no layers"):
        model.apply(params, jnp.zeros((1, 1), jnp.int32), cache, context=cache)
    with pytest.raises(ValueError, match="no layers"):
        model.truncate(1)

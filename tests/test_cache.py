"""Writing, moving and forgetting cache slots: against loops; what falls outside is dropped, never clamped."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as kv
from specjax.types import KVCache

B, G, D, S = 3, 2, 4, 8


def random_cache(length, seed=0):
    rng = np.random.default_rng(seed)
    k = tuple(jnp.asarray(rng.normal(size=(B, G, D, S)), jnp.float32) for _ in range(2))
    v = tuple(jnp.asarray(rng.normal(size=(B, G, S, D)), jnp.float32) for _ in range(2))
    return KVCache(k, v, jnp.asarray(length, jnp.int32))


def test_allocate():
    cache = kv.allocate(layers=2, batch=B, kv_heads=G, head_dim=D, capacity=S, dtype=jnp.bfloat16)
    assert [x.shape for x in cache.k] == [(B, G, D, S)] * 2 and [x.shape for x in cache.v] == [(B, G, S, D)] * 2
    assert {x.dtype for x in cache.k + cache.v} == {jnp.dtype(jnp.bfloat16)} and cache.length.tolist() == [0] * B


@pytest.mark.parametrize("at", [[0, 3, 5], [6, 7, 8], [5, 9, 100]])
def test_write_and_put_drop_what_falls_outside(at):
    cache, rng = random_cache([0] * B), np.random.default_rng(1)
    new_k, new_v = rng.normal(size=(2, B, 3, G, D)).astype(np.float32)
    k, v = kv.write(cache.k[0], cache.v[0], jnp.asarray(new_k), jnp.asarray(new_v), jnp.asarray(at))
    buffer = np.arange(B * S).reshape(B, S)
    tokens = kv.put(jnp.asarray(buffer), jnp.full((B, 3), -7), jnp.asarray(at))
    expected_k, expected_v, expected_t = np.array(cache.k[0]), np.array(cache.v[0]), buffer.copy()
    for b in range(B):
        for t in range(3):
            if at[b] + t < S:
                expected_k[b, :, :, at[b] + t] = new_k[b, t]
                expected_v[b, :, at[b] + t] = new_v[b, t]
                expected_t[b, at[b] + t] = -7
    np.testing.assert_array_equal(k, expected_k)
    np.testing.assert_array_equal(v, expected_v)
    np.testing.assert_array_equal(tokens, expected_t)


def test_write_keeps_the_type_of_the_cache():
    cache = kv.allocate(layers=1, batch=1, kv_heads=1, head_dim=2, capacity=2, dtype=jnp.bfloat16)
    new = jnp.full((1, 1, 1, 2), 1.0009765625)
    k, v = kv.write(cache.k[0], cache.v[0], new, new, jnp.array([0]))
    assert k.dtype == v.dtype == jnp.bfloat16 and float(k[0, 0, 0, 0]) == 1.0


@pytest.mark.parametrize("paths", [[[0, 1, 2, 3], [0, 2, 5, 0], [0, 4, 0, 0]], [[0, 5, 6, 7], [0, 3, 4, 5], [0, 0, 0, 0]]])
def test_keep_path_moves_an_accepted_path(paths):
    """Sources and goals overlap; each slot must be read before it is written.  Slots before `length` stay."""
    length = [0, 2, 1]
    cache = random_cache(length)
    kept = kv.keep_path(cache, jnp.asarray(paths, jnp.int32))
    for layer in range(2):
        for b, path in enumerate(paths):
            ends = [0] + [j for j in range(1, 4) if path[j] > 0]
            for j in ends:
                if length[b] + path[j] < S:
                    np.testing.assert_array_equal(
                        kept.k[layer][b, :, :, length[b] + j], cache.k[layer][b, :, :, length[b] + path[j]]
                    )
                    np.testing.assert_array_equal(kept.v[layer][b, :, length[b] + j], cache.v[layer][b, :, length[b] + path[j]])
            np.testing.assert_array_equal(kept.k[layer][b, :, :, : length[b] + 1], cache.k[layer][b, :, :, : length[b] + 1])
    assert kept.length.tolist() == length


def test_keep_path_at_the_end_of_the_cache_overwrites_nothing():
    cache = random_cache([6, 7, 8])
    kept = kv.keep_path(cache, jnp.asarray([[0, 1, 2, 3]] * B, jnp.int32))
    for b, n in enumerate((6, 7, 8)):
        np.testing.assert_array_equal(kept.k[0][b, :, :, :n], cache.k[0][b, :, :, :n])
        np.testing.assert_array_equal(kept.v[0][b, :, :n], cache.v[0][b, :, :n])


def test_rewind_only_forgets():
    cache = random_cache([5, 6, 7])
    back = kv.rewind(cache, jnp.asarray([1, 0, 7]))
    assert back.length.tolist() == [1, 0, 7]
    np.testing.assert_array_equal(back.k[1], cache.k[1])


def test_take_gathers_by_row():
    x = jnp.arange(2 * 3 * 2).reshape(2, 3, 2)
    assert kv.take(x, jnp.array([[2, 0], [1, 1]])).tolist() == [[[4, 5], [0, 1]], [[8, 9], [8, 9]]]

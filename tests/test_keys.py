"""Which randomness belongs to what: streams never meet, requests never share, equal questions have equal answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import keys


def data(key):
    return [tuple(row) for row in np.asarray(jax.random.key_data(key)).reshape(-1, 2).tolist()]


def test_no_two_purposes_share_a_key():
    """Requests x streams x positions x depths, and the request keys themselves: all different."""
    request = keys.request_keys(jax.random.key(0), jnp.arange(6))
    found = data(request)
    for stream in range(4):
        for length in range(1, 12):
            of_round = keys.round_keys(request, stream, jnp.full(6, length))
            found += data(of_round)
            for depth in range(1, 4):
                found += data(jax.vmap(lambda k, d=depth: jax.random.fold_in(k, d))(of_round))
    assert len(found) == len(set(found)) == 6 * (1 + 4 * 11 * 4)


def test_a_request_key_follows_its_id():
    key = jax.random.key(3)
    assert data(keys.request_keys(key, jnp.array([4, 2]))) == data(keys.request_keys(key, jnp.arange(5)))[4:1:-2]
    assert data(keys.request_keys(key, jnp.array([7]))) == data(jax.random.fold_in(key, 7))


def test_rows_have_rounds_of_their_own():
    request = keys.request_keys(jax.random.key(0), jnp.arange(2))
    together = keys.round_keys(request, keys.ACCEPT, jnp.array([5, 9]))
    assert data(together)[0] == data(keys.round_keys(request, keys.ACCEPT, jnp.array([5, 5])))[0]
    assert data(together)[1] == data(keys.round_keys(request, keys.ACCEPT, jnp.array([9, 9])))[1]


def test_draft_noise_depends_on_the_round_and_coupled_noise_on_the_position():
    request = keys.request_keys(jax.random.key(0), jnp.arange(2))
    at = lambda *length: keys.round_keys(request, keys.DRAFT, jnp.array(length))
    here, there = keys.gumbel(at(5, 5), 2, (1, 8)), keys.gumbel(at(6, 6), 1, (1, 8))  # the same positions
    assert not np.isclose(here, there).any()
    assert not np.isclose(keys.gumbel(at(5, 5), 1, (1, 8)), here).any(), "depths"
    mixed = keys.gumbel_at(request, jnp.array([7, 3]), 8)
    np.testing.assert_array_equal(mixed[0], keys.gumbel_at(request, jnp.array([7, 7]), 8)[0])
    np.testing.assert_array_equal(mixed[1], keys.gumbel_at(request, jnp.array([3, 3]), 8)[1])


def test_gumbel_is_standard_gumbel():
    """Kolmogorov distance of 40k draws below 1.9 / sqrt(n) (alpha about 1e-3), and no number repeats along an axis."""
    x = np.sort(np.asarray(keys.gumbel(keys.request_keys(jax.random.key(1), jnp.arange(10)), 1, (2, 2000))).ravel())
    cdf = np.exp(-np.exp(-x.astype(np.float64)))
    n = len(x)
    assert np.abs(cdf - (np.arange(n) + 0.5) / n).max() < 1.9 / np.sqrt(n)
    assert len(np.unique(x)) > 0.98 * n


@pytest.mark.parametrize("noise", ["draft", "target"])
def test_noise_is_fine_grained_where_it_is_large(noise):
    """JAX's default Gumbel noise has 51 values above 12 and none above 15.95: with a head of .99 over a vocabulary of 49k it
    never draws a quarter of the tail.  About 30 of these 5 million numbers lie above 12; all differ (a chance repeat: 5e-4).
    """
    many = jax.random.split(jax.random.key(5), 100)
    of = {"draft": lambda: keys.gumbel(many, 1, (49_152,)), "target": lambda: keys.gumbel_at(many, jnp.arange(100), 49_152)}
    large = np.asarray(of[noise]()).ravel()
    large = large[large > 12]
    assert 10 < len(large) == len(set(large.tolist()))

"""The table a schedule reads: interpolation, envelope, stairs, in NumPy and in jax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.latency import cost_table as costs


def test_seconds_add_up():
    table = costs.cost_table([1, 5, 9], [1.0, 2.0, 6.0], requests=[1, 3], draft=[0.5, 0.7], per_slot=0.01, dtype=np.float64)
    assert costs.pass_seconds(table, np.asarray(3), np.asarray(0)) == pytest.approx(1.5)
    assert costs.pass_seconds(table, np.asarray(11), np.asarray(100)) == pytest.approx(8.0 + 1.0)  # past the end: 1 a token
    assert costs.draft_seconds(table, np.asarray(2)) == pytest.approx(0.6)
    assert costs.draft_seconds(table, np.asarray(5)) == pytest.approx(0.9)
    assert costs.draft_seconds(table, np.asarray(0)) == pytest.approx(0.5)  # before the first point: as at it
    whole = costs.round_seconds(table, np.asarray(2), np.array([1, 3]), np.asarray(100))
    np.testing.assert_allclose(whole, [0.6 + 1.0 + 1.0, 0.6 + 1.5 + 1.0])


def test_envelope_never_falls():
    table = costs.cost_table([1, 2, 4, 8], [1.0, 0.7, 1.2, 1.1], requests=[1, 2], draft=[0.3, 0.2])
    np.testing.assert_allclose(table.verify, [1.0, 1.0, 1.2, 1.2])
    np.testing.assert_allclose(table.draft, [0.3, 0.3])


def test_stairs():
    """Buckets 1, 4 and 8: a pass of 2, 3 or 4 tokens costs that of 4; past 8, what the last four cost."""
    tokens, seconds = costs.staircase([1, 4, 8], [1.0, 1.2, 2.0])
    table = costs.cost_table(tokens, seconds, dtype=np.float64)
    made = costs.pass_seconds(table, np.arange(1, 13), np.asarray(0))
    np.testing.assert_allclose(made, [1, 1.2, 1.2, 1.2, 2, 2, 2, 2, 2.2, 2.4, 2.6, 2.8])
    one = costs.cost_table(*costs.staircase([4], [1.0]), dtype=np.float64)
    np.testing.assert_allclose(costs.pass_seconds(one, np.array([1, 4, 8, 12]), np.asarray(0)), [1, 1, 2, 3])


def test_inside_jax_it_is_the_same():
    table = costs.cost_table([1, 5, 9], [1.0, 2.0, 6.0], requests=[1, 3], draft=[0.5, 0.7], per_slot=0.01)
    tokens = np.arange(1, 15)
    host = costs.round_seconds(table, np.asarray(2), tokens, np.asarray(7))
    arguments = jax.tree.map(jnp.asarray, (table, 2, tokens, 7))
    np.testing.assert_allclose(jax.jit(costs.round_seconds)(*arguments), host, rtol=1e-6)


@pytest.mark.parametrize(
    "points",
    [
        dict(tokens=[1, 1], verify=[1, 2]),
        dict(tokens=[1], verify=[1]),
        dict(tokens=[1, 2], verify=[1, 2, 3]),
        dict(tokens=[1, 2], verify=[0, 1]),
        dict(tokens=[1, 2], verify=[1, np.nan]),
        dict(tokens=[1, 2], verify=[1, 2], draft=[-1]),
        dict(tokens=[1, 2], verify=[1, 2], per_slot=-1.0),
    ],
)
def test_what_a_table_refuses(points):
    with pytest.raises(ValueError, match=r"ascending|positive"):
        costs.cost_table(points.pop("tokens"), points.pop("verify"), **points)

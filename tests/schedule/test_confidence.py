"""Calibration by hand, recovered from made-up rounds whose truth is known, and against independent formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, special

from specjax.schedule import confidence as c


def rounds(probability, rng):
    """[R, K] whether the prefix up to k was accepted, of conditional probabilities [R, K]."""
    return np.cumprod(rng.random(probability.shape) < probability, 1).astype(bool)


def test_survival_never_rises():
    """Also where float32 would round a product up, and where a confidence is nonsense."""
    rng = np.random.default_rng(0)
    x = rng.random((2000, 16)).astype(np.float32) ** 0.01
    x[rng.random(x.shape) < 0.3] = 1
    for made in (c.survival(x), np.asarray(c.survival(jnp.asarray(x)))):
        assert made.dtype == np.float32 and (np.diff(made, axis=1) <= 0).all()
        np.testing.assert_allclose(made, np.cumprod(x.astype(float), 1), rtol=1e-5)
    odd = c.survival(np.array([[2.0, 0.5, -1.0, 0.5], [np.inf, np.nan, 1.0, 1.0]]))
    assert odd.tolist() == [[1.0, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]


def test_outcomes_by_hand():
    """K = 3: all of 3 accepted; 1 of 3; all of a draft of 1; none of a draft of 1; nothing drafted."""
    o = c.outcomes(np.array([3, 1, 1, 0, 0]), np.array([3, 3, 1, 1, 0]), 3)
    assert o.accepted.astype(int).tolist() == [[1, 1, 1], [1, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert o.known.astype(int).tolist() == [[1, 1, 1], [1, 1, 1], [1, 0, 0], [1, 1, 1], [0, 0, 0]]
    assert o.reached.astype(int).tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0]]


def test_temperatures_are_recovered():
    """Logits are the truth's times 3, 1/2, 2: these temperatures undo it, and only they calibrate the product."""
    rng = np.random.default_rng(1)
    z = rng.normal(1.5, 1.5, (40_000, 3))
    true = np.array([3.0, 0.5, 2.0])
    accepted = rounds(special.expit(z), rng)
    fitted = c.fit_temperatures(z * true, accepted)
    assert np.abs(np.log(fitted / true)).max() < 0.2  # two steps of the grid
    before = c.scores(c.survival(special.expit(z * true)), accepted).ece
    after = c.scores(c.survival(c.temper(special.expit(z * true), fitted)), accepted).ece
    assert (after < 0.015).all() and (before > 3 * after).all()


def test_each_temperature_is_fitted_on_the_product_so_far():
    """c_1 says one half whatever its temperature, and .9 is true: T_2 makes up for it, where c_2 by itself wants 1."""
    rng = np.random.default_rng(2)
    z = np.stack([np.zeros(20_000), rng.normal(1.0, 0.5, 20_000)], 1)
    accepted = rounds(np.stack([np.full(20_000, 0.9), special.expit(z[:, 1])], 1), rng)
    grid = np.array([0.25, 0.5, 1.0, 2.0])
    first, second = c.fit_temperatures(z, accepted, grid=grid)
    errors = [c.ece(0.5 * special.expit(z[:, 1] / t), accepted[:, 1]) for t in grid]
    assert first == 1.0 and second == grid[int(np.argmin(errors))] < 1
    on = accepted[:, 0]
    assert c.fit_temperatures(z[on, 1:], accepted[on, 1:], grid=grid).tolist() == [1.0]


def test_what_is_not_known_is_not_fitted():
    rng = np.random.default_rng(3)
    z = rng.normal(0, 2, (5000, 2))
    accepted = rounds(special.expit(z / 2), rng)
    known = np.ones(accepted.shape, bool)
    known[:4000, 0] = False
    known[:, 1] = False
    spoiled = np.where(known, accepted, ~accepted)
    both = [c.fit_temperatures(z, labels, known).tolist() for labels in (accepted, spoiled)]
    assert both[0] == both[1] and both[0][1] == pytest.approx(1.0)
    assert both[0][0] == pytest.approx(2.0, rel=0.3)


def test_temper_divides_the_logit():
    z = np.random.default_rng(4).normal(0, 3, (50, 3))
    t = np.array([0.5, 1.0, 4.0])
    np.testing.assert_allclose(c.temper(special.expit(z), t), special.expit(z / t), atol=1e-5)
    made = c.temper(jnp.asarray(special.expit(z), jnp.float32), jnp.asarray(t, jnp.float32))
    np.testing.assert_allclose(made, special.expit(z / t), atol=1e-4)
    ends = c.temper(np.array([[0.0, 1.0, np.nan]]), np.ones(3))
    np.testing.assert_allclose(ends, [[0.0, 1.0, np.nan]], atol=2e-6)


def test_scores_by_hand():
    """Bins .2 .4 | .6 .8, outcomes 0 1 | 1 1: ECE = (2 |.3 - .5| + 2 |.7 - 1|)/4, Brier (.04 + .36 + .16 + .04)/4."""
    p, y = np.array([0.2, 0.4, 0.6, 0.8]), np.array([0, 1, 1, 1], bool)
    s = c.scores(p[:, None], y[:, None], num_bins=2)
    assert s.ece == pytest.approx([0.25]) and s.brier == pytest.approx([0.15]) and s.auroc == pytest.approx([1.0])
    assert s.count.tolist() == [4]
    bins = c.reliability(np.array([0.0, 0.5, 1.0, 1.0]), np.array([0, 1, 1, 0]), 4)
    assert bins.edges.tolist() == [0, 0.25, 0.5, 0.75, 1] and bins.count.tolist() == [1, 0, 1, 2]
    np.testing.assert_array_equal(bins.predicted, [0, np.nan, 0.5, 1])
    np.testing.assert_array_equal(bins.observed, [0, np.nan, 1, 0.5])


def test_auroc_counts_pairs():
    rng = np.random.default_rng(5)
    p, y = np.round(rng.random(60), 1), rng.random(60) < 0.6
    pairs = [(a > b) + 0.5 * (a == b) for a in p[y] for b in p[~y]]
    assert c.auroc(p, y) == pytest.approx(np.mean(pairs))


def test_scores_of_nothing_are_not_numbers():
    known = np.array([[True, False], [True, False]])
    s = c.scores(np.full((2, 2), 0.5), np.ones((2, 2), bool), known)
    assert np.isnan(s.auroc).all() and np.isnan([s.ece[1], s.brier[1]]).all() and s.count.tolist() == [2, 0]
    assert s.ece[0] == 0.5


def test_margins_do_not_depend_on_the_temperature():
    logits = jnp.asarray(np.random.default_rng(6).normal(size=(3, 4, 9)), jnp.float32)
    heat = jnp.array([0.5, 1.0, 2.0])
    log_q = jax.nn.log_softmax(logits / heat[:, None, None])
    np.testing.assert_allclose(c.law_margins(log_q, heat), c.margins(logits), rtol=1e-5)
    top = np.sort(np.asarray(logits), -1)
    np.testing.assert_allclose(c.margins(logits), top[..., -1] - top[..., -2], rtol=1e-6)
    point = jnp.where(jnp.arange(9) == 3, 0.0, -jnp.inf)[None, None]
    assert np.isposinf(c.law_margins(point, jnp.zeros(1))).all()


def test_margin_fit_is_the_optimum_and_recovers_the_truth():
    rng = np.random.default_rng(7)
    x = rng.gamma(2, 1, (30_000, 2))
    weight, bias = np.array([1.5, 0.7]), np.array([-1.0, 0.5])
    accepted = rounds(special.expit(weight * x + bias), rng)
    reached = np.stack([np.ones(len(x), bool), accepted[:, 0]], 1)
    fit = c.fit_margins(x, accepted, reached)
    np.testing.assert_allclose(fit.weight, weight, atol=0.12)
    np.testing.assert_allclose(fit.bias, bias, atol=0.12)

    def loss(theta, x, y, centre):
        z = theta[0] * x + theta[1]
        return np.logaddexp(0, z).sum() - z @ y + ((theta - centre) ** 2).sum() / 2

    pooled = optimize.minimize(loss, np.zeros(2), (x[reached], accepted[reached], np.zeros(2))).x
    for k in range(2):
        on = reached[:, k]
        best = optimize.minimize(loss, pooled, (x[on, k], accepted[on, k], pooled)).x
        np.testing.assert_allclose([fit.weight[k], fit.bias[k]], best, atol=1e-4)
    made = c.margin_confidence(fit, x)
    np.testing.assert_allclose(made, special.expit(fit.weight * x + fit.bias), atol=1e-12)
    assert c.scores(made, accepted, reached).ece.max() < 0.02


def test_margin_fit_of_little_data():
    """Separable margins give a finite fit; a position that no round reached has that of all together."""
    x = np.array([[3.0, 9.0, 9.0], [2.0, 9.0, 9.0], [0.2, 9.0, 9.0], [0.1, 9.0, 9.0]])
    accepted = np.array([[1, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]], bool)
    reached = np.array([[1, 0, 0]] * 4, bool)
    fit = c.fit_margins(x, accepted, reached)
    assert np.isfinite(fit.weight).all() and fit.weight[0] > 0 and fit.weight[1] == fit.weight[2] > 0
    with pytest.raises(ValueError, match="no round verified"):
        c.fit_margins(x, accepted, np.zeros_like(reached))

"""The tests are tested: false alarms at the rate promised over 200 seeds, and the stated effect found as often as stated."""

import math

import numpy as np
import pytest
from scipy import stats

from specjax.lossless import statistics as s
from specjax.lossless.kernel import spectrum

SEEDS, LEVEL = 200, 0.05
LAW = np.random.default_rng(5).dirichlet(np.full(64, 1.0))


def expected_alarms(level=LEVEL, seeds=SEEDS):
    """An interval that the number of false alarms leaves once in 10,000 sound test suites."""
    return stats.binom.ppf(5e-5, seeds, level), stats.binom.ppf(1 - 5e-5, seeds, level)


def assert_calibrated(alarms, *, exact=True):
    low, high = expected_alarms()
    assert (low if exact else 0) <= sum(alarms) <= high


def assert_found(found):
    """At a power of .99, fewer than this happens once in 10,000 times."""
    assert sum(found) >= stats.binom.ppf(1e-4, len(found), s.POWER)


def even_split(law, tv):
    """The law with half of its mass scaled up and half down, cells paired by size: the hardest fault of its TV."""
    sign = np.where(np.arange(law.size) % 2, 1.0, -1.0)[np.argsort(np.argsort(law))]
    up = law[sign > 0].sum()
    return np.where(sign > 0, law * (1 + tv / up), law * (1 - tv / (1 - up)))


@pytest.mark.parametrize("n", [1_500, 20_000])  # the smaller n pools two thirds of the cells
def test_g_test_has_the_false_alarms_it_promises(n):
    counts = np.random.default_rng(1).multinomial(n, LAW, size=SEEDS)
    assert_calibrated([s.g_test(c, LAW, alpha=LEVEL).p_value <= LEVEL for c in counts])


@pytest.mark.parametrize("alpha", [1e-2, 1e-6])
def test_g_test_finds_its_effect(alpha):
    n, law = 20_000, np.random.default_rng(5).dirichlet(np.full(32, 5.0))
    effect = s.g_test(n * law, law, alpha=alpha).effect
    fault = even_split(law, effect)
    assert np.abs(fault - law).sum() / 2 == pytest.approx(effect)
    counts = np.random.default_rng(2).multinomial(n, fault, size=SEEDS)
    assert_found([s.g_test(c, law, alpha=alpha).p_value <= alpha for c in counts])


def test_g_test_pools_by_the_law_alone_and_never_forgives_the_impossible():
    law = np.array([0.9, 0.0899, 0.0001, 0.01, 0.0])
    group, pooled = s.pool(1000 * law[:4])
    assert np.bincount(group, 1000 * law[:4]).min() >= s.SMALLEST_CELL and pooled == pytest.approx(10.1)
    assert s.g_test([900, 90, 0, 10, 0], law, alpha=0.01).p_value > 0.5
    assert s.g_test([900, 90, 0, 9, 1], law, alpha=0.01).p_value == 0
    assert s.g_test([1, 0], [0.5, 0.5], alpha=0.01)[1:4] == (1.0, 1, math.inf)  # too few samples to say anything
    assert s.g_test([0, 1], [1.0, 0.0], alpha=0.01).p_value == 0  # but not for the impossible
    with pytest.raises(ValueError, match="cells"):
        s.g_test([1, 2], [0.5, 0.2], alpha=0.01)


def test_samples_needed_is_the_inverse_of_the_effect():
    n = s.samples_needed(0.02, cells=64, alpha=1e-6)
    assert s.g_test(np.full(64, n / 64), np.full(64, 1 / 64), alpha=1e-6).effect == pytest.approx(0.02, rel=1e-4)


def acceptance(shift, n=4000):
    """Steps of differing acceptance, [SEEDS, n] coins with the mean shifted."""
    rate = np.random.default_rng(3).uniform(0.2, 0.9, n)
    return rate, np.random.default_rng(4).random((SEEDS, n)) < rate[None] + shift


def test_martingale_test_is_calibrated_and_finds_its_effect():
    rate, coins = acceptance(0.0)
    tests = [s.martingale_test(c - rate, rate * (1 - rate), alpha=LEVEL) for c in coins]
    assert_calibrated([t.p_value <= LEVEL for t in tests])
    _, shifted = acceptance(-tests[0].effect)
    assert_found([s.martingale_test(c - rate, rate * (1 - rate), alpha=LEVEL).p_value <= LEVEL for c in shifted])


def test_martingale_test_is_right_for_a_rare_token():
    """p = .001 over 1,000 steps: seven of them happen once in 12,000 times; a normal tail says once in 10^9."""
    rare = np.full(1000, 0.001)
    seen = np.zeros(1000)
    seen[:7] = 1
    p = s.martingale_test(seen - rare, rare * (1 - rare), alpha=1e-6).p_value
    assert stats.binom.sf(6, 1000, 0.001) <= p <= 4 * stats.binom.sf(6, 1000, 0.001)
    sure = np.ones(10)
    assert s.martingale_test(sure - sure, 0 * sure, alpha=0.01).p_value == 1
    assert s.martingale_test(0 * sure - sure, 0 * sure, alpha=0.01).p_value == 0
    with pytest.raises(ValueError, match="differences"):
        s.martingale_test([2.0], [1.0], alpha=0.01)


def test_uniform_test_is_calibrated_and_finds_its_effect():
    n, rng = 4000, np.random.default_rng(6)
    tests = [s.uniform_test(u, alpha=LEVEL) for u in rng.random((SEEDS, n))]
    assert_calibrated([t.p_value <= LEVEL for t in tests])
    effect = tests[0].effect
    high = rng.random((SEEDS, n)) < 0.5 + effect  # a shift from the lower half to the upper one
    u = (high + rng.random((SEEDS, n))) / 2
    assert_found([s.uniform_test(x, alpha=LEVEL).p_value <= LEVEL for x in u])
    with pytest.raises(ValueError, match="outside"):
        s.uniform_test([math.nan], alpha=0.1)


def test_randomised_cdf_is_uniform_for_tokens_of_their_rows_only():
    rng, n = np.random.default_rng(7), 20_000
    laws = rng.dirichlet(np.full(6, 0.5), size=n)
    y = (rng.random(n)[:, None] > laws.cumsum(-1)).sum(-1).clip(0, 5)
    assert s.uniform_test(s.randomised_cdf(y, laws, rng.random(n)), alpha=0.01).p_value > 0.01
    assert s.uniform_test(s.randomised_cdf(laws.argmax(-1), laws, rng.random(n)), alpha=1e-6).p_value < 1e-6


def test_bets_never_promise_more_than_they_keep():
    """Ville: P(the running e-value ever reaches 1/alpha) <= alpha, here with alpha 5 %."""
    rng, n = np.random.default_rng(8), 400
    laws = rng.dirichlet(np.ones(4), size=n)
    last, alarms = [], []
    for _ in range(SEEDS):
        y = (rng.random(n)[:, None] > laws.cumsum(-1)).sum(-1).clip(0, 3)
        e = s.bets(y, laws)
        last.append(e[-1])
        alarms.append(s.e_test(e, alpha=LEVEL).e_value >= 1 / LEVEL)
    assert_calibrated(alarms, exact=False)
    assert np.mean(last) < 1 + 5 * np.std(last) / math.sqrt(SEEDS)
    rate, coins = acceptance(0.0, 400)
    assert_calibrated([s.e_acceptance(c, rate).max() >= 1 / LEVEL for c in coins], exact=False)


def test_one_bet_is_a_likelihood_ratio():
    """E[e] = 1 to rounding: summed over all outcomes of two steps with their probabilities."""
    laws = np.array([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]])
    mean = sum(laws[0, a] * laws[1, b] * s.bets(np.array([a, b]), laws)[-1] for a in range(3) for b in range(4))
    assert mean == pytest.approx(1, abs=1e-12)
    assert s.bets(np.array([3, 0]), laws).tolist() == [math.inf, math.inf]


@pytest.mark.parametrize(
    ("p", "moved", "n"),
    [
        ([0.3, 0.2, 0.3, 0.2], [0.012, 0.008, -0.012, -0.008], 45_000),
        ([0.4, 0.3, 0.2, 0.1], [0.02, -0.02, 0, 0], 34_000),
    ],
)
def test_bets_find_TV_02_in_the_samples_stated(p, moved, n):
    rng, p = np.random.default_rng(9), np.array(p)
    draws = rng.choice(4, size=(60, n), p=p + np.array(moved))
    laws = np.broadcast_to(p, (n, 4))
    tests = [s.e_test(s.bets(y, laws), alpha=1e-6) for y in draws]
    assert_found([t.e_value >= 1e6 for t in tests])
    assert tests[0].effect == pytest.approx(0.021, abs=0.004)


def test_e_acceptance_finds_a_shift_of_02_in_the_samples_stated():
    accepted = np.random.default_rng(10).random((SEEDS, 40_000)) < 0.72
    found = [s.e_acceptance(a, np.full(40_000, 0.7)).max() >= 1e6 for a in accepted]
    assert_found(found)
    with pytest.raises(ValueError, match="steps"):
        s.e_acceptance([3], [1.0])


def walks(rng, table, n, length=6):
    """[n, length] tokens of a Markov chain."""
    tokens = np.zeros((n, length), int)
    for i in range(1, length):
        tokens[:, i] = (rng.random(n)[:, None] > table.cumsum(-1)[tokens[:, i - 1]]).sum(-1).clip(0, len(table) - 1)
    return tokens


def test_two_sample_is_calibrated_and_finds_its_effect():
    """The effect holds whatever the direction of the fault, so along this one the power is above .99."""
    rng, n = np.random.default_rng(11), 50
    one, other = rng.dirichlet(np.ones(5), size=(2, 5))
    kw = dict(permutations=199, alpha=LEVEL)
    tests = [s.two_sample(walks(rng, one, n), walks(rng, one, n), seed=k, **kw) for k in range(SEEDS)]
    assert_calibrated([t.p_value <= LEVEL for t in tests])
    gram = spectrum([*walks(rng, one, 1500), *walks(rng, other, 1500)])
    inside = [(g.sum() - np.trace(g)) / (1500 * 1499) for g in (gram[:1500, :1500], gram[1500:, 1500:])]
    apart = math.sqrt(sum(inside) - 2 * gram[:1500, 1500:].mean())  # MMD of the two laws; of a mixture, in proportion
    share = np.mean([t.effect for t in tests]) / apart
    assert share < 1
    found = []
    for k in range(60):
        b = np.where(rng.random(n)[:, None] < share, walks(rng, other, n), walks(rng, one, n))
        found.append(s.two_sample(walks(rng, one, n), b, seed=k, **kw).p_value <= LEVEL)
    assert_found(found)


def test_two_sample_within_prompts():
    """Two prompts with answers of their own in unequal numbers: pooled labels would call that a difference."""
    a, b = [[0, 1, 2]] * 15 + [[5, 6]] * 5, [[0, 1, 2]] * 5 + [[5, 6]] * 15
    prompts = [0] * 15 + [1] * 5 + [0] * 5 + [1] * 15
    assert s.two_sample(a, b, seed=0, permutations=199, alpha=0.01).p_value < 0.02
    assert s.two_sample(a, b, seed=0, permutations=199, alpha=0.01, strata=prompts).p_value == 1
    with pytest.raises(ValueError, match="999999"):
        s.two_sample(a, b, seed=0, permutations=199, alpha=1e-6)


def test_spectrum_counts_shared_pieces():
    """0 1 0 against 0 1: single tokens (2, 1) . (1, 1) / sqrt(5 * 2), pairs (1, 1) . (1, 0) / sqrt(2), no triple in common."""
    gram = spectrum([[0, 1, 0], [0, 1], [0, 1, 0], []])
    np.testing.assert_allclose(np.diag(gram), 1)
    assert gram[0, 1] == pytest.approx((3 / math.sqrt(10) + 1 / math.sqrt(2)) / 3) and gram[0, 2] == pytest.approx(1)


def test_many_tests_together():
    assert s.product_of_e([2.0, 0.5, 4.0]) == 4
    p = np.random.default_rng(12).random((2000, 10))
    assert s.holm([0.5], 0.6).tolist() == [True] and not s.holm([0.02, 0.03], 0.03).any()
    alarms = np.array([s.holm(row, LEVEL).any() for row in p]).sum()
    assert alarms <= stats.binom.ppf(0.9999, 2000, LEVEL)


def test_binomial_interval_covers():
    covered = [low <= 0.3 <= high for low, high in (s.binomial_interval(k, 50, 0.9) for k in range(51))]
    assert (stats.binom.pmf(np.arange(51), 50, 0.3) * covered).sum() >= 0.9
    assert s.binomial_interval(50, 50)[1] == 1

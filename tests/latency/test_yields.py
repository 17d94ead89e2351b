"""Known numbers, and limits that hold for every acceptance."""

import math

import numpy as np
import pytest

from specjax.latency import yields


@pytest.mark.parametrize(("alpha", "k", "tokens"), [(0.8, 4, 3.36), (0.9, 5, 4.69), (0.5, 4, 1.94), (0.0, 4, 1), (1.0, 7, 8)])
def test_expected_tokens(alpha, k, tokens):
    assert yields.expected_tokens(alpha, k) == pytest.approx(tokens, abs=0.005)
    if alpha < 1:
        assert yields.expected_tokens(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha), abs=1e-12)


TABLE_1 = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]


@pytest.mark.parametrize(("alpha", "k", "operations", "speed"), TABLE_1)
def test_leviathan_table_1(alpha, k, operations, speed):
    """arXiv 2211.17192, Table 1: a drafter that costs nothing (c = c^ = 0)."""
    assert yields.speedup(yields.expected_tokens(alpha, k), 0.0, 1.0) == pytest.approx(speed, abs=0.006)
    assert yields.operations(alpha, k) == pytest.approx(operations, abs=0.006)


def test_a_draft_of_a_fifth_of_a_pass():
    assert yields.speedup(yields.expected_tokens(0.8, 4), 0.2, 1.0) == pytest.approx(2.8, abs=0.005)
    assert yields.inter_token_latency(draft=6.0, verify=30.0, tau=yields.expected_tokens(0.8, 4)) == pytest.approx(
        30 / 2.8, rel=1e-3
    )


def test_operations_count_the_drafter():
    assert yields.operations(0.8, 4, 0.1) == pytest.approx((4 * 0.1 + 5) / 3.3616)
    assert all(yields.operations(a, k) > 1 for a in (0.1, 0.5, 0.99) for k in (1, 4, 10))


def test_positions_and_trees_agree_with_the_constant():
    alpha, k = 0.7, 5
    flat = alpha ** np.arange(1, k + 1)
    assert yields.expected_tokens_by_position(flat) == pytest.approx(yields.expected_tokens(alpha, k))
    assert yields.expected_tokens_of_tree(range(-1, k - 1), [alpha] * k) == pytest.approx(yields.expected_tokens(alpha, k))


def test_tree_by_hand():
    """Two children of the root, .5 and .3; the first has one of .4, the second one of .9 whose only child does not exist."""
    parents, accept = [-1, -1, 0, 1, -2], [0.5, 0.3, 0.4, 0.9, 1.0]
    assert yields.expected_tokens_of_tree(parents, accept) == pytest.approx(1 + 0.5 + 0.3 + 0.5 * 0.4 + 0.3 * 0.9)


@pytest.mark.parametrize(("k", "draft", "verify"), [(1, 0.25, 1.0), (4, 0.2, 1.0), (4, 0.2, 2.5), (16, 1.0, 3.0)])
def test_break_even_is_where_speed_up_is_one(k, draft, verify):
    alpha = yields.break_even(k, draft, verify)
    assert 0 < alpha < 1 and yields.speedup(yields.expected_tokens(alpha, k), draft, verify) == pytest.approx(1)


def test_break_even_at_the_ends():
    assert yields.break_even(4, 0.0, 1.0) == 0 and math.isinf(yields.break_even(4, 0.5, 5.0))


@pytest.mark.parametrize("c", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("alpha", [0.01, 0.3, 0.6, 0.9])
def test_speculation_pays_exactly_where_alpha_exceeds_c(alpha, c):
    """Leviathan et al., Corollary 3.9: if alpha > c some k gains, at least (1 + alpha)/(1 + c); else none does."""
    k = np.arange(41)
    tokens = [yields.expected_tokens(alpha, int(n)) for n in k]
    best = yields.best_num_draft(tokens, c * k, np.ones(41))
    if alpha > c:
        assert best.num_draft > 0 and best.speedup >= (1 + alpha) / (1 + c) - 1e-12
    else:
        assert best.num_draft == 0 and best.speedup == 1
    every = [(1 - alpha ** (n + 1)) / ((1 - alpha) * (n * c + 1)) for n in k]  # Theorem 3.8
    np.testing.assert_allclose(best.speedups, every, rtol=1e-12)
    assert best.num_draft == int(np.argmax(every))


def test_best_num_draft_in_times():
    """Alpha .8: 1, 1.8, 2.44, 2.952 tokens at 10, 11 + 1, 12 + 2, 24 + 3 ms: 1, 1.5, 1.743, 1.093 times plain."""
    best = yields.best_num_draft([1, 1.8, 2.44, 2.952], [0, 1, 2, 3], [10, 11, 12, 24])
    assert best.num_draft == 2 and best.speedup == pytest.approx(10 * 2.44 / 14)
    assert yields.best_num_draft([1, 1.8], [0, 4], [10, 20]).num_draft == 0
    assert yields.best_num_draft([1, 2], [0, 0], [10, 20]).num_draft == 0  # equally fast: the fewest
    with pytest.raises(ValueError, match="entry 0"):
        yields.best_num_draft([1.8, 2.44], [1, 2], [11, 12])

"""Prompt look-up against a search in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.drafters.ngram import continuation, ngram

SIZE, K = 24, 4


def search(text, num_draft, min_order, max_order):
    """The longest suffix (of at most max_order) that stands earlier; of several, the latest; what followed it."""
    n = len(text)
    for order in range(min(max_order, n - 1), min_order - 1, -1):
        for end in range(n - 1, order - 1, -1):  # the match is text[end - order : end]
            if text[end - order : end] == text[n - order :]:
                return text[end : end + num_draft]
    return []


def proposed(text, num_draft=K, min_order=2, max_order=8, junk=0):
    line = np.full(SIZE, junk, np.int32)
    line[: len(text)] = text
    go = compiled(num_draft, min_order, max_order)
    tokens, count = go(jnp.asarray(line), jnp.array(len(text)))
    return np.asarray(tokens)[: int(count)].tolist()


def compiled(*static, cache={}):  # noqa: B006
    if static not in cache:
        cache[static] = jax.jit(lambda tokens, length: continuation(tokens, length, *static))
    return cache[static]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=SIZE),
    st.sampled_from([(4, 1, 3), (4, 2, 8), (1, 1, 1), (8, 3, 3)]),
    st.integers(0, 2),
)
def test_equals_a_plain_search(text, settings_, junk):
    """Whatever lies past the length, at the longest length too."""
    assert proposed(text, *settings_, junk=junk) == search(text, *settings_)


@pytest.mark.parametrize(
    ("text", "order", "expected"),
    [
        ([1, 1, 1], 1, [1]),  # S09
        ([7], 1, []),
        ([1, 2], 1, []),
        ([0, 1, 2, 0, 1], 1, [2, 0, 1]),  # runs into the end: shorter than K
        ([0, 1, 2, 0, 1], 3, []),
        ([5, 1, 2, 6, 1, 2, 9, 5, 1, 2], 2, [6, 1, 2, 9]),  # a match of three beats a later one of two
        ([1, 2, 6, 3, 1, 2, 9, 4, 1, 2], 2, [9, 4, 1, 2]),  # of equals, the latest
    ],
)
def test_examples(text, order, expected):
    assert proposed(text, min_order=order) == expected
    assert search(text, K, order, 8) == expected


@pytest.mark.parametrize("orders", [(0, 3), (4, 3), (-1, -1)])
def test_orders_that_make_no_sense(orders):
    with pytest.raises(ValueError, match=f"min_order={orders[0]} and max_order={orders[1]}"):
        ngram(num_draft=2, min_order=orders[0], max_order=orders[1])

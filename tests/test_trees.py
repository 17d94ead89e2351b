"""Topology from parents, against recursion over every small tree."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import trees
from specjax.types import Draft
from specjax.verify import draw


def all_trees(n):
    """Every parents list of n nodes: parents before children, absent nodes have no children."""
    for parents in itertools.product(*[range(-2, i) for i in range(n)]):
        if all(p < 0 or parents[p] != -2 for p in parents):
            yield parents


def path(parents, row):
    """Block rows from 0 to `row`, by climbing."""
    if row == 0:
        return [0]
    parent = parents[row - 1]
    return [*path(parents, parent + 1), row] if parent >= -1 else [0, row]


def depth_of(parents):
    return max(len(path(parents, i + 1)) - 1 for i in range(len(parents)))


N = 4


def test_ancestors_paths_and_links_of_every_tree_of_four():
    every = list(all_trees(N))
    assert len(every) == 65
    stack = jnp.asarray(every, jnp.int32)
    seen = jax.jit(jax.vmap(trees.ancestors))(stack)
    first, sibling = jax.jit(jax.vmap(trees.links))(stack)
    paths = jax.jit(jax.vmap(lambda s: jax.vmap(lambda row: trees.path_to(row, s, N))(jnp.arange(N + 1))))(seen)
    for parents, s, child, brother, ways in zip(every, *map(np.asarray, (seen, first, sibling, paths)), strict=True):
        for row in range(N + 1):
            climbed = path(parents, row)
            assert np.flatnonzero(s[row]).tolist() == sorted(climbed)
            assert ways[row].tolist() == climbed + [0] * (N + 1 - len(climbed))
            assert child[row] == next((i for i in range(N) if parents[i] == row - 1), N)
        for i in range(N):
            if parents[i] >= -1:
                assert brother[i] == next((j for j in range(i + 1, N) if parents[j] == parents[i]), N)


def test_chain():
    assert trees.chain(3).tolist() == [-1, 0, 1] and trees.chain(0).tolist() == [] and trees.chain(3).dtype == np.int32
    np.testing.assert_array_equal(trees.ancestors(jnp.asarray(trees.chain(3))), np.tril(np.ones((4, 4), bool)))


@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 8, 15, 16])
def test_walk_follows_any_list_to_its_end(n):
    """Pointers only lead on; the longest list visits every decision."""
    rng = np.random.default_rng(n)
    for longest in (True, False):
        taken = [m + 1 if longest and m + 1 < n else int(rng.integers(m + 1, 2 * n + 1)) for m in range(n)]
        at = 0 if n else None
        while at is not None and at < n:
            at = taken[at]
        assert int(draw.walk(jnp.asarray(taken, jnp.int32))) == (at - n if n else 0)


def test_verdict_of_every_row_of_every_tree():
    """Tokens of the path, then the emitted one."""
    tokens = [10, 11, 12, 13]
    for parents in all_trees(N):
        draft = Draft(jnp.asarray(tokens, jnp.int32), jnp.asarray(parents, jnp.int32))
        seen = trees.ancestors(draft.parents)
        if sum(parents) % 5:  # a fifth of them will do
            continue
        for row in [0] + [i + 1 for i in range(N) if parents[i] >= -1]:
            climbed = path(parents, row)
            got = draw.verdict(draft, seen, jnp.array(row), jnp.array(99), N)
            expected = [tokens[r - 1] for r in climbed[1:]] + [99]
            assert got.tokens.tolist()[: len(expected)] == expected
            assert int(got.num_accepted) == len(climbed) - 1 and got.path.tolist()[: len(climbed)] == climbed

"""Topology from parents, against recursion over every small tree; builders, against search over all of them."""

import itertools
import json
from pathlib import Path

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references as ref

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


# Builders.

SHARED = Path(__file__).parents[2] / "shared" / "data" / "trees"


def test_k_ary():
    assert trees.k_ary([2, 2]).tolist() == [-1, -1, 0, 0, 1, 1]
    assert trees.k_ary([1, 1, 3, 1]).tolist() == [-1, 0, 1, 1, 1, 2, 3, 4]
    assert trees.k_ary([1, 1, 1]).tolist() == trees.chain(3).tolist()
    for bad in ([], [2, 0]):
        with pytest.raises(ValueError, match="at least one"):
            trees.k_ary(bad)


def test_from_paths():
    tree = trees.from_paths([(0,), (0, 1), (1,), (0, 0), (0, 1, 2)])
    assert tree.parents.tolist() == [-1, -1, 0, 0, 3] and tree.ranks.tolist() == [0, 1, 0, 1, 2]
    assert tree.depths.tolist() == [1, 1, 2, 2, 3]
    assert len(trees.from_paths(h.MEDUSA_63).parents) == 63 and trees.from_paths(h.MEDUSA_63).depths.max() == 4


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([(0, 0)], r"path \[0, 0\] hangs in the air: list \[0\] too"),
        ([(0,), (0,)], "listed twice"),
        ([()], "not a list of ranks"),
        ([(0,), (-1,)], "not a list of ranks"),
        ([("a",)], "not a list of ranks"),
        ([5], "not a list of ranks"),
    ],
)
def test_paths_that_are_no_tree_are_refused(paths, message):
    with pytest.raises(ValueError, match=message):
        trees.from_paths(paths)


def test_read_paths(tmp_path):
    """The three forms that files have; node names of children lists are arbitrary."""

    def read(data):
        (tmp_path / "tree.json").write_text(json.dumps(data))
        return trees.read_paths(tmp_path / "tree.json")

    paths = [(0,), (1,), (0, 0)]
    assert read(paths) == read({"tree_choices": paths}) == paths
    assert read({"0": [7, 9], "7": [3]}) == read({"tree_adj": {"0": ["a", "b"], "a": [1]}}) == paths
    for bad in (3, [1, 2], {"0": 4}, {"0": [[1]]}, {"0": [None]}):
        with pytest.raises(ValueError, match="holds no draft tree"):
            read(bad)
    for bad in ({"0": [0]}, {"0": [1, 2], "1": [3], "2": [3]}):
        with pytest.raises(ValueError, match="two parents, or is its own ancestor"):
            read(bad)
    for bad in ({"1": [2]}, {"0": [1], "5": [6]}):
        with pytest.raises(ValueError, match="nothing leads from node 0 to node"):
            read(bad)
    for bad in ([[True]], [[0], [1 << 40]], [[0.5]]):
        with pytest.raises(ValueError, match="not a list of ranks"):
            read(bad)
    (tmp_path / "tree.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="is broken JSON"):
        trees.read_paths(tmp_path / "tree.json")


@pytest.mark.parametrize(
    ("name", "nodes"), [("samd_eagle", 25), ("samd_default_tree", 23), ("samd_token_recycle", 60), ("samd_default_tree_1_1", 0)]
)
@pytest.mark.skipif(not SHARED.exists(), reason="the founders' shared files are not part of the repository")
def test_published_trees(name, nodes):
    paths = trees.read_paths(SHARED / f"{name}.json")
    assert len(paths) == nodes
    tree = trees.from_paths(paths)
    assert (tree.parents < np.arange(nodes)).all()


def products(rates):
    """Every rank path with its product of rates."""
    every = {}
    for depth in range(1, len(rates) + 1):
        for path in itertools.product(range(rates.shape[1]), repeat=depth):
            every[path] = np.prod([rates[d, r] for d, r in enumerate(path)])
    return every


@pytest.mark.parametrize("nodes", [1, 4, 9])
def test_best_first_takes_the_most_probable_paths(nodes):
    for seed in range(5):
        rates = -np.sort(-np.random.default_rng(seed).dirichlet(np.ones(4), 3)[:, :3], 1)
        every = products(rates)
        chosen = trees.best_first(rates, nodes)
        trees.from_paths(chosen)
        assert sum(every[p] for p in chosen) == pytest.approx(sum(sorted(every.values())[-nodes:]))
    assert len(trees.best_first(np.array([[0.5, 0.0], [0.0, 0.0]]), 99)) == 6, "no more than there are"
    with pytest.raises(ValueError, match="grows with the rank"):
        trees.best_first(np.array([[0.1, 0.2]]), 2)
    for bad in (np.array([[np.nan]]), np.array([[1.5]]), np.zeros((0, 0)), np.array([0.5])):
        with pytest.raises(ValueError, match="no table of probabilities"):
            trees.best_first(bad, 2)
    with pytest.raises(ValueError, match="sizes from 0"):
        trees.sequoia(np.array([0.5]), -1, 2)


def expected_tokens(parents, rates):
    """1 + the sum over nodes of the product of their path's positional acceptances."""
    value = {-1: 1.0}
    for i, parent in enumerate(parents):
        rank = sum(parents[j] == parent for j in range(i))
        value[i] = value[parent] * (rates[rank] if rank < len(rates) else 0)
    return sum(value.values())


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_sequoia_finds_the_best_tree(depth):
    """Against every tree of up to five nodes."""
    for rates in ([0.6, 0.2, 0.1], [0.3, 0.28], [0.9, 0.5, 0.4]):
        paths, value = trees.sequoia(np.array(rates), 5, depth)
        for n in range(1, 6):
            every = [p for p in all_trees(n) if -2 not in p and depth_of(p) <= depth]
            best = max(expected_tokens(p, rates) for p in every)
            if best > value[n] + 1e-12 or n <= depth * len(rates):
                assert value[n] == pytest.approx(best)
        assert expected_tokens(trees.from_paths(paths).parents.tolist(), rates) == pytest.approx(value[5])
        assert (np.diff(value) >= -1e-12).all() or depth == 1
    assert trees.best_size(np.array([1, 1.6, 2.1, 2.3]), np.array([1.0, 1.1, 1.3, 2.0])) == 2


@pytest.mark.parametrize(("width", "levels", "nodes"), [(10, 6, 59), (3, 2, 5), (2, 4, 7), (1, 3, 3)])
def test_a_dynamic_tree_is_eagle_2(width, levels, nodes):
    """grow, beam and rerank together, the draft's law a function of the path; half of the time laws have ties."""
    for seed in range(4):

        def law(prefix, seed=seed, vocab=12):
            rng = np.random.default_rng([seed, *[x + 1 for x in prefix]])
            q = rng.dirichlet(np.ones(vocab)) if seed % 2 else rng.integers(1, 4, vocab) / 8
            return np.log(q / q.sum()).astype(np.float32)

        prefixes, scores, place = [()], jnp.zeros(1), [-1]
        pool = trees.Candidates(*(jnp.zeros(0, t) for t in (jnp.int32, jnp.float32, jnp.int32)))
        for _ in range(levels):
            tokens, best = trees.grow(scores, jnp.asarray(np.stack([law(p) for p in prefixes])), width)
            start, parents = pool.tokens.shape[0], jnp.repeat(jnp.asarray(place, jnp.int32), width)
            pool = trees.Candidates(*(jnp.append(a, b) for a, b in zip(pool, (tokens, best, parents), strict=True)))
            kept = np.asarray(trees.beam(best.ravel(), min(width, best.size)))
            prefixes = [(*prefixes[i // width], int(tokens.ravel()[i])) for i in kept]
            scores, place = best.ravel()[kept], (start + kept).tolist()
        got = trees.rerank(pool, nodes)
        expected = ref.eagle2(law, width, levels, nodes)
        assert got[0].tolist() == expected[0] and got[1].tolist() == expected[1]
        np.testing.assert_allclose(got[2], expected[2], rtol=1e-6)

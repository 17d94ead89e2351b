"""Ceilings: against brute force over all sets, and against exact expectations of rules that attain them or stay below."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import V, table

from specjax import trees
from specjax.lossless import law
from specjax.lossless.drawn import DRAWN
from specjax.types import Draft
from specjax.verify import RULES, draw, limits

P, Q = (1 / 3, 2 / 3), (2 / 3, 1 / 3)
TREES = {"one": [-1], "2x2": [-1, -1, 0, 1], "wide": [-1, -1, 0, 0], "skew": [-1, -1, 0, 1, 1], "cut": [-1, -1, 0, -2]}
CHAINS = {"three": [-1, 0, 1], "cut": [-1, 0, -2], "none": [-2, -2]}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def brute_force(p, q, k, replace):
    """1 + min over ALL sets H of P(H) - P(every draw lies in H); draws stop when q is exhausted."""
    best = 0.0
    for r in range(1, V + 1):
        for chosen in itertools.combinations(range(V), r):
            inside = 0.0
            for draws in itertools.product(chosen, repeat=k if replace else min(k, np.count_nonzero(q))):
                weight, left = 1.0, np.array(q)
                for x in draws:
                    weight *= left[x] / left.sum() if left.sum() > 0 else 0
                    left[x] *= replace
                inside += weight
            best = min(best, sum(p[list(chosen)]) - inside)
    return 1 + best


def test_known_ceilings_of_two_drafts():
    """p = (1/3, 2/3), q = (2/3, 1/3): 2/3 from one, 8/9 from two i.i.d., 1 from two without replacement."""
    p, q = jnp.asarray(P), jnp.asarray(Q)
    assert float(limits.one_draft(p, q)) == pytest.approx(2 / 3)
    assert float(limits.iid_drafts(p, q, 2)) == pytest.approx(8 / 9)
    assert float(limits.without_replacement_drafts(p, q, 2)) == pytest.approx(1)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_ceilings_equal_the_minimum_over_all_sets(k, zeros):
    for seed in range(6):
        p, q = table(seed, zeros)(()), table(seed + 50, zeros)(())
        p_, q_ = jnp.asarray(p), jnp.asarray(q)
        assert float(limits.iid_drafts(p_, q_, k)) == pytest.approx(brute_force(p, q, k, 1), abs=1e-9)
        without = brute_force(p, q, k, 0)
        assert float(limits.without_replacement_drafts(p_, q_, k)) == pytest.approx(without, abs=1e-9)
        traced = jax.jit(lambda p, q, k: limits.without_replacement_drafts(p, q, k, most=3))
        assert float(traced(p_, q_, k)) == pytest.approx(without, abs=1e-9)
        single = traced(p_.astype(jnp.float32), q_.astype(jnp.float32), k)
        assert single.dtype == jnp.float32 and float(single) == pytest.approx(without, abs=1e-6)
        assert float(limits.fixed_set(p_, jnp.asarray([0, 2, 2]))) == pytest.approx(p[0] + p[2])


@pytest.mark.parametrize("rest", [1e-5, 1e-9, 1e-14])
def test_a_first_draw_that_is_nearly_certain(rest):
    """The second draw without replacement waits a time of 1/rest, and still has its own law."""
    p, q = np.asarray([0.2, 0.3, 0.4, 0.1]), np.asarray([1 - rest, rest / 2, rest / 4, rest / 4])
    for k in (2, 3):
        ours = float(limits.without_replacement_drafts(jnp.asarray(p), jnp.asarray(q), k))
        assert ours == pytest.approx(brute_force(p, q, k, 0), abs=1e-9)


def test_without_replacement_over_a_large_vocabulary():
    """V = 4096, float32 against float64; above i.i.d. draws, which may repeat, and growing with K."""
    rng = np.random.default_rng(0)
    p, q = (np.exp(x) / np.exp(x).sum() for x in rng.normal(size=(2, 4096)) * 2)
    double = [float(limits.without_replacement_drafts(jnp.asarray(p), jnp.asarray(q), k)) for k in (1, 2, 4)]
    p, q = jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32)
    assert [float(limits.without_replacement_drafts(p, q, k)) for k in (1, 2, 4)] == pytest.approx(double, abs=1e-6)
    assert double[0] == pytest.approx(float(limits.one_draft(p, q)), abs=1e-6)
    assert all(x > float(limits.iid_drafts(p, q, k)) for x, k in zip(double[1:], (2, 4), strict=True))
    assert double[0] < double[1] < double[2]


def expectations(name, parents, q, *, p, children, chain, log_q=True):
    """E over drafts and coins of the accepted tokens and of the ceiling, by enumeration."""
    rule, parents = RULES[name], np.asarray(parents, np.int32)
    n, depth = len(parents), int(np.asarray(trees.ancestors(jnp.asarray(parents))).sum(1).max()) - 1
    kind = dict(children=children, chain=chain, top_down=rule.top_down)

    @jax.jit
    def numbers(tokens, log_p, log_q):
        draft = Draft(tokens, jnp.asarray(parents), log_q)
        seen, plan = trees.ancestors(draft.parents), rule.plan(draft, log_p)
        ends = [draw.verdict(draft, seen, jnp.int32(row), jnp.int32(0), depth) for row in range(n + 1)]
        ceilings = jnp.stack([limits.ceiling(draft, log_p, end, **kind) for end in ends])
        return plan[:3], ceilings, jnp.stack([end.num_accepted for end in ends])

    accepted = ceiling = 0.0
    for tokens in itertools.product(range(V), repeat=n):
        weight, prefixes, laws = law.draft_probability(tokens, parents, q)
        if weight > 0:
            with np.errstate(divide="ignore"):
                log_p, log_laws = np.log(np.stack([p(prefix) for prefix in prefixes])), np.log(np.stack(laws))
            plan, ceilings, counts = numbers(
                np.asarray(tokens, np.int32), jnp.asarray(log_p), jnp.asarray(log_laws) if log_q else None
            )
            stop = weight * law.stop_law(*map(np.asarray, plan))
            accepted, ceiling = accepted + stop @ np.asarray(counts), ceiling + stop @ np.asarray(ceilings)
    return accepted, ceiling


def both(name, parents, drawn, seed=1, **kwargs):
    p, q = table(seed, True), DRAWN[drawn](table(seed + 1, drawn == "iid"))
    return expectations(name, parents, q, p=p, children=drawn, **kwargs)


@pytest.mark.parametrize("shape", CHAINS)
@pytest.mark.parametrize("drawn", ["iid", "independent"])
def test_rejection_attains_the_ceiling_of_a_chain(drawn, shape):
    accepted, ceiling = both("rejection", CHAINS[shape], drawn, chain=True)
    assert accepted == pytest.approx(ceiling, abs=1e-12) and (shape == "none") == (ceiling == 0)


def test_block_stays_below_the_ideal_and_above_rejection():
    accepted, ideal = both("block", [-1, 0, 1], "iid", seed=7, chain=True)
    assert both("rejection", [-1, 0, 1], "iid", seed=7, chain=True)[0] + 0.01 < accepted < ideal - 0.01
    p, q = table(7, True), table(8, True)
    prefixes = [x for n in (1, 2, 3) for x in itertools.product(range(V), repeat=n)]
    paths = [jnp.asarray([np.prod([f(x[:i])[x[i]] for i in range(len(x))]) for x in prefixes]) for f in (p, q)]
    assert ideal == pytest.approx(float(limits.ideal_block(*paths)), abs=1e-12)
    assert np.subtract(*both("block", [-1], "iid", chain=True)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("shape", TREES)
def test_any_rule_attains_the_path_sum_of_a_fixed_tree(shape):
    for name in ("target_match", "traversal"):
        for log_q in (True, False):
            accepted, ceiling = both(name, TREES[shape], "point", chain=False, log_q=log_q)
            assert accepted == pytest.approx(ceiling, abs=1e-12) and ceiling > 0


@pytest.mark.parametrize("shape", TREES)
def test_sampled_children_tested_first_attain_their_ceiling(shape):
    accepted, ceiling = both("greedy_multi_draft", TREES[shape], "sampled_then_top", chain=False)
    assert accepted == pytest.approx(ceiling, abs=1e-12)


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize(
    ("name", "drawn"), [("recursive", "iid"), ("k_seq", "iid"), ("target_match", "iid"), ("recursive", "without_replacement")]
)
def test_tree_rules_stay_below_their_ceiling(name, drawn, shape):
    """Strictly, unless each node has one child and the rule is optimal there."""
    accepted, ceiling = both(name, TREES[shape], drawn, seed=7, chain=False)
    if shape == "one" and name != "target_match":
        assert accepted == pytest.approx(ceiling, abs=1e-9)
    else:
        assert 1e-3 < ceiling - accepted < 0.5


def test_unknown_ceilings_are_refused():
    draft = Draft(jnp.zeros(2, jnp.int32), jnp.full(2, -1), jnp.zeros((2, V)))
    for children, top_down in (("independent", True), ("iid", False)):
        with pytest.raises(ValueError, match=f"'{children}' under a rule with top_down={top_down}"):
            limits.ceiling(draft, jnp.zeros((3, V)), None, children=children, chain=False, top_down=top_down)

"""Exact laws on trees: every rule with every way of drawing children that fits it, float64, two levels, zeros, duplicates."""

import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import TOLERANCE, constant, distance, table

from specjax import trees
from specjax.lossless import law
from specjax.lossless.drawn import DRAWN, iid, point, ranked, without_replacement
from specjax.types import Draft
from specjax.verify import RULES, recursive, target_match
from specjax.verify.limits import path_sum


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


TREES = {"2x2": [-1, -1, 0, 1], "wide": [-1, -1, 0, 0], "skew": [-1, -1, 0, 1, 1], "cut": [-1, -1, 0, -2], "chain": [-1, 0, 1]}
PAIRS = [(n, d) for n, r in RULES.items() if r.lossless and not r.coupled and not r.chain for d in r.accepts]


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize(("name", "drawn"), PAIRS)
def test_every_rule_keeps_the_law_on_trees(name, drawn, shape):
    q = table(2, zeros=drawn == "iid")
    assert distance(RULES[name], TREES[shape], DRAWN[drawn](q), point=drawn == "point")[0] < TOLERANCE


@pytest.mark.parametrize("name", [n for n, r in RULES.items() if not r.lossless])
def test_lossy_rules_do_not(name):
    assert distance(RULES[name], TREES["2x2"], iid(table(2, True)))[0] > 1e-3


def test_traversal_is_block_on_a_chain():
    for seed in range(3):
        p = table(seed + 20, True)
        both = [distance(RULES[r], [-1, 0, 1], iid(table(2, True)), p=p)[1] for r in ("traversal", "block")]
        assert both[0] == pytest.approx(both[1], abs=1e-12)


P, Q = (1 / 3, 2 / 3), (2 / 3, 1 / 3)


def success(rule, draw):
    return law.exact(RULES[rule], np.asarray([-1, -1], np.int32), constant(*P), draw, 2).accepted


def test_known_acceptance_of_two_drafts():
    """p = (1/3, 2/3), q = (2/3, 1/3): 2/3 single, 7/9 recursive, .8114 K-SEQ, 8/9 optimal, 1 without replacement."""
    assert law.exact(RULES["rejection"], trees.chain(1), constant(*P), constant(*Q), 2).accepted == pytest.approx(2 / 3)
    assert success("recursive", constant(*Q)) == pytest.approx(7 / 9)
    assert success("k_seq", constant(*Q)) == pytest.approx(0.8114, abs=5e-5)
    both = lambda prefix, siblings: np.asarray(Q) if not siblings else np.eye(2)[1 - siblings[0]]
    assert success("recursive", both) == pytest.approx(1)


@pytest.mark.parametrize("name", ["target_match", "recursive", "traversal"])
def test_a_fixed_tree_accepts_the_sum_of_its_path_probabilities(name):
    p, q, parents = table(1, True), table(2, False), np.asarray(TREES["skew"], np.int32)
    tokens, prefixes = [], [()]
    for i, parent in enumerate(parents):
        rank = sum(parents[j] == parent for j in range(i))
        tokens.append(int(np.argmax(ranked(q(prefixes[parent + 1]), rank))))
        prefixes.append((*prefixes[parent + 1], tokens[-1]))
    with np.errstate(divide="ignore"):
        log_p = jnp.log(jnp.asarray(np.stack([p(x) for x in prefixes])))
    expected = float(path_sum(Draft(jnp.asarray(tokens, jnp.int32), jnp.asarray(parents)), log_p))
    assert distance(RULES[name], parents, point(q), p=p, point=True)[1] == pytest.approx(expected, abs=1e-12)


# Planted faults, each of which shipped somewhere.


def merged(draft, log_p):
    """Duplicate i.i.d. siblings made one attempt."""
    right = recursive.plan(draft, log_p)
    node = jnp.arange(draft.tokens.shape[0])
    same = (draft.parents[None] == draft.parents[:, None]) & (draft.tokens[None] == draft.tokens[:, None])
    twin = (same & (node[None] < node[:, None])).any(-1)
    return recursive.plan(draft._replace(parents=jnp.where(twin, -2, draft.parents)), log_p)._replace(if_accept=right.if_accept)


def original_q(draft, log_p):
    """Children drawn without replacement, verified with the law of the first one."""
    first = trees.links(draft.parents)[0][jnp.maximum(draft.parents, -1) + 1]
    return recursive.plan(draft._replace(log_q=draft.log_q[first]), log_p)


def soft_q(q):
    """Top-k children verified with the softmax value they had."""

    def plan(draft, log_p):
        return recursive.plan(draft._replace(log_q=jnp.broadcast_to(jnp.log(jnp.asarray(q)), draft.log_q.shape)), log_p)

    return plan


def test_planted_faults_are_caught():
    """TV above .05 for duplicates merged, the original q without replacement, softmax q on top-k children."""
    p, q, parents = (0.2, 0.6, 0, 0.2), (0.1, 0, 0.8, 0.1), [-1, -1]
    faults = [
        (merged, iid, (0.5, 0, 0.5, 0), (0.3, 0.7, 0, 0)),
        (original_q, without_replacement, p, q),
        (soft_q(q), point, p, q),
    ]
    for plan, drawn, p, q in faults:
        rule = RULES["recursive"]._replace(plan=plan)
        assert distance(rule, parents, drawn(constant(*q)), p=constant(*p))[0] > 0.05, plan
        assert distance(RULES["recursive"], parents, drawn(constant(*q)), p=constant(*p))[0] < TOLERANCE


# An oracle written apart from the library: exact fractions, one node with two children.


def fraction_law(p, q, replace):
    """Output law of recursive rejection on two siblings, by hand."""
    out = [Fraction(0)] * len(p)
    for a, b in itertools.product(range(len(p)), repeat=2):
        second = [Fraction(0) if (not replace and x == a) else q[x] for x in range(len(q))]
        total = sum(second)
        if q[a] == 0 or total == 0 or second[b] == 0:
            continue
        second = [x / total for x in second]
        weight, left = q[a] * second[b], Fraction(1)
        r = list(p)
        for x, law_x in ((a, q), (b, second)):
            accept = min(Fraction(1), r[x] / law_x[x])
            out[x] += weight * left * accept
            left *= 1 - accept
            rest = [max(u - v, Fraction(0)) for u, v in zip(r, law_x, strict=True)]
            r = [u / sum(rest) for u in rest] if sum(rest) > 0 else r
        out = [o + weight * left * u for o, u in zip(out, r, strict=True)]
    return out


@pytest.mark.parametrize("replace", [True, False])
def test_a_rational_oracle_agrees(replace):
    p = [Fraction(x, 10) for x in (1, 2, 3, 4)]
    q = [Fraction(x, 10) for x in (5, 3, 2, 0)]
    assert fraction_law(p, q, replace) == p
    drawn = (iid if replace else without_replacement)(constant(*map(float, q)))
    assert distance(RULES["recursive"], [-1, -1], drawn, p=constant(*map(float, p)))[0] < TOLERANCE
    assert (
        distance(RULES["recursive"]._replace(plan=target_match.plan), [-1, -1], drawn, p=constant(*map(float, p)))[0]
        < TOLERANCE
    )

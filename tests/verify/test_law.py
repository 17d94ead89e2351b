"""Exact laws: the joint of K + 1 tokens from each rule's own `plan`, float64, equals the target's; faults do not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import TOLERANCE, V, constant, distance, table

from specjax import trees
from specjax.lossless import law
from specjax.lossless.drawn import iid, point
from specjax.types import Draft
from specjax.verify import RULES, rejection
from specjax.verify.common import at_tokens, ratio, top_down


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


LOSSLESS = [n for n, r in RULES.items() if r.lossless and not r.coupled]
CHAINS = {"K=1": [-1], "K=2": [-1, 0], "K=3": [-1, 0, 1], "short": [-1, 0, -2], "none": [-2, -2]}


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("shape", CHAINS)
@pytest.mark.parametrize("name", LOSSLESS)
def test_every_rule_keeps_the_law_on_chains(name, shape, zeros):
    q = table(2, zeros)
    assert distance(RULES[name], CHAINS[shape], iid(q))[0] < TOLERANCE
    assert distance(RULES[name], CHAINS[shape], point(q))[0] < TOLERANCE
    assert distance(RULES[name], CHAINS[shape], point(q), point=True)[0] < TOLERANCE


def test_toy_of_block_verification():
    """Sun et al. 2024, section 1: 10/9 accepted tokens by token verification, 11/9 by block verification."""
    p, q, parents = constant(1 / 3, 2 / 3), constant(2 / 3, 1 / 3), trees.chain(2)
    assert law.exact(RULES["rejection"], parents, p, q, 2).accepted == pytest.approx(10 / 9, abs=1e-12)
    assert law.exact(RULES["block"], parents, p, q, 2).accepted == pytest.approx(11 / 9, abs=1e-12)


def test_block_never_accepts_less_and_a_point_mass_makes_them_equal():
    q = table(2, True)
    for seed in range(5):
        p = table(seed + 10, True)
        token = distance(RULES["rejection"], CHAINS["K=3"], iid(q), p=p)[1]
        block = distance(RULES["block"], CHAINS["K=3"], iid(q), p=p)[1]
        assert block >= token - 1e-12
        one = [distance(RULES[r], CHAINS["K=3"], point(q), p=p, point=True)[1] for r in ("rejection", "block", "target_match")]
        assert one == pytest.approx([one[0]] * 3, abs=1e-12)


def from_target(draft, log_p):
    """The classic fault: after a refusal, draw from p instead of the residual."""
    right = rejection.plan(draft, log_p)
    return right._replace(correction=lambda row: log_p[row])


def test_resampling_from_the_target_is_caught():
    """It gives min(p, q) + (1 - alpha) p, which the same measure rejects."""
    p, q = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.1, 0.2, 0.3, 0.4])
    faulty = RULES["rejection"]._replace(plan=from_target)
    result = law.exact(faulty, trees.chain(1), constant(*p), constant(*q), V).joint.sum(1)
    alpha = np.minimum(p, q).sum()
    np.testing.assert_allclose(result, np.minimum(p, q) + (1 - alpha) * p, atol=1e-12)
    assert distance(faulty, CHAINS["K=2"], iid(table(2, False)))[0] > 0.01


def unscaled(draft, log_p):
    """Block verification's thresholds with the residual of token verification: invisible where V = 2."""
    return RULES["block"].plan(draft, log_p)._replace(correction=rejection.plan(draft, log_p).correction)


def soft_on_point(draft, log_p):
    """An argmax draft verified with the probability its softmax gave it."""
    node = jnp.arange(draft.tokens.shape[0], dtype=jnp.int32)
    soft = jnp.full((draft.tokens.shape[0], V), jnp.log(1 / V))
    accept = ratio(at_tokens(log_p, node, draft.tokens), at_tokens(soft, node, draft.tokens))
    return top_down(draft, accept, rejection.plan(draft._replace(log_q=soft), log_p).correction)


@pytest.mark.parametrize("plan", [unscaled, soft_on_point])
def test_faults_that_shipped_elsewhere_are_caught(plan):
    q = table(2, False)
    law_of_q = point(q) if plan is soft_on_point else iid(q)
    assert distance(RULES["rejection"]._replace(plan=plan), CHAINS["K=2"], law_of_q)[0] > 1e6 * TOLERANCE


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_row_without_a_law_changes_no_earlier_token(name):
    """The row after token 0 is NaN: the first token keeps its law under every rule, as in plain decoding."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.6, 0.2, 0.2])
    first = np.zeros(3)
    for x, y in np.ndindex(3, 3):
        log_p = np.log(np.stack([p, p, p]))
        log_p[1:] = np.nan if x == 0 else log_p[1:]
        draft = Draft(jnp.array([x, y], jnp.int32), jnp.asarray(trees.chain(2)), jnp.asarray(np.log(np.stack([q, q]))))
        plan = RULES[name].plan(draft, jnp.asarray(log_p))
        accept = np.nan_to_num(np.asarray(plan.accept), nan=0)  # a coin is never below NaN
        stop = law.stop_law(accept, np.asarray(plan.if_accept), np.asarray(plan.if_reject))
        first[x] += q[x] * q[y] * stop[1:].sum()
        first += q[x] * q[y] * stop[0] * np.exp(np.asarray(plan.correction(jnp.int32(0))))
    np.testing.assert_allclose(first, p, atol=1e-12)


def test_worked_round():
    """ "The cat sat on the": q .70 .35 .25 .30 .., p .85 .40 .30 .10 ..; a coin above 1/3 at the fourth token refuses it.

    Three accepted, one from the residual, the fifth dropped.
    """
    q_x, p_x = np.array([0.70, 0.35, 0.25, 0.30, 0.5]), np.array([0.85, 0.40, 0.30, 0.10, 0.5])
    words = 6
    tokens = jnp.arange(5, dtype=jnp.int32)

    def rows(x):
        spread = (1 - x)[:, None] / (words - 1) * np.ones((5, words))
        spread[np.arange(5), np.arange(5)] = x
        return np.log(spread)

    log_p = jnp.asarray(np.vstack([rows(p_x), np.full((1, words), -np.log(words))]))
    plan = rejection.plan(Draft(tokens, jnp.asarray(trees.chain(5)), jnp.asarray(rows(q_x))), log_p)
    np.testing.assert_allclose(plan.accept, [1, 1, 1, 1 / 3, 1], atol=1e-12)
    from specjax.verify.draw import follow, verdict, walk

    row = walk(follow(plan, jnp.array([0.9, 0.9, 0.9, 0.34, 0.0])))
    assert int(row) == 3
    correction = np.exp(plan.correction(row))
    expected = np.maximum(np.exp(log_p[3]) - np.exp(rows(q_x)[3]), 0)
    np.testing.assert_allclose(correction, expected / expected.sum(), atol=1e-12)
    assert correction[3] == 0
    result = verdict(
        Draft(tokens, jnp.asarray(trees.chain(5))), trees.ancestors(jnp.asarray(trees.chain(5))), row, jnp.array(5), 5
    )
    assert int(result.num_accepted) == 3 and result.tokens[:4].tolist() == [0, 1, 2, 5]
    assert int(walk(follow(plan, jnp.array([0.9, 0.9, 0.9, 0.33, 0.0])))) == 5

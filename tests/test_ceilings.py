"""Measured acceptance beside its ceiling: attained by the rules that attain it, exceeded by one that cheats alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import bench, ceilings, load_drafter
from specjax.drafters.siblings import SIBLINGS
from specjax.drafters.specinfer import specinfer
from specjax.models.load import LM
from specjax.models.table import table
from specjax.sampling import SamplingParams
from specjax.verify import RULES, rejection

MODEL = table(8, order=1)
TARGET = LM(MODEL, MODEL.init(jax.random.key(1)) * 1.5, None, None)
LITTLE = LM(MODEL, MODEL.init(jax.random.key(2)) * 1.5, None, None)
WORK = bench.Work([[1, 2, 3, 1, 2]] * 32, jax.random.key(0), 24, SamplingParams(temperature=1.0), batch_size=32)


def held(method, rule, work=WORK, **settings):
    loaded = load_drafter(method, TARGET, num_draft=3, **settings)
    return ceilings.hold(TARGET, bench.Contender(method, loaded, rule), work)


@pytest.mark.parametrize("rule", ["rejection", "traversal", "target_match"])
def test_a_chain_against_its_ceiling(rule):
    """`rejection` attains the ceiling of what it reaches; nothing exceeds its own by more than chance."""
    result = held("small", rule, model=LITTLE)
    assert 0.1 < result.accepted and result.rounds > 200 and result.excess.low <= 0
    if rule == "rejection":
        assert result.excess.low <= 0 <= result.excess.high
    if rule == "target_match":
        assert result.excess.high < 0


def test_a_fixed_draft_attains_its_path_sum():
    result = held("ngram", "target_match", min_order=1)
    assert result.excess.low <= 0 <= result.excess.high and result.ceiling > 0.1


@pytest.mark.parametrize(("kind", "rule"), [("iid", "recursive"), ("without_replacement", "recursive"), ("iid", "k_seq")])
def test_a_tree_stays_below_optimal_transport(kind, rule):
    result = held("specinfer", rule, models=[LITTLE], children=kind)
    assert result.excess.low <= 0 and 0.5 < result.accepted / result.ceiling


def test_greedy_children_are_held_against_their_own_sum():
    """At temperature 0 three children without replacement are three certain tokens, not one draw."""
    work = WORK._replace(sampling=SamplingParams(temperature=0.0))
    result = held("specinfer", "recursive", work, models=[LITTLE])
    assert result.accepted == pytest.approx(result.ceiling)


def accept_all(draft, log_p):
    return rejection.plan(draft, log_p)._replace(accept=jnp.ones(draft.tokens.shape[0], log_p.dtype))


def test_a_rule_that_cheats_is_above_its_ceiling(monkeypatch):
    monkeypatch.setitem(RULES, "cheat", RULES["rejection"]._replace(plan=accept_all))
    assert held("small", "cheat", model=LITTLE).above


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_drafter_as_good_as_the_target_is_not_accused(noise):
    """Every round accepts everything, so that a bootstrap has no spread, and float32 rounds ceilings below 1."""
    near = LITTLE._replace(params=TARGET.params + noise * LITTLE.params)
    result = held("small", "rejection", model=near)
    assert result.accepted > 2.5 and not result.above


def test_a_bet_wins_on_what_is_above_alone():
    """At acceptance .95 exactly on the ceiling no stretch of luck reaches a million; .05 above it does."""
    rng = np.random.default_rng(0)
    assert max(ceilings.bet((rng.random(400) < 0.95) - 0.95, 1) for _ in range(200)) < ceilings.PROOF / 100
    assert ceilings.bet((rng.random(4000) < 0.95) - 0.85, 1) > ceilings.PROOF


@pytest.mark.parametrize(("logits", "expansion"), [([20.0] + [0.0] * 7, (2, 1)), ([0.0, 0.0] + [-120.0] * 6, (3, 1))])
def test_a_sharp_drafter_has_no_ceiling_below_the_truth(logits, expansion):
    """q of the later siblings is below what float32 holds, and they are drawn all the same."""
    flat = TARGET._replace(params=jnp.log(jnp.broadcast_to(jnp.asarray([0.3] + [0.1] * 7), TARGET.params.shape)))
    sharp = TARGET._replace(params=jnp.broadcast_to(jax.nn.log_softmax(jnp.asarray(logits)), TARGET.params.shape))
    loaded = load_drafter("specinfer", flat, num_draft=2, models=[sharp], expansion=expansion)
    result = ceilings.hold(flat, bench.Contender("specinfer", loaded, "recursive"), WORK)
    assert result.excess.low <= 0 and not result.above


def test_where_no_ceiling_is_known():
    tree = specinfer((MODEL, MODEL), expansion=(2, 1), siblings=SIBLINGS["iid"])
    other = specinfer((MODEL, MODEL), expansion=(2, 1), siblings=SIBLINGS["without_replacement"])
    assert not ceilings.known(other, RULES["recursive"])
    assert not ceilings.known(tree, RULES["recursive"]) and not ceilings.known(tree, RULES["traversal"])
    one = load_drafter("specinfer", TARGET, num_draft=3, models=[LITTLE]).drafter
    assert ceilings.known(one, RULES["recursive"]) and not ceilings.known(one, RULES["traversal"])
    with pytest.raises(ValueError, match="no ceiling is known"):
        held("specinfer", "traversal", models=[LITTLE])

"""The self-check before saving: quiet where training and drafting are one, and loud for each way in which they came apart."""

from unittest import mock

import helpers as h
import jax
import jax.numpy as jnp
import pytest

from specjax.drafters import blockwise, small
from specjax.drafters.recipe import Recipe, labels
from specjax.models import layers
from specjax.models.transformer import language_model
from specjax.train import recipes
from specjax.train import self_check as module
from specjax.train.self_check import self_check
from specjax.verify import RULES

K = 3
RULE = {"point": "target_match", "iid": "rejection", "without_replacement": "recursive"}
PROMPTS = [[3, 4, 5, 3, 4, 1, 12], [1, 2], [5, 11] * 11 + [5], [9, 8, 7, 6, 9, 8, 7, 16, 0, 2, 5, 5]]


def recipe_of(name):
    return small.recipe(h.TARGET, h.SMALL, num_draft=K) if name == "small" else h.RECIPES[name](K)


def params_of(name):
    return h.small_params() if name == "small" else h.trained(name)


def check(recipe, name, **settings):
    rule = RULES[RULE[recipe.drafter.children]]
    return self_check(recipe, params_of(name), h.target_params(), PROMPTS, target=h.TARGET, rule=rule, **settings)


@pytest.mark.parametrize("name", ["small", *h.RECIPES])
def test_R21_every_drafter_drafts_what_its_loss_predicts(name):
    """Every token of every round, after prefill and after commits, chains and trees."""
    assert check(recipe_of(name), name) == {f"agreement_{i + 1}": 1.0 for i in range(K)}


def test_noise_in_a_loss_is_no_fault():
    """EAGLE-1 learns from features that are off at random, as its drafts are not; what it is judged by has none."""
    noisy = recipes.eagle_1(h.TARGET, num_draft=K, config=h.EAGLES["eagle1"], noise=10.0)
    with pytest.raises(ValueError, match="the loss predicts"):
        check(noisy._replace(clean=None), "eagle1")
    assert check(noisy, "eagle1") == {"agreement_1": 1.0}


def test_ties_of_bfloat16_are_no_fault():
    """Weights are looked at as float32: there no pass rounds another way than the one beside it."""
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 1 else x, h.target_params())
    recipe, rule = recipe_of("mtp"), RULES["rejection"]
    seen = []

    def spied(name):
        original = getattr(module, name)

        def spy(recipe, params, target_params, *rest, **how):
            seen.extend(x.dtype for x in jax.tree.leaves((params, target_params)))
            return original(recipe, params, target_params, *rest, **how)

        return mock.patch.object(module, name, spy)

    with spied("_decoded"), spied("_hits"):
        found = self_check(recipe, params_of("mtp"), narrow, PROMPTS, target=h.TARGET, rule=rule)
    assert found == {f"agreement_{i + 1}": 1.0 for i in range(K)}
    assert set(seen) == {jnp.dtype(jnp.float32)}


def while_drafting(recipe, enter):
    """The recipe with a fault in its drafter alone: `enter` is entered while its functions are traced."""

    def wrapped(f):
        def faulty(*args):
            with enter():
                return f(*args)

        return faulty

    names = ("absorb", "propose", "commit")
    return recipe._replace(drafter=recipe.drafter._replace(**{n: wrapped(getattr(recipe.drafter, n)) for n in names}))


def partial_rotary(name):
    """A quarter of each head turns, as with partial_rotary_factor 0.25."""
    whole = layers.rope
    part = lambda x, positions, frequency: jnp.concatenate([whole(x[..., :2], positions, frequency[:1]), x[..., 2:]], -1)
    return while_drafting(recipe_of(name), lambda: mock.patch.object(layers, "rope", part))


def other_rotary(name):
    turned = language_model(h.CONFIG._replace(layers=1, sliding=(), window=None, rope_theta=3.0))
    return recipe_of(name)._replace(drafter=small.small(turned, num_draft=K, vocab_size=h.V))


def labels_one_off(name):
    right = recipe_of(name)

    def loss(*args):
        with mock.patch.object(blockwise, "labels", lambda batch, ahead: labels(batch, ahead - 1)):
            return right.loss(*args)

    return right._replace(loss=loss)


def row_one_off(name):
    """`commit` takes the state of the row before."""
    right = recipe_of(name)
    commit = lambda params, state, out, verdict: right.drafter.commit(
        params, state, out, verdict._replace(num_accepted=jnp.maximum(verdict.num_accepted - 1, 0))
    )
    return right._replace(drafter=right.drafter._replace(commit=commit))


def prefill_one_off(name):
    """`absorb` takes the state of the row before: seen in the first round only."""
    right = recipe_of(name)
    absorb = lambda params, state, sequences, out, count: right.drafter.absorb(params, state, sequences, out, count - 1)
    return right._replace(drafter=right.drafter._replace(absorb=absorb))


FAULTS = {
    "partial rotary": (partial_rotary, "mtp"),
    "other rotary": (other_rotary, "small"),
    "labels": (labels_one_off, "blockwise"),
    "commit": (row_one_off, "hydra"),
    "prefill": (prefill_one_off, "medusa"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_R21_a_fault_is_found_before_anything_is_saved(fault):
    make, name = FAULTS[fault]
    with pytest.raises(ValueError, match=r"self-check: of \d+ tokens drafted at depth \d the loss predicts \d+") as error:
        check(make(name), name)
    assert "\n" not in str(error.value)


def test_what_cannot_be_checked_is_said():
    recipe = recipe_of("blockwise")
    with pytest.raises(ValueError, match="nothing that drafts"):
        self_check(Recipe(recipe.init, recipe.loss), (), (), PROMPTS, target=h.TARGET, rule=RULES["rejection"])
    for prompts in ([], [[1, 2], [3]]):
        with pytest.raises(ValueError, match="less than 2 tokens"):
            self_check(recipe, (), (), prompts, target=h.TARGET, rule=RULES["rejection"])
    silent = recipe._replace(loss=lambda *args: (jnp.zeros(()), {"weight": jnp.ones(())}))
    with pytest.raises(ValueError, match="reports no accuracy_1"):
        check(silent, "blockwise", rounds=1)
    broken = jax.tree.map(lambda x: x * jnp.nan, h.trained("blockwise"))
    with pytest.raises(ValueError, match="no token was drafted at depth 1"):
        rule = RULES["rejection"]
        self_check(recipe, broken, h.target_params(), PROMPTS, target=h.TARGET, rule=rule, rounds=1)

"""A drafter that knows some tokens only: the same drafter otherwise, for every method that reads the target's head."""

import functools
import json
import shutil

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode, load_drafter
from specjax.drafters import blockwise, hydra, medusa, mtp, objectives
from specjax.drafters.recipe import Batch, with_output
from specjax.drafters.vocabulary import frequent, narrowed, places, widened, within
from specjax.models.load import LM
from specjax.types import Params
from specjax.verify import RULES

K = 3
ALL, SOME = tuple(range(h.V)), (1, 2, 3, 5, 8, 11, 14)
MAKE = {
    "blockwise": lambda target, **how: blockwise.recipe(target, num_draft=K, hidden=8, **how),
    "medusa": lambda target, **how: medusa.recipe(target, num_draft=K, **how),
    "hydra": lambda target, **how: hydra.recipe(target, num_draft=K, **how),
    "mtp": lambda target, **how: mtp.recipe(target, num_draft=K, config=h.MTP_CONFIG, **how),
}
each = pytest.mark.parametrize("name", MAKE)
TEXT = np.random.default_rng(5).integers(0, h.V, (2, 12)).astype(np.int32)
GIVEN = Batch(jnp.asarray(TEXT), jnp.ones((2, 12), bool), jnp.zeros((2, 12), jnp.int32))


@functools.cache
def trained(name):
    """What the recipe begins with, disturbed."""
    params = jax.jit(MAKE[name](h.TARGET).init)(jax.random.key(3), h.target_params())
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(4)
    return treedef.unflatten([x + jnp.asarray(0.15 * rng.standard_normal(x.shape), x.dtype) for x in leaves])


def loss(name, ids, objective=objectives.hard):
    make = lambda target: MAKE[name](target, objective=objective)
    recipe = make(h.TARGET) if ids is None else within(make, h.TARGET, ids)

    @jax.jit
    def run(params, target_params):
        batch = with_output(GIVEN, h.TARGET, target_params)
        return recipe.loss(params, target_params, batch, jax.random.key(0))

    return run(trained(name), h.target_params())


@each
@pytest.mark.parametrize("objective", [objectives.hard, objectives.soft])
def test_all_tokens_are_no_restriction(name, objective):
    whole, few = loss(name, None, objective), loss(name, ALL, objective)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), whole, few)


def test_labels_outside_teach_nothing_and_are_misses():
    """Against the heads' own logits, by hand."""
    value, metrics = loss("medusa", SOME)
    hidden = h.TARGET.apply(h.target_params(), GIVEN.tokens, h.TARGET.init_cache(2, 12))[0].hidden
    logits = medusa.head_logits(h.TARGET, h.target_params(), trained("medusa"), hidden.reshape(24, -1)).reshape(2, 12, K, h.V)
    few = np.asarray(jax.nn.log_softmax(logits[..., list(SOME)], -1), np.float64)
    total, hits, count = 0.0, np.zeros(K), np.zeros(K)
    for b in range(2):
        for t in range(12):
            for i in range(K):
                if t + i + 2 < 12:
                    token = int(TEXT[b, t + i + 2])
                    count[i] += 1
                    if token in SOME:
                        law = few[b, t, i]
                        total -= 0.8 ** (i + 1) * law[SOME.index(token)]
                        hits[i] += SOME[int(law.argmax())] == token
    np.testing.assert_allclose(value, total / count.mean(), rtol=1e-5)
    for i in range(K):
        np.testing.assert_allclose(metrics[f"accuracy_{i + 1}"], hits[i] / count[i], rtol=1e-6)


@each
def test_what_is_drafted_lies_within_and_text_is_plain(name):
    recipe = within(MAKE[name], h.TARGET, SOME)
    params = Params(h.target_params(), trained(name))
    rule = "recursive" if recipe.drafter.children == "without_replacement" else "rejection"
    done = h.generate(recipe.drafter, rule, h.MIXED, params=params, temperature=h.MIXED_HEAT)
    assert done.tokens[:5] == h.reference().tokens[:5]  # greedy
    assert done.accepted.sum() > 0
    full = h.generate(MAKE[name](h.TARGET).drafter, rule, h.MIXED, params=params, temperature=h.MIXED_HEAT)
    assert done.tokens[5:] != full.tokens[5:]  # it was another drafter


def test_a_law_within():
    hidden = jax.random.normal(jax.random.key(0), (4, h.TARGET.width))
    whole = h.TARGET.unembed(h.target_params(), hidden)
    wide, few = (view(h.TARGET, SOME).unembed(h.target_params(), hidden) for view in (widened, narrowed))
    np.testing.assert_allclose(few, whole[:, list(SOME)], rtol=1e-5)
    np.testing.assert_allclose(wide[:, list(SOME)], few)
    assert np.isneginf(np.delete(np.asarray(wide), SOME, 1)).all()
    assert places(SOME, h.V)[list(SOME)].tolist() == list(range(len(SOME)))


@each
def test_it_is_saved_with_the_weights(name, tmp_path):
    """config.json says which ids; without that line the same weights draft with all."""
    lm = LM(h.TARGET, h.target_params(), None, h.CONFIG)
    shutil.copytree(h.saved(name), tmp_path / "few")
    file = tmp_path / "few" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "vocabulary": SOME}))
    few = load_drafter(name, lm, num_draft=K, weights=str(tmp_path / "few"))
    again = load_drafter(name, lm, num_draft=K, weights=str(tmp_path / "few"))
    assert few.drafter is again.drafter  # nothing compiles anew
    assert few.drafter is not load_drafter(name, lm, num_draft=K, weights=h.saved(name)).drafter


def test_what_is_no_vocabulary_is_refused():
    for ids in [(), (3, 2), (1, 1), (5, h.V), (-1, 2)]:
        with pytest.raises(ValueError, match="must ascend within 0 to 16"):
            narrowed(h.TARGET, ids)
    with pytest.raises(ValueError, match="no vocabulary head to narrow"):
        narrowed(h.table_model(5), (1, 2))
    own = within(lambda target: medusa.recipe(target, num_draft=K, own_head=True), h.TARGET, SOME)
    with pytest.raises(ValueError, match="takes no draft vocabulary"):
        own.init(jax.random.key(0), h.target_params())


def test_frequent_covers_most():
    ids, share = frequent(np.asarray([4, 4, 4, 9, 9, 0]), 2, 12)
    assert ids == (4, 9) and share == pytest.approx(5 / 6)


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_noise_of_some_tokens(rule):
    """Under a coupled rule it is the request's own, under the others as much noise as is asked for, and none when greedy."""
    state = h.generate(h.drafter("ngram"), rule, h.PROMPTS[:2], rounds=0, temperature=1.0).state
    noise = decode.noise_source(state, RULES[rule], h.V)
    some, whole = noise(1, 3, jnp.asarray(SOME)), noise(1, 3)
    assert some.shape == (2, 3, len(SOME)) and len(np.unique(some[:, 0])) == 2 * len(SOME)
    assert (rule == "coupled") == bool((some == whole[..., jnp.asarray(SOME)]).all())
    cold = state._replace(sampling=state.sampling._replace(temperature=jnp.zeros(2)))
    assert not decode.noise_source(cold, RULES[rule], h.V)(1, 3, jnp.asarray(SOME)).any()

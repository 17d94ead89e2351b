"""A drafter that knows some tokens only: the same drafter otherwise, for every method that reads the target's head."""

import functools

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode, load_drafter
from specjax.drafters import blockwise, files, hydra, medusa, mtp, objectives, parallel_heads, small
from specjax.drafters.recipe import Batch, with_output
from specjax.drafters.siblings import SIBLINGS
from specjax.drafters.vocabulary import frequent, narrowed, places, spread, within
from specjax.models.load import LM
from specjax.types import Params, Sequences
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


def output():
    """The batch with what the target says of it."""
    return with_output(GIVEN, h.TARGET, h.target_params())


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


def masked(ids):
    """The target with logits of -inf outside `ids`, no draft vocabulary to a drafter: what one of `ids` must equal."""
    few = narrowed(h.TARGET, ids)
    return h.TARGET._replace(unembed=lambda params, hidden: spread(few.unembed(params, hidden), ids, h.V))


@functools.cache
def masked_trunk():
    model, few = h.TARGET.truncate(1), masked(SOME)

    def apply(params, *inputs, **how):
        out, cache = model.apply(params, *inputs, **how)
        return out._replace(logits=few.unembed(params, out.hidden)), cache

    return model._replace(apply=apply)


def of_trunk(target):
    model = masked_trunk() if target.vocabulary is None else small.trunk(target, 1)
    return small.small(model, num_draft=K, vocab_size=h.V, own=small.beside)


BUILD = {
    "blockwise": lambda target: blockwise.blockwise(target, num_draft=K),
    "medusa": lambda target: medusa.medusa(target, paths=h.HEAD_TREE, siblings=SIBLINGS["without_replacement"]),
    "hydra": lambda target: hydra.hydra(target, paths=h.HEAD_TREE),
    "hydra, prefix": lambda target: hydra.hydra(target, paths=h.HEAD_TREE, prefix=h.LAYER_CONFIG),
    "parallel_heads": lambda target: parallel_heads.parallel_heads(target, paths=h.HEAD_TREE, config=h.LAYER_CONFIG),
    "mtp": lambda target: mtp.mtp(target, num_draft=K, config=h.MTP_CONFIG),
    "trunk": of_trunk,
}


@pytest.mark.parametrize("name", BUILD)
def test_places_of_a_vocabulary_draft_what_a_mask_over_all_tokens_drafts(name):
    """From the same state and, as a coupled rule gives it, the same noise: tokens, tree and laws; greedy rows and hot ones."""
    own = {"trunk": h.trunk_params}.get(name, functools.partial(trained if name in MAKE else h.trained, name))
    params = Params(h.target_params(), own())
    masking, within_places = (BUILD[name](target) for target in (masked(SOME), narrowed(h.TARGET, SOME)))
    how = dict(params=params, temperature=h.MIXED_HEAT)
    state = h.generate(masking, "coupled", h.MIXED, rounds=1, **how).state
    sequences = Sequences(state.tokens, state.length, state.cache, state.sampling)

    def propose(drafter):
        noise = decode.noise_source(state, RULES["coupled"], h.V)
        return jax.jit(lambda params, own: drafter.propose(noise, params, own, sequences)[0])(params, state.drafter)

    mask, places_of = propose(masking), propose(within_places)
    np.testing.assert_array_equal(places_of.parents, mask.parents)
    np.testing.assert_array_equal(places_of.tokens, np.where(mask.parents == -2, places_of.tokens, mask.tokens))
    assert (places_of.parents > -2).any() and set(np.unique(places_of.tokens)) <= set(SOME)
    if mask.log_q is not None:
        there = np.asarray(mask.parents > -2)
        np.testing.assert_allclose(np.exp(places_of.log_q)[there], np.exp(mask.log_q)[there], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["medusa", "hydra", "parallel_heads"])
def test_a_tree_of_more_children_than_tokens_is_refused(name):
    with pytest.raises(ValueError, match="a candidate of rank 2, the vocabulary 2 tokens"):
        BUILD[name](narrowed(h.TARGET, (3, 7)))


def test_a_law_within():
    hidden = jax.random.normal(jax.random.key(0), (4, h.TARGET.width))
    whole = h.TARGET.unembed(h.target_params(), hidden)
    few = narrowed(h.TARGET, SOME).unembed(h.target_params(), hidden)
    np.testing.assert_allclose(few, whole[:, list(SOME)], rtol=1e-5)
    wide = spread(few, SOME, h.V)
    np.testing.assert_array_equal(wide[:, list(SOME)], few)
    assert np.isneginf(np.delete(np.asarray(wide), SOME, 1)).all()
    assert places(SOME, h.V)[list(SOME)].tolist() == list(range(len(SOME)))


@each
def test_it_is_saved_with_the_weights(name, tmp_path):
    """config.json says which ids; without that line the same weights draft with all."""
    about = {"method": name, "vocab_size": h.V, "width": h.CONFIG.width, **(h.MTP_CONFIG._asdict() if name == "mtp" else {})}
    for where, ids in {"few": {"vocabulary": SOME}, "all": {}}.items():
        files.save(tmp_path / where, trained(name), {**about, **ids})
    lm = LM(h.TARGET, h.target_params(), None, h.CONFIG)
    load = lambda where: load_drafter(name, lm, num_draft=K, weights=str(tmp_path / where))
    few, again = load("few"), load("few")
    assert few.drafter is again.drafter  # nothing compiles anew
    assert few.drafter is not load("all").drafter


def test_what_is_no_vocabulary_is_refused():
    for ids in [(), (3, 2), (1, 1), (5, h.V), (-1, 2)]:
        with pytest.raises(ValueError, match="must ascend within 0 to 16"):
            narrowed(h.TARGET, ids)
    with pytest.raises(ValueError, match="a view of 2 ids cannot be narrowed again"):
        narrowed(narrowed(h.TARGET, (1, 2)), (1,))
    with pytest.raises(ValueError, match="no vocabulary head to narrow"):
        narrowed(h.table_model(5), (1, 2))


@pytest.mark.parametrize("name", ["medusa", "hydra"])
def test_heads_of_their_own_have_a_column_for_each_of_its_tokens(name, tmp_path):
    """They start as the target's columns, learn, are saved and loaded, and draft what heads that share the target's draft."""
    recipe = within(functools.partial(MAKE[name], own_head=True), h.TARGET, SOME)
    params = jax.jit(recipe.init)(jax.random.key(0), h.target_params())
    own = params["head"] if name == "medusa" else params["head_0"]["head"][None]
    whole = h.TARGET.unembed(h.target_params(), jnp.eye(h.TARGET.width))
    np.testing.assert_array_equal(own[0], whole[:, list(SOME)])
    gradient = jax.grad(lambda p: recipe.loss(p, h.target_params(), output(), jax.random.key(0))[0])(params)
    assert np.abs(gradient["head"] if name == "medusa" else gradient["head_0"]["head"]).max() > 0
    files.save(tmp_path, params, {"method": name, "vocabulary": SOME, "vocab_size": h.V, "width": h.CONFIG.width})
    loaded = load_drafter(name, LM(h.TARGET, h.target_params(), None, h.CONFIG), num_draft=K, weights=str(tmp_path))
    rule = "recursive" if name == "hydra" else "rejection"
    done = h.generate(loaded.drafter, rule, h.MIXED, params=Params(h.target_params(), loaded.params), temperature=0.0)
    shared = within(MAKE[name], h.TARGET, SOME)
    params = Params(h.target_params(), jax.jit(shared.init)(jax.random.key(0), h.target_params()))
    same = h.generate(shared.drafter, rule, h.MIXED, params=params, temperature=0.0)
    assert done.tokens == same.tokens and (done.accepted == same.accepted).all() and done.accepted.sum() > 0


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

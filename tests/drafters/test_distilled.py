"""The recipe of `small`, and the objectives that all recipes share."""

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references as ref

from specjax import generate, load_drafter, sampling
from specjax.drafters import files, objectives, small, vocabulary
from specjax.drafters.base import LoadedDrafter
from specjax.drafters.recipe import with_output
from specjax.models.load import LM
from specjax.models.transformer import language_model
from specjax.train.export import save_directory
from specjax.types import Params


def logits(p):
    """The small model, of one layer without a window, on each document by itself: {(b, t): logits}."""
    found = {}
    for b, part in ref.DOCUMENTS:
        before = []
        for t, token in enumerate(ref.TOKENS[b, part], part.start):
            x, entry = ref.layer(p["layer_0"], p["embedding"][token], t - part.start, before)
            before.append(entry)
            found[b, t] = ref.rms(x, p["norm"]) @ p["head"]
    return found


@pytest.mark.parametrize("name", ["hard", "soft", "kl", "total_variation"])
def test_loss_and_gradient(name):
    """The mean over labels of each objective, at the position before, each document by itself."""
    recipe = small.recipe(h.TARGET, h.SMALL, num_draft=2, objective=getattr(objectives, name))

    def reference(p):
        found = logits(p)
        return ref.pooled(lambda b, t, i: found[b, t], [1.0], getattr(ref, name), first=1)

    ref.check(recipe, h.small_params(), reference)
    weight = recipe.loss(h.small_params(), h.target_params(), ref.batch(), None)[1]["weight"]
    assert float(weight) == sum(ref.MASK[b, part][1:].sum() for b, part in ref.DOCUMENTS)


def test_a_perfect_predictor_costs_the_entropy():
    """A model that moves the counter by one; by none or two it costs far more, and is far from the target's law."""
    target, batch = ref.known()
    pairs = target.unembed((), jnp.eye(target.width))
    move = lambda params, x: x @ ref.later(params) @ pairs
    model = h.table_model(target.width)._replace(unembed=move)  # its hidden state is the last token
    table = model._replace(apply=lambda params, *a, **k: h.table_model(target.width).apply(jnp.zeros((11, 10)), *a, **k))
    batch = batch._replace(output=batch.output._replace(hidden=batch.output.hidden @ ref.later(1)))
    for objective, best in ((objectives.hard, np.log(2)), (objectives.soft, np.log(2)), (objectives.kl, 0.0)):
        recipe = small.recipe(target, table, num_draft=3, objective=objective)
        for by in (1, 0, 2):
            loss, metrics = recipe.loss(by, (), batch, None)
            assert abs(float(loss) - best) < 1e-5 if by == 1 else float(loss) > 10
            if by == 1:
                assert 1 < float(metrics["tau"]) < 4 and 0 < float(metrics["accuracy_3"]) < 1


def test_metrics_are_those_of_a_chain():
    """accuracy_i and tau, counted by hand from the model's best tokens."""
    recipe, k = small.recipe(h.TARGET, h.SMALL, num_draft=3), 3
    metrics = recipe.loss(h.small_params(), h.target_params(), ref.batch(), None)[1]
    found, hits = logits(ref.double(h.small_params())), {}
    for b, part in ref.DOCUMENTS:
        hits |= {(b, t): found[b, t].argmax() == ref.TOKENS[b, t + 1] for t in range(part.start, part.stop - 1)}
    labelled = {at: hit for at, hit in hits.items() if ref.MASK[at[0], at[1] + 1]}
    for i in range(k):
        there = [hit for (b, t), hit in labelled.items() if t >= i]
        np.testing.assert_allclose(metrics[f"accuracy_{i + 1}"], np.mean(there), rtol=1e-6)
    whole = [[labelled[b, t + i] for i in range(k)] for b, t in hits if all((b, t + i) in labelled for i in range(k))]
    np.testing.assert_allclose(metrics["tau"], 1 + np.mean([np.cumprod(run).sum() for run in whole]), rtol=1e-6)


def test_what_was_distilled_is_published_and_loaded(tmp_path):
    """Through config.json and float32 safetensors: the same parameters, the same drafts, token for token."""
    config = h.CONFIG._replace(vocab_size=32, window=None, sliding=())
    target, model = language_model(config), language_model(config._replace(layers=1))
    own = h.peaked(jax.jit(target.init)(jax.random.key(0)), 5)
    lm, recipe = LM(target, own, h.tokenizer(), config), small.recipe(target, model, num_draft=3, objective=objectives.kl)
    given = with_output(ref.batch()._replace(output=()), target, own)
    value = jax.jit(jax.value_and_grad(lambda p: recipe.loss(p, own, given, jax.random.key(0))[0]))
    params = jax.jit(recipe.init)(jax.random.key(0), own)
    for _ in range(3):
        params = jax.tree.map(lambda x, g: x - 0.05 * g, params, value(params)[1])
    save_directory(tmp_path, config._replace(layers=1), params, lm.tokenizer, dtype=np.float32)
    loaded = load_drafter("small", lm, num_draft=3, model=str(tmp_path))
    for a, b in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)
    trained = LoadedDrafter(recipe.drafter, params, loaded.card)
    prompts, heat = ["the cat sat", "a b a b"], [sampling.SamplingParams(), sampling.SamplingParams(temperature=1.0)]
    one, two = (generate(lm, d, prompts, key=jax.random.key(1), max_new_tokens=24, sampling=heat) for d in (trained, loaded))
    assert one == two and sum(c.stats.num_accepted_draft_tokens for c in one) > 0


def test_the_target_itself_has_nothing_to_learn():
    """Forward KL of a model that is the target is zero, and so is its gradient; it starts as the target."""
    recipe = small.recipe(h.TARGET, h.TARGET, num_draft=2, objective=objectives.kl)
    params = jax.jit(recipe.init)(jax.random.key(0), h.target_params())
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), params, h.target_params())))
    given = ref.batch()
    value = lambda p: recipe.loss(p, h.target_params(), given, jax.random.key(0))[0]
    loss, gradient = jax.jit(jax.value_and_grad(value))(params)
    assert abs(float(loss)) < 1e-6 and max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradient)) < 1e-5


def test_a_smaller_model_starts_with_what_it_shares():
    """The embedding, head and first layer of the target; a width of its own shares nothing."""
    recipe = small.recipe(h.TARGET, h.SMALL, num_draft=2)
    params = jax.jit(recipe.init)(jax.random.key(0), h.target_params())
    for name in ("embedding", "head", "layer_0", "norm"):
        same = jax.tree.map(lambda a, b: bool((a == b).all()), params[name], h.target_params()[name])
        assert all(jax.tree.leaves(same)), name
    zeros = lambda key: jax.tree.map(jnp.zeros_like, h.SMALL.init(key))
    wide = {"embedding": jnp.ones((3, 3)), **{n: x for n, x in h.target_params().items() if n != "embedding"}}
    assert (
        float(
            jnp.abs(small.recipe(h.TARGET, h.SMALL, num_draft=2, init=zeros).init(jax.random.key(0), wide)["embedding"]).max()
        )
        == 0
    )


def test_chunks_change_nothing():
    """Value and gradient whatever the size of a chunk, also where it does not divide the rows."""
    x, w = jax.random.normal(jax.random.key(0), (2, 7, 3)), jax.random.normal(jax.random.key(1), (3, 5))
    rows = lambda w: lambda x: jax.nn.logsumexp(x @ w, -1)
    whole = jax.value_and_grad(lambda w: rows(w)(x).sum())(w)
    for size in (1, 4, 7, 100):
        part = jax.value_and_grad(lambda w, size=size: objectives.chunked(rows(w), x, size=size).sum())(w)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), part, whole)


def test_what_has_no_mass_costs_nothing():
    """-inf where neither law has mass, and a NaN where there is no label."""
    logits = jnp.asarray([[0.0, 1.0, -jnp.inf]])
    for objective in (objectives.soft, objectives.kl, objectives.total_variation):
        value, gradient = jax.value_and_grad(lambda x, f=objective: f(x, None, logits)[0])(logits)
        assert np.isfinite(value) and np.isfinite(gradient[0, :2]).all()
    assert float(objectives.mean(jnp.asarray([1.0, jnp.nan]), jnp.asarray([1.0, 0.0]))) == 1
    assert float(objectives.mean(jnp.ones(2), jnp.zeros(2))) == 0


def test_a_trunk_learns_and_drafts_as_the_model_that_it_is_part_of(tmp_path):
    """Loss, gradient and drafts are those of a whole model with the target's embedding and head; its own weights are saved."""
    target_params, own = h.target_params(), h.trunk_params()
    whole, trunk = {**target_params, **own}, small.trunk_recipe(h.TARGET, num_draft=3, layers=1)
    model, given = h.TARGET.truncate(1), ref.batch()
    alone = small.recipe(h.TARGET, model, num_draft=3)
    for a, b in zip(trunk.loss(own, target_params, given, None), alone.loss(whole, target_params, given, None), strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)
    gradient = jax.grad(lambda p: trunk.loss(p, target_params, given, None)[0])(own)
    assert jax.tree.structure(gradient) == jax.tree.structure(own)
    assert all(jax.tree.leaves(jax.tree.map(lambda g: bool((g != 0).any()), gradient)))
    begun = jax.jit(trunk.init)(jax.random.key(0), target_params)
    jax.tree.map(np.testing.assert_array_equal, begun, {name: target_params[name] for name in ("layer_0", "norm")})
    lm = LM(h.TARGET, target_params, None, h.CONFIG)
    files.save(tmp_path, own, {"method": "small", "layers": 1, "vocab_size": h.V, "width": h.CONFIG.width})
    loaded = load_drafter("small", lm, num_draft=3, weights=str(tmp_path))
    jax.tree.map(np.testing.assert_array_equal, loaded.params, own)
    found = h.generate(loaded.drafter, "rejection", h.PROMPTS, params=Params(target_params, loaded.params), temperature=0.0)
    same = h.generate(h.small(model, num_draft=3), "rejection", h.PROMPTS, params=Params(target_params, whole), temperature=0.0)
    assert found.tokens == same.tokens and (found.accepted == same.accepted).all()


def test_a_trunk_of_a_draft_vocabulary_proposes_nothing_else():
    ids = tuple(range(0, h.V, 3))
    drafter = small.small(small.trunk(vocabulary.narrowed(h.TARGET, ids), 1), num_draft=3, vocab_size=h.V, own=small.beside)
    params = Params(h.target_params(), h.trunk_params())
    result = h.generate(drafter, "rejection", h.PROMPTS, params=params, temperature=1.0, rounds=1)
    whole = h.generate(h.drafter("plain"), "rejection", h.PROMPTS, temperature=1.0, params=Params(h.target_params(), ()))
    assert {len(tokens) for tokens in whole.tokens} == {h.NEW} and result.drafted.sum() == 3 * len(h.PROMPTS)
    for tokens, accepted in zip(result.tokens, result.accepted[:, 0], strict=True):
        assert set(tokens[:accepted]) <= set(ids)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give one of them"),
        ({"model": 1, "weights": "x"}, "give one of them"),
        ({"weights": "nowhere"}, "nowhere"),
    ],
)
def test_a_trunk_or_a_model(given, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        small.load(LM(h.TARGET, h.target_params(), None, h.CONFIG), num_draft=2, **given)
    assert "\n" not in str(error.value)

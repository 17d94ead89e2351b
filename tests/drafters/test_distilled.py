"""The recipe of `small`, and the objectives that all recipes share."""

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references as ref

from specjax.drafters import objectives, small


def laws(params, model):
    """Softmax of a model on each document by itself: {(b, t): p}."""
    found = {}
    for b, part in ((0, slice(0, 6)), (0, slice(6, 11)), (1, slice(0, 8))):
        tokens = jnp.asarray(ref.TOKENS[b : b + 1, part])
        logits = model.apply(params, tokens, model.init_cache(*tokens.shape))[0].logits[0]
        found |= {(b, part.start + t): ref.softmax(np.asarray(x, np.float64)) for t, x in enumerate(logits)}
    return found


NUMPY = {
    "hard": lambda p, q, label: -np.log(q[label]),
    "soft": lambda p, q, label: -(p * np.log(q)).sum(),
    "kl": lambda p, q, label: (p * np.log(p / q)).sum(),
    "total_variation": lambda p, q, label: np.abs(p - q).sum() / 2,
}


@pytest.mark.parametrize("name", NUMPY)
def test_loss(name):
    """The mean over labels of each objective between the laws of target and model at the position before."""
    recipe = small.recipe(h.TARGET, h.SMALL, num_draft=2, objective=getattr(objectives, name))
    given = ref.batch()  # outside of what is traced, for it is kept
    loss, metrics = jax.jit(lambda p: recipe.loss(p, h.target_params(), given, jax.random.key(0)))(h.small_params())
    p, q, nats = laws(h.target_params(), h.TARGET), laws(h.small_params(), h.SMALL), []
    for b, t in np.ndindex(2, 10):
        if ref.MASK[b, t + 1] and ref.SEGMENTS[b, t] == ref.SEGMENTS[b, t + 1] >= 0:
            nats.append(NUMPY[name](p[b, t], q[b, t], ref.TOKENS[b, t + 1]))
    np.testing.assert_allclose(float(loss), np.mean(nats), rtol=1e-5)
    assert float(metrics["weight"]) == len(nats)


def test_the_target_itself_has_nothing_to_learn():
    """Forward KL of a model that is the target is zero, and so is its gradient; it starts as the target."""
    recipe = small.recipe(h.TARGET, h.TARGET, num_draft=2, objective=objectives.kl)
    params = recipe.init(jax.random.key(0), h.target_params())
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), params, h.target_params())))
    given = ref.batch()
    value = lambda p: recipe.loss(p, h.target_params(), given, jax.random.key(0))[0]
    loss, gradient = jax.jit(jax.value_and_grad(value))(params)
    assert abs(float(loss)) < 1e-6 and max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradient)) < 1e-5


def test_a_smaller_model_starts_with_what_it_shares():
    """The embedding, head and first layer of the target; a width of its own shares nothing."""
    recipe = small.recipe(h.TARGET, h.SMALL, num_draft=2)
    params = recipe.init(jax.random.key(0), h.target_params())
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

"""Blockwise: the loss by hand, and labels that a copying model proves."""

import helpers as h
import jax.numpy as jnp
import numpy as np
import pytest
import references as ref

from specjax.drafters import blockwise, objectives

K = 3


@pytest.mark.parametrize("name", ["hard", "soft"])
def test_loss_and_gradient(name):
    """h + W2 relu(W1 h + b1) + b2, then the target's head; heads weigh alike."""
    hidden, head = ref.hidden(), np.asarray(h.target_params()["head"], np.float64)

    def row(p, b, t, i):
        y = np.maximum(hidden[b, t] @ p["up"][i] + p["up_bias"][i], 0)
        return (hidden[b, t] + y @ p["down"][i] + p["down_bias"][i]) @ head

    recipe = blockwise.recipe(h.TARGET, num_draft=K, hidden=8, objective=getattr(objectives, name))
    reference = lambda p: ref.pooled(lambda *at: row(p, *at), [1 / K] * K, getattr(ref, name))
    ref.check(recipe, h.trained("blockwise"), reference)


def test_a_perfect_predictor_costs_the_entropy():
    """Head i moves the counter by 2 + i; moved by one more or less it costs far more."""
    target, batch = ref.known()
    recipe = blockwise.recipe(target, num_draft=K)
    d = target.width
    for wrong in (0, 1, -1):
        down = jnp.stack([ref.later(2 + i + wrong) - jnp.eye(d) for i in range(K)])
        params = {"up": jnp.stack([jnp.eye(d)] * K), "up_bias": jnp.zeros((K, d)), "down": down, "down_bias": jnp.zeros((K, d))}
        loss = float(recipe.loss(params, (), batch, None)[0])
        assert loss > 10 if wrong else abs(loss - np.log(2)) < 1e-5

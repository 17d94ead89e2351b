"""Losses against NumPy, their gradients against each other, and where labels stand."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import V, successor_table, table_model

from specjax.drafters import objectives as losses
from specjax.drafters.recipe import Batch, labels, layout
from specjax.train.target import target_recipe

RNG = np.random.default_rng(0)
LOGITS, TEACHER = (RNG.normal(size=(6, V)).astype(np.float32) * 3 for _ in range(2))
LABELS = RNG.integers(0, V, 6).astype(np.int32)
TABLE = table_model(V)._replace(unembed=lambda params, hidden: hidden @ params[:V])  # its hidden state is the last token


def softmax(x):
    x = x.astype(np.float64)
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def batch(tokens, mask=None, segments=None):
    tokens = jnp.asarray(tokens, jnp.int32)
    mask = jnp.ones(tokens.shape, bool) if mask is None else jnp.asarray(mask, bool)
    return Batch(tokens, mask, jnp.zeros(tokens.shape, jnp.int32) if segments is None else jnp.asarray(segments, jnp.int32))


def test_values():
    p, q = softmax(TEACHER), softmax(LOGITS)
    a, b = jnp.asarray(LOGITS), jnp.asarray(TEACHER)
    np.testing.assert_allclose(losses.hard(a, jnp.asarray(LABELS)), -np.log(q[np.arange(6), LABELS]), rtol=1e-5)
    np.testing.assert_allclose(losses.soft(a, None, b), -(p * np.log(q)).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(losses.kl(a, None, b), (p * np.log(p / q)).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(losses.total_variation(a, None, b), 1 - np.minimum(p, q).sum(-1), rtol=1e-5)


def test_gradients():
    """d/dlogits: q - onehot, q - p (KL and soft cross-entropy alike); nothing reaches the target."""
    p, q = softmax(TEACHER), softmax(LOGITS)
    a, b = jnp.asarray(LOGITS), jnp.asarray(TEACHER)
    hard = jax.grad(lambda x: losses.hard(x, jnp.asarray(LABELS)).sum())(a)
    np.testing.assert_allclose(hard, q - np.eye(V)[LABELS], atol=1e-6)
    for soft in (losses.soft, losses.kl):
        np.testing.assert_allclose(jax.grad(lambda x, soft=soft: soft(x, None, b).sum())(a), q - p, atol=1e-6)
    sign = np.sign(q - p)
    expected = 0.5 * q * (sign - (sign * q).sum(-1, keepdims=True))
    np.testing.assert_allclose(jax.grad(lambda x: losses.total_variation(x, None, b).sum())(a), expected, atol=1e-6)
    for soft in (losses.soft, losses.kl, losses.total_variation):
        assert not np.any(jax.grad(lambda y, soft=soft: soft(a, None, y).sum())(b))


def test_a_law_with_holes():
    """A target that never says a token (-inf) is no reason for NaN, in value or gradient."""
    hole = jnp.asarray(TEACHER).at[:, 3].set(-jnp.inf)
    for soft in (losses.soft, losses.kl, losses.total_variation):
        value, gradient = jax.value_and_grad(lambda x, soft=soft: soft(x, None, hole).sum())(hole)
        assert np.isfinite(value) and np.isfinite(gradient).all()


def test_R07_R11_mean_counts_labels_only():
    """Padding dilutes nothing, and a batch without labels is zero with zero gradient."""
    values, weights = jnp.asarray([[1.0, 2.0, 9.0]]), jnp.asarray([[1.0, 1.0, 0.0]])
    assert losses.mean(values, weights) == 1.5
    assert losses.mean(jnp.pad(values, ((0, 3), (0, 61))), jnp.pad(weights, ((0, 3), (0, 61)))) == 1.5
    value, gradient = jax.value_and_grad(lambda x: losses.mean(x, jnp.zeros_like(weights)))(values.at[0, 2].set(jnp.nan))
    assert value == 0 and not np.any(gradient)
    assert jnp.isnan(losses.mean(values.at[0, 0].set(jnp.nan), weights))  # but a label's NaN is not hidden


def test_R07_padding_dilutes_no_short_answer():
    """2 of 16 tokens and 14 of 16 to predict: sum / labels, in rows of 16 or padded to 64; gradients too."""
    rng, law = np.random.default_rng(3), jnp.asarray(RNG.normal(size=(V + 1, V)), jnp.float32)
    tokens, mask = rng.integers(0, V, (2, 16)), np.arange(16)[None] >= np.asarray([[14], [2]])
    loss = jax.value_and_grad(lambda law, rows: target_recipe(TABLE).loss(law, (), rows, jax.random.key(0))[0])
    value, gradient = loss(law, batch(tokens, mask))
    logs = np.log(softmax(np.asarray(law)))
    nats = [-logs[tokens[b, t - 1], tokens[b, t]] for b, t in zip(*np.nonzero(mask), strict=True)]
    assert len(nats) == 16
    np.testing.assert_allclose(value, np.sum(nats) / 16, rtol=1e-6)
    wide = [np.pad(x, ((0, 6), (0, 48))) for x in (tokens, mask)]
    padded = loss(law, batch(*wide, segments=np.pad(np.zeros((2, 16)), ((0, 6), (0, 48)), constant_values=-1)))
    np.testing.assert_allclose(padded[0], value, rtol=1e-6)
    np.testing.assert_allclose(padded[1], gradient, atol=1e-7)


@pytest.mark.parametrize("size", [4, 7, 100])
def test_chunks_change_nothing(size):
    head, hidden = (jnp.asarray(RNG.normal(size=s), jnp.float32) for s in ((8, V), (3, 5, 8)))
    goal = jnp.asarray(RNG.integers(0, V, (3, 5)), jnp.int32)

    def loss(head, cut):
        rows = lambda x: losses.hard(x[0] @ head, x[1])
        return (losses.chunked(rows, (hidden, goal), size=size) if cut else rows((hidden.reshape(-1, 8), goal.ravel()))).sum()

    for a, b in zip(jax.value_and_grad(loss)(head, True), jax.value_and_grad(loss)(head, False), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_R17_chunks_bound_memory():
    """At V = 50,000 and 512 positions: the same loss and gradients, and temporaries far from those of all logits."""
    rng = np.random.default_rng(4)
    head, hidden = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((32, 50_000), (1, 512, 32)))
    goal = jnp.asarray(rng.integers(0, 50_000, (1, 512)), jnp.int32)

    def run(size):
        def loss(head, hidden, goal):
            return losses.chunked(lambda x: losses.hard(x[0] @ head, x[1]), (hidden, goal), size=size).mean()

        compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(head, hidden, goal).compile()
        return compiled.memory_analysis().temp_size_in_bytes, compiled(head, hidden, goal)

    (naive, a), (chunked, b) = run(512), run(32)
    assert naive > 512 * 50_000 * 4 and chunked < naive / 4
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * float(jnp.abs(one).max()))


def test_what_is_kept_is_not_made_again():
    """A verdict from logits of its own costs one product with their matrix, and a second one where it is not kept."""
    wide, head, hidden = (jnp.asarray(RNG.normal(size=s), jnp.float32) for s in ((8, 977), (8, V), (2, 6, 8)))

    def products(kept):
        def nats(head, x):
            return jnp.where(kept((x @ wide).argmax(-1) < 500), losses.hard(x @ head, jnp.zeros(len(x), jnp.int32)), 0)

        loss = lambda head: losses.chunked(lambda x: nats(head, x), hidden, size=4).sum()
        program = jax.jit(jax.value_and_grad(loss)).lower(head).compile().as_text()
        return len(re.findall(r"f32\[4,977\]\S* dot\(", program))

    assert (products(losses.kept), products(lambda x: x)) == (1, 2)


def test_R01_weights_follow_the_labels():
    """With an answer at 4..6 the positions that learn are 3..5, also at the edge and for later heads."""
    mask = [[0, 0, 0, 0, 1, 1, 1, 0]]
    for ahead, where in ((1, [3, 4, 5]), (2, [2, 3, 4]), (3, [1, 2, 3]), (9, [])):
        goal, weights = labels(batch(np.arange(8)[None], mask), ahead)
        assert np.flatnonzero(weights[0]).tolist() == where
        assert [int(goal[0, t]) for t in where] == [t + ahead for t in where]
    law = jnp.zeros((V + 1, V))
    loss = lambda law: target_recipe(TABLE).loss(law, (), batch(np.arange(8)[None], mask), jax.random.key(0))[0]
    learns = np.flatnonzero(np.abs(jax.grad(loss)(law)).sum(-1))
    assert learns.tolist() == [3, 4, 5]  # rows of the table are tokens, and token t stands at t: nothing at a stale edge


def test_R15_documents_of_a_row_do_not_meet():
    """No label across a border, none in padding; positions start anew; attention stays inside."""
    one = batch(np.arange(8)[None], segments=[[0, 0, 0, 1, 1, 1, -1, -1]])
    assert labels(one)[1][0].tolist() == [1, 1, 0, 1, 1, 0, 0, 0]
    assert labels(one, 2)[1][0].tolist() == [1, 0, 0, 1, 0, 0, 0, 0]
    positions, mask = layout(one.segments)
    assert positions[0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert np.flatnonzero(mask[0, 4]).tolist() == [3, 4]


def test_a_model_that_copies():
    """Labels are the next tokens: a table that knows the successor of each has no loss, and one shifted by one has much."""
    recipe = target_recipe(TABLE)
    rows = batch([[(3 * t) % V for t in range(9)]])
    right = successor_table({t: (t + 3) % V for t in range(V)}, V)
    loss, metrics = recipe.loss(right, (), rows, jax.random.key(0))
    assert loss < 1e-6 and metrics["accuracy"] == 1 and metrics["weight"] == 8
    wrong = successor_table({t: t for t in range(V)}, V)
    assert recipe.loss(wrong, (), rows, jax.random.key(0))[0] > 5


def test_a_perfect_predictor_loses_its_entropy():
    """The mean loss of the true law on its own samples is the law's entropy, to the error of the sample."""
    law = jax.nn.log_softmax(2 * jax.random.normal(jax.random.key(1), (V + 1, V)), -1)
    tokens = [jnp.zeros(64, jnp.int32)]
    for step in range(63):
        tokens.append(jax.random.categorical(jax.random.key(step), law[tokens[-1]]))
    rows = batch(jnp.stack(tokens, 1))
    loss, _ = target_recipe(TABLE).loss(law, (), rows, jax.random.key(0))
    own = -(np.exp(law) * np.asarray(law)).sum(-1)[np.asarray(rows.tokens[:, :-1])]
    assert abs(float(loss) - own.mean()) < 4 * 1.5 / np.sqrt(own.size)  # a nat and a half of spread a token

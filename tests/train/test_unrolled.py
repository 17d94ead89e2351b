"""R09: what an unrolled loss may look at is what drafting has."""

from unittest import mock

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters import mtp
from specjax.drafters.recipe import Batch
from specjax.types import Output, Params, Sequences

T, STEPS = 6, 3


class Spy:
    """Which keys each entry of each call of the module saw, and at which position it stood."""

    def __init__(self):
        self.seen, self.positions, self.columns = [], [], []

    def __enter__(self):
        real = mtp.apply

        def noted(config, params, embedded, hidden, k, v, at, positions, seen, columns=None):
            self.positions.append(np.asarray(positions))
            self.seen.append(np.asarray(seen))
            self.columns.append(0 if columns is None else columns.k.shape[3] + 1)  # with the one that is made now
            return real(config, params, embedded, hidden, k, v, at, positions, seen, columns)

        self.both = mock.patch.object(mtp, "apply", noted), jax.disable_jit()
        for one in self.both:
            one.__enter__()
        return self

    def __exit__(self, *args):
        for one in self.both:
            one.__exit__(*args)


def test_R09_an_unrolled_step_sees_what_drafting_sees():
    """Length 6, 3 steps: allowed keys [step, position, (step, position) of the key], and the rotary position of each entry.

    That logits are equal too, and so that a column is its own query's alone, is in tests/drafters/test_trained.py.
    """
    params = Params(h.target_params(), h.trained("mtp"))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, h.V, (1, T)), jnp.int32)
    hidden = jax.random.normal(jax.random.key(0), (1, T, h.TARGET.width))
    out = Output(jnp.zeros((1, T, 0)), hidden, jnp.zeros((1, T, 0, 1)))
    batch = Batch(tokens, jnp.ones((1, T), bool), jnp.zeros((1, T), jnp.int32), out)
    with Spy() as training:
        mtp.unrolled(h.MTP_CONFIG, params.drafter, h.TARGET, params.target, batch, STEPS)
    trained = np.zeros((STEPS, T, STEPS, T), bool)
    for j, (seen, columns) in enumerate(zip(training.seen, training.columns, strict=True)):
        trained[j, :, 0] = seen[0]
        trained[j, :, 1 : columns + 1] = np.eye(T, dtype=bool)[:, None]

    drafter, served, size = h.drafter("mtp", STEPS), np.zeros_like(trained), T + STEPS
    heat = h.sampling.stack([h.SamplingParams()] * T, h.V)
    with Spy() as drafting:
        state = drafter.init(params, 1, size)
        text = Sequences(jnp.zeros((1, size), jnp.int32), jnp.full(1, T + 1), None, None)
        drafter.absorb(params, state, text, out, jnp.full(1, T))
        many = drafter.init(params, T, size)  # row i has taken in the true entries 0 .. i
        many = many._replace(cache=many.cache._replace(length=jnp.arange(1, T + 1)))
        rows = Sequences(jnp.zeros((T, size), jnp.int32), jnp.arange(2, T + 2), None, heat)
        drafter.propose(lambda depth, width=1: jnp.zeros((T, width, h.V)), params, many, rows)
    assert len(training.seen) == len(drafting.seen) == STEPS
    for i in range(T):
        served[0, i, 0] = drafting.seen[0][0, i, :T]
        for j in range(1, STEPS):
            slots = drafting.seen[j][i, 0]
            served[j, i, 0, : i + 1] = slots[: i + 1]
            served[j, i, 1 : j + 1, i] = slots[i + 1 : i + 1 + j]
            assert not slots[i + 1 + j :].any()
            assert drafting.positions[j][i, 0] == training.positions[j][0, i] == i + j
    assert (drafting.positions[0] == training.positions[0]).all()
    np.testing.assert_array_equal(trained, served)
    assert trained.sum() == sum(i + 1 + j for i in range(T) for j in range(STEPS))

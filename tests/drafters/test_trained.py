"""What every drafter trained after the target promises: training sees what serving sees, and weights survive a disk."""

import functools
import json
import re

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decode, keys, load_drafter, sampling, timing
from specjax.drafters import files, hydra, medusa, parallel_heads
from specjax.drafters.dflash import loss as block_loss
from specjax.drafters.precision import is_matrix, lowered
from specjax.drafters.recipe import Batch, with_output
from specjax.drafters.siblings import SIBLINGS
from specjax.models.load import LM
from specjax.models.transformer import language_model
from specjax.sampling import SamplingParams
from specjax.types import Params, Sequences
from specjax.verify import RULES

K, T = 3, 16
TARGET_LM = LM(h.TARGET, h.target_params(), None, h.CONFIG)
each = pytest.mark.parametrize("name", h.RECIPES)


@functools.cache
def recipe(name):
    return h.RECIPES[name](K)


TEXT = np.random.default_rng(5).integers(0, h.V, (2, T)).astype(np.int32)
SEGMENTS = np.int32([[0] * 9 + [1] * 5 + [-1] * 2, [0] * 16])


@functools.cache
def loss_of(name):
    """(trainable, batch) -> loss, metrics; compiled."""
    return jax.jit(lambda trainable, batch: recipe(name).loss(trainable, h.target_params(), batch, jax.random.key(0)))


def batch(mask, tokens=TEXT, segments=SEGMENTS):
    given = Batch(jnp.asarray(tokens), jnp.asarray(mask), jnp.asarray(segments))
    return with_output(given, h.TARGET, h.target_params(), (0, 1))


# What training sees.


def prefill(drafter, params, rows):
    """The state after the prompts `rows`, at temperature 1."""
    tokens = np.zeros((len(rows), decode.capacity_for(64, drafter)), np.int32)
    for row, prompt in enumerate(rows):
        tokens[row, : len(prompt)] = prompt
    lengths = jnp.asarray([len(p) for p in rows], jnp.int32)
    heat = sampling.stack([SamplingParams(temperature=1.0)] * len(rows), h.V)
    key, static = keys.request_keys(jax.random.key(1), jnp.arange(len(rows))), dict(target=h.TARGET, drafter=drafter)

    @jax.jit
    def go(params, tokens):
        eos = jnp.full((len(rows), 1), -1, jnp.int32)
        state = decode.start(params, tokens, lengths, lengths + 8, eos, key, heat, **static)
        return decode.prefill(params, state, chunk=4, **static)

    return go(params, jnp.asarray(tokens))


@pytest.mark.parametrize("name", [*h.RECIPES, "eagle1, static", "eagle3, dynamic"])
def test_a_round_leaves_what_prefill_would(name):
    """The drafter's state after rounds of decoding is that of a fresh prefill of the text so far."""
    drafter, params = h.drafter(name), Params(h.target_params(), h.drafter_params(name))
    state = h.mixed(name, RULES_OF[name], rounds=2).state
    rows = [np.asarray(state.tokens)[row, :n].tolist() for row, n in enumerate(np.asarray(state.length))]
    fresh, held = prefill(drafter, params, rows).drafter, state.drafter
    if hasattr(held, "cache"):
        n = np.asarray(held.cache.length)
        np.testing.assert_array_equal(n, [len(row) - 1 for row in rows])
        np.testing.assert_array_equal(n, fresh.cache.length)
        for row, used in enumerate(n):
            for a, b in zip(held.cache.k + held.cache.v, fresh.cache.k + fresh.cache.v, strict=True):
                a, b = (np.asarray(x[row, 0].T if x.shape[2] == h.CONFIG.head_dim else x[row, 0])[:used] for x in (a, b))
                np.testing.assert_allclose(a, b, atol=1e-5)
        held, fresh = held[1:], fresh[1:]
    for a, b in zip(jax.tree.leaves(held), jax.tree.leaves(fresh), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
        assert np.abs(a).sum() > 1


@each
def test_batch_mates_change_nothing(name):
    """Tokens of a row, and how many of its drafts were accepted in each round, whatever the other rows hold."""
    result = h.mixed(name, RULES_OF[name])
    for rows in ([0, 4, 7], [3, 6, 9]):
        prompts = [prompt if row in rows else [2, 2, 3] for row, prompt in enumerate(h.MIXED)]
        heat = [t if row in rows else 0.7 for row, t in enumerate(h.MIXED_HEAT)]
        other = h.run(name, RULES_OF[name], prompts, temperature=heat, ids=range(10))
        assert [other.tokens[row] for row in rows] == [result.tokens[row] for row in rows]
        np.testing.assert_array_equal(other.accepted[rows], result.accepted[rows])


RULES_OF = {"blockwise": "rejection", "medusa": "target_match", "hydra": "recursive", "hydra, prefix": "recursive"}
RULES_OF |= {"parallel_heads": "rejection", "mtp": "rejection", **dict.fromkeys((*h.EAGLES, "peagle", *h.BLOCKS), "rejection")}
RULES_OF |= {"eagle1, static": "recursive", "eagle3, dynamic": "target_match"}
IID = {"paths": medusa.chain_paths(K), "siblings": SIBLINGS["iid"]}
CHAINS = {
    "medusa": medusa.medusa(h.TARGET, **IID),
    "hydra": h.drafter("hydra, chain"),
    "hydra, prefix": hydra.hydra(h.TARGET, prefix=h.LAYER_CONFIG, **IID),
    "parallel_heads": parallel_heads.parallel_heads(h.TARGET, config=h.LAYER_CONFIG, **IID),
    "mtp": h.drafter("mtp"),
    **{name: h.drafter(name) for name in (*h.EAGLES, "peagle", "dflash")},
}
SHARES = {"medusa": [0.8, 0.64, 0.512], "hydra": [0.8, 0.64, 0.512], "hydra, prefix": [0.8, 0.64, 0.512]}
SHARES |= {"parallel_heads": [1 / 3] * 3, "mtp": np.asarray([1, 0.6, 0.36]) / 1.96}
SHARES |= {**dict.fromkeys(h.EAGLES, [1, 0.8, 0.64]), "peagle": [1 / 3] * 3, "dflash": block_loss.shares(K, None)}


@functools.cache
def served(name):
    """log_q [T, K, V]: what `propose` draws from after the first n tokens of the text, if its drafts are what follows."""
    drafter, params = CHAINS[name], Params(h.target_params(), h.trained(name))
    line, sizes = TEXT[1], np.arange(2, T - K + 1)
    state = prefill(drafter, params, [line[:n].tolist() for n in sizes])

    def noise(depth, width=1):
        wanted = jnp.asarray(line)[jnp.asarray(sizes) - 1 + depth]
        return jnp.broadcast_to(1e6 * jax.nn.one_hot(wanted, h.V)[:, None], (len(sizes), width, h.V))

    sequences = Sequences(state.tokens, state.length, state.cache, state.sampling)
    draft = jax.jit(lambda p, d, s: drafter.propose(noise, p, d, s)[0])(params, state.drafter, sequences)
    assert (np.asarray(draft.tokens) == line[sizes[:, None] + np.arange(K)[None]]).all()
    return dict(zip(sizes.tolist(), np.asarray(draft.log_q), strict=True))


@pytest.mark.parametrize("name", CHAINS)
def test_training_and_serving_cannot_drift_apart(name):
    """The loss of one label is what the served laws give it: after m - i tokens, the i-th draft (from 0) is token m."""
    for m in (5, 9, 12):
        mask = np.zeros((2, T), bool)
        mask[1, m] = True
        loss, metrics = loss_of(name)(h.trained(name), batch(mask))
        nats = [-served(name)[m - i][i][TEXT[1, m]] for i in range(K)]
        np.testing.assert_allclose(float(loss), np.dot(SHARES[name], nats), rtol=2e-5)
        assert float(metrics["weight"]) == 1


def test_blockwise_trains_what_it_serves():
    """Its drafts have no law; each of them is right where training says that its head is."""
    drafter, params = h.drafter("blockwise"), Params(h.target_params(), h.trained("blockwise"))
    sizes = range(2, T - K + 1)
    state = prefill(drafter, params, [TEXT[1, :n].tolist() for n in sizes])
    sequences = Sequences(state.tokens, state.length, state.cache, state.sampling)
    tokens = np.asarray(jax.jit(lambda p, d, s: drafter.propose(None, p, d, s)[0])(params, state.drafter, sequences).tokens)
    for n in sizes:
        told = TEXT.copy()
        told[1, n : n + K] = tokens[n - 2]  # heads read h alone: the text after n is only a label
        mask = np.zeros((2, T), bool)
        mask[1, n : n + K] = True
        given = batch(mask)._replace(tokens=jnp.asarray(told))
        only = given._replace(output=given.output._replace(hidden=given.output.hidden.at[:, np.arange(T) != n - 2].set(0)))
        for i in range(K):
            one = np.zeros((2, T), bool)
            one[1, n + i] = True
            hit = loss_of("blockwise")(h.trained("blockwise"), only._replace(mask=jnp.asarray(one)))[1][f"accuracy_{i + 1}"]
            assert float(hit) == 1


# Labels.


@pytest.mark.parametrize("name", [name for name in h.RECIPES if name != "dspark"])  # which learns from that label's law
def test_the_loss_of_a_label_does_not_see_past_it(name):
    """Later tokens and states change nothing, and the gradient with respect to them is zero."""
    m, mask = 7, np.zeros((2, T), bool)
    mask[:, m] = True
    clean = batch(mask, segments=np.zeros((2, T), np.int32))
    tokens = clean.tokens.at[:, m + 1 :].set(3)
    parts = {"hidden": clean.output.hidden, "features": clean.output.features}
    spoiled = clean._replace(
        tokens=tokens, output=clean.output._replace(**{n: x.at[:, m - 1 :].set(7.0) for n, x in parts.items()})
    )
    loss = lambda given: loss_of(name)(h.trained(name), given)[0]
    assert float(loss(clean)) == float(loss(spoiled))
    gradient = jax.grad(lambda x: loss(clean._replace(output=clean.output._replace(**x))))(parts)
    size = np.abs(gradient["hidden"]).sum((0, 2)) + np.abs(gradient["features"]).sum((0, 2, 3))
    assert (size[m - 1 :] == 0).all() and (size[m - 1 - K : m - 1] > 0).all()


@each
def test_documents_do_not_see_each_other(name):
    """Two documents in a row weigh and cost what they do in rows of their own."""
    whole, mask = np.concatenate([TEXT[:1, :7], TEXT[1:, :9]], 1), np.ones((1, T), bool)
    together = loss_of(name)(h.trained(name), batch(mask, whole, np.int32([[0] * 7 + [1] * 9])))
    rows = np.zeros((2, T), np.int32)
    rows[0, :7], rows[1, :9] = TEXT[0, :7], TEXT[1, :9]
    inside = np.arange(T)[None] < np.asarray([[7], [9]])
    apart = loss_of(name)(h.trained(name), batch(inside, rows, np.where(inside, 0, -1).astype(np.int32)))
    for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(apart), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    assert float(together[1]["weight"]) == np.mean([5 + 7, 4 + 6, 3 + 5])


@each
def test_rows_split_into_batches_add_up(name):
    """weight x loss is a plain sum, so that accumulated batches are one batch."""
    mask = np.random.default_rng(0).random((2, T)) < 0.6
    whole = batch(mask)
    both, metrics = loss_of(name)(h.trained(name), whole)
    parts = [loss_of(name)(h.trained(name), jax.tree.map(lambda x, i=i: x[i : i + 1], whole)) for i in range(2)]
    np.testing.assert_allclose(sum(m["weight"] * x for x, m in parts), metrics["weight"] * both, rtol=1e-5)
    nothing, metrics = loss_of(name)(h.trained(name), batch(np.zeros_like(mask)))
    assert float(nothing) == 0 == float(metrics["weight"])


@each
def test_a_few_steps_of_descent_learn(name):
    """From the recipe's own beginning, plain gradient steps lower the loss on one batch, and every leaf moves."""
    one = recipe(name)
    begin = params = jax.jit(one.init)(jax.random.key(0), h.target_params())
    given = batch(np.ones((2, T), bool))
    step = jax.jit(jax.value_and_grad(lambda p: one.loss(p, h.target_params(), given, jax.random.key(0))[0]))
    first = float(step(params)[0])
    for _ in range(20):
        params = jax.tree.map(lambda x, g: x - 0.02 * g, params, step(params)[1])
    assert float(step(params)[0]) < 0.9 * first
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), begin, params)
    assert all(jax.tree.leaves(moved)), moved


# On disk.


@each
def test_saved_and_loaded_again(name, tmp_path):
    """Bit for bit, with fewer drafts than it was trained for too, and in half the bytes where that is asked for."""
    method = name.split(",")[0]
    loaded = load_drafter(method, TARGET_LM, num_draft=K, weights=h.saved(name))
    for a, b in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(h.trained(name)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert loaded.card.extra_parameters == sum(x.size for x in jax.tree.leaves(h.trained(name)))
    fewer = load_drafter(method, TARGET_LM, num_draft=2, weights=h.saved(name))
    assert fewer.drafter.depth == 2 and fewer.card.extra_parameters <= loaded.card.extra_parameters
    decode.check(h.TARGET, fewer.drafter, RULES[fewer.rule])
    config = json.loads((files.Path(h.saved(name)) / "config.json").read_text())
    files.save(tmp_path, h.trained(name), config, dtype=jnp.bfloat16)
    half = load_drafter(method, TARGET_LM, num_draft=K, weights=str(tmp_path))
    for path, x in files.flat(half.params).items():
        exact = files.flat(loaded.params)[path]
        np.testing.assert_array_equal(x, exact.astype(jnp.bfloat16).astype(jnp.float32) if is_matrix(path, x) else exact)
    assert half.card.extra_bytes == loaded.card.extra_bytes, "what a drafter is kept in is the target's affair"
    if name not in ("mtp", "peagle", *h.EAGLES, *h.BLOCKS):
        with pytest.raises(ValueError, match="num_draft 4 > 3 heads"):
            load_drafter(method, TARGET_LM, num_draft=4, weights=h.saved(name))


@each
def test_matrices_are_in_the_targets_numbers(name, tmp_path):
    """Beside a target in bfloat16 so are they, from a file in float16 too; the card counts their bytes, and they draft."""
    method, target = name.split(",")[0], lowered(h.target_params(), jnp.bfloat16)
    config = json.loads((files.Path(h.saved(name)) / "config.json").read_text())
    files.save(tmp_path, h.trained(name), config, dtype=jnp.float16)
    given = (h.target_params(), target)
    whole, half = (load_drafter(method, TARGET_LM._replace(params=p), num_draft=K, weights=str(tmp_path)) for p in given)
    assert {str(x.dtype) for path, x in files.flat(whole.params).items() if is_matrix(path, x)} == {"float32"}
    assert {str(x.dtype) for path, x in files.flat(half.params).items() if is_matrix(path, x)} == {"bfloat16"}
    assert half.card.extra_bytes < 0.6 * whole.card.extra_bytes
    assert half.drafter is whole.drafter and half.card.extra_parameters == whole.card.extra_parameters
    capacity, both = decode.capacity_for(12, half.drafter), Params(target, half.params)
    inputs = [jnp.asarray(x, jnp.int32) for x in ([[1] * capacity] * 2, [4, 5], [12, 12], [[-1], [-1]])]
    key, law = keys.request_keys(jax.random.key(0), jnp.arange(2)), sampling.stack([SamplingParams(temperature=1.0)] * 2, h.V)
    run = h.program(h.TARGET, half.drafter, RULES[half.rule])
    jax.eval_shape(run, both, *inputs, key, law, jnp.asarray(1))  # strict promotion refuses numbers that do not go together

    @jax.jit  # XLA for CPUs has fewer products outside of a loop, where `timing` drafts too
    def drafted(params, *given):
        static = dict(target=h.TARGET, drafter=half.drafter)
        return timing.proposed(params, decode.start(params, *given, **static), **static, rule=RULES[half.rule])[0]

    jax.block_until_ready(drafted(both, *inputs, key, law))


@each
def test_weights_that_do_not_fit_are_refused(name, tmp_path):
    """None, another method's, a missing tensor, one too many, another target's, a damaged file: one line each."""
    method = name.split(",")[0]

    def refused(message, kind=ValueError, lm=TARGET_LM, weights=str(tmp_path)):
        with pytest.raises(kind, match=re.escape(message)) as error:
            load_drafter(method, lm, num_draft=K, weights=weights)
        assert "\n" not in str(error.value)

    home = "eagle" if "eagle" in name else "dflash" if name in h.BLOCKS else method
    refused(f"train specjax.drafters.{home}.recipe", weights=None)
    refused("no config.json", FileNotFoundError)
    config = json.loads((files.Path(h.saved(name)) / "config.json").read_text())
    files.save(tmp_path, h.trained(name), {**config, "method": "other"})
    refused("holds a drafter of method 'other'")
    flat = files.flat(h.trained(name))
    files.save(tmp_path, {**h.trained(name), "extra": jnp.zeros(3)}, config)
    refused("1 not used: extra")
    files.save(tmp_path, {n: x for n, x in flat.items() if n != sorted(flat)[0]}, config)
    refused("missing")
    other = language_model(h.CONFIG._replace(width=24))
    refused("24", lm=LM(other, jax.eval_shape(other.init, jax.random.key(0)), None, None), weights=h.saved(name))
    (tmp_path / files.WEIGHTS).write_bytes(b"\x10\0\0\0\0\0\0\0{")
    refused("damaged safetensors")

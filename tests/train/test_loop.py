"""The loop: resumable bit for bit, honest about weights, and its tau is that of decoding."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import CONFIG, PROMPTS, SMALL, TARGET, V, small_params, target_params

from specjax import checkpoint
from specjax.drafters.objectives import chunked, kl, mean
from specjax.drafters.recipe import Batch, Recipe, forward, labels, with_output
from specjax.drafters.small import small
from specjax.models.transformer import TransformerConfig, language_model
from specjax.train import corpus
from specjax.train.evaluate import acceptance, decoding, held_out
from specjax.train.export import save_directory
from specjax.train.features import cached, estimate
from specjax.train.loop import adamw as optimizer_of
from specjax.train.loop import begin, fit, train_step
from specjax.train.packing import batches, then
from specjax.train.settings import Settings, rates
from specjax.train.target import target_recipe
from specjax.types import Params
from specjax.verify import RULES

SETTINGS = Settings(steps=6, peak=1e-2, warmup=2, evaluate_every=3, log_every=2, save_seconds=0.0)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """24 documents of 3 to 14 tokens; every third token is not to be predicted."""
    rng = np.random.default_rng(0)
    items = [corpus.Document(rng.integers(0, V, n).tolist(), [k % 3 > 0 for k in range(n)]) for n in rng.integers(3, 15, 24)]
    return corpus.build(tmp_path_factory.mktemp("text"), 24, lambda n: [items[i] for i in n], provenance={})


@pytest.fixture(scope="module")
def rows(text):
    return batches(text, length=12, batch=2)


def distil():
    """The small model learns the target's law."""
    start = small_params()

    def loss(params, target_params, batch, key):
        hidden, weights = forward(SMALL, params, batch).hidden, labels(batch)[1]
        laws = lambda x: kl(SMALL.unembed(params, x[0]), None, TARGET.unembed(target_params, x[1]))
        value = mean(chunked(laws, (hidden, batch.output.hidden)), weights)
        return value, {"weight": weights.sum(), "seen": batch.output.features.shape[2] * jnp.ones(())}

    return Recipe(lambda key, target: start, loss, small(SMALL, num_draft=3), features=(0,))


def same_bits(a, b):
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b)))


def lines(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def target_of(recipe):
    return {} if recipe.drafter is None else {"target": TARGET, "target_params": target_params()}


@pytest.mark.parametrize("recipe", [target_recipe(SMALL), distil()], ids=["target", "drafter"])
def test_killed_and_resumed(recipe, rows, tmp_path):
    """Stopped while step 4 is reported, begun again: parameters, learning rates and journal of a run that never stopped."""
    judge = (held_out(recipe, rows, steps=2, target=target_of(recipe).get("target")),)
    settings = SETTINGS._replace(accumulate=2)
    whole = fit(recipe, rows, settings, tmp_path / "whole", evaluate=judge, **target_of(recipe))

    def kill(report):
        if report.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(recipe, rows, settings, tmp_path / "cut", evaluate=judge, progress=kill, **target_of(recipe))
    reports = []
    again = fit(recipe, rows, settings, tmp_path / "cut", evaluate=judge, progress=reports.append, **target_of(recipe))
    assert same_bits(again, whole)
    assert reports[0].step == 4 and reports[-1].step == reports[-1].steps == 6
    a, b = lines(tmp_path / "whole"), lines(tmp_path / "cut")
    timed = ("tokens_per_second", "rate", "seconds")
    strip = lambda found: [{k: v for k, v in line.items() if k not in timed} for line in found]
    assert [line["step"] for line in b] == list(range(7))  # a report before every checkpoint
    assert strip(a) == strip(b)
    assert a[0]["held_out_loss"] > a[-1]["held_out_loss"]


def test_another_recipe_is_refused(rows, tmp_path):
    fit(target_recipe(SMALL), rows, SETTINGS._replace(steps=1), tmp_path)
    with pytest.raises(ValueError, match="missing.*layer_1"):
        fit(target_recipe(TARGET), rows, SETTINGS, tmp_path)


def step_with(recipe, parts, settings=SETTINGS):
    """One update from stacked parts: (before, after, metrics)."""
    state = begin(recipe, (), settings, Path("/nowhere"))
    run = jax.jit(
        lambda s, p: train_step(s, (), p, jax.random.key(0), recipe=recipe, target=None, optimizer=optimizer_of(settings))
    )
    state = run(state, parts)[0]  # the rate of the first update is 0
    after, metrics = run(state, parts)
    return state, after, metrics


def stack(*parts):
    return jax.tree.map(lambda *x: jnp.stack(x), *parts)


def uneven():
    """One row with 1 label and one with 15."""
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, V, (2, 16)), jnp.int32)
    mask = jnp.asarray([[0, 1] + [0] * 14, [0] + [1] * 15], bool)
    return Batch(tokens, mask, jnp.zeros((2, 16), jnp.int32))


def test_R19_accumulation_weighs_by_labels():
    """1 and 15 labels, as one batch or as two."""
    recipe, batch = target_recipe(SMALL), uneven()
    halves = [jax.tree.map(lambda x, i=i: x[i : i + 1], batch) for i in range(2)]
    _, whole, a = step_with(recipe, stack(batch))
    _, parts, b = step_with(recipe, stack(*halves))
    assert a["weight"] == b["weight"] == 16 and abs(a["loss"] - b["loss"]) < 1e-6
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), whole.params, parts.params)


def test_R19_the_logged_loss_is_a_mean_over_labels(rows, tmp_path):
    """Two updates with 1 and 15 labels, the first at rate 0: their line is the loss of both rows at the first parameters."""
    recipe, batch = target_recipe(SMALL), uneven()
    parts = rows._replace(at=lambda step: jax.tree.map(lambda x: x[step : step + 1], batch))
    fit(recipe, parts, SETTINGS._replace(steps=2, warmup=1, save_seconds=300), tmp_path)
    params = jax.jit(recipe.init)(jax.random.key(0), ())
    expected = [float(recipe.loss(params, (), x, jax.random.key(0))[0]) for x in (batch, parts.at(0), parts.at(1))]
    found = lines(tmp_path)[-1]
    assert abs(found["loss"] - expected[0]) < 1e-5 and abs(np.mean(expected[1:]) - expected[0]) > 1e-2
    assert found["weight"] == 8


def test_R11_a_batch_without_labels_teaches_nothing(rows, text, tmp_path):
    """Loss 0, parameters as they were, counted; among others it does not count."""
    recipe = target_recipe(SMALL)
    empty = rows.at(0)._replace(mask=jnp.zeros((2, 12), bool))
    before, after, metrics = step_with(recipe, stack(empty))
    assert metrics["loss"] == 0 and metrics["weight"] == 0 and metrics["gradient_norm"] == 0
    assert same_bits(before.params, after.params) and same_bits(before.optimizer, after.optimizer)
    _, alone, _ = step_with(recipe, stack(rows.at(0)))
    _, among, _ = step_with(recipe, stack(rows.at(0), empty))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5), alone.params, among.params)
    odd = rows._replace(at=lambda step: empty if step == 1 else rows.at(step))
    fit(recipe, odd, SETTINGS._replace(steps=2), tmp_path)
    assert lines(tmp_path)[-1]["empty"] == 1


def test_nan_stops_with_step_and_rows(rows, tmp_path):
    """And what is on disk is from before it."""
    recipe = target_recipe(SMALL)
    bad = rows.at(3)

    def loss(params, target_params, batch, key):
        value, metrics = recipe.loss(params, target_params, batch, key)
        return jnp.where((batch.tokens == bad.tokens).all(), jnp.nan, value), metrics

    with pytest.raises(FloatingPointError, match=r"step 3: loss nan, gradient norm .*, on rows \[\d+, \d+\], of documents \["):
        fit(recipe._replace(loss=loss), rows, SETTINGS._replace(log_every=6), tmp_path)
    state = begin(recipe, (), SETTINGS, tmp_path)
    assert int(state.step) <= 3 and all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_R13_ten_and_ten_is_twenty(rows, tmp_path):
    """Warm-up of 4: a run that is killed after 10 steps goes on with the learning rates and parameters of one that is not."""
    settings, rate = SETTINGS._replace(steps=20, warmup=4, log_every=1, evaluate_every=99), []

    def note(report):
        rate.append((report.step, report.metrics.get("rate")))

    def kill(report):
        note(report)
        if report.step == 11:  # step 10 is on disk
            raise KeyboardInterrupt

    whole = fit(target_recipe(SMALL), rows, settings, tmp_path / "whole", progress=note)
    expected, rate[:] = dict(rate), []
    with pytest.raises(KeyboardInterrupt):
        fit(target_recipe(SMALL), rows, settings, tmp_path / "cut", progress=kill)
    first, rate[:] = dict(rate), []
    state = begin(target_recipe(SMALL), (), settings, tmp_path / "cut")
    counts = [int(x) for x in jax.tree.leaves(state.optimizer) if jnp.issubdtype(x.dtype, jnp.integer)]
    assert int(state.step) == 10 and counts and set(counts) == {10}  # what the optimizer's schedule is asked for
    again = fit(target_recipe(SMALL), rows, settings, tmp_path / "cut", progress=note)
    assert min(dict(rate)) == 11
    schedule = rates(settings)
    for found in (expected, first | dict(rate)):
        known = {step: x for step, x in found.items() if x is not None}
        assert len(known) >= 18
        np.testing.assert_allclose(list(known.values()), [float(schedule(step - 1)) for step in known], rtol=1e-6)
    assert same_bits(again, whole)
    checkpoint.save(tmp_path / "bare" / "checkpoints", 10, state._asdict() | {"optimizer": {}})
    with pytest.raises(ValueError, match="missing: optimizer"):  # without the optimizer's state there is no going on
        begin(target_recipe(SMALL), (), settings, tmp_path / "bare")


def test_R19_rates():
    """Never above the peak; a resumed run asks the same function of the same step."""
    rate = rates(Settings(steps=30, peak=0.5, warmup=5))
    values = np.asarray([float(rate(n)) for n in range(31)])
    assert values.argmax() == 5 and values.max() == 0.5 and values[0] == 0 and abs(values[30] - 0.05) < 1e-6
    assert (np.diff(values[:6]) > 0).all() and (np.diff(values[5:]) < 0).all()


def test_R15_no_leak_of_the_future(rows):
    """What stands at t does not depend on later tokens, nor on another document of its row."""
    batch = rows.at(0)._replace(segments=jnp.asarray([[0] * 12, [0] * 5 + [1] * 7], jnp.int32))
    run = jax.jit(lambda tokens: forward(TARGET, target_params(), batch._replace(tokens=tokens), (0, 1)))
    base = run(batch.tokens)
    for changed in range(12):
        other = run(batch.tokens.at[:, changed].set((batch.tokens[:, changed] + 1) % V))
        for a, b in zip(jax.tree.leaves(base), jax.tree.leaves(other), strict=True):
            differs = np.asarray(a != b).reshape(2, 12, -1).any(-1)
            assert not differs[:, :changed].any() and differs[:, changed].all()
            if changed < 5:
                assert not differs[1, 5:].any()


def test_R15_packed_documents_count_as_separate_ones():
    """7 and 9 tokens in one row of 16, or in two rows: same loss, same gradient."""
    rng, recipe = np.random.default_rng(1), target_recipe(TARGET)
    tokens = jnp.asarray(rng.integers(0, V, (1, 16)), jnp.int32)
    packed = Batch(tokens, jnp.ones((1, 16), bool), jnp.asarray([[0] * 7 + [1] * 9], jnp.int32))
    alone = jnp.zeros((2, 16), jnp.int32).at[0, :7].set(tokens[0, :7]).at[1, :9].set(tokens[0, 7:])
    there = jnp.arange(16)[None] < jnp.asarray([[7], [9]])
    separate = Batch(alone, there, jnp.where(there, 0, -1))
    loss = jax.jit(jax.value_and_grad(lambda p, b: recipe.loss(p, (), b, jax.random.key(0))[0]))
    a, b = loss(target_params(), packed), loss(target_params(), separate)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), a, b)


def test_features_on_disk_are_those_of_the_pass(rows, tmp_path, monkeypatch):
    """Interrupted and finished; refused where the disk lacks the bytes that were announced."""
    live = with_output(rows.at(7), TARGET, target_params(), (0, 1)).output
    arguments = dict(features=(0, 1), dtype=np.float32)

    def kill(done, total):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path, rows, TARGET, target_params(), progress=kill, **arguments)
    done = []
    found = cached(tmp_path, rows, TARGET, target_params(), progress=lambda n, total: done.append(n), **arguments)
    assert done[:2] == [6, 8]  # rows, two a chunk: 4 were there
    output = found.at(7).output
    np.testing.assert_allclose(output.hidden, live.hidden, atol=1e-5)
    np.testing.assert_allclose(output.features, live.features, atol=1e-5)
    bytes_of_arrays = sum((tmp_path / f"{n}.npy").stat().st_size for n in ("hidden", "features"))
    assert abs(bytes_of_arrays - estimate(rows, 12, TARGET.width, 2, np.float32)) < 1000
    for fewer in ((1,), (1, 0), ()):  # a drafter of other layers reads the same files
        part = cached(tmp_path, rows, TARGET, target_params(), features=fewer, dtype=np.float32).at(7).output
        np.testing.assert_array_equal(part.features, output.features[:, :, list(fewer)])
        np.testing.assert_array_equal(part.hidden, output.hidden)
    cached(tmp_path / "one", rows, TARGET, target_params(), features=(0,))
    with pytest.raises(ValueError, match="was begun with another layers, shapes"):
        cached(tmp_path / "one", rows, TARGET, target_params(), features=(0, 1))
    monkeypatch.setattr("shutil.disk_usage", lambda path: (0, 0, 10))
    with pytest.raises(OSError, match="GB"):
        cached(tmp_path / "full", rows, TARGET, target_params())


def test_features_of_another_seed_and_batch(text, rows, tmp_path):
    """Begun by a run that was killed, finished by one that takes other rows first: no row is left out."""

    def kill(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path, rows, TARGET, target_params(), progress=kill, dtype=np.float32)
    other = batches(text, length=12, batch=3, seed=5)
    found = cached(tmp_path, other, TARGET, target_params(), dtype=np.float32)
    again = cached(tmp_path, rows, TARGET, target_params(), dtype=np.float32)
    whole = jax.jit(lambda batch: with_output(batch, TARGET, target_params()).output.hidden)
    for kept, live in ((found, other), (again, rows)):
        for step in range(-(-live.count // len(live.rows(0)))):
            np.testing.assert_allclose(kept.at(step).output.hidden, whole(live.at(step)), atol=1e-5)


def test_features_of_something_else_are_refused(text, rows, tmp_path):
    """Other tokens, other borders, other parameters, another config: each of the very same shapes."""
    cached(tmp_path, rows, TARGET, target_params(), config=CONFIG)
    tokens, starts = np.array(text.tokens), np.array(text.starts)
    tokens[3] += 1
    starts[np.argmax(np.diff(starts) > 3) + 1] -= 1
    tuned = {**target_params(), "norm": jax.tree.map(lambda x: x * 1.01, target_params()["norm"])}
    others = (
        batches(text._replace(tokens=tokens), length=12, batch=2),
        batches(text._replace(starts=starts), length=12, batch=2),
    )
    assert {other.count for other in others} == {rows.count}
    for changed, params, config, message in (
        (others[0], target_params(), CONFIG, "rows"),
        (others[1], target_params(), CONFIG, "rows"),
        (rows, tuned, CONFIG, "target"),
        (rows, target_params(), CONFIG._replace(rope_theta=1e6), "target"),
    ):
        with pytest.raises(ValueError, match=f"was begun with another {message}: choose an empty directory"):
            cached(tmp_path, changed, TARGET, params, config=config)
    with pytest.raises(ValueError, match="rows of several lengths"):
        cached(tmp_path, then(rows, 2, others[0]), TARGET, target_params())


def test_settings_that_make_no_run(rows, tmp_path):
    for name, value in (("seed", -1), ("log_every", 0), ("keep", 0), ("accumulate", 0), ("floor", 2.0), ("peak", float("inf"))):
        with pytest.raises(ValueError, match=name):
            fit(distil(), rows, SETTINGS._replace(**{name: value}), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_weight_decay_is_for_matrices():
    """A stacked bias is a vector: at zero gradient it stays as it is."""
    optimizer = optimizer_of(SETTINGS._replace(warmup=0))
    params = {"head": {"kernel": jnp.ones((2, 3, 3)), "bias": jnp.ones((2, 3)), "up_bias": jnp.ones((2, 3))}, "v": jnp.ones(3)}
    with jax.numpy_dtype_promotion("standard"):
        found, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    still = jax.tree.map(lambda x: not x.any(), found)
    assert still == {"head": {"kernel": False, "bias": True, "up_bias": True}, "v": True}


def test_tau_is_that_of_decoding():
    """A drafter equal to its target is always accepted; a bad one is not."""
    perfect = Recipe(lambda *a: (), lambda *a: (), small(TARGET, num_draft=3))
    run = acceptance(perfect, PROMPTS, target=TARGET, rule=RULES["rejection"], new_tokens=12)
    found = run(target_params(), target_params())
    assert found["tau_t0"] > 3.2 and found["accepted_t0_1"] > 0.9  # the last round of a row is cut
    heats = (0.0, 1.0, 5.0)
    worse = acceptance(distil(), PROMPTS, target=TARGET, rule=RULES["rejection"], new_tokens=12, temperatures=heats)
    at = worse(small_params(), target_params())
    assert all(1 <= at[f"tau_t{t:g}"] < found["tau_t0"] for t in heats)
    assert len({at[f"accepted_t{t:g}_1"] for t in heats}) == 3, "each at its own temperature"
    with pytest.raises(ValueError, match="nothing that drafts"):
        acceptance(target_recipe(SMALL), PROMPTS, target=TARGET, rule=RULES["rejection"])
    with pytest.raises(ValueError, match="temperature"):
        acceptance(perfect, PROMPTS, target=TARGET, rule=RULES["rejection"], temperatures=(0.0, -1.0))
    assert distil().assemble(1, 2) == Params(2, 1)


def test_one_program_decodes_at_every_temperature():
    traced, drafter = [], small(TARGET, num_draft=2)
    noted = drafter._replace(propose=lambda *given: traced.append(given) or drafter.propose(*given))
    decoded = decoding(PROMPTS, target=TARGET, drafter=noted, rule=RULES["rejection"], new_tokens=4)
    both = Params(target_params(), target_params())
    counts = [(decoded(both, heat), len(traced))[1] for heat in (0.0, 3.0)]
    assert counts[0] == counts[1] > 0


def test_export_reads_back(tmp_path):
    """Grouped heads, tied and not, biases and query norms: what is loaded is what was trained, rounded."""
    from helpers import tokenizer

    from specjax.models.load import load

    plain = TransformerConfig(32, 16, 2, 4, 2, 8, 32, 64)
    for name, config in {
        "tied": plain._replace(tied=True), "llama": plain, "qwen2": plain._replace(attention_bias=True),
        "qwen3": plain._replace(qk_norm=True),
    }.items():  # fmt: skip
        params = jax.jit(language_model(config).init)(jax.random.key(0))
        lm = load(save_directory(tmp_path / name, config, params, tokenizer()))
        assert lm.config == config and lm.tokenizer.eos_ids == (31,)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, np.asarray(b).astype(np.float16)), lm.params, params)
    with pytest.raises(ValueError, match="cannot say all of"):
        save_directory(tmp_path, plain._replace(window=4, sliding=(True, False)), params, tokenizer())
    huge = jax.tree.map(lambda x: x * 1e9, jax.jit(language_model(plain).init)(jax.random.key(0)))
    with pytest.raises(ValueError, match="NaN or what float16 cannot"):
        save_directory(tmp_path, plain, huge, tokenizer())

"""Targets trained with what drafts for them: losses by hand, what is served is what is trained, published and read again."""

import functools

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references as ref

from specjax import load, load_drafter
from specjax.drafters import medusa, mtp, objectives
from specjax.drafters.recipe import Batch, with_output
from specjax.models.transformer import language_model
from specjax.train import corpus, joint, lora, testbed
from specjax.train.evaluate import acceptance, held_out
from specjax.train.loop import fit
from specjax.train.packing import batches
from specjax.train.settings import Settings
from specjax.train.target import target_recipe
from specjax.types import Params
from specjax.verify import RULES

K, RANK, ALPHA, SHARE = 3, 2, 3.0, 0.5
HEADS_SHARES = [SHARE * 0.8**i for i in (1, 2, 3)]


@functools.cache
def medusa_2(target_objective=objectives.hard, objective=objectives.hard):
    options = dict(rank=RANK, alpha=ALPHA, heads_weight=SHARE, objective=objective, target_objective=target_objective)
    return joint.medusa_2(h.TARGET, num_draft=K, heads=h.trained("medusa"), **options)


@functools.cache
def joint_mtp():
    return joint.joint_mtp(h.TARGET, num_draft=K, config=h.MTP_CONFIG)


RECIPES = {"medusa_2": medusa_2, "joint_mtp": joint_mtp}
each = pytest.mark.parametrize("name", RECIPES)


@functools.cache
def trainable(name):
    """Parameters in the midst of training: nothing in them is zero, and the target is another one."""
    if name == "joint_mtp":
        return {"target": h.target_params(), "mtp": h.trained("mtp")}
    params = jax.jit(medusa_2().init)(jax.random.key(0), h.target_params())
    leaves, treedef = jax.tree.flatten(params["adapters"])
    rng = np.random.default_rng(0)
    leaves = [x + jnp.asarray(0.2 * rng.standard_normal(x.shape), jnp.float32) for x in leaves]
    return {**params, "adapters": treedef.unflatten(leaves)}


@functools.cache
def pair(name):
    return RECIPES[name]().assemble(trainable(name), h.target_params())


# Adapters.


def test_adapters_begin_as_nothing_and_merge_by_hand():
    """Bit for bit the target at first; then W + alpha / rank * A B in every kernel of the layers, and nowhere else."""
    begun = jax.jit(functools.partial(lora.init, rank=RANK))(jax.random.key(0), h.target_params())
    same = lambda a, b: jax.tree.all(jax.tree.map(np.array_equal, a, b))
    assert same(lora.merge(h.target_params(), begun, alpha=ALPHA), h.target_params())
    assert len(jax.tree.leaves(begun)) == 2 * 4 * 2
    assert np.unique(np.concatenate([x.ravel() for x in jax.tree.leaves(begun)])).size > 300  # no two matrices alike
    own, tuned = trainable("medusa_2")["adapters"], pair("medusa_2").target
    for path, x in jax.tree_util.tree_leaves_with_path(ref.double(tuned)):
        *place, last = [part.key for part in path]
        before = ref.double(functools.reduce(lambda tree, part: tree[part], [*place, last], h.target_params()))
        if last == "kernel":
            ab = ref.double(functools.reduce(lambda tree, part: tree[part], place, own))
            assert np.abs(x - before).max() > 0.01
            before = before + ALPHA / RANK * ab["a"] @ ab["b"]
        np.testing.assert_allclose(x, before, rtol=1e-5, atol=1e-6)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), h.target_params())
    assert {x.dtype for x in jax.tree.leaves(lora.merge(half, own, alpha=ALPHA))} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(("params", "rank"), [(jnp.zeros((4, 3)), 2), (h.target_params(), 0)])
def test_what_cannot_be_adapted(params, rank):
    with pytest.raises(ValueError, match="adapters need a rank of 1 or more and a transformer"):
        lora.init(jax.random.key(0), params, rank=rank)


# Losses.


def by_hand(row, shares, nats):
    """(the model's nats + sum of shares[i] x nats of head i) / the model's labels; row(b, t, i) -> logits, its own at 0."""
    total, count = 0.0, 0
    for b, t in np.ndindex(ref.TOKENS.shape):
        for i, share in enumerate([1.0, *shares]):
            goal = t + 1 + i
            if goal < ref.TOKENS.shape[1] and ref.MASK[b, goal] and ref.SEGMENTS[b, goal] == ref.SEGMENTS[b, t] >= 0:
                total, count = total + share * nats[min(i, 1)](row(b, t, i), b, goal), count + (i == 0)
    return total / count


def hidden_by_hand(p):
    return {(b, part.start + t): x for b, part in ref.DOCUMENTS for t, x in enumerate(ref.states(p, ref.TOKENS[b, part]))}


@pytest.mark.parametrize("target_objective", ["hard", "kl"])
def test_loss_and_gradient_of_medusa_2(target_objective):
    frozen = ref.double(h.target_params())

    def tuned(params, own):
        """W + alpha / rank * A B at every pair."""
        if "a" in own:
            return {"kernel": params["kernel"] + ALPHA / RANK * own["a"] @ own["b"]}
        return {name: tuned(x, own[name]) if name in own else x for name, x in params.items()}

    def reference(p):
        hidden, heads = hidden_by_hand(tuned(frozen, p["adapters"])), p["heads"]

        def row(b, t, i):
            x = hidden[b, t]
            if i == 0:
                return x @ frozen["head"]
            for j in range(2):
                x = x + ref.silu(x @ heads["kernel"][i - 1, j] + heads["bias"][i - 1, j])
            return x @ heads["head"][i - 1]

        return by_hand(row, HEADS_SHARES, (getattr(ref, target_objective), ref.hard))

    ref.check(medusa_2(getattr(objectives, target_objective)), trainable("medusa_2"), reference)


def test_loss_and_gradient_of_a_joint_module():
    """The trunk learns from the module too, and so do the embedding and the head that they share."""

    def reference(p):
        own, found = p["target"], {}
        hidden = hidden_by_hand(own)
        for b, part in ref.DOCUMENTS:
            states = [hidden[b, part.start + t] for t in range(part.stop - part.start)]
            found |= {(b, part.start + t, 0): x for t, x in enumerate(states)}
            normed = ref.entries(p["mtp"], h.MTP_CONFIG, own["embedding"], ref.TOKENS[b, part], states, K)
            found |= {(b, part.start + t, 1 + j): x for t, row in enumerate(normed) for j, x in enumerate(row)}
        return by_hand(lambda *at: found[at] @ own["head"], [0.3 / K] * K, (ref.hard, ref.hard))

    ref.check(joint_mtp(), trainable("joint_mtp"), reference)


def test_heads_learn_the_law_of_the_tuned_target():
    """With a law for objective: that of the target as it is, and no gradient passes through it."""
    one, frozen = medusa_2(objective=objectives.kl), ref.batch()
    tuned = pair("medusa_2")
    alone = medusa.recipe(h.TARGET, num_draft=K, objective=objectives.kl)
    now = with_output(frozen._replace(output=()), h.TARGET, tuned.target)
    own, m = target_recipe(h.TARGET).loss(tuned.target, (), now, None)
    heads, n = alone.loss(tuned.drafter, tuned.target, now, None)
    whole, _ = one.loss(trainable("medusa_2"), h.target_params(), frozen, None)
    np.testing.assert_allclose(float(whole), float(own + SHARE * heads * n["weight"] / m["weight"]), rtol=1e-5)


@pytest.mark.parametrize("target_objective", [objectives.hard, objectives.kl])
def test_the_frozen_target_learns_nothing(target_objective):
    """Its states are read by self-distillation alone, and get no gradient from it."""
    given = ref.batch()
    hidden = given.output.hidden

    def loss(hidden):
        output = given.output._replace(hidden=hidden)
        return medusa_2(target_objective).loss(trainable("medusa_2"), h.target_params(), given._replace(output=output), None)[0]

    value, gradient = jax.jit(jax.value_and_grad(loss))(hidden)
    assert not np.any(gradient)
    assert (float(value) != float(jax.jit(loss)(2 * hidden))) == (target_objective is objectives.kl)


@each
def test_rows_split_into_batches_add_up(name):
    """weight x loss is a plain sum, with rows of few labels too; without labels there is nothing to learn."""
    loss = jax.jit(lambda given: RECIPES[name]().loss(trainable(name), h.target_params(), given, jax.random.key(0)))
    mask = ref.MASK.copy()
    mask[1, 3:] = False
    whole = ref.batch()._replace(mask=jnp.asarray(mask))
    both, metrics = loss(whole)
    parts = [loss(jax.tree.map(lambda x, i=i: x[i : i + 1], whole)) for i in range(2)]
    np.testing.assert_allclose(sum(m["weight"] * x for x, m in parts), metrics["weight"] * both, rtol=1e-5)
    assert [float(m["weight"]) for _, m in parts] == [ref.MASK[0, 1:6].sum() + ref.MASK[0, 7:].sum(), ref.MASK[1, 1:3].sum()]
    nothing, metrics = loss(whole._replace(mask=jnp.zeros_like(whole.mask)))
    assert float(nothing) == 0 == float(metrics["weight"])


# What is trained is what is served.


@functools.cache
def told(name):
    """Greedy decoding with both parts, after a few steps on what the target says, and the target's own plain decoding."""
    recipe, params = RECIPES[name](), trainable(name)
    step = jax.jit(jax.value_and_grad(lambda p, rows: recipe.loss(p, h.target_params(), rows, jax.random.key(0))[0]))
    for _ in range(15):
        params = jax.tree.map(lambda x, g: x - 0.1 * g, params, step(params, ref.batch())[1])
    both = recipe.assemble(params, h.target_params())
    plain = h.generate(h.drafter("plain"), "rejection", h.PROMPTS, params=Params(both.target))
    return params, h.generate(recipe.drafter, "rejection", h.PROMPTS, params=both), plain


@each
def test_decoding_gives_the_tuned_targets_text(name):
    """Not that of the target before."""
    _, run, plain = told(name)
    assert run.tokens == plain.tokens and run.reasons == plain.reasons
    assert run.tokens != [row[: h.NEW] for row in h.reference().tokens[: len(h.PROMPTS)]]


@each
def test_what_training_calls_right_is_what_decoding_accepts(name):
    """In every round the accepted tokens are those that teacher-forced heads get right, from the first one on."""
    params, run, _ = told(name)
    lines = [[*prompt, *new] for prompt, new in zip(h.PROMPTS, run.tokens, strict=True)]
    width = max(map(len, lines))
    inside = np.arange(width)[None] < np.asarray([len(line) for line in lines])[:, None]
    tokens = np.stack([np.pad(line, (0, width - len(line))) for line in lines]).astype(np.int32)
    rows = Batch(jnp.asarray(tokens), jnp.zeros(inside.shape, bool), jnp.asarray(np.where(inside, 0, -1).astype(np.int32)))

    @jax.jit
    def hits(params, masks):  # [M, B, T], one label in each -> [K, M]
        given = with_output(rows, h.TARGET, h.target_params())
        one = lambda mask: RECIPES[name]().loss(params, h.target_params(), given._replace(mask=mask), jax.random.key(0))[1]
        found = jax.lax.map(one, masks)
        return jnp.stack([found[f"accuracy_{i + 1}"] for i in range(K)])

    places = [(b, m) for b in range(len(lines)) for m in range(1, len(lines[b]))]
    masks = np.zeros((len(places), *inside.shape), bool)
    masks[np.arange(len(places)), *np.transpose(places)] = True
    right = dict(zip(places, np.asarray(hits(params, jnp.asarray(masks))).T, strict=True))
    seen = []
    for b, prompt in enumerate(h.PROMPTS):
        n = len(prompt)
        for emitted, accepted in zip(run.emitted[b], run.accepted[b], strict=True):
            if n >= 2 and emitted and n + K < len(lines[b]):
                wanted = [right[b, n + i][i] for i in range(K)]
                assert accepted == np.cumprod(wanted).sum(), (b, n)
                seen.append(int(accepted))
            n += emitted
    assert {0, 1, 2} <= set(seen)


# Whole runs.


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    rng = np.random.default_rng(0)
    items = [corpus.Document(rng.integers(0, h.V, n).tolist()) for n in rng.integers(3, 15, 24)]
    text = corpus.build(tmp_path_factory.mktemp("text"), 24, lambda n: [items[i] for i in n], provenance={})
    return batches(text, length=12, batch=2)


@each
def test_a_run(name, rows, tmp_path):
    """Both parts learn; tau before the first step is that of the target as it was."""
    recipe = RECIPES[name]()
    frozen = {"target": h.TARGET, "target_params": h.target_params()} if name == "medusa_2" else {}
    judges = (
        held_out(recipe, rows, steps=2, target=frozen.get("target")),
        acceptance(recipe, h.PROMPTS, target=h.TARGET, rule=RULES["rejection"], new_tokens=16),
    )
    found = {}
    settings = Settings(steps=8, peak=1e-2, warmup=2, evaluate_every=8, log_every=4)
    collect = lambda report: found.update({report.step: report.metrics})
    params = fit(recipe, rows, settings, tmp_path, evaluate=judges, progress=collect, **frozen)
    begun = jax.jit(recipe.init)(jax.random.key(0), frozen.get("target_params", ()))
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), begun, params)
    assert all(jax.tree.leaves(moved)), moved
    assert found[8]["held_out_loss"] < found[0]["held_out_loss"]
    assert found[8]["held_out_target_loss"] < found[0]["held_out_target_loss"]
    if name == "medusa_2":
        before = h.generate(
            recipe.drafter, "rejection", h.PROMPTS, new=16, params=Params(h.target_params(), h.trained("medusa"))
        )
        np.testing.assert_allclose(found[0]["tau_t0"], before.emitted.sum() / (before.emitted > 0).sum(), rtol=0.02)


def test_the_testbeds_joint_run():
    shapes = jax.eval_shape(lambda: testbed.joint().init(jax.random.key(0), ()))
    assert shapes["target"].keys() == jax.eval_shape(language_model(testbed.CONFIG).init, jax.random.key(0)).keys()
    assert shapes["mtp"]["mlp"]["down"]["kernel"].shape == (testbed.CONFIG.hidden, testbed.CONFIG.width)


# On disk.


@each
def test_published_and_read_again(name, tmp_path):
    """A directory that loads as a model, and a drafter in it that loads as any other of its method."""
    config = h.CONFIG._replace(vocab_size=32, layers=1, sliding=(), window=None)
    model, module = language_model(config), mtp.config_of(config)
    target_params = jax.jit(model.init)(jax.random.key(1))
    recipe = joint.medusa_2(model, num_draft=2, rank=2) if name == "medusa_2" else None
    recipe = recipe or joint.joint_mtp(model, num_draft=2, config=module)
    params = jax.jit(recipe.init)(jax.random.key(0), target_params)
    params = jax.tree.map(lambda x: x + 0.1, params)
    both = recipe.assemble(params, target_params)
    method = {"medusa_2": "medusa", "joint_mtp": "mtp"}[name]
    about = {"method": method, **(module._asdict() if method == "mtp" else {})}
    path = joint.save(tmp_path, config, both, h.tokenizer(), about, dtype=np.float32)
    lm = load(path)
    again = load_drafter(method, lm, num_draft=2, weights=str(path / joint.DRAFTER))
    assert lm.config == config and again.drafter.depth == 2
    jax.tree.map(np.testing.assert_array_equal, (lm.params, again.params), (both.target, both.drafter))


def test_too_few_heads():
    with pytest.raises(ValueError, match="num_draft 4 > 3 heads"):
        joint.medusa_2(h.TARGET, num_draft=4, heads=h.trained("medusa"))

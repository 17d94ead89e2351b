"""The EAGLE family: the module entry by entry, training-time test against drafting, trees against EAGLE-2 in Python."""

import functools
import re

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references as ref

from specjax import decode, load_drafter, trees
from specjax.drafters import files, objectives, vocabulary
from specjax.drafters.eagle import drafter as eagle
from specjax.drafters.eagle import head as eagle_head
from specjax.drafters.eagle import loss as eagle_loss
from specjax.drafters.eagle import start as eagle_start
from specjax.drafters.eagle import tree as eagle_tree
from specjax.drafters.recipe import Batch
from specjax.models.layers import Columns
from specjax.models.load import LM
from specjax.train import recipes
from specjax.types import Params, Sequences
from specjax.verify import RULES

K = 3
SHARES = [1, 0.8, 0.64]
IDS = (0, 2, 3, 5, 7, 8, 9, 11, 12, 13, 16)
TARGET_LM = LM(h.TARGET, h.target_params(), None, h.CONFIG)
VARIANTS = {
    **h.EAGLES,
    "eagle1, normed": h.EAGLES["eagle1"]._replace(input_norm=True, norm_before_residual=True, output_norm=True),
    "eagle3, one tap": h.EAGLES["eagle3"]._replace(taps=(0,), input_norm=False, fc_norm=True, own_head=False),
    "eagle3, two layers": h.EAGLES["eagle3"]._replace(layers=2, qk_norm=True),
    "eagle3, hidden": h.EAGLES["eagle3"]._replace(taps=(), own_head=False),
}
each_variant = pytest.mark.parametrize("name", VARIANTS)


@functools.cache
def params_of(name, ids=None):
    """What training begins with, disturbed, so that nothing in it is zero."""
    make = jax.jit(lambda key: eagle_start.params_init(h.TARGET, VARIANTS[name], ids, key, h.target_params()))
    leaves, treedef = jax.tree.flatten(make(jax.random.key(3)))
    rng = np.random.default_rng(4)
    return treedef.unflatten([x + jnp.asarray(0.15 * rng.standard_normal(x.shape), x.dtype) for x in leaves])


def features_of(config, output):
    """Of an output that has the features of layers 0 and 1: [B, T, M, D]."""
    return eagle_head.features_of(config, output._replace(features=output.features[:, :, list(config.taps)]))


def double(name):
    return np.asarray(h.target_params()[name], np.float64)


def steps_by_hand(config, p, line, features):
    """normed[t][j] of one document."""
    hidden = [ref.fused(p, config, x) for x in features]
    return ref.entries(p, config, double("embedding"), line, hidden, K, ref.extrapolate)


# Losses.


def within(nats):
    """A loss of logits and the target's law, both within `IDS`, where the target's best token of all is one of them."""

    def loss(logits, b, goal):
        p = ref.taught(b, goal)
        return nats(p[list(IDS)] / p[list(IDS)].sum(), ref.softmax(logits)) if p.argmax() in IDS else 0.0

    return loss


def cross_entropy(p, q):
    return -(p * np.log(q)).sum()


def surprise(p, q):
    return -np.log(np.minimum(p, q).sum())


def smooth_l1(given, b, goal):
    size = np.abs(given - ref.hidden()[b, goal - 1])
    return np.where(size < 1, size**2 / 2, size - 0.5).mean()


LOSSES = {
    "eagle1": (None, dict(law=0.1, state=1.0), lambda x, y, *at: 0.1 * ref.soft(y, *at) + smooth_l1(x, *at)),
    "eagle3": (IDS, {}, lambda x, y, *at: within(cross_entropy)(y, *at)),
    "eagle3.1": (IDS, dict(objective=objectives.log_acceptance), lambda x, y, *at: within(surprise)(y, *at)),
    "eagle1, normed": (None, dict(objective=objectives.hard), lambda x, y, *at: ref.hard(y, *at)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient(name):
    """Against NumPy in float64, entry by entry; with a draft vocabulary, an own head and a shared one."""
    config, (ids, how, nats) = VARIANTS[name], LOSSES[name]
    recipe = eagle.recipe(h.TARGET, num_draft=K, config=config, vocabulary=ids, **how)
    features = ref.double(features_of(config, ref.batch().output))
    columns = slice(None) if ids is None else list(ids)
    if ids is not None:
        best = [ref.taught(b, t + 1).argmax() in ids for b, t in np.ndindex(*ref.TOKENS.shape) if t < 10]
        assert 0 < sum(best) < len(best)

    def reference(p):
        head = p["head"] if config.own_head else double("head")[:, columns]
        found = {}
        for b, part in ref.DOCUMENTS:
            for t, row in enumerate(steps_by_hand(config, p, ref.TOKENS[b, part], features[b, part])):
                found |= {(b, part.start + t, j): (x, x @ head) for j, x in enumerate(row)}
        return ref.pooled(lambda *at: found[at], SHARES, lambda pair, *at: nats(*pair, *at))

    ref.check(recipe, params_of(name, ids), reference)


@pytest.mark.parametrize("name", ["eagle3", "eagle3, one KV head"])
def test_what_the_backward_pass_keeps(name):
    """Of 37 positions products with weights, one of each a step, and no scores, which grow with the square."""
    config, t = h.EAGLES["eagle3"]._replace(hidden=20), 37
    config = config._replace(kv_heads=1) if "one" in name else config
    params = jax.eval_shape(lambda key: eagle_head.module_init(config, key), jax.random.key(0))
    x, segments = jax.ShapeDtypeStruct((1, t, config.width), jnp.float32), jax.ShapeDtypeStruct((1, t), jnp.int32)
    features = jax.ShapeDtypeStruct((1, t, len(config.taps), config.width), jnp.float32)

    def backward(params, x, features, segments):
        return jax.vjp(lambda p: eagle_loss.unrolled(config, p, [x] * K, features, segments), params)[1]

    found = jax.tree.leaves(jax.eval_shape(backward, params, x, features, segments))
    shapes = [r.shape for r in found if r.dtype == jnp.float32]  # the mask is read by every step, and made once
    assert [s[-2:] for s in shapes].count((t, 2 * config.hidden)) == K, "gate and up, side by side"
    assert not [s for s in shapes if len(s) > 1 and s[-1] == t and s[-2] >= t]


def test_a_step_of_training_reads_the_targets_head_once():
    """For the best token of all; the backward pass takes it from what was kept."""
    recipe = eagle.recipe(h.TARGET, num_draft=K, config=VARIANTS["eagle3"], vocabulary=IDS)
    batch = ref.batch()
    loss = lambda p, both: recipe.loss(p, both, batch, jax.random.key(0))[0]
    program = str(jax.make_jaxpr(jax.grad(loss))(params_of("eagle3", IDS), h.target_params()))
    assert len(re.findall(rf":f32\[\d+,{h.V}\] = dot_general", program)) == 1


def test_objectives_of_acceptance():
    """-log acceptance and LK by their formulas, and their gradients; w is data."""
    rng = np.random.default_rng(0)
    a, b = (3 * rng.normal(size=(5, h.V)).astype(np.float32) for _ in range(2))
    q, p = ref.softmax(a.astype(float)), ref.softmax(b.astype(float))
    kept = np.minimum(p, q).sum(-1)
    np.testing.assert_allclose(objectives.log_acceptance(jnp.asarray(a), None, jnp.asarray(b)), -np.log(kept), rtol=1e-5)
    w = np.exp(-2 * kept)
    expected = w * (p * np.log(p / q)).sum(-1) + (1 - w) * (1 - kept)
    lk = functools.partial(objectives.lk, eta=2.0)
    np.testing.assert_allclose(lk(jnp.asarray(a), None, jnp.asarray(b)), expected, rtol=1e-5)
    slope = lambda f: np.asarray(jax.grad(lambda x: f(x, None, jnp.asarray(b)).sum())(jnp.asarray(a)))
    mass = np.where(q < p, q, 0)
    overlap = mass - q * mass.sum(-1, keepdims=True)  # d sum min(p, q) / d logits
    np.testing.assert_allclose(slope(objectives.log_acceptance), -overlap / kept[:, None], atol=1e-5)
    np.testing.assert_allclose(slope(lk), w[:, None] * (q - p) - (1 - w)[:, None] * overlap, atol=1e-5)
    for one in (objectives.log_acceptance, lk):
        assert not np.any(jax.grad(lambda y, one=one: one(jnp.asarray(a), None, y).sum())(jnp.asarray(b)))


def test_a_state_loss_needs_the_last_state():
    with pytest.raises(ValueError, match="state 1.0 compares with the last hidden state"):
        eagle.recipe(h.TARGET, num_draft=2, config=h.EAGLES["eagle3"], state=1.0)


def test_noise_on_features():
    """From the key, within its width, and in the loss alone; EAGLE-1's other numbers are the paper's."""
    seen = []
    make = lambda noise: recipes.eagle_1(h.TARGET, num_draft=2, config=h.EAGLES["eagle1"], noise=noise)
    loss = lambda recipe, seed: recipe.loss(h.trained("eagle1"), h.target_params(), ref.batch(), jax.random.key(seed))[0]
    assert loss(make(0.0), 1) == loss(make(0.0), 2)
    assert loss(make(0.1), 1) == loss(make(0.1), 1) != loss(make(0.1), 2)
    plain = dict(steps=1, law=0.1, state=1.0)
    spied = eagle.recipe(h.TARGET, num_draft=2, config=h.EAGLES["eagle1"], noise=lambda key, x: seen.append(x) or x, **plain)
    assert loss(spied, 1) == loss(make(0.0), 1)
    assert seen[0].shape == (2, 11, 1, 16)


# Training-time test and drafting.


def text(rows=2, length=9):
    tokens = np.random.default_rng(6).integers(0, h.V, (rows, length)).astype(np.int32)
    given = Batch(jnp.asarray(tokens), jnp.ones(tokens.shape, bool), jnp.zeros(tokens.shape, jnp.int32))
    return ref.with_output(given, h.TARGET, h.target_params(), (0, 1))


@each_variant
def test_training_time_test_is_drafting(name):
    """J steps on whole rows equal J steps of drafting from the same state with the same tokens, and the recursion by hand."""
    config, batch = VARIANTS[name], text()
    p, (b, t) = params_of(name), batch.tokens.shape
    embedded = [h.TARGET.embed(h.target_params(), objectives.ahead(batch.tokens, j + 1)) for j in range(K)]
    features = features_of(config, batch.output)
    trained = jax.jit(lambda p: eagle_loss.unrolled(config, p, embedded, features, batch.segments))(p)

    @jax.jit
    def served(params, row):
        """[T-1, K, D] what drafting makes after n = 2 .. T committed tokens of one row."""
        count = jnp.arange(1, t)
        state = eagle.empty(config, t - 1, t + K)
        many = lambda x: jnp.broadcast_to(x[None], (t - 1, *x.shape))
        tokens, taken = many(objectives.ahead(batch.tokens, 1)[row]), many(features[row])
        state = eagle.entered(h.TARGET, config, params, state, tokens, taken, count)
        level, given = eagle_tree.root(*state), [state.normed]
        for depth in range(1, K):
            token = jnp.take_along_axis(tokens, jnp.minimum(count - 1 + depth, t - 1)[:, None], 1)
            level = eagle_tree.below(h.TARGET, config, params, level, token, jnp.zeros((t - 1, 1), jnp.int32), depth)
            given.append(level.normed[:, 0])
        return jnp.stack(given, 1)

    for row in range(b):
        drafted = np.asarray(served(Params(h.target_params(), p), row))
        by_hand = steps_by_hand(config, ref.double(p), np.asarray(batch.tokens)[row], ref.double(features)[row])
        for n in range(t - 1):
            for j in range(min(K, t - 1 - n)):
                np.testing.assert_allclose(trained[j][row, n], drafted[n, j], atol=1e-5)
                np.testing.assert_allclose(trained[j][row, n], by_hand[n][j], atol=1e-5)


def test_R09_a_step_sees_the_true_entries_up_to_its_own_and_its_own_before_it(monkeypatch):
    """Allowed keys [step, position, (step, position) of the key], by what a change of an entry's embedding can reach.

    That keys are seen, and not only reached through what is recycled, shows in the columns: step j has those of 1 .. j - 1.
    """
    counts, real, is_columns = [], eagle_head.step, lambda x: isinstance(x, Columns)

    def counted(*inputs):
        counts.extend(x.k.shape[3] for x in jax.tree.leaves(inputs, is_leaf=is_columns) if is_columns(x))
        return real(*inputs)

    monkeypatch.setattr(eagle_head, "step", counted)
    t, config, p = 5, h.EAGLES["eagle3"], params_of("eagle3")
    features = jax.random.normal(jax.random.key(0), (1, t, 2, 16))
    embedded = [jax.random.normal(jax.random.key(j + 1), (1, t, 16)) for j in range(K)]
    segments = jnp.asarray([[0, 0, 0, 1, 1]])
    out = lambda e: jnp.stack(eagle_loss.unrolled(config, p, e, features, segments))[:, 0]
    reach = np.stack([np.abs(x[:, :, :, 0]).sum((2, 4)) for x in jax.jit(jax.jacrev(out))(embedded)], 2) > 0
    allowed = np.zeros((K, t, K, t), bool)
    for j in range(K):
        for i in range(t):
            first = 0 if i < 3 else 3
            allowed[j, i, 0, first : i + 1] = True
            allowed[j, i, 1 : j + 1, i] = True
    np.testing.assert_array_equal(reach, allowed)
    assert counts[: K - 1] == list(range(K - 1))


# Trees.


@pytest.mark.parametrize(("width", "depth", "nodes"), [(10, 6, 59), (3, 2, 5), (2, 4, 7), (1, 3, 3)])
def test_a_dynamic_tree_is_eagle_2(width, depth, nodes):
    """Nodes, parents and scores of a batch, the draft's law a function of the path; half of the rows have ties."""
    vocab, rows = 12, 4

    def law(row, prefix):
        rng = np.random.default_rng([row, *[x + 1 for x in prefix]])
        q = rng.dirichlet(np.ones(vocab)) if row % 2 else rng.integers(1, 4, vocab) / 8
        return np.log(q / q.sum()).astype(np.float32)

    def read(level):  # a level is the paths to its nodes
        return jnp.asarray([[law(row, path) for path in paths] for row, paths in enumerate(level.tolist())])

    def run(level, tokens, parents, depth):
        assert level.shape[2] == depth - 1
        return np.concatenate([np.take_along_axis(level, np.asarray(parents)[..., None], 1), np.asarray(tokens)[..., None]], 2)

    how = dict(batch=rows, depth=depth, width=width, num_nodes=nodes)
    (tokens, parents, scores), _ = eagle_tree.dynamic(read, run, np.zeros((rows, 1, 0), np.int64), **how)
    for row in range(rows):
        expected = ref.eagle2(functools.partial(law, row), width, depth, nodes)
        assert tokens[row].tolist() == expected[0] and parents[row].tolist() == expected[1]
        np.testing.assert_allclose(scores[row], expected[2], rtol=1e-5)


def proposal(drafter, params, prompts, heat=1.0):
    """What is drafted after `prompts`, and the noise that it was given."""
    state = h.generate(drafter, "coupled", prompts, params=params, rounds=0).state
    sampling = state.sampling._replace(temperature=jnp.full(len(prompts), heat))
    noise = functools.partial(h.gumbel, len(prompts))
    sequences = Sequences(state.tokens, state.length, state.cache, sampling)
    return jax.jit(lambda p, d, s: drafter.propose(noise, p, d, s)[0])(params, state.drafter, sequences)


def laws_by_hand(name, line, ids=None):
    """(tokens drafted so far) -> log-probabilities [n] of the next, entry by entry."""
    config, p = VARIANTS[name], ref.double(params_of(name, ids))
    tokens = jnp.asarray([line])
    out = h.TARGET.apply(h.target_params(), tokens, h.TARGET.init_cache(1, len(line)), features=(0, 1))[0]
    features = ref.double(features_of(config, out))[0]
    head, true = p["head"] if config.own_head else double("head"), []
    for t in range(len(line) - 1):
        hidden = ref.fused(p, config, features[t])
        recycled, normed, entry = ref.extrapolate(p, config, double("embedding")[line[t + 1]], hidden, t, true)
        true.append(entry)

    def law(path):
        fed, last, own = recycled, normed, list(true)
        for i, token in enumerate(path):
            token = token if ids is None else ids[token]
            fed, last, entry = ref.extrapolate(p, config, double("embedding")[token], fed, len(line) - 1 + i, own)
            own.append(entry)
        return np.log(ref.softmax(last @ head)).astype(np.float32)

    return law


@pytest.mark.parametrize(("name", "ids"), [("eagle3", None), ("eagle3", IDS), ("eagle1", None)])
def test_a_dynamic_draft_by_hand(name, ids):
    """Every node sees the text and its own ancestors: the tree that the laws of single paths give."""
    config, prompts = VARIANTS[name], [h.PROMPTS[0], h.PROMPTS[3]]
    drafter = eagle.eagle2(h.TARGET, config=config, num_draft=4, top_k=3, nodes=12, vocabulary=ids)
    draft = proposal(drafter, Params(h.target_params(), params_of(name, ids)), prompts)
    for row, line in enumerate(prompts):
        tokens, parents, scores = ref.eagle2(laws_by_hand(name, line, ids), 3, 4, 12)
        reached = {-1: 0.0, **dict(enumerate(scores))}
        sure = [np.exp(score - reached[parent]) for parent, score in zip(parents, scores, strict=True)]
        np.testing.assert_allclose(draft.confidence[row], sure, rtol=1e-3)
        assert draft.tokens[row].tolist() == [x if ids is None else ids[x] for x in tokens]
        assert draft.parents[row].tolist() == parents and max(parents) > 2
    assert draft.log_q is None and drafter.children == "point"


def test_a_static_draft_by_hand():
    """First children have the law of the path above them; their siblings that law without those before them."""
    line, heat, paths = h.PROMPTS[3], 25.0, (*h.HEAD_TREE, (1, 0, 0))  # so hot that laws are soft
    drafter = eagle.eagle(h.TARGET, config=h.EAGLES["eagle1"], paths=paths)
    draft = proposal(drafter, Params(h.target_params(), params_of("eagle1")), [line], heat)
    tokens, parents, log_q = (np.asarray(x[0]) for x in draft[:3])
    assert parents.tolist() == trees.from_paths(paths).parents.tolist() and np.exp(log_q).max(-1).min() < 0.7
    law, lines = laws_by_hand("eagle1", line), {-1: ()}
    for node, parent in enumerate(parents):
        lines[node] = (*lines[parent], int(tokens[node]))
        before = [tokens[i] for i in range(node) if parents[i] == parent]
        logits = law(lines[parent]) / heat
        logits[before] = -np.inf
        np.testing.assert_allclose(np.exp(log_q[node]), ref.softmax(logits), atol=1e-5)


def test_the_authors_tree():
    depths = trees.from_paths(eagle_tree.TREE_25).depths
    assert np.bincount(depths).tolist() == [0, 4, 8, 8, 3, 2]
    drafter = eagle.eagle(h.TARGET, config=h.EAGLES["eagle1"], paths=eagle_tree.TREE_25)
    assert (drafter.num_nodes, drafter.depth, drafter.children) == (25, 5, "without_replacement")


def test_trees_that_cannot_be():
    build = functools.partial(eagle.eagle2, h.TARGET, config=h.EAGLES["eagle3"], num_draft=3)
    for options, message in (
        (dict(top_k=18), "top_k 18 does not lie in 1 to 17"),
        (dict(top_k=3, vocabulary=(1, 2)), "top_k 3 does not lie in 1 to 2"),
        (dict(top_k=2, nodes=2), "nodes 2 do not lie in 3 to 10"),
        (dict(top_k=2, nodes=11), "nodes 11 do not lie in 3 to 10"),
        (dict(top_k=2, nodes=5, vocabulary=(2, 1)), "must ascend"),
    ):
        with pytest.raises(ValueError, match=message):
            build(**options)
    with pytest.raises(ValueError, match="2 features with one narrow fc"):
        eagle_head.eagle1(h.CONFIG, taps=(0, 1))


def test_as_many_nodes_as_levels_are_no_chain_yet():
    build = functools.partial(eagle.eagle2, h.TARGET, config=h.EAGLES["eagle3"], num_draft=3, nodes=3)
    assert build(top_k=1).chain and not build(top_k=2).chain


def test_a_tree_has_room_at_the_end_of_the_text():
    """Growing runs more nodes than are verified; none may be dropped from the cache where the text is longest."""
    longest, num_run = 20, 9
    drafter = eagle.eagle2(h.TARGET, config=h.EAGLES["eagle3"], num_draft=4, top_k=3, nodes=4)
    capacity = decode.capacity_for(longest, drafter)
    assert capacity < longest - 1 + num_run <= drafter.init(None, 1, capacity).cache.k[0].shape[-1]


# Decoding.


@pytest.mark.parametrize(("name", "rule"), [("eagle1, static", "recursive"), ("eagle3, dynamic", "target_match")])
def test_a_drafter_of_nan_changes_no_token(name, rule):
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), h.drafter_params(name))
    result = h.generate(h.drafter(name), rule, h.MIXED, params=Params(h.target_params(), broken), temperature=h.MIXED_HEAT)
    assert result.tokens[:5] == h.reference().tokens[:5] and result.drafted.sum() == 0


def test_a_prompt_of_one_token_drafts_nothing_at_first():
    result = h.run("eagle3, dynamic", "target_match", rounds=2)
    assert result.drafted[1].tolist()[:2] == [0, 5] and (result.drafted[[0, 2, 3, 4], 0] == 5).all()


@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("eagle3", "dynamic"),  # a head of its own
        ("eagle3.1", "chain"),  # and none
        pytest.param("eagle3", "chain", marks=pytest.mark.slow),
        pytest.param("eagle3.1", "dynamic", marks=pytest.mark.slow),
    ],
)
def test_a_draft_vocabulary(name, tree, tmp_path):
    """No other id is ever proposed, with a head of its own or the target's columns; tokens are plain decoding's; from disk."""
    config, p = VARIANTS[name], params_of(name, IDS)
    about = {"method": name, "vocabulary": IDS, **config._asdict()}
    files.save(tmp_path, p, about)
    options = dict(tree=tree, **({"top_k": 3, "nodes": 5} if tree == "dynamic" else {}))
    loaded = load_drafter(name, TARGET_LM, num_draft=K, weights=str(tmp_path), **options)
    draft = proposal(loaded.drafter, Params(h.target_params(), loaded.params), h.PROMPTS[2:])
    assert np.isin(draft.tokens, IDS).all()
    if draft.log_q is not None:
        outside = np.setdiff1d(np.arange(h.V), IDS)
        assert (np.asarray(draft.log_q)[..., outside] == -np.inf).all() and np.isfinite(draft.log_q[..., list(IDS)]).all()
    params = Params(h.target_params(), loaded.params)
    result = h.generate(loaded.drafter, loaded.rule, h.MIXED, params=params, temperature=h.MIXED_HEAT)
    assert result.tokens[:5] == h.reference().tokens[:5]
    assert 0 < result.accepted.sum() < result.drafted.sum()
    if config.own_head:
        files.save(tmp_path, p, {**about, "vocabulary": IDS[1:]})
        with pytest.raises(ValueError, match=r"head is \[16, 11\] but should be \[16, 10\]"):
            load_drafter(name, TARGET_LM, num_draft=K, weights=str(tmp_path))


def test_a_draft_vocabulary_is_the_recipes_own(tmp_path):
    """By name, a head of its own has as many columns as there are ids; saved and loaded as such."""
    recipe = recipes.build("eagle3", TARGET_LM, num_draft=2, options={}, vocabulary=IDS)
    params = jax.jit(recipe.init)(jax.random.key(0), h.target_params())
    assert params["head"].shape == (16, 11) and recipe.features == (0, 1)
    both = recipe.assemble(params, h.target_params())
    recipes.save(tmp_path, "eagle3", TARGET_LM, both, num_draft=2, options={}, dtype="int8", vocabulary=IDS)
    loaded = load_drafter("eagle3", TARGET_LM, num_draft=2, weights=str(tmp_path))
    assert loaded.drafter is recipe.drafter
    np.testing.assert_allclose(loaded.params["head"], params["head"], atol=0.02 * np.abs(params["head"]).max())


def test_d2t_holds_offsets():
    d2t = vocabulary.offsets(IDS)
    assert all(place + d2t[place] == token for place, token in enumerate(IDS)) and vocabulary.from_offsets(d2t) == IDS


def test_the_rule_follows_the_tree(tmp_path):
    """A chain, the listed tree, the authors', a dynamic one; what config.json lists is the default."""
    files.save(tmp_path, h.trained("eagle1"), {"method": "eagle1", "tree": h.HEAD_TREE, **h.EAGLES["eagle1"]._asdict()})
    load = functools.partial(load_drafter, "eagle1", TARGET_LM, weights=str(tmp_path))
    for depth, options, nodes, children, rule in (
        (3, {}, 8, "without_replacement", "recursive"),
        (3, {"tree": "chain"}, 3, "iid", "rejection"),
        (5, {"tree": "static"}, 25, "without_replacement", "recursive"),
        (5, {"tree": "static", "children": "point"}, 25, "point", "target_match"),
        (6, {"tree": "dynamic"}, 59, "point", "target_match"),
    ):
        loaded = load(num_draft=depth, **options)
        assert (loaded.drafter.num_nodes, loaded.drafter.depth, loaded.drafter.children) == (nodes, depth, children)
        assert loaded.rule == rule and loaded.card.method == "eagle1"
        decode.check(h.TARGET, loaded.drafter, RULES[rule])
    with pytest.raises(ValueError, match="children 'iid' of a dynamic tree"):
        load(num_draft=3, tree="dynamic", children="iid")


# Where training begins.


def begun(config, ids):
    init = functools.partial(eagle_start.params_init, h.TARGET, config, ids)
    return jax.jit(init)(jax.random.key(0), h.target_params())


def test_a_module_begins_as_the_targets_last_layer():
    config, last = h.EAGLES["eagle3"], h.target_params()["layer_1"]
    params = begun(config, IDS)
    equal = lambda a, b: jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))
    assert equal(params["mlp"], last["mlp"]) and equal(params["mlp_norm"], last["mlp_norm"])
    assert equal(params["norm"], h.target_params()["norm"]) and equal(params["attention"]["out"], last["attention"]["out"])
    for half in np.split(np.asarray(params["attention"]["qkv"]["kernel"]), 2):
        np.testing.assert_allclose(half, last["attention"]["qkv"]["kernel"] * 0.5**0.5)
    np.testing.assert_array_equal(params["head"], h.target_params()["head"][:, list(IDS)])
    np.testing.assert_array_equal(params["fc"]["kernel"], np.eye(32, 16, -16))


def test_eagle_1_begins_with_the_sum_of_both():
    """What it gives is the feature plus the embedding, lifted to its size: the layer adds nothing yet."""
    config, batch = eagle_head.eagle1(h.CONFIG), text()
    params = begun(config, None)
    embedded = h.TARGET.embed(h.target_params(), objectives.ahead(batch.tokens, 1))
    given = eagle_loss.unrolled(config, params, [embedded], features_of(config, batch.output), batch.segments)[0]
    size = float(jnp.sqrt(jnp.square(h.target_params()["embedding"]).mean()))
    np.testing.assert_allclose(given, batch.output.hidden + embedded / size, atol=1e-5)


def test_a_module_of_another_shape_begins_anew():
    config = eagle_head.eagle3(h.CONFIG, hidden=24)
    params = begun(config, None)
    assert params["mlp"]["down"]["kernel"].shape == (24, 16) and not (params["mlp"]["down"]["kernel"] == 0).all()

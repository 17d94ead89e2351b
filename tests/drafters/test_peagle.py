"""P-EAGLE: masks by hand and against training, what a depth may look at, conditional drop, published files."""

import functools
import json

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references as ref
from safetensors.numpy import save_file

from specjax import load_drafter
from specjax.drafters import files, objectives
from specjax.drafters.eagle import files as eagle_files
from specjax.drafters.eagle import head as eagle_head
from specjax.drafters.eagle import parallel
from specjax.drafters.eagle import start as eagle_start
from specjax.drafters.recipe import Batch
from specjax.models.load import LM
from specjax.models.transformer import language_model
from specjax.train import recipes
from specjax.types import Params

K = 3
IDS = (0, 2, 3, 5, 7, 8, 9, 11, 12, 13, 16)
TARGET_LM = LM(h.TARGET, h.target_params(), None, h.CONFIG)
VARIANTS = {
    "peagle": h.PEAGLE,
    "one layer": h.PEAGLE._replace(layers=1, norm_before_residual=True, fc_norm=True),
    "three layers": h.PEAGLE._replace(layers=3, qk_norm=True, norm_before_fc=True, own_head=False, own_embedding=True),
}
each_variant = pytest.mark.parametrize("name", VARIANTS)


@functools.cache
def params_of(name, ids=None):
    """What training begins with, disturbed, so that nothing in it is zero."""
    make = jax.jit(lambda key: eagle_start.params_init(h.TARGET, VARIANTS[name], ids, key, h.target_params()))
    leaves, treedef = jax.tree.flatten(make(jax.random.key(3)))
    rng = np.random.default_rng(4)
    return treedef.unflatten([x + jnp.asarray(0.15 * rng.standard_normal(x.shape), x.dtype) for x in leaves])


def by_hand(config, p, line, features):
    """normed[t][j] of one document, in float64: the entry at t, then the masks behind it, each on those before."""
    embedding = p["embedding"] if config.own_embedding else np.asarray(h.target_params()["embedding"], np.float64)
    true, result = [], []
    for t in range(len(line) - 1):
        _, normed, entry = ref.extrapolate(p, config, embedding[line[t + 1]], ref.fused(p, config, features[t]), t, true)
        true.append(entry)
        own, row = list(true), [normed]
        mask = p["mask_embedding"], ref.fused(p, config, p["mask_hidden"].reshape(2, -1))
        for j in range(1, min(K, len(line) - 1 - t)):
            _, normed, entry = ref.extrapolate(p, config, *mask, t + j, own)
            own.append(entry)
            row.append(normed)
        result.append(row)
    return result


# Drafting and training.


@each_variant
def test_one_pass_drafts_what_training_sees(name):
    """After every number of tokens, K rows at once: those of training at the same state, and entry by entry by hand."""
    config, p, (b, t) = VARIANTS[name], params_of(name), (2, 9)
    tokens = np.random.default_rng(6).integers(0, h.V, (b, t)).astype(np.int32)
    given = Batch(jnp.asarray(tokens), jnp.ones((b, t), bool), jnp.zeros((b, t), jnp.int32))
    batch = ref.with_output(given, h.TARGET, h.target_params(), (0, 1))
    features, both = batch.output.features, Params(h.target_params(), p)
    order = np.stack([np.random.default_rng(row).permutation(t) for row in range(b)])

    @jax.jit
    def trained(params):
        embedded = eagle_head.embed(h.TARGET, config, params, objectives.ahead(batch.tokens, 1))
        anchors = [jnp.asarray(order)] * (K - 1)
        return parallel.unmasked(config, params.drafter, embedded, features, batch.segments, anchors)

    @jax.jit
    def served(params, row):
        """[T-1, K, D] after n = 2 .. T tokens."""
        state = parallel.peagle(h.TARGET, config=config, num_draft=K).init(params, t - 1, t + K)
        many = lambda x: jnp.broadcast_to(x[None], (t - 1, *x.shape))
        tokens = many(objectives.ahead(batch.tokens, 1)[row])
        state = parallel.entered(h.TARGET, config, params, state, tokens, many(features[row]), jnp.arange(1, t))
        return state.normed, state.cache.length

    seen, exact = trained(both), ref.double(p)
    for row in range(b):
        normed, length = served(both, row)
        expected = by_hand(config, exact, tokens[row], ref.double(features)[row])
        np.testing.assert_array_equal(length, np.arange(1, t))
        places = np.argsort(order[row])
        for n in range(t - 1):
            for j in range(min(K, t - 1 - n)):
                np.testing.assert_allclose(seen[j][row, places[n] if j else n], normed[n, j], atol=1e-5)
                np.testing.assert_allclose(normed[n, j], expected[n][j], atol=1e-5)


def test_a_depth_sees_the_true_entries_up_to_its_anchor_and_nothing_later():
    """By what a change of an entry's embedding or features can reach, each document by itself."""
    t, config, p = 5, h.PEAGLE, params_of("peagle")
    features = jax.random.normal(jax.random.key(0), (1, t, 2, 16))
    embedded = jax.random.normal(jax.random.key(1), (1, t, 16))
    segments, anchors = jnp.asarray([[0, 0, 0, 1, 1]]), [jnp.arange(t)[None]] * (K - 1)
    out = lambda e, f: jnp.stack(parallel.unmasked(config, p, e, f, segments, anchors))[:, 0]
    reach = jax.jit(jax.jacrev(out, (0, 1)))(embedded, features)
    allowed = np.tril(np.ones((t, t), bool)) & (np.asarray(segments).T == np.asarray(segments))
    for found in reach:
        size = np.abs(found).reshape(K, t, 16, t, -1).sum((2, 4))
        np.testing.assert_array_equal(size > 0, np.broadcast_to(allowed[None], size.shape))


def test_what_lies_past_the_length_is_never_read():
    """The masks' keys and values are left there: a commit is the same over junk, and `propose` runs nothing."""
    drafter, params = h.drafter("peagle"), Params(h.target_params(), h.drafter_params("peagle"))
    state = h.mixed("peagle", "rejection", rounds=2).state.drafter
    rng, batch = np.random.default_rng(0), len(h.MIXED)
    tokens = jnp.asarray(rng.integers(0, h.V, (batch, K + 1)), jnp.int32)
    features = jnp.asarray(rng.standard_normal((batch, K + 1, 2, 16)), jnp.float32)
    count = jnp.asarray([0, 1, 2, 3, 4] * 2)
    enter = jax.jit(lambda held: parallel.entered(h.TARGET, h.PEAGLE, params, held, tokens, features, count))
    free = np.arange(state.cache.v[0].shape[2])[None] >= np.asarray(state.cache.length)[:, None]
    junk = state.cache._replace(
        k=tuple(jnp.where(free[:, None, None], 50.0, x) for x in state.cache.k),
        v=tuple(jnp.where(free[:, None, :, None], 50.0, x) for x in state.cache.v),
    )
    clean, spoiled = enter(state), enter(state._replace(cache=junk))
    np.testing.assert_array_equal(clean.normed, spoiled.normed)
    np.testing.assert_array_equal(clean.normed[0], state.normed[0])  # of a row that took nothing in
    used = np.arange(free.shape[1])[None] < np.asarray(clean.cache.length)[:, None]
    for a, b in zip(clean.cache.v, spoiled.cache.v, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[used[:, None].repeat(2, 1)], np.asarray(b)[used[:, None].repeat(2, 1)])
    assert drafter.features == (0, 1) and drafter.chain and drafter.children == "iid"


def test_a_prompt_of_one_token_drafts_nothing_at_first():
    result = h.run("peagle", "rejection", rounds=2)
    assert result.drafted[1].tolist()[:2] == [0, K] and (result.drafted[[0, 2, 3, 4], 0] == K).all()


def test_a_chain_of_one():
    """No mask is run: the first draft of a longer chain."""
    result = h.run("peagle", "coupled", k=1)
    assert result.tokens == h.reference().tokens[:5] and 0 < result.accepted.sum() < result.drafted.sum()
    longer = h.run("peagle", "coupled")
    assert result.accepted[0, 0] == min(longer.accepted[0, 0], 1)


def test_a_module_without_a_mask():
    with pytest.raises(ValueError, match="masked False: a module without a mask drafts one token a pass"):
        parallel.peagle(h.TARGET, config=h.EAGLES["eagle3"], num_draft=K)
    with pytest.raises(ValueError, match="must ascend"):
        parallel.peagle(h.TARGET, config=h.PEAGLE, num_draft=K, vocabulary=(2, 1))


def test_a_draft_vocabulary(tmp_path):
    """By name, trained and saved as the recipe says, loaded: no other id is proposed, and tokens are plain decoding's."""
    recipe = recipes.build("peagle", TARGET_LM, num_draft=K, options={"layers": 2}, vocabulary=IDS)
    both = recipe.assemble(params_of("peagle", IDS), h.target_params())
    recipes.save(tmp_path, "peagle", TARGET_LM, both, num_draft=K, options={"layers": 2}, dtype="float32", vocabulary=IDS)
    loaded = load_drafter("peagle", TARGET_LM, num_draft=K, weights=str(tmp_path))
    assert loaded.drafter is recipe.drafter and loaded.rule == "rejection"
    params = Params(h.target_params(), loaded.params)
    result = h.generate(loaded.drafter, "rejection", h.MIXED, params=params, temperature=h.MIXED_HEAT)
    assert result.tokens[:5] == h.reference().tokens[:5] and 0 < result.accepted.sum() < result.drafted.sum()
    state, noise = result.state, functools.partial(h.gumbel, 10)
    draft = jax.jit(lambda p, s: loaded.drafter.propose(noise, p, s.drafter, s)[0])(params, state)
    outside = np.setdiff1d(np.arange(h.V), IDS)
    assert np.isin(draft.tokens, IDS).all() and (np.asarray(draft.log_q)[..., outside] == -np.inf).all()


# Losses.


def taught(logits, b, goal):
    """Soft cross-entropy within `IDS`, where the target's best token of all is one of them."""
    p = ref.taught(b, goal)
    return -(p[list(IDS)] / p[list(IDS)].sum() * np.log(ref.softmax(logits))).sum() if p.argmax() in IDS else 0.0


def exact(p, config):
    """(b, t, j) -> logits of depth j at position t, for all there are, in float64."""
    head = p["head"] if config.own_head else np.asarray(h.target_params()["head"], np.float64)
    features, found = ref.double(ref.batch().output.features), {}
    for b, part in ref.DOCUMENTS:
        for t, row in enumerate(by_hand(config, p, ref.TOKENS[b, part], features[b, part])):
            found |= {(b, part.start + t, j): x @ head for j, x in enumerate(row)}
    return found


@pytest.mark.parametrize(("name", "ids"), [("peagle", IDS), ("three layers", None)])
def test_loss_and_gradient(name, ids):
    """All positions looked at, against NumPy: with a draft vocabulary; with an embedding that is trained."""
    recipe = parallel.recipe(h.TARGET, num_draft=K, config=VARIANTS[name], vocabulary=ids, share=1.0, decay=0.9)

    def reference(p):
        found = exact(p, VARIANTS[name])
        return ref.pooled(lambda *at: found[at], [0.9**j / K for j in range(K)], taught if ids else ref.soft)

    ref.check(recipe, params_of(name, ids), reference)


def has_label(b, t, j):
    goal, (_, length) = t + 2 + j, ref.TOKENS.shape
    return goal < length and ref.MASK[b, goal] and ref.SEGMENTS[b, goal] == ref.SEGMENTS[b, t] >= 0


def test_conditional_drop():
    """The mean over the labels of the positions that are looked at: 11 of 11, then 7, then 5 of the same."""
    rows, length = ref.TOKENS.shape
    recipe = parallel.recipe(h.TARGET, num_draft=K, config=h.PEAGLE, share=0.7, least=0.5)
    given = ref.batch()  # outside of what is traced, for it is kept
    loss, metrics = jax.jit(lambda p: recipe.loss(p, h.target_params(), given, jax.random.key(5)))(params_of("peagle"))
    labelled = [[any(has_label(b, t, j) for j in range(K)) for t in range(length)] for b in range(rows)]
    order = np.asarray(parallel.drawn(jax.random.key(5), jnp.asarray(labelled)))
    found = exact(ref.double(params_of("peagle")), h.PEAGLE)
    seen = [(b, t, j) for b, t, j in np.ndindex(rows, length, K) if has_label(b, t, j) and t in order[b, : (11, 7, 5)[j]]]
    every = [at for at in np.ndindex(rows, length, K) if has_label(*at)]
    np.testing.assert_allclose(float(metrics["weight"]), len(seen) / K)
    np.testing.assert_allclose(float(loss), np.mean([ref.soft(found[at], at[0], sum(at[1:]) + 2) for at in seen]), rtol=1e-5)
    assert len(seen) < len(every)


def test_the_order_in_which_positions_are_kept():
    """All of a row, labels first, drawn from the key; so that a lone label is looked at in every depth."""
    labelled = np.random.default_rng(0).random((3, 40)) < 0.5
    order = np.asarray(parallel.drawn(jax.random.key(5), jnp.asarray(labelled)))
    np.testing.assert_array_equal(np.sort(order), np.tile(np.arange(40), (3, 1)))
    for row, has in zip(order, labelled, strict=True):
        assert has[row[: has.sum()]].all() and (np.diff(row[: has.sum()]) < 0).any()
    assert (order != np.asarray(parallel.drawn(jax.random.key(6), jnp.asarray(labelled)))).any()


# Where training begins.


def test_a_module_begins_as_eagle_3_with_layers_that_add_nothing():
    config, size = eagle_head.peagle(h.CONFIG), float(jnp.square(h.target_params()["embedding"]).mean() ** 0.5)

    @functools.partial(jax.jit, static_argnums=0)
    def begun(config):
        params = eagle_start.params_init(h.TARGET, config, IDS, jax.random.key(0), h.target_params())
        embedded = h.TARGET.embed(h.target_params(), jnp.asarray([[1, 2, 3]]))
        features = jax.random.normal(jax.random.key(1), (1, 3, 2, 16))
        return params, parallel.unmasked(config, params, embedded, features, jnp.zeros((1, 3), jnp.int32), [])[0]

    (params, deep), (single, flat) = begun(config), begun(config._replace(layers=1))
    assert sorted(params.keys() - single.keys()) == ["deeper_0", "deeper_1", "deeper_2"]
    np.testing.assert_allclose(deep, flat, atol=1e-6)
    assert 0.5 * size < float(params["mask_embedding"].std()) < 2 * size and params["mask_hidden"].shape == (32,)


# Published files.

D, AUX, MASK = 16, "eagle_aux_hidden_state_layer_ids", 4
DEEP = h.CONFIG._replace(layers=8, sliding=(), window=None)
DEEP_LM = LM(language_model(DEEP), h.target_params(), None, DEEP)  # of its parameters, embedding and head are all that is read
CONFIG = eagle_head.peagle(DEEP, taps=(1, 3, 4), layers=3)
LLAMA = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_attention_heads": 4, "head_dim": 8}
LLAMA |= {"rms_norm_eps": 1e-6, "vocab_size": h.V, "num_hidden_layers": 3, "ptd_token_id": MASK, "parallel_drafting": True}


def random(config, ids):
    rng, like = np.random.default_rng(0), eagle_head.like(config, h.V if ids is None else len(ids), h.V)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), like)


def by_name(params, first="midlayer."):
    """Tensors under published names, the mask's row of the embedding left to the caller."""
    found = {"fc.weight": params["fc"]["kernel"].T, "norm.weight": params["norm"]["scale"], "lm_head.weight": params["head"].T}
    found["mask_hidden"] = params["mask_hidden"][None]
    for at, own in ((first, params), *((f"layers.{i + 1}.", params[f"deeper_{i}"]) for i in range(2))):
        by_head = own["attention"]["qkv"]["kernel"].reshape(-1, 2, 4, 8)  # [in, KV heads, 2 query heads, k and v, head_dim]
        for part, x in (("q", by_head[:, :, :2]), ("k", by_head[:, :, 2]), ("v", by_head[:, :, 3])):
            found[f"{at}self_attn.{part}_proj.weight"] = x.reshape(len(by_head), -1).T
        found[f"{at}self_attn.o_proj.weight"] = own["attention"]["out"]["kernel"].T
        gate, up = np.split(own["mlp"]["gate_up"]["kernel"].T, 2)
        found |= {f"{at}mlp.gate_proj.weight": gate, f"{at}mlp.up_proj.weight": up}
        found[f"{at}mlp.down_proj.weight"] = own["mlp"]["down"]["kernel"].T
        norms = {"input_norm": "input_layernorm", "attention_norm": "input_layernorm", "hidden_norm": "hidden_norm"}
        norms |= {"mlp_norm": "post_attention_layernorm"}
        found |= {f"{at}{theirs}.weight": own[ours]["scale"] for ours, theirs in norms.items() if ours in own}
    return {name: np.array(x, order="C") for name, x in found.items()}


def write(directory, said, tensors):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({n: x for n, x in said.items() if x is not None}))
    save_file({n: x for n, x in tensors.items() if x is not None}, directory / "model.safetensors")
    return directory


def load(directory, method="peagle"):
    return load_drafter(method, DEEP_LM, num_draft=K, weights=str(directory))


def check_same(directory, config, ids, params):
    """The same drafter with the same parameters."""
    loaded = load(directory)
    assert files.flat(loaded.params).keys() == files.flat(params).keys()
    for path, x in files.flat(params).items():
        np.testing.assert_array_equal(files.flat(loaded.params)[path], x, err_msg=path)
    assert loaded.drafter is parallel.peagle(DEEP_LM.model, config=config, num_draft=K, vocabulary=ids)
    assert loaded.card.method == "peagle"


def embedding(row):
    """The target's, with the mask's row."""
    return np.concatenate(
        [np.asarray(h.target_params()["embedding"])[:MASK], row[None], h.target_params()["embedding"][MASK + 1 :]]
    )


def test_read(tmp_path):
    """vLLM's layout; an embedding that is the target's but for the mask, one that was trained, and none at all."""
    own = random(CONFIG._replace(own_embedding=True), None)
    params = {name: x for name, x in own.items() if name != "embedding"}
    tensors = by_name(params)
    with_rows = lambda x: {**tensors, "embed_tokens.weight": x}
    check_same(write(tmp_path, LLAMA, with_rows(embedding(params["mask_embedding"]))), CONFIG, None, params)
    trained = {**own, "mask_embedding": own["embedding"][MASK]}
    check_same(write(tmp_path, LLAMA, with_rows(own["embedding"])), CONFIG._replace(own_embedding=True), None, trained)
    row = np.asarray(h.target_params()["embedding"])[MASK]
    check_same(write(tmp_path, LLAMA, tensors), CONFIG, None, {**params, "mask_embedding": row})
    half = {n: x.astype(jnp.bfloat16) for n, x in with_rows(own["embedding"]).items()}
    rounded = {path: np.asarray(x).astype(jnp.bfloat16).astype(np.float32) for path, x in files.flat(trained).items()}
    found = files.flat(load(write(tmp_path, LLAMA, half)).params)
    for path, x in rounded.items():
        assert found[path].dtype == jnp.float32
        np.testing.assert_array_equal(found[path], x, err_msg=path)


WRITTEN = {
    "peagle": (CONFIG, IDS),
    "trained": (CONFIG._replace(layers=1, own_embedding=True, fc_norm=True, attention_bias=True, taps=(0, 7)), None),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_written_for_speculators(name, tmp_path):
    config, ids = WRITTEN[name]
    params = random(config, ids)
    eagle_files.save_speculators(tmp_path, params, config, DEEP_LM, vocabulary=ids, verifier="some/target", mask_token=MASK)
    if config.own_embedding:
        params["embedding"][MASK] = params["mask_embedding"]  # what is written in place of that row
    check_same(tmp_path, config, ids, params)
    written, said = files.read_tensors(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    assert said["speculators_model_type"] == "peagle" and said["mask_token_id"] == MASK
    assert said["transformer_layer_config"]["num_hidden_layers"] == config.layers
    assert written["mask_hidden"].shape == (1, 1, len(config.taps) * D)
    np.testing.assert_array_equal(written["embed_tokens.weight"][MASK], params["mask_embedding"])
    if name == "peagle":
        for key, x in by_name(params, "layers.0.").items():
            np.testing.assert_array_equal(written[key], x.reshape(written[key].shape), err_msg=key)
    with pytest.raises(ValueError, match=r"P-EAGLE, which drafts in one pass \(method peagle\)"):
        load(tmp_path, "eagle3")


REFUSED = {
    "no mask": ({}, {"mask_hidden": None}, "1 missing: mask_hidden"),
    "no mask and no token": ({"ptd_token_id": None}, {"mask_hidden": None}, "of method 'eagle3' != 'peagle'"),
    "no token": ({"ptd_token_id": None}, {}, "say nothing: one of the target's 17 tokens is needed"),
    "two tokens": ({"mask_token_id": 5}, {}, r"say \[4, 5\]"),
    "a token too many": ({"ptd_token_id": h.V}, {}, r"say \[17\]"),
    "no id": ({"ptd_token_id": "4"}, {}, "ptd_token_id '4' is not a whole number from 0"),
    "a longer embedding": ({}, {"embed_tokens.weight": np.zeros((h.V + 1, D), np.float32)}, r"is \[18, 16\] but should be"),
    "a layer too few": ({}, {"layers.1.mlp.up_proj.weight": None}, "1 missing: layers.1.mlp.up_proj.weight"),
    "a mask of another size": (
        {},
        {"mask_hidden": np.zeros((1, D), np.float32)},
        r"mask_hidden is \[16\] but should be \[48\]",
    ),
    "eagle3": ({"speculators_model_type": "dflash"}, {}, "another method"),
    "latent": ({}, {"midlayer.self_attn.kv_a_proj_with_mqa.weight": np.zeros((4, D), np.float32)}, "latent attention"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path):
    change, more, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as error:
        load(write(tmp_path, {**LLAMA, **change}, {**by_name(random(CONFIG, None)), **more}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "token", "message"),
    [
        (CONFIG, None, "mask_token None of a module of kind peagle: give one of the target's 17 tokens"),
        (CONFIG, h.V, "mask_token 17 of a module of kind peagle"),
        (eagle_head.eagle3(DEEP), 3, "mask_token 3 of a module of kind eagle3: give None"),
        (eagle_head.eagle3(DEEP, layers=2), None, "2 layers of a module without a mask"),
        (eagle_head.eagle3(DEEP, own_embedding=True), None, "an embedding of its own beside no mask"),
    ],
)
def test_what_cannot_be_written(config, token, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        eagle_files.save_speculators(tmp_path, random(config, None), config, DEEP_LM, mask_token=token)
    assert not list(tmp_path.iterdir())

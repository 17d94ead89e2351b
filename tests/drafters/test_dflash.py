"""DFlash: the backbone row by row, blocks in training against blocks in decoding, what a block sees and the cache holds."""

import functools

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references as ref
from blocks import IDS, K, T, block_by_hand, logits_by_hand, loss_by_hand, proposal, state_after, text, told

from specjax import load_drafter
from specjax.drafters import files, objectives
from specjax.drafters.dflash import backbone, start
from specjax.drafters.dflash import drafter as dflash
from specjax.drafters.dflash import loss as block_loss
from specjax.drafters.dflash.config import checked, default_taps, dflash_config
from specjax.drafters.recipe import Batch
from specjax.drafters.siblings import SIBLINGS
from specjax.models.load import LM
from specjax.sampling import tempered
from specjax.types import Params, Sequences

TARGET_LM = LM(h.TARGET, h.target_params(), None, h.CONFIG)
SMALL = functools.partial(dflash_config, h.CONFIG, layers=2, qk_norm=True)
VARIANTS = {
    "dflash": SMALL(),
    "anchor first": SMALL(anchor_first=True, qk_norm=False, embedding_scale=2.0, mask_token=5),
    "window": SMALL(sliding=(True, False), window=3, output_multiplier=0.5, softcap=3.0),
    "causal": SMALL(taps=(1,), causal=True),
    "convolved": SMALL(layers=1, sliding=(True,), window=2, causal=False, conv_taps=2, conv_group=8, output_multiplier=0.2),
}
each = pytest.mark.parametrize("name", VARIANTS)


@functools.cache
def params_of(name):
    """What training begins with, disturbed, so that nothing in it is zero."""
    make = jax.jit(lambda key: start.params_init(h.TARGET, VARIANTS[name], key, h.target_params()))
    leaves, treedef = jax.tree.flatten(make(jax.random.key(3)))
    rng = np.random.default_rng(4)
    return treedef.unflatten([x + jnp.asarray(0.15 * rng.standard_normal(x.shape), x.dtype) for x in leaves])


def both(name):
    return Params(h.target_params(), params_of(name))


def few(nats):
    """A loss of logits and the target's law, both within `IDS`, where the target's best token of all is one of them."""

    def loss(logits, b, goal):
        p = ref.taught(b, goal)
        return nats(p[list(IDS)] / p[list(IDS)].sum(), ref.softmax(logits)) if p.argmax() in IDS else 0.0

    return loss


def cross_entropy(p, q):
    return -(p * np.log(q)).sum()


LOSSES = {
    "dflash": (None, {}, ref.hard, np.exp(-1 / 4)),
    "anchor first": (IDS, dict(objective=objectives.soft, decay=0.7), few(cross_entropy), 0.7),
    "window": (None, dict(objective=objectives.total_variation), ref.total_variation, np.exp(-1 / 4)),
    "convolved": (None, {}, ref.hard, np.exp(-1 / 4)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient(name):
    """Against NumPy in float64, row by row."""
    config, (ids, how, nats, decay) = VARIANTS[name], LOSSES[name]
    made = dflash.recipe(h.TARGET, num_draft=K, config=config, vocabulary=ids, **how)
    recipe = made._replace(loss=lambda p, target, batch, key: made.loss(p, target, told(config, batch), key))
    columns = slice(None) if ids is None else list(ids)
    read = lambda hidden, tokens: logits_by_hand(config, hidden, columns)
    ref.check(recipe, params_of(name), lambda p: loss_by_hand(config, p, nats, decay, read))


def test_published_weights_of_a_block():
    for k, gamma in ((7, 4), (9, 5), (15, 7)):
        w = np.exp(-np.arange(k) / gamma)
        np.testing.assert_allclose(block_loss.shares(k, None), w / w.sum())


def test_blocks_are_drawn():
    """A function of the key; without repeats; with context, and tokens to predict, from the first on where there are such."""
    t, k = 40, 4
    tokens, mask = jnp.zeros((2, t), jnp.int32), np.zeros((2, t), bool)
    mask[0, 10:30], mask[1, [1, 2, 21]] = True, True
    segments = np.where(np.arange(t) < 20, 0, 1)[None].repeat(2, 0)
    batch = Batch(tokens, jnp.asarray(mask), jnp.asarray(segments))
    draw = jax.jit(lambda seed: block_loss.drawn(jax.random.key(seed), batch, k, 8))
    seen = []
    for seed in range(30):
        anchors, kept = (np.asarray(x) for x in draw(seed))
        assert kept[0].all() and len(set(anchors[0])) == 8 and set(anchors[0]) <= set(range(9, 29)) - {19, 20}
        assert sorted(anchors[1][kept[1]]) == [1] and anchors[1][0] == 1  # 0 and 20 begin documents, 17..19 end one
        seen += anchors[0].tolist()
    assert set(seen) == set(range(9, 29)) - {19, 20}
    np.testing.assert_array_equal(draw(3).anchors, draw(3).anchors)
    every = block_loss.drawn(jax.random.key(0), batch, k, 999)
    assert every.anchors.shape == (2, t) and sorted(np.asarray(every.anchors)[0][np.asarray(every.kept)[0]])[:4] == [6, 7, 8, 9]


# Training and drafting.


@each
def test_a_block_in_training_is_the_block_that_is_drafted(name):
    """Its logits, from the same text: a block in the middle of a row, among others, and a block that `propose` runs."""
    config, batch = VARIANTS[name], told(VARIANTS[name], text())
    blocks = block_loss.Blocks(jnp.broadcast_to(jnp.arange(T)[None], (2, T)), jnp.ones((2, T), bool))
    hidden = jax.jit(lambda p: block_loss.given(h.TARGET, config, p, batch, blocks, num_draft=K))(both(name))
    logits = backbone.few_logits(h.TARGET, config, None, h.target_params(), hidden)
    drafter, exact = dflash.dflash(h.TARGET, config=config, num_draft=K), ref.double(params_of(name))
    rows = [(b, n) for b in range(2) for n in range(2, T)]
    lines = [np.asarray(batch.tokens)[b, :n].tolist() for b, n in rows]
    draft, _ = proposal(drafter, both(name), *state_after(drafter, both(name), lines))
    assert (np.asarray(draft.parents) == np.arange(K)[None] - 1).all()
    for row, (b, n) in enumerate(rows):
        trained = tempered(logits[b, n - 1][None], jnp.ones(1))[0]
        np.testing.assert_allclose(draft.log_q[row], trained, atol=1e-5)
        by_hand = block_by_hand(exact, config, lines[row][-1], ref.double(batch.output.features)[b, : n - 1])
        np.testing.assert_allclose(hidden[b, n - 1], by_hand, atol=1e-5)


SEEN = {
    "dflash": ["11110000", "10000000", "00000110", "00000000"],
    "window": ["00110000", "10000000", "00000110", "00000000"],
}


@pytest.mark.parametrize("name", SEEN)
def test_what_a_block_sees(name):
    """[anchor, position of a feature]: strictly before the anchor, of its own document, within the window of its first row."""
    config, batch, params = VARIANTS[name]._replace(sliding=(True, True) if name == "window" else ()), text(1, 8), both(name)
    segments = jnp.asarray([[0, 0, 0, 0, 0, 1, 1, 1]])
    blocks = block_loss.Blocks(jnp.asarray([[4, 1, 7, 5]]), jnp.asarray([[True, True, True, False]]))

    @jax.jit
    @jax.grad
    def slope(features, weights):
        given = batch._replace(segments=segments, output=batch.output._replace(features=features))
        return (block_loss.given(h.TARGET, config, params, given, blocks, num_draft=K) * weights).sum()

    rng = np.random.default_rng(0)
    for block, seen in enumerate(SEEN[name]):
        weights = jnp.zeros((1, 4, K, 16)).at[:, block].set(rng.standard_normal((K, 16)))
        reach = np.abs(slope(batch.output.features, weights)).sum((0, 2, 3)) > 0
        assert reach.tolist() == [x == "1" for x in seen]


def test_no_leak():
    """The loss of one block, whatever it is: no gradient to features from its anchor on, nor to another document's."""
    config, batch = VARIANTS["dflash"], ref.batch()
    only = block_loss.Blocks(jnp.asarray([[8], [5]]), jnp.ones((2, 1), bool))
    how = dict(num_draft=K, vocabulary=None, objective=objectives.soft)

    def loss(x):
        given = batch._replace(output=batch.output._replace(features=x))
        found = block_loss.scores(h.TARGET, config, params, given, only, **how)
        return objectives.pool(found, [1.0] * K)[0]

    params, gradient = both("dflash"), jax.jit(jax.grad(loss))
    size = np.abs(gradient(batch.output.features)).sum((2, 3))
    assert (size[0, 6:8] > 0).all() and (size[1, :5] > 0).all()
    assert size[0, :6].sum() == size[0, 8:].sum() == size[1, 5:].sum() == 0


def test_the_cache_holds_true_features_only():
    """Before and after rounds with rejections: what the target alone gives on the text, and no row of a block."""
    config, params = VARIANTS["window"], both("window")
    drafter = dflash.dflash(h.TARGET, config=config, num_draft=K)
    for rounds in (0, 3):
        state, sequences = state_after(drafter, params, h.PROMPTS, rounds=rounds)
        _, after = proposal(drafter, params, state, sequences)
        for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
            np.testing.assert_array_equal(x, y)
        lines = np.asarray(sequences.tokens)[:, :40]
        out = h.TARGET.apply(h.target_params(), jnp.asarray(lines), h.TARGET.init_cache(5, 40), features=(0, 1))[0]
        at = jnp.broadcast_to(jnp.arange(40)[None], (5, 40))
        ks, vs = backbone.entries(config, params.drafter, out.features, at)
        np.testing.assert_array_equal(state.cache.length, np.asarray(sequences.length) - 1)
        for row, n in enumerate(np.asarray(state.cache.length)):
            for i in range(config.layers):
                np.testing.assert_allclose(state.cache.k[i][row, :, :, :n].transpose(2, 0, 1), ks[i][row, :n], atol=1e-5)
                np.testing.assert_allclose(state.cache.v[i][row, :, :n].transpose(1, 0, 2), vs[i][row, :n], atol=1e-5)


def test_a_broken_token_spoils_no_other():
    """Values that are not finite lie in free slots only, and are not read there."""
    state = dflash.DFlashState(backbone.empty_cache(VARIANTS["dflash"], 1, 8))
    features = jnp.ones((1, 4, 2, 16)).at[:, 2:].set(jnp.nan)
    state = dflash.entered(VARIANTS["dflash"], both("dflash"), state, features, jnp.asarray([2]))
    assert np.isfinite(state.cache.v[0]).all() and state.cache.length.tolist() == [2]
    drafter = dflash.dflash(h.TARGET, config=VARIANTS["dflash"], num_draft=K)
    sequences = Sequences(jnp.zeros((1, 8), jnp.int32), jnp.asarray([3]), None, h.sampling.SamplingParams(jnp.ones(1)))
    draft, _ = proposal(drafter, both("dflash"), state, sequences)
    assert draft.parents.tolist() == [[-1, 0, 1]] and np.isfinite(draft.log_q).all()


# Drafts.


def test_best_tokens():
    """Point children: the best of each row whatever the temperature, without a law."""
    greedy = dflash.dflash(h.TARGET, config=VARIANTS["dflash"], num_draft=K, siblings=SIBLINGS["point"])
    iid = dflash.dflash(h.TARGET, config=VARIANTS["dflash"], num_draft=K)
    given = state_after(iid, both("dflash"), h.PROMPTS)
    best, drawn = (proposal(d, both("dflash"), *given)[0] for d in (greedy, iid))
    assert best.log_q is None and (greedy.children, iid.children) == ("point", "iid")
    np.testing.assert_array_equal(best.tokens, np.asarray(drawn.log_q).argmax(-1))
    assert (best.tokens != drawn.tokens).any()
    assert best.parents[1].tolist() == [-2] * 3 and (best.parents[jnp.asarray([0, 2, 3, 4])] == jnp.arange(3)[None] - 1).all()
    with pytest.raises(ValueError, match="children 'without_replacement' of a chain"):
        dflash.dflash(h.TARGET, config=VARIANTS["dflash"], num_draft=K, siblings=SIBLINGS["without_replacement"])


def test_a_prompt_of_one_token_drafts_nothing_at_first():
    result = h.run("dflash", "rejection", rounds=2)
    assert result.drafted[1].tolist()[:2] == [0, 3] and (result.drafted[[0, 2, 3, 4], 0] == 3).all()


@pytest.mark.parametrize("children", ["iid", "point"])
def test_a_draft_vocabulary(children, tmp_path):
    """No other id is ever proposed; tokens are plain decoding's; from disk."""
    about = {"method": "dflash", "vocabulary": IDS, **VARIANTS["dflash"]._asdict()}
    files.save(tmp_path, params_of("dflash"), about)
    loaded = load_drafter("dflash", TARGET_LM, num_draft=K, weights=str(tmp_path), children=children)
    recipe = dflash.recipe(h.TARGET, num_draft=K, config=VARIANTS["dflash"], vocabulary=IDS)
    assert (loaded.drafter is recipe.drafter) == (children == "iid")  # the same: nothing is compiled anew
    params = Params(h.target_params(), loaded.params)
    draft, _ = proposal(loaded.drafter, params, *state_after(loaded.drafter, params, h.PROMPTS[2:]))
    assert np.isin(draft.tokens, IDS).all()
    if draft.log_q is not None:
        outside = np.setdiff1d(np.arange(h.V), IDS)
        assert (np.asarray(draft.log_q)[..., outside] == -np.inf).all() and np.isfinite(draft.log_q[..., list(IDS)]).all()
    result = h.generate(loaded.drafter, loaded.rule, h.MIXED, params=params, temperature=h.MIXED_HEAT)
    assert result.tokens[:5] == h.reference().tokens[:5]
    assert 0 < result.accepted.sum() < result.drafted.sum()


# Facts, and where training begins.


def test_layers_that_are_read():
    """DFlash's for deep targets, and all or the last ones of shallow ones."""
    assert default_taps(40) == (1, 10, 19, 28, 37) and default_taps(64) == (1, 16, 31, 46, 61)
    assert [default_taps(n) for n in (1, 2, 5, 7, 8)] == [(0,), (0, 1), (0, 1, 2, 3, 4), (2, 3, 4, 5, 6), (1, 2, 3, 4, 5)]


def test_a_backbone_is_shaped_like_its_target():
    assert not dflash_config(h.CONFIG).qk_norm and dflash_config(h.CONFIG._replace(qk_norm=True)).qk_norm
    assert [dflash_config(h.CONFIG._replace(layers=n, sliding=())).layers for n in (1, 2, 4, 30)] == [1, 1, 2, 5]
    assert dflash_config(h.CONFIG) == SMALL(layers=1, qk_norm=False, taps=[0, 1], mask_token=16)


def test_configs_that_cannot_be():
    for flags, message in (
        (dict(taps=()), "no taps"),
        (dict(sliding=[True]), "1 entries != 2 layers"),
        (dict(sliding=[True, False]), "set window"),
        (dict(conv_taps=2, conv_group=5), "width 16 is no multiple of 5"),
        (dict(heads=3), "heads must be a multiple"),
    ):
        with pytest.raises(ValueError, match=message):
            checked(SMALL(**flags))


def test_a_backbone_begins_as_the_targets_last_layers():
    """fc reads the highest feature; norms of q and k that the target lacks are its own."""
    make = jax.jit(lambda key, own: start.params_init(h.TARGET, SMALL(), key, own))
    own = h.target_params()
    p = make(jax.random.key(0), own)
    for name in ("layer_0", "layer_1"):
        mine, theirs = p[name], own[name]
        whole = np.asarray(theirs["attention"]["qkv"]["kernel"]).reshape(16, 2, 4, 8)
        np.testing.assert_array_equal(mine["attention"]["q"]["kernel"], whole[:, :, :2].reshape(16, 32))
        np.testing.assert_array_equal(mine["attention"]["kv"]["kernel"], whole[:, :, 2:].reshape(16, 32))
        np.testing.assert_array_equal(mine["attention"]["out"]["kernel"], theirs["attention"]["out"]["kernel"])
        np.testing.assert_array_equal(mine["mlp"]["down"]["kernel"], theirs["mlp"]["down"]["kernel"])
        assert (mine["attention"]["q_norm"]["scale"] == 1).all()
    np.testing.assert_array_equal(p["norm"]["scale"], own["norm"]["scale"])
    np.testing.assert_array_equal(p["fc"]["kernel"], np.eye(32, 16, -16))


def begun(config):
    return jax.jit(functools.partial(start.params_init, h.TARGET, config))(jax.random.key(0), h.target_params())


def test_what_the_target_has_no_like_of_begins_as_nothing():
    """A layer too many, a narrower feed-forward, other heads: what they add is zero, and the rest is the target's."""
    silent = lambda p, layer, name, part: not p[layer][name][part]["kernel"].any()
    p = begun(SMALL(layers=3, hidden=24))
    assert p["layer_1"]["mlp"]["gate_up"]["kernel"].shape == (16, 48) and p["layer_1"]["mlp"]["gate_up"]["kernel"].any()
    assert [silent(p, f"layer_{i}", "mlp", "down") for i in range(3)] == [True] * 3
    assert [silent(p, f"layer_{i}", "attention", "out") for i in range(3)] == [True, False, False]
    p = begun(SMALL(heads=2))
    assert silent(p, "layer_0", "attention", "out") and not silent(p, "layer_0", "mlp", "down")
    assert p["layer_0"]["attention"]["q"]["kernel"].any()

"""DSpark: its heads in NumPy, training against drafting from left to right, what confidence may see."""

import functools

import blocks
import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references as ref

from specjax import load_drafter
from specjax.drafters import files, objectives
from specjax.drafters.dflash import backbone, dspark
from specjax.drafters.dflash import loss as block_loss
from specjax.drafters.dflash.config import dflash_config
from specjax.drafters.siblings import SIBLINGS
from specjax.models.load import LM
from specjax.sampling import tempered
from specjax.train.blocks import heads_of
from specjax.types import Params

K, R, IDS = blocks.K, 4, blocks.IDS
TARGET_LM = LM(h.TARGET, h.target_params(), None, h.CONFIG)
CONFIG = dflash_config(h.CONFIG, anchor_first=True)
KINDS = {
    "vanilla": (dspark.DSparkConfig(R), None),
    "gated": (dspark.DSparkConfig(R, "gated", confidence_markov=False), IDS),
    "rnn": (dspark.DSparkConfig(R, "rnn"), None),
}
each = pytest.mark.parametrize("kind", KINDS)


@functools.cache
def params_of(kind):
    """What training begins with, disturbed, so that nothing in it is zero."""
    heads, ids = KINDS[kind]
    make = jax.jit(lambda key: dspark.params_init(h.TARGET, CONFIG, heads, ids, key, h.target_params()))
    leaves, treedef = jax.tree.flatten(make(jax.random.key(3)))
    rng = np.random.default_rng(4)
    return treedef.unflatten([x + jnp.asarray(0.15 * rng.standard_normal(x.shape), x.dtype) for x in leaves])


def build(kind, **how):
    heads, ids = KINDS[kind]
    return dspark.dspark(h.TARGET, config=CONFIG, heads=heads, num_draft=K, vocabulary=ids, **how)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def heads_by_hand(p, kind, hidden, before):
    """(what is added to logits [K, n], confidence logits [K]) of a block, hidden [K, D], after the tokens `before` [K]."""
    own, state, added, sure = p["heads"], np.zeros(R), [], []
    linear = lambda x, name: x @ own[name]["kernel"] + own[name]["bias"]
    for x, token in zip(hidden, before, strict=True):
        e = own["before"][token]
        if kind == "rnn":
            g, c, o = np.split(linear(np.concatenate([state, e, x]), "mix"), 3)
            m, state = np.tanh(o), sigmoid(g) * state + (1 - sigmoid(g)) * np.tanh(c)
        else:
            m = sigmoid(linear(np.concatenate([x, e]), "mix")) * e if kind == "gated" else e
        added.append(m @ own["after"])
        sure.append(linear(np.concatenate([x, e]) if KINDS[kind][0].confidence_markov else x, "sure")[0])
    return np.asarray(added), np.asarray(sure)


@each
def test_loss_and_gradient(kind):
    """Against NumPy in float64: .1 CE + .9 L1 + BCE; of a draft vocabulary L1 counts what it lacks, and CE its own labels."""
    heads, ids = KINDS[kind]
    recipe = dspark.recipe(h.TARGET, num_draft=K, config=CONFIG, heads=heads, vocabulary=ids)
    columns = list(range(h.V) if ids is None else ids)
    branch = blocks.Branches()  # where q is above p; and what confidence is to be, which is data

    def reference(p):
        def read(hidden, tokens):
            short = np.concatenate([tokens, np.zeros(K - len(tokens), int)])
            added, sure = heads_by_hand(p, kind, hidden, short)
            return list(zip(blocks.logits_by_hand(CONFIG, hidden, columns) + added, sure, strict=True))

        def nats(found, b, goal):
            (logits, sure), law = found, ref.taught(b, goal)
            q = np.zeros(h.V)
            q[columns] = ref.softmax(logits)
            label, signs = ref.TOKENS[b, goal], branch.of(lambda: np.sign(q - law))
            distance = signs @ (q - law)
            true = branch.of(lambda: 1 - distance / 2)
            ce = -np.log(q[label]) if label in columns else 0.0
            return 0.1 * ce + 0.9 * distance - true * np.log(sigmoid(sure)) - (1 - true) * np.log(1 - sigmoid(sure))

        branch.again()
        return blocks.loss_by_hand(CONFIG, p, nats, np.exp(-1 / 4), read)

    ref.check(recipe, params_of(kind), reference)


@each
def test_a_block_in_training_is_the_block_that_is_drafted(kind):
    """After the tokens that were drawn: laws and confidences of `propose` are those of training on these very tokens."""
    (heads, ids), n = KINDS[kind], 7
    drafter, params = build(kind), Params(h.target_params(), params_of(kind))
    line = np.random.default_rng(6).integers(0, h.V, n).tolist()
    draft, _ = blocks.proposal(drafter, params, *blocks.state_after(drafter, params, [line]))
    tokens = [*line, *np.asarray(draft.tokens)[0].tolist()]
    batch = blocks.text(1, n + K)._replace(tokens=jnp.asarray([tokens]))
    batch = blocks.with_output(batch._replace(output=()), h.TARGET, h.target_params(), (0, 1))
    one = block_loss.Blocks(jnp.asarray([[n - 1]]), jnp.ones((1, 1), bool))
    hidden = block_loss.given(h.TARGET, CONFIG, params, batch, one, num_draft=K)[0]
    own = {"params": params.drafter["heads"]}
    module = dspark.heads_of(h.TARGET, heads, ids)
    more, sure = module.apply(own, jnp.asarray([tokens[n - 1 : -1]]), hidden, method="along")
    logits = backbone.few_logits(h.TARGET, CONFIG, ids, h.target_params(), hidden) + more
    columns = list(range(h.V) if ids is None else ids)
    np.testing.assert_allclose(draft.log_q[0][:, columns], tempered(logits, jnp.ones(1))[0], atol=1e-5)
    np.testing.assert_allclose(draft.confidence, jax.nn.sigmoid(sure), atol=1e-6)
    exact = ref.double(params_of(kind))
    by_hand = blocks.block_by_hand(exact, CONFIG, line[-1], ref.double(batch.output.features)[0, : n - 1])
    added, sure = heads_by_hand(exact, kind, by_hand, tokens[n - 1 : -1])
    law = ref.softmax(blocks.logits_by_hand(CONFIG, by_hand, columns) + added)
    np.testing.assert_allclose(np.exp(draft.log_q[0][:, columns]), law, atol=1e-5)
    np.testing.assert_allclose(draft.confidence[0], sigmoid(sure), atol=1e-5)


def test_confidence_looks_at_earlier_tokens_only():
    """Another noise for one token: it changes, its confidence and those before it do not, and later ones do."""
    drafter, params = build("rnn"), Params(h.target_params(), params_of("rnn"))
    state, sequences = blocks.state_after(drafter, params, [h.PROMPTS[0]])
    hot = sequences._replace(sampling=sequences.sampling._replace(temperature=jnp.full(1, 30.0)))

    @jax.jit
    def go(seeds):
        noise = lambda depth, width=1: jax.random.gumbel(jax.random.key(seeds[depth - 1]), (1, width, h.V))
        return drafter.propose(noise, params, state, hot)[0]

    one, other = go(jnp.asarray([1, 2, 3])), go(jnp.asarray([1, 7, 3]))
    same = np.asarray(one.tokens == other.tokens)[0]
    assert same[0] and not same[1]
    np.testing.assert_array_equal(one.confidence[0, :2], other.confidence[0, :2])
    assert one.confidence[0, 2] != other.confidence[0, 2] and ((one.confidence > 0) & (one.confidence < 1)).all()


def test_best_tokens():
    """Point children follow the best token of each corrected law."""
    params = Params(h.target_params(), params_of("vanilla"))
    greedy, iid = build("vanilla", siblings=SIBLINGS["point"]), build("vanilla")
    state, sequences = blocks.state_after(iid, params, h.PROMPTS[2:])
    cold = sequences._replace(sampling=sequences.sampling._replace(temperature=jnp.zeros(3)))
    best, drawn = (blocks.proposal(d, params, state, s)[0] for d, s in ((greedy, sequences), (iid, cold)))
    assert best.log_q is None and greedy.children == "point"
    np.testing.assert_array_equal(best.tokens, drawn.tokens)
    np.testing.assert_allclose(best.confidence, drawn.confidence, atol=1e-6)


def test_no_leak():
    """No term of a block's loss reaches features from its anchor on, nor the target's states; the target is data."""
    batch, params = blocks.text(1, 9), Params(h.target_params(), params_of("gated"))
    only = block_loss.Blocks(jnp.asarray([[4]]), jnp.ones((1, 1), bool))
    how = dict(num_draft=K, vocabulary=IDS, text=0.1, law=0.9, confidence=1.0)

    @jax.jit
    @jax.grad
    def slope(output):
        found = dspark.scores(h.TARGET, CONFIG, KINDS["gated"][0], params, batch._replace(output=output), only, **how)
        return objectives.pool([scored for scored, _ in found], [1.0] * K)[0]

    gradient = slope(batch.output._replace(logits=jnp.zeros(())))
    size = np.abs(gradient.features[0]).sum((1, 2))
    assert (size[:4] > 0).all() and not size[4:].any() and not gradient.hidden.any()


def test_the_metrics_tell_how_far_confidence_is_off():
    recipe = h.RECIPES["dspark"](K)
    loss = jax.jit(lambda p: recipe.loss(p, h.target_params(), ref.batch(), jax.random.key(0))[1])
    metrics = loss(h.trained("dspark"))
    assert 0 < metrics["confidence_error"] < 1 and metrics["tau"] >= 1
    without = dspark.recipe(h.TARGET, num_draft=K, config=CONFIG, heads=heads_of({"rank": 4, "confidence": 0.0}))
    assert "sure" not in jax.eval_shape(without.init, jax.random.key(0), h.target_params())["heads"]


def test_saved_heads(tmp_path):
    """Of another kind, of another rank, or of a kind that there is not: refused, with what is wrong."""
    heads, ids = KINDS["gated"]
    about = {"method": "dspark", "vocabulary": ids, **CONFIG._asdict(), **heads._asdict()}
    files.save(tmp_path, params_of("gated"), about)
    loaded = load_drafter("dspark", TARGET_LM, num_draft=K, weights=str(tmp_path))
    recipe = dspark.recipe(h.TARGET, num_draft=K, config=CONFIG, heads=heads, vocabulary=ids)
    assert loaded.drafter is recipe.drafter and loaded.card.method == "dspark"  # the same: nothing is compiled anew
    for change, message in (
        ({"markov": "gate"}, "no Markov head 'gate': did you mean 'gated'"),
        ({"markov": "rnn"}, "heads/mix/bias is .4. but should be .12."),
        ({"rank": 5}, "heads/before is .17, 4. but should be .17, 5."),
        ({"confidence": False}, "2 not used: heads/sure/bias"),
        ({"rank": 0}, "rank '0' is not a whole number from 1"),
        ({"num_draft": 2}, "num_draft 3 > 2 tokens of the blocks"),
    ):
        files.save(tmp_path, params_of("gated"), {**about, **change})
        with pytest.raises(ValueError, match=message):
            load_drafter("dspark", TARGET_LM, num_draft=K, weights=str(tmp_path))
    files.save(tmp_path, params_of("gated"), about)
    with pytest.raises(ValueError, match="anchor_first=false, and it was trained otherwise"):
        load_drafter("dspark", TARGET_LM, num_draft=K, weights=str(tmp_path), anchor_first=False)

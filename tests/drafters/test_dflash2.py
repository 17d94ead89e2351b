"""DFlash 2: its selector in NumPy, training against drafting, the law of its candidates; for convolutions see test_dflash."""

import functools

import blocks
import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references as ref

from specjax.drafters.dflash import dflash2, start
from specjax.drafters.dflash import drafter as dflash
from specjax.drafters.dflash import loss as block_loss
from specjax.drafters.siblings import SIBLINGS
from specjax.sampling import tempered
from specjax.types import Params

K, R, C, IDS = blocks.K, 4, 6, blocks.IDS
CONFIG = dflash2.dflash2_config(h.CONFIG, conv_group=8, output_multiplier=0.2)
SELECTOR = dflash2.SelectorConfig(R, C)
VOCABULARIES = {"all": None, "few": IDS}


@functools.cache
def params_of(name):
    """What training begins with, disturbed, so that nothing in it is zero."""
    make = jax.jit(lambda key, own: dflash2.params_init(h.TARGET, CONFIG, SELECTOR, VOCABULARIES[name], key, own))
    leaves, treedef = jax.tree.flatten(make(jax.random.key(3), h.target_params()))
    rng = np.random.default_rng(4)
    return treedef.unflatten([x + jnp.asarray(0.15 * rng.standard_normal(x.shape), x.dtype) for x in leaves])


def build(name, **how):
    return dflash2.dflash2(
        h.TARGET, config=CONFIG, selector=SELECTOR, num_draft=K, vocabulary=VOCABULARIES[name], **how
    )  # fmt: skip


def best(logits):
    return np.argsort(-logits, kind="stable")[:C].tolist()


def selected(p, hidden, logits, token, candidates):
    """{token: score} of the candidates of one row, by their places; hidden [D], logits [n]."""
    own = p["selector"]
    context = own["before"][token] * (hidden @ own["project"]["kernel"])
    return {b: logits[b] + context @ own["after"][b] for b in candidates}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_loss_and_gradient(name):
    """Against NumPy in float64: the rows' own cross-entropy, and that of the path where the text is among the candidates."""
    ids = VOCABULARIES[name]
    recipe = dflash2.recipe(h.TARGET, num_draft=K, config=CONFIG, selector=SELECTOR, vocabulary=ids)
    columns, seen, branch = list(range(h.V) if ids is None else ids), [], blocks.Branches()

    def reference(p):
        def read(hidden, tokens):
            logits = blocks.logits_by_hand(CONFIG, hidden, columns)
            before = np.concatenate([tokens, np.zeros(K, int)])
            chosen = [branch.of(lambda x=x: best(x)) for x in logits]
            return [(x, selected(p, hidden[k], x, before[k], chosen[k])) for k, x in enumerate(logits)]

        def nats(found, b, goal):
            (logits, scores), label = found, ref.TOKENS[b, goal]
            place, inside = columns.index(label) if label in columns else -1, ref.taught(b, goal).argmax() in columns
            own = -np.log(ref.softmax(logits)[place]) if place >= 0 and inside else 0.0
            seen.append(place in scores)
            law = ref.softmax(np.asarray(list(scores.values())))
            return own - (np.log(law[list(scores).index(place)]) if place in scores else 0.0)

        branch.again()
        return blocks.loss_by_hand(CONFIG, p, nats, np.exp(-1 / 4), read)

    ref.check(recipe, params_of(name), reference)
    assert 0 < np.mean(seen) < 1


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_block_in_training_is_the_block_that_is_drafted(name):
    """From left to right, after the tokens that were drawn: a law of C points, theirs by hand from training's own rows."""
    drafter, params, n = build(name), Params(h.target_params(), params_of(name)), 7
    ids, line = VOCABULARIES[name], np.random.default_rng(6).integers(0, h.V, 7).tolist()
    draft, _ = blocks.proposal(drafter, params, *blocks.state_after(drafter, params, [line]))
    tokens = [*line, *np.asarray(draft.tokens)[0].tolist()]
    batch = blocks.text(1, n + K)._replace(tokens=jnp.asarray([tokens]))
    batch = blocks.with_output(batch._replace(output=()), h.TARGET, h.target_params(), (0, 1))
    one = block_loss.Blocks(jnp.asarray([[n - 1]]), jnp.ones((1, 1), bool))
    hidden = np.asarray(block_loss.given(h.TARGET, CONFIG, params, batch, one, num_draft=K)[0, 0], np.float64)
    exact, columns = ref.double(params_of(name)), list(range(h.V) if ids is None else ids)
    by_hand = blocks.block_by_hand(exact, CONFIG, line[-1], ref.double(batch.output.features)[0, : n - 1])
    np.testing.assert_allclose(hidden, by_hand, atol=1e-5)
    for k, logits in enumerate(blocks.logits_by_hand(CONFIG, hidden, columns)):
        scores = selected(exact, hidden[k], logits, tokens[n - 1 + k], best(logits))
        law = np.full(h.V, -np.inf)
        law[[columns[b] for b in scores]] = np.log(ref.softmax(np.asarray(list(scores.values()))))
        np.testing.assert_allclose(draft.log_q[0, k], law, atol=1e-5)
        assert np.isfinite(draft.log_q[0, k]).sum() == C and tokens[n + k] in [columns[b] for b in scores]


def test_best_tokens():
    """Point children follow the best candidate; at temperature 0 the law is that point."""
    params = Params(h.target_params(), params_of("all"))
    greedy, iid = build("all", siblings=SIBLINGS["point"]), build("all")
    state, sequences = blocks.state_after(iid, params, h.PROMPTS[2:])
    cold = sequences._replace(sampling=sequences.sampling._replace(temperature=jnp.zeros(3)))
    top, drawn = (blocks.proposal(d, params, state, s)[0] for d, s in ((greedy, sequences), (iid, cold)))
    assert top.log_q is None and greedy.children == "point"
    np.testing.assert_array_equal(top.tokens, drawn.tokens)
    assert (np.isfinite(drawn.log_q).sum(-1) == 1).all()


def test_it_begins_as_dflash():
    """Convolutions that change nothing and a selector that adds nothing: DFlash's laws, cut to the candidates."""
    plain = CONFIG._replace(conv_taps=0)
    begun = lambda init, *config: jax.jit(functools.partial(init, h.TARGET, *config))(jax.random.key(0), h.target_params())
    p = begun(dflash2.params_init, CONFIG, SELECTOR, None)
    own = begun(start.params_init, plain)
    own = {**own, **{f"layer_{i}": {n: p[f"layer_{i}"][n] for n in own[f"layer_{i}"]} for i in range(CONFIG.layers)}}
    assert p["layer_0"]["mlp_conv"]["base"][:, 0].min() == 1 and not p["selector"]["after"].any()
    disturbed = lambda tree: {**tree, "layer_0": {**tree["layer_0"], "mlp": h.trained("dflash")["layer_0"]["mlp"]}}
    both = [Params(h.target_params(), disturbed(x)) for x in (p, own)]
    ours, theirs = build("all"), dflash.dflash(h.TARGET, config=plain, num_draft=K)
    one, other = (
        blocks.proposal(d, x, *blocks.state_after(d, x, h.PROMPTS[2:]))[0] for d, x in zip((ours, theirs), both, strict=True)
    )
    highest, at = jax.lax.top_k(other.log_q, C)
    np.testing.assert_allclose(jnp.take_along_axis(one.log_q, at, -1), tempered(highest, jnp.ones(3)), atol=1e-5)


def test_groups_of_channels_divide_the_width():
    assert dflash2.dflash2_config(h.CONFIG._replace(width=576)).conv_group == 16
    assert dflash2.dflash2_config(h.CONFIG._replace(width=20)).conv_group == 4

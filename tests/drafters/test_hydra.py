"""Hydra: the loss by hand, labels that a copying model proves, and that a node's law follows its own path."""

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references as ref

from specjax import load_drafter, sampling
from specjax.drafters import files, hydra, layer, medusa, objectives
from specjax.drafters.siblings import SIBLINGS
from specjax.models.load import LM
from specjax.types import Params, Sequences

K, SHARES = 3, [0.8, 0.64, 0.512]


def logits(p, hidden, tokens):
    """A u + SiLU(B u + b), u = [h; E(x); ..]; one more block; the target's head."""
    embedding, head = (np.asarray(h.target_params()[name], np.float64) for name in ("embedding", "head"))
    one = p[f"head_{len(tokens) - 1}"]
    u = np.concatenate([hidden, *(p["scale"] * embedding[x] for x in tokens)])
    y = u @ one["through"] + ref.silu(u @ one["gate"] + one["gate_bias"])
    return (y + ref.silu(y @ one["kernel"][0] + one["bias"][0])) @ head


@pytest.mark.parametrize("name", ["hard", "soft"])
def test_loss_and_gradient(name):
    hidden = ref.hidden()
    recipe = hydra.recipe(h.TARGET, num_draft=K, layers=2, objective=getattr(objectives, name))
    row = lambda p, b, t, i: logits(p, hidden[b, t], ref.TOKENS[b, t + 1 : t + 2 + i])
    ref.check(recipe, h.trained("hydra"), lambda p: ref.pooled(lambda *at: row(p, *at), SHARES, getattr(ref, name)))


@pytest.mark.parametrize("name", ["hard", "soft"])
def test_loss_and_gradient_behind_a_prefix(name):
    """Hydra++: what a layer gives stands in for h_t; the teacher is the target's own law all the same."""
    recipe = hydra.recipe(h.TARGET, num_draft=K, layers=2, prefix=h.LAYER_CONFIG, objective=getattr(objectives, name))

    def reference(p):
        seen = ref.layer_rows(p["prefix"])
        row = lambda b, t, i: logits(p, seen[b, t], ref.TOKENS[b, t + 1 : t + 2 + i])
        return ref.pooled(row, SHARES, getattr(ref, name))

    ref.check(recipe, h.trained("hydra, prefix"), reference)


def test_a_perfect_predictor_costs_the_entropy():
    """Head i moves the counter of the LAST token that it is given by one; read from another token it costs far more."""
    target, batch = ref.known()
    recipe = hydra.recipe(target, num_draft=K, decay=1.0)
    d = target.width
    for wrong in (0, 1):
        params = jax.jit(recipe.init)(None, ())
        for i in range(K):
            moved = jnp.zeros(((i + 2), d, d)).at[i + 1 - wrong].set(ref.later(1) / (params["scale"] if i + 1 - wrong else 1))
            params[f"head_{i}"] = {**params[f"head_{i}"], "through": moved.reshape(-1, d)}
        loss, metrics = recipe.loss(params, (), batch, None)
        assert float(loss) > 10 * K if wrong else abs(float(loss) - K * np.log(2)) < 1e-5
    assert float(metrics["accuracy_1"]) == 0


def test_a_nodes_children_follow_its_own_path():
    """Laws of all nodes of a tree, against the formula at the tokens on the way to each."""
    drafter, params = h.drafter("hydra"), Params(h.target_params(), h.trained("hydra"))
    hidden, lines = jax.random.normal(jax.random.key(0), (2, 16)), jnp.asarray([[3, 5, 2, 0], [8, 1, 0, 0]])
    noise = lambda depth, width=1: jax.random.gumbel(jax.random.fold_in(jax.random.key(1), depth), (2, width, h.V))
    heat = sampling.stack([sampling.SamplingParams(temperature=1.0)] * 2, h.V)
    sequences = Sequences(lines, jnp.asarray([3, 2]), None, heat)
    draft = jax.jit(lambda p, s: drafter.propose(noise, p, s, sequences)[0])(params, hidden)
    tokens, exact = np.asarray(draft.tokens), ref.double(h.trained("hydra"))
    for b, last in enumerate((2, 1)):
        for node, path in enumerate(h.HEAD_TREE):
            way = [tokens[b, h.HEAD_TREE.index(path[:n])] for n in range(1, len(path))]
            q = ref.softmax(logits(exact, np.asarray(hidden[b], np.float64), [last, *way]))
            q[[tokens[b, h.HEAD_TREE.index((*path[:-1], r))] for r in range(path[-1])]] = 0
            np.testing.assert_allclose(np.exp(draft.log_q[b, node]), q / q.sum(), rtol=1e-3, atol=1e-6)


def test_heads_begin_as_the_targets_own_and_options():
    hidden, tokens = jnp.asarray(ref.hidden()[0], jnp.float32), jnp.asarray(ref.TOKENS[0])[:, None]
    for own in (False, True):
        params = jax.jit(hydra.recipe(h.TARGET, num_draft=2, layers=3, own_head=own).init)(None, h.target_params())
        assert ("head" in params["head_1"]) == own and params["head_1"]["kernel"].shape == (2, 16, 16)
        got = hydra.head_logits(h.TARGET, h.target_params(), params, 1, hidden, jnp.concatenate([tokens, tokens], 1))
        np.testing.assert_allclose(got, h.TARGET.unembed(h.target_params(), hidden), rtol=1e-5, atol=1e-5)
    lm = LM(h.TARGET, h.target_params(), None, h.CONFIG)
    load = lambda **options: load_drafter("hydra", lm, num_draft=K, weights=h.saved("hydra"), **options)
    assert load().rule == "recursive" and load(tree="chain").rule == "rejection"
    assert load(children="point").rule == "target_match" and load(children="point").drafter.children == "point"


def test_a_prefix_begins_as_nothing():
    """The target's last layer, but that what it gives is what it is given, to the last bit."""
    params = jax.jit(hydra.recipe(h.TARGET, num_draft=2, prefix=layer.config_of(h.CONFIG)).init)(
        jax.random.key(0), h.target_params()
    )
    donor, prefix = h.target_params()["layer_1"], params["prefix"]
    for name in ("attention_norm", "mlp_norm"):
        np.testing.assert_array_equal(prefix[name]["scale"], donor[name]["scale"])
    np.testing.assert_array_equal(prefix["attention"]["qkv"]["kernel"], donor["attention"]["qkv"]["kernel"])
    np.testing.assert_array_equal(prefix["mlp"]["gate_up"]["kernel"], donor["mlp"]["gate_up"]["kernel"])
    hidden, segments = ref.batch().output.hidden, jnp.asarray(ref.SEGMENTS)
    np.testing.assert_array_equal(layer.over_rows(layer.config_of(h.CONFIG), prefix, hidden, segments), hidden)


def test_a_prefix_on_disk(tmp_path):
    """`"prefix": true` is a layer like the target's; one that is not announced, or only announced, is refused."""
    lm = LM(h.TARGET, h.target_params(), None, h.CONFIG._replace(qk_norm=True))
    load = lambda lm=lm: load_drafter("hydra", lm, num_draft=K, weights=str(tmp_path))
    files.save(tmp_path, h.trained("hydra, prefix"), {"method": "hydra", "prefix": True})
    loaded = load()
    assert "behind a layer" in loaded.card.note
    drawn = SIBLINGS["without_replacement"]
    assert loaded.drafter is hydra.hydra(h.TARGET, paths=medusa.chain_paths(K), siblings=drawn, prefix=h.LAYER_CONFIG)
    with pytest.raises(ValueError, match="2 not used: prefix/attention/k_norm/scale, prefix/attention/q_norm/scale"):
        load(lm._replace(config=h.CONFIG))
    with pytest.raises(ValueError, match="without a config does not say width, heads, kv_heads, head_dim, hidden"):
        load(lm._replace(config=None))
    files.save(tmp_path, h.trained("hydra, prefix"), {"method": "hydra"})
    with pytest.raises(ValueError, match="8 not used: prefix/attention"):
        load()
    files.save(tmp_path, h.trained("hydra"), {"method": "hydra", "prefix": True})
    with pytest.raises(ValueError, match="8 missing: prefix/attention"):
        load()

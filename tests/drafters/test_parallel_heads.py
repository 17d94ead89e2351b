"""Parallel heads: the loss by hand, labels that a copying model proves, how they begin, and their options."""

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references as ref

from specjax import load_drafter
from specjax.drafters import layer, objectives, parallel_heads
from specjax.models.load import LM

K = 3


@pytest.mark.parametrize("name", ["hard", "soft"])
def test_loss_and_gradient(name):
    """Each head is a layer of its own on the same states; heads weigh alike."""
    head = np.asarray(h.target_params()["head"], np.float64)

    def reference(p):
        given = [ref.layer_rows(p[f"head_{i}"]) for i in range(K)]
        return ref.pooled(lambda b, t, i: given[i][b, t] @ head, [1 / K] * K, getattr(ref, name))

    recipe = parallel_heads.recipe(h.TARGET, num_draft=K, config=h.LAYER_CONFIG, objective=getattr(objectives, name))
    ref.check(recipe, h.trained("parallel_heads"), reference)


def test_a_perfect_predictor_costs_the_entropy():
    """Head i moves the counter by 2 + i; moved by one more or less it costs far more."""
    target, batch = ref.known()
    d = target.width
    recipe = parallel_heads.recipe(target, num_draft=K, config=layer.LayerConfig(d, 2, 1, 4, d))
    begin = jax.jit(recipe.init)(jax.random.key(0), {})
    one = d**0.5 * ref.silu(d**0.5)  # what gate and up make of a one-hot, which the norm has lifted to the root of D
    loss_of = jax.jit(lambda p: recipe.loss(p, (), batch, jax.random.key(0))[0])
    for wrong in (0, 1, -1):
        params = {}
        for i in range(K):
            down = (ref.later(2 + i + wrong) - jnp.eye(d)) / one
            mlp = {"gate_up": {"kernel": jnp.concatenate([jnp.eye(d)] * 2, 1)}, "down": {"kernel": down}}
            params[f"head_{i}"] = {**begin[f"head_{i}"], "mlp": mlp}
        loss = float(loss_of(params))
        assert loss > 10 if wrong else abs(loss - np.log(2)) < 1e-5


def test_heads_begin_as_the_targets_own():
    """What each gives is what it is given, so that step 0 has the target's own logits."""
    config = layer.config_of(h.CONFIG)
    params = jax.jit(parallel_heads.recipe(h.TARGET, num_draft=2, config=config).init)(jax.random.key(0), h.target_params())
    hidden = ref.batch().output.hidden
    for i in range(2):
        given = layer.over_rows(config, params[f"head_{i}"], hidden, jnp.asarray(ref.SEGMENTS))
        np.testing.assert_array_equal(given, hidden)
        same = jax.tree.map(lambda a, b: bool((a == b).all()), params[f"head_{i}"], h.target_params()["layer_1"])
        assert same["attention"] == {"qkv": {"kernel": True}, "out": {"kernel": False}}


def test_a_prompt_of_one_token_drafts_nothing_at_first():
    result = h.run("parallel_heads", "rejection", rounds=2)
    assert result.drafted[1].tolist()[:2] == [0, K] and (result.drafted[[0, 2, 3, 4], 0] == K).all()


def test_options(tmp_path):
    """A tree from a file, children that are drawn, the rules that fit; a target of another width is refused."""
    lm, directory = LM(h.TARGET, h.target_params(), None, h.CONFIG), h.saved("parallel_heads")
    load = lambda lm=lm, **options: load_drafter("parallel_heads", lm, num_draft=K, weights=directory, **options)
    (tmp_path / "tree.json").write_text("[[0], [1], [0, 0], [0, 1]]")
    chain, tree = load(children="iid"), load(tree=str(tmp_path / "tree.json"))
    assert load().rule == chain.rule == "rejection" and load().drafter.children == "point"
    assert tree.rule == "target_match" and tree.drafter.num_nodes == 5 and not tree.drafter.chain
    with pytest.raises(ValueError, match="made for a target of width 16 != 24: train one for this target"):
        load(lm._replace(model=h.TARGET._replace(width=24)))

"""Medusa: the loss by hand, labels that a copying model proves, the static tree, published heads."""

import json
import re

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references as ref
from safetensors.numpy import save_file

from specjax import load_drafter
from specjax.drafters import medusa, objectives
from specjax.drafters.siblings import SIBLINGS
from specjax.models.load import LM

K, SHARES = 3, [0.8, 0.64, 0.512]
TARGET_LM = LM(h.TARGET, h.target_params(), None, h.CONFIG)


def row(hidden):
    """h + SiLU(W h + b), twice, then the head's own matrix."""

    def logits(params, b, t, i):
        x = hidden[b, t]
        for layer in range(2):
            x = x + ref.silu(x @ params["kernel"][i, layer] + params["bias"][i, layer])
        return x @ params["head"][i]

    return logits


@pytest.mark.parametrize("name", ["hard", "soft"])
def test_loss_and_gradient(name):
    recipe = medusa.recipe(h.TARGET, num_draft=K, layers=2, own_head=True, objective=getattr(objectives, name))
    one = row(ref.hidden())
    reference = lambda p: ref.pooled(lambda *at: one(p, *at), SHARES, getattr(ref, name))
    ref.check(recipe, h.trained("medusa"), reference)


def test_a_perfect_predictor_costs_the_entropy():
    """Head i moves the counter by 2 + i; moved by one more or less it costs far more."""
    target, batch = ref.known()
    recipe = medusa.recipe(target, num_draft=K, own_head=True, decay=1.0)
    pairs = target.unembed((), jnp.eye(target.width))
    for wrong in (0, 1, -1):
        params = {**jax.jit(recipe.init)(None, ()), "head": jnp.stack([ref.later(2 + i + wrong) @ pairs for i in range(K)])}
        loss, metrics = recipe.loss(params, (), batch, None)
        if wrong:
            assert float(loss) > 10 * K
        else:
            np.testing.assert_allclose(float(loss), K * np.log(2), rtol=1e-5)
            assert 1 < float(metrics["tau"]) < 1 + K


def test_heads_begin_as_the_targets_own():
    """Both kinds give the target's logits at first, and what is theirs to learn is no more than it should be."""
    hidden = jnp.asarray(ref.hidden()[0], jnp.float32)
    expected = h.TARGET.unembed(h.target_params(), hidden)
    for own in (False, True):
        params = jax.jit(medusa.recipe(h.TARGET, num_draft=2, own_head=own).init)(None, h.target_params())
        assert ("head" in params) == own
        logits = medusa.head_logits(h.TARGET, h.target_params(), params, hidden)
        np.testing.assert_allclose(logits, jnp.stack([expected] * 2, 1), rtol=1e-5, atol=1e-5)


# The tree.


def test_the_authors_tree():
    assert set(medusa.TREE_63) == set(h.MEDUSA_63) and len(medusa.TREE_63) == 63
    assert len(medusa.choose_tree(None, medusa.TREE_63, 1)) == 10
    assert medusa.choose_tree(None, medusa.TREE_63, 6)[-2:] == ((0,) * 5, (0,) * 6)
    assert medusa.choose_tree("chain", medusa.TREE_63, 2) == ((0,), (0, 0)) == medusa.choose_tree(None, (), 2)


def grown(kind, temperature):
    """A draft of HEAD_TREE whose logits at a level are given, with the logits and the noise."""
    logits = 2 * jax.random.normal(jax.random.key(0), (2, K, h.V))
    noise = lambda depth, width=1: jax.random.gumbel(jax.random.fold_in(jax.random.key(1), depth), (2, width, h.V))
    siblings = SIBLINGS[kind]
    look = lambda depth, path: jnp.repeat(logits[:, depth - 1 : depth], 1 if kind == "point" else path.shape[1], 1)
    tree = medusa.static_tree(h.HEAD_TREE, siblings)
    return medusa.grow(tree, siblings, jnp.full(2, temperature), noise, look), np.asarray(logits), noise, tree


@pytest.mark.parametrize("kind", ["point", "without_replacement"])
def test_a_node_is_the_candidate_of_its_rank(kind):
    """At temperature 0 the same whatever its parent; at 1 drawn children are drawn anew below each."""
    draft, logits, _, tree = grown(kind, 0.0)
    order = np.argsort(-logits, -1)
    assert (np.asarray(draft.tokens) == order[:, tree.depths - 1, tree.ranks]).all()
    assert (np.asarray(draft.parents) == tree.parents[None]).all()
    draft, _, noise, _ = grown(kind, 1.0)
    if kind == "point":
        assert draft.log_q is None and (np.asarray(draft.tokens) == order[:, tree.depths - 1, tree.ranks]).all()
        return
    scores = jax.nn.log_softmax(logits[:, 1:2], -1) + noise(2, 2)  # below nodes 0 and 1
    drawn = np.argsort(-np.asarray(scores), -1)
    below = [h.HEAD_TREE.index(path) for path in ((0, 0), (0, 1), (1, 0))]
    assert (np.asarray(draft.tokens)[:, below] == drawn[:, [0, 0, 1], [0, 1, 0]]).all()
    second = np.asarray(draft.log_q)[:, below[1]]  # the law of a second sibling is without the first
    assert (np.exp(second[np.arange(2), np.asarray(draft.tokens)[:, below[0]]]) == 0).all()
    np.testing.assert_allclose(np.exp(second).sum(-1), 1, rtol=1e-5)


def test_nothing_hangs_below_what_is_absent():
    logits = jnp.zeros((1, 1, h.V)).at[..., 1:].set(-jnp.inf)  # one token has all the mass: no second sibling exists
    tree, siblings = medusa.static_tree(h.HEAD_TREE, SIBLINGS["without_replacement"]), SIBLINGS["without_replacement"]
    noise = lambda depth, width=1: jnp.zeros((1, width, h.V))
    draft = medusa.grow(tree, siblings, jnp.ones(1), noise, lambda depth, path: jnp.repeat(logits, path.shape[1], 1))
    alive = {path for path, parent in zip(h.HEAD_TREE, np.asarray(draft.parents)[0], strict=True) if parent >= -1}
    assert alive == {(0,), (0, 0), (0, 0, 0)}


REFUSED = {
    "hole": (((0,), (2,)), "iid", "ranks [0, 2] below () != 0..1: children iid skip no rank"),
    "uneven": (((0,), (1,), (0, 0), (0, 1), (1, 0)), "sampled_then_top", "ranks [0] below (1,) != 0..1"),
    "no tree": (((0, 0),), "point", "hangs in the air"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_trees_that_cannot_be_drawn(name):
    paths, kind, message = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        medusa.medusa(h.TARGET, paths=paths, siblings=SIBLINGS[kind])


def test_options(tmp_path):
    """The tree by name or from a file, children by kind; the rule that fits."""
    load = lambda **options: load_drafter("medusa", TARGET_LM, num_draft=K, weights=h.saved("medusa"), **options)
    assert load().rule == "target_match" and load().drafter.num_nodes == len(h.HEAD_TREE)
    assert load(tree="chain").rule == "rejection" and load(tree="chain").drafter.chain
    (tmp_path / "tree.json").write_text(json.dumps([[0], [1], [0, 0]]))
    drawn = load(tree=str(tmp_path / "tree.json"), children="without_replacement")
    assert drawn.rule == "recursive" and drawn.drafter.num_nodes == 3 + 1  # and a chain down to the third level
    with pytest.raises(ValueError, match="did you mean 'iid'"):
        load(children="idd")


# Published heads.


def published(prefix=""):
    """The authors' names; [out, in]."""
    heads, tensors = jax.tree.map(np.asarray, h.trained("medusa")), {}
    for i in range(K):
        for layer in range(2):
            tensors[f"{prefix}{i}.{layer}.linear.weight"] = np.array(heads["kernel"][i, layer].T, order="C")
            tensors[f"{prefix}{i}.{layer}.linear.bias"] = heads["bias"][i, layer]
        tensors[f"{prefix}{i}.2.weight"] = np.array(heads["head"][i].T, order="C")
    return tensors


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_published_heads(tmp_path, prefix):
    """Heads and blocks are counted, whatever config.json says; a directory or the file itself; the authors' tree."""
    save_file(published(prefix), tmp_path / "medusa_lm_head.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    for weights in (tmp_path, tmp_path / "medusa_lm_head.safetensors"):
        loaded = load_drafter("medusa", TARGET_LM, num_draft=K, weights=str(weights))
        for name, x in h.trained("medusa").items():
            np.testing.assert_array_equal(loaded.params[name], x)
        assert loaded.drafter.num_nodes == sum(len(p) <= K for p in medusa.TREE_63)


BROKEN = {
    "missing": (lambda t: t.pop("1.0.linear.bias"), "1 missing: 1.0.linear.bias"),
    "unused": (lambda t: t.update(lm_head=np.zeros(2, np.float32)), "1 not used: lm_head"),
    "shape": (
        lambda t: t.update({"2.2.weight": np.zeros((5, 16), np.float32)}),
        "2.2.weight is [5, 16] but should be [17, 16]",
    ),
    "nothing": (lambda t: t.clear(), "tensors do not fit"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_published_heads_that_do_not_fit(tmp_path, name):
    change, message = BROKEN[name]
    tensors = published()
    change(tensors)
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_drafter("medusa", TARGET_LM, num_draft=K, weights=str(tmp_path))
    assert "\n" not in str(error.value)


def test_pt_files_need_torch_and_run_no_code(tmp_path):
    """Read where torch is; where it is not, the error names the extra."""
    path = tmp_path / "medusa_lm_head.pt"
    try:
        import torch
    except ImportError:
        path.write_bytes(b"PK")
        with pytest.raises(ValueError, match=re.escape("pip install 'specjax[torch]'")):
            load_drafter("medusa", TARGET_LM, num_draft=K, weights=str(tmp_path))
        return
    torch.save({name: torch.from_numpy(np.array(x)) for name, x in published().items()}, path)
    loaded = load_drafter("medusa", TARGET_LM, num_draft=K, weights=str(tmp_path))
    np.testing.assert_array_equal(loaded.params["head"], h.trained("medusa")["head"])

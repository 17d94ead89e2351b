"""EAGLE-3, 3.1 and P-EAGLE against the numbers of speculators 0.9 (tests/golden/make_eagle.py), from files in its layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import make_eagle as golden

from specjax.drafters.eagle import files as eagle_files
from specjax.drafters.eagle import head as eagle_head
from specjax.drafters.eagle import loss as eagle_loss
from specjax.drafters.eagle import parallel
from specjax.drafters.objectives import ahead
from specjax.models.huggingface import read_directory
from specjax.models.load import LM
from specjax.models.transformer import language_model
from specjax.types import Params

CLOSE = {"rtol": 0, "atol": 1e-5}  # theirs in float64: what differs is our own rounding


@pytest.fixture(scope="module")
def arrays():
    with np.load(golden.FILE) as file:
        return dict(file)


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    path = golden.families.save(tmp_path_factory.mktemp("target"), golden.TARGET, golden.families.weights("llama"))
    _, config, params = read_directory(path)
    return LM(language_model(config), params, None, config)


def published(lm, path, name):
    """(config, params) of a case, and params -> what the head reads and gives, [T + 1, ...], of each step."""
    config, ids, params = eagle_files.read(golden.save(path, name, "none"), lm, name.split()[0])
    tokens, features = (jnp.asarray(x) for x in golden.inputs())
    segments = jnp.zeros(tokens.shape, jnp.int32)

    @jax.jit
    def run(params):
        both = Params(lm.params, params)
        embedded = [eagle_head.embed(lm.model, config, both, ahead(tokens, j + 1)) for j in range(golden.STEPS)]
        if config.masked:
            anchors = [jnp.arange(golden.T + 1)[None]] * (golden.STEPS - 1)
            given = parallel.unmasked(config, params, embedded[0], features, segments, anchors)
        else:
            given = eagle_loss.unrolled(config, params, embedded, features, segments)
        return [(x[0], eagle_head.few_logits(lm.model, config, ids, both, x)[0]) for x in given]

    return config, params, run


@pytest.mark.parametrize("name", golden.CASES)
def test_every_step_equals_speculators(name, arrays, lm, tmp_path):
    config, params, run = published(lm, tmp_path, name)
    got = run(params)
    assert config.own_embedding == config.masked == name.startswith("peagle")
    assert config.layers == (3 if name == "peagle" else 1)
    for i, kind in enumerate(("hidden", "logits")):
        if config.masked:
            anchors, depths = arrays[f"{name}.places"].T
            assert np.bincount(depths).tolist() == [10, 5, 3, 2]
            mine = np.stack([np.asarray(x[i]) for x in got])[depths, anchors]
            np.testing.assert_allclose(mine, arrays[f"{name}.{kind}"], **CLOSE, err_msg=kind)
            continue
        for j, step in enumerate(got):
            theirs = arrays[f"{name}.{kind} {j}"]
            assert len(theirs) == golden.T - j and np.abs(theirs).max() > 0.5
            np.testing.assert_allclose(step[i][: golden.T - j], theirs, **CLOSE, err_msg=f"{kind} {j}")


def test_another_module_is_told_apart(arrays, lm, tmp_path):
    """A hundredth on one parameter shows where it is read: the mask's feature in masks, and there alone."""
    _, params, run = published(lm, tmp_path, "peagle")
    changed = run({**params, "mask_hidden": params["mask_hidden"] + 0.01})
    anchors, depths = arrays["peagle.places"].T
    for depth in range(golden.STEPS):
        at = anchors[depths == depth]
        far = np.abs(np.asarray(changed[depth][1])[at] - arrays["peagle.logits"][depths == depth]).max()
        assert (far > 1e-4) == (depth > 0)

"""EAGLE-3 and 3.1 against `Eagle3DraftModel` of speculators 0.9, live: files written here, loaded there, and written again.

make parity        (all of tests/parity; this file takes 1 minute)

`make parity` installs speculators without what it asks for, transformers below 5.20 and much that this test does not need: it
is no part of the extra.  Theirs runs in float64, so that what differs is our own rounding: in float32 each side is up to 1e-5
away from that by the fourth step, beside values of 4.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import make_families as golden
from parity.agreement import close

import specjax
from specjax.drafters.eagle import files as eagle_files
from specjax.drafters.eagle import head as eagle_head
from specjax.drafters.eagle import loss as eagle_loss
from specjax.drafters.objectives import ahead
from specjax.models.huggingface import read_directory
from specjax.models.layers import RopeScaling
from specjax.models.load import LM
from specjax.models.transformer import language_model
from specjax.types import Params

torch = pytest.importorskip("torch")
speculators = pytest.importorskip("speculators")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]  # the peers' own warnings are not ours

T, STEPS = 12, 4
IDS = tuple(range(0, 61, 3))
FLAGS = {  # beside those of EAGLE-3
    "eagle3": ({}, IDS),
    "all ids, norm_before": (dict(norm_before_residual=True, norm_before_fc=True, attention_bias=True), None),
    "eagle3.1": (dict(fc_norm=True, norm_output=True, qk_norm=True, rope_theta=100.0), IDS),
    "llama3": (dict(rope_theta=500.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16)), IDS),
}
each = pytest.mark.parametrize("name", FLAGS)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """(directory, LM) of a tiny Llama."""
    path = golden.save(tmp_path_factory.mktemp("target"), golden.CONFIGS["llama"], golden.weights("llama"))
    _, config, params = read_directory(path)
    return path, LM(language_model(config), params, None, config)


def module(lm, name):
    """(config, ids, params), random, no norm's scale 1."""
    flags, ids = FLAGS[name]
    config, rng = eagle_head.eagle3(lm.config, taps=(0, 1), **flags), np.random.default_rng(0)
    like = eagle_head.like(config, lm.model.vocab_size if ids is None else len(ids))
    draw = lambda x: rng.standard_normal(x.shape).astype(np.float32) * (0.2 if x.ndim > 1 else 0.5) + (x.ndim == 1)
    return config, ids, jax.tree.map(draw, like)


def inputs(lm):
    """tokens [1, T + 1] and features [1, T + 1, 2, D]."""
    rng = np.random.default_rng(1)
    return rng.integers(0, lm.model.vocab_size, (1, T + 1)), rng.standard_normal((1, T + 1, 2, lm.model.width), np.float32)


def ours(lm, config, ids, params):
    """For each step what the vocabulary head reads and gives, [T + 1, D] and [T + 1, n]."""
    tokens, features = inputs(lm)
    embedded = [lm.model.embed(lm.params, ahead(jnp.asarray(tokens), j + 1)) for j in range(STEPS)]
    run = jax.jit(lambda p: eagle_loss.unrolled(config, p, embedded, jnp.asarray(features), jnp.zeros((1, T + 1), jnp.int32)))
    few = lambda x: eagle_head.few_logits(lm.model, config, ids, Params(lm.params, params), x)
    return [(np.asarray(x[0]), np.asarray(few(x)[0])) for x in run(params)]


def theirs(path, lm):
    """(model, the same of theirs, in float64): they are given tokens from the second on."""
    config = speculators.Eagle3SpeculatorConfig.from_pretrained(path)
    config.transformer_layer_config._attn_implementation = "eager"
    model, steps = speculators.Eagle3DraftModel.from_pretrained(path, config=config).double().eval(), []
    model.lm_head.register_forward_hook(lambda _, given, out: steps.append((given[0][0].numpy(), out[0].numpy())))
    tokens, features = inputs(lm)
    hidden = torch.from_numpy(features[:, :-1].reshape(1, T, -1)).double()
    with torch.no_grad():
        model(hidden, torch.from_numpy(tokens[:, 1:]), torch.zeros(1, T, dtype=torch.long), ttt_steps=STEPS)
    return model, steps


def compare(expected, got, record):
    """Rows whose token is known: T - j of step j."""
    assert len(expected) == len(got) == STEPS
    for j, (a, b) in enumerate(zip(expected, got, strict=True)):
        for kind, x, y in zip(("hidden", "logits"), a, b, strict=True):
            assert np.abs(x[: T - j]).max() > 0.1
            close(f"{kind} of step {j}", x[: T - j], y[: T - j], record)


@each
def test_training_time_test(name, target, tmp_path, record_property):
    """What we write, speculators loads without a word, and each step gives the same."""
    (path, lm), written = target, tmp_path / "module"
    config, ids, params = module(lm, name)
    eagle_files.save_speculators(written, params, config, lm, vocabulary=ids, verifier=str(path))
    _, expected = theirs(written, lm)
    compare(expected, ours(lm, config, ids, params), record_property)


@pytest.mark.parametrize("name", ["eagle3", "eagle3.1"])
@pytest.mark.parametrize("more", [{}, {"mscale": 0.5, "mscale_all_dim": 2.0}, {"attention_factor": 0.8}])
def test_yarn(name, more, target, tmp_path, record_property):
    """Which ModelOpt writes into config.json when it exports a module."""
    path, lm = target
    config, ids, params = module(lm, name)
    eagle_files.save_speculators(tmp_path, params, config, lm, vocabulary=ids, verifier=str(path))
    file = tmp_path / "config.json"
    said = json.loads(file.read_text())
    rope = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 3.0, "original_max_position_embeddings": 40, **more}
    said["transformer_layer_config"] |= {"rope_theta": 50.0, "rope_scaling": rope}
    file.write_text(json.dumps(said))
    _, expected = theirs(tmp_path, lm)
    found = eagle_files.read(tmp_path, lm, name)
    compare(expected, ours(lm, found.config, found.vocabulary, found.params), record_property)
    with pytest.raises(AssertionError):
        compare(expected, ours(lm, config, ids, params), record_property)


@each
@pytest.mark.parametrize("publisher", ["speculators", "SafeAILab", "ModelOpt"])
def test_loaded_from_each_layout(name, publisher, target, tmp_path, record_property):
    """Saved by speculators itself, and its tensors under the others' names and in their files."""
    path, lm = target
    config, ids, params = module(lm, name)
    eagle_files.save_speculators(tmp_path / "a", params, config, lm, vocabulary=ids, verifier=str(path))
    model, expected = theirs(tmp_path / "a", lm)
    other = tmp_path / "b"
    model.float().save_pretrained(other)
    if publisher != "speculators":
        said = json.loads((other / "config.json").read_text())
        tensors = {n: x for n, x in model.state_dict().items() if not n.startswith(("verifier_", "embed_tokens"))}
        flat = {n: said[n] for n in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
        flat |= {**said["transformer_layer_config"], "eagle_config": {eagle_files.IDS: list(config.taps)}}
        for file in other.iterdir():
            file.unlink()
        (other / "config.json").write_text(json.dumps(flat))
        if publisher == "SafeAILab":
            torch.save({n.replace("layers.0.", "midlayer."): x for n, x in tensors.items()}, other / "pytorch_model.bin")
        else:
            from safetensors.torch import save_file

            save_file({n: x.contiguous() for n, x in tensors.items() if n != "t2d"}, other / "model.safetensors")
    method = "eagle3.1" if config.norm_output else "eagle3"
    found = eagle_files.read(other, lm, method)
    assert (found.config, found.vocabulary) == (config, ids)
    compare(expected, ours(lm, found.config, found.vocabulary, found.params), record_property)
    assert specjax.load_drafter(method, lm, num_draft=2, weights=str(other)).drafter.features == config.taps

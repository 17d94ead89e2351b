"""P-EAGLE against `PEagleDraftModel` of speculators 0.9, live: files written here, loaded there, and written again.

make parity        (all of tests/parity; this file takes 1 minute; see test_eagle_live.py)

Theirs runs in float64 as its training does: on the positions of each depth that its conditional drop keeps.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import make_families as golden
from parity.agreement import close

from specjax.drafters import objectives
from specjax.drafters.eagle import files as eagle_files
from specjax.drafters.eagle import head as eagle_head
from specjax.drafters.eagle import parallel
from specjax.drafters.objectives import ahead
from specjax.models.huggingface import read_directory
from specjax.models.layers import RMSNorm, RopeScaling
from specjax.models.load import LM
from specjax.models.transformer import language_model
from specjax.types import Params

torch = pytest.importorskip("torch")
speculators = pytest.importorskip("speculators")
core, losses = (pytest.importorskip(f"speculators.{name}") for name in ("models.peagle.core", "losses"))
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]  # the peers' own warnings are not ours

T, K, MASK = 16, 4, 60
LABELS = np.arange(T) % 9 != 0
IDS = tuple(range(0, 61, 3))
FLAGS = {  # beside those of P-EAGLE
    "four layers": ({}, IDS),
    "one layer, all ids": (dict(layers=1, norm_before_residual=True, norm_before_fc=True, attention_bias=True), None),
    "an embedding of its own": (dict(layers=2, own_embedding=True, fc_norm=True, qk_norm=True, rope_theta=100.0), IDS),
    "llama3": (dict(layers=2, rope_theta=500.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16)), None),
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
    config, rng = eagle_head.peagle(lm.config, taps=(0, 1), **flags), np.random.default_rng(0)
    like = eagle_head.like(config, lm.model.vocab_size if ids is None else len(ids), lm.model.vocab_size)
    draw = lambda x: rng.standard_normal(x.shape).astype(np.float32) * (0.2 if x.ndim > 1 else 0.5) + (x.ndim == 1)
    return config, ids, jax.tree.map(draw, like)


def inputs(lm, config):
    """tokens [1, T + 1] and features [1, T + 1, 2, D]; the mask's token is in the text where its row is the module's own."""
    rng = np.random.default_rng(1)
    tokens, features = rng.integers(0, MASK, (1, T + 1)), rng.standard_normal((1, T + 1, 2, lm.model.width), np.float32)
    tokens[0, 5] = MASK if config.own_embedding else 5
    return tokens, features


def ours(lm, config, ids, params):
    """(anchor, depth) -> what the vocabulary head reads and gives, [D] and [n]; all anchors, last first."""
    tokens, features = inputs(lm, config)
    anchors = [jnp.arange(T + 1)[::-1][None]] * (K - 1)
    segments = jnp.zeros((1, T + 1), jnp.int32)

    @jax.jit
    def run(p):
        embedded = eagle_head.embed(lm.model, config, Params(lm.params, p), ahead(jnp.asarray(tokens), 1))
        given = parallel.unmasked(config, p, embedded, jnp.asarray(features), segments, anchors)
        return [(x, eagle_head.few_logits(lm.model, config, ids, Params(lm.params, p), x)) for x in given]

    rows = run(params)
    return {(a, j): tuple(np.asarray(x[0, T - a if j else a]) for x in rows[j]) for a in range(T) for j in range(K)}


def theirs(path, lm, config, monkeypatch):
    """(model, the same of theirs, in float64): they are given tokens from the second on."""
    said = speculators.PEagleSpeculatorConfig.from_pretrained(path)
    said.transformer_layer_config._attn_implementation = "eager"
    model, seen, kept = speculators.PEagleDraftModel.from_pretrained(path, config=said).double().eval(), [], []
    model.lm_head.register_forward_hook(lambda _, given, out: seen.append((given[0][0].numpy(), out[0].numpy())))
    real = core.generate_cod_sample_indices
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **how: kept.append(real(**how)) or kept[-1])
    tokens, features = inputs(lm, config)
    hidden = torch.from_numpy(features[:, :-1].reshape(1, T, -1)).double()
    told = dict(document_ids=torch.zeros(1, T, dtype=torch.long), verifier_last_hidden_states=hidden[..., : lm.model.width])
    told |= dict(loss_mask=torch.from_numpy(LABELS[None]), loss_config=losses.resolve_loss_config("kl_div", "eager"))
    torch.manual_seed(0)
    with torch.no_grad():
        _, loss, _ = model(hidden, torch.from_numpy(tokens[:, 1:]), num_depths=K, **told)
    (places,), (rows,) = kept, seen
    found = {(int(a), int(j)): (x, y) for a, j, x, y in zip(*places, *rows, strict=True)}
    assert all(sum(j == depth for _, j in found) >= least for depth, least in enumerate((T, 6, 3, 1)))
    return model, found, float(loss)


def our_loss(lm, config, ids, got, kept):
    """The mean KL of the labels that theirs looks at."""
    hidden = jnp.asarray(inputs(lm, config)[1][0, :T].reshape(T, -1)[:, : lm.model.width])  # as theirs: before the norm
    normed = RMSNorm(lm.config.norm_eps).apply({"params": lm.params["norm"]}, hidden)
    target = lm.model.unembed(lm.params, normed)[:, jnp.asarray(range(lm.model.vocab_size) if ids is None else ids)]
    rows = [at for at in kept if LABELS[sum(at)]]
    logits = jnp.asarray(np.stack([got[at][1] for at in rows]))
    return float(objectives.kl(logits, None, target[jnp.asarray([sum(at) for at in rows])]).mean())


def compare(expected, got, record):
    for j in range(K):
        for i, kind in enumerate(("hidden", "logits")):
            theirs, ours = map(np.stack, zip(*((x[i], got[at][i]) for at, x in expected.items() if at[1] == j), strict=True))
            assert np.abs(theirs).max(-1).min() > 0.1
            close(f"{kind} of depth {j}", theirs, ours, record)


@each
def test_every_depth(name, target, tmp_path, record_property, monkeypatch):
    """What we write, speculators loads, and each depth gives the same; and so does what it writes itself, read back."""
    path, lm = target
    config, ids, params = module(lm, name)
    written = tmp_path / "written"
    eagle_files.save_speculators(written, params, config, lm, vocabulary=ids, verifier=str(path), mask_token=MASK)
    model, expected, loss = theirs(written, lm, config, monkeypatch)
    if config.own_embedding:
        params["embedding"][MASK] = params["mask_embedding"]
    compare(expected, ours(lm, config, ids, params), record_property)
    assert loss > 0.1
    close("loss", loss, our_loss(lm, config, ids, ours(lm, config, ids, params), expected), record_property)
    model.float().save_pretrained(tmp_path / "again")
    found = eagle_files.read(tmp_path / "again", lm, "peagle")
    assert (found.config, found.vocabulary) == (config, ids)
    compare(expected, ours(lm, found.config, found.vocabulary, found.params), record_property)


def test_the_comparison_can_fail(target, tmp_path, record_property, monkeypatch):
    """With another mask, depth 0 is the same and the others are not."""
    path, lm = target
    config, ids, params = module(lm, "four layers")
    eagle_files.save_speculators(tmp_path, params, config, lm, vocabulary=ids, verifier=str(path), mask_token=MASK)
    _, expected, _ = theirs(tmp_path, lm, config, monkeypatch)
    with pytest.raises(AssertionError, match="hidden of depth 1"):
        compare(expected, ours(lm, config, ids, {**params, "mask_hidden": params["mask_hidden"] + 0.01}), record_property)

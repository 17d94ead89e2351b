"""Block drafters against z-lab's `dflash` 0.1.0 and SpecForge 0.2.0, live: files that they write, loaded here.

make parity        (all of tests/parity; this file takes 2 minutes)

`make parity` installs them without the engines that they ask for and this test does not need.  Theirs run in float64 where
hidden states, losses and gradients are compared, so that what differs is our own rounding.
"""

import functools
import json
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import make_families as golden
from parity.agreement import close

from specjax import decode, keys, load_drafter, sampling
from specjax.drafters import files
from specjax.drafters.dflash import dspark
from specjax.drafters.dflash import files as block_files
from specjax.drafters.dflash import loss as block_loss
from specjax.drafters.dflash.naming import join, split
from specjax.drafters.objectives import hard, total
from specjax.drafters.recipe import Batch
from specjax.models.huggingface import read_directory
from specjax.models.load import LM
from specjax.models.transformer import language_model
from specjax.sampling import SamplingParams
from specjax.types import Output, Params
from specjax.verify import RULES

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]  # the peers' own warnings are not ours

V, D, T, LAYERS, TAPS = 61, 32, 14, 5, [0, 2, 3]
PROMPTS = [[7, 3, 50, 9, 9, 2], [11, 12], [5] * 9 + [60, 4]]
VARIANTS = {
    "full": {},
    "windows": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "rope_theta": 500.0},
    "both ways": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "is_causal": False},
}
SCALED = {"input_embedding_scale": 1.5, "output_multiplier": 0.5, "final_logit_softcapping": 2.0}
CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 6, "selector_top_k": 5, "block_size": 5}


@functools.cache
def target():
    """(theirs, LM) of a tiny Llama."""
    config, rng = {**golden.CONFIGS["llama"], "num_hidden_layers": LAYERS}, np.random.default_rng(0)
    size = lambda shape: 1.0 if len(shape) == 1 else shape[1] ** -0.5
    weights = {n: (rng.standard_normal(s) * size(s)).astype(np.float32) for n, s in golden.shapes(config)}
    with tempfile.TemporaryDirectory() as path:
        golden.save(path, config, weights)
        _, facts, params = read_directory(path)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval(), LM(language_model(facts), jax.tree.map(jnp.asarray, params), None, facts)


def config_of(mask, more, own):
    """A Qwen3 config as both peers read it."""
    config = transformers.Qwen3Config(
        vocab_size=V, hidden_size=D, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, rms_norm_eps=1e-5, max_position_embeddings=64, tie_word_embeddings=False,
        **{"layer_types": ["full_attention"] * 2, "use_sliding_window": "sliding_window" in more, **more},
    )  # fmt: skip
    config.num_target_layers, config.dflash_config = LAYERS, {"mask_token_id": mask, "target_layer_ids": TAPS, **own}
    if "block_size" not in own:
        config.block_size = 5
    config._attn_implementation = "sdpa"
    return config


def random_weights(model, scale):
    """No norm's scale 1, no kernel uninitialised."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, x in model.named_parameters():
            drawn = torch.randn(x.shape, generator=generator)
            x.copy_(1 + 0.3 * drawn if "norm" in name else scale * drawn + (name.endswith("base_kernel")))
    return model.eval()


def written(model, path, architecture):
    """The directory that they save."""
    model.save_pretrained(path)
    said = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**said, "architectures": [architecture]}))
    return path


# z-lab.


def zlab(name, mask=9, scale=0.3):
    model = pytest.importorskip("dflash.model")
    if name == "dflash2":
        return random_weights(model.DFlash2DraftModel(config_of(mask, {"is_causal": False}, CONVOLVED)), scale)
    own = SCALED if name == "both ways" else {}
    return random_weights(model.DFlashDraftModel(config_of(mask, VARIANTS[name], own)), scale)


def loaded(model, name, path):
    written(model, path, type(model).__name__)
    return block_files.read(path, target()[1], name if name == "dflash2" else "dflash", anchor_first=False)


@pytest.mark.parametrize("name", [*VARIANTS, "dflash2"])
def test_hidden_states(name, tmp_path, record_property):
    """Of a block after 9 tokens, without a cache there and in the middle of a row here."""
    theirs, (reference, lm), n = zlab(name), target(), 9
    found, rng = loaded(theirs, name, tmp_path), np.random.default_rng(1)
    tokens, features = rng.integers(0, V, (1, T)), rng.standard_normal((1, T, len(TAPS), D), np.float32)
    ids = torch.tensor([[tokens[0, n]] + [9] * 4])
    scale = theirs.config.dflash_config.get("input_embedding_scale", 1.0)
    with torch.no_grad():
        expected = theirs.double()(
            position_ids=torch.arange(n + 5)[None], noise_embedding=reference.get_input_embeddings()(ids).double() * scale,
            target_hidden=torch.from_numpy(features[:, :n].reshape(1, n, -1)).double(),
        )[0, 1:]  # fmt: skip
        logits = theirs.compute_logits(expected, reference.lm_head.double()).numpy()
    reference.float()
    output = Output(jnp.zeros(()), jnp.zeros((1, T, D)), jnp.asarray(features))
    batch = Batch(jnp.asarray(tokens), jnp.ones((1, T), bool), jnp.zeros((1, T), jnp.int32), output)
    blocks = block_loss.Blocks(jnp.asarray([[3, n, 12]]), jnp.ones((1, 3), bool))
    params = Params(lm.params, found.params)
    got = jax.jit(lambda p: block_loss.given(lm.model, found.config, p, batch, blocks, num_draft=4))(params)[0, 1]
    close("hidden", expected.numpy(), got, record_property)
    few = block_loss.backbone.few_logits(lm.model, found.config, None, lm.params, got)
    close("logits", logits, few, record_property)


@pytest.mark.parametrize("name", [*VARIANTS, "dflash2"])
def test_greedy_drafts(name, tmp_path):
    """Their first drafts after some prompts, from the target's own features in either library."""
    theirs, (reference, lm) = zlab(name), target()
    loaded(theirs, name, tmp_path)
    method, option = ("dflash2", {}) if name == "dflash2" else ("dflash", {"anchor_first": False})
    own = load_drafter(method, lm, num_draft=4, weights=str(tmp_path), **option)
    drafts = [draft for *_, draft in generated(own, lm, PROMPTS, 1)]
    assert drafts == [drafted_by(theirs, reference, prompt) for prompt in PROMPTS]
    assert len({token for draft in drafts for token in draft}) > 2


@functools.cache
def stuck(prompt):
    """What the target says after a prompt, and the mask for which an empty block says what it says most often."""
    reference, lm = target()
    with torch.no_grad():
        line = reference.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None)[0].tolist()
        weights = reference.get_input_embeddings().weight
        normed = weights / weights.pow(2).mean(-1, keepdim=True).sqrt()
        logits = reference.lm_head(normed).numpy()
    often = max(set(line[len(prompt) :]), key=line.count)
    others = np.delete(logits, often, 1).max(1)
    return line, int((logits[:, often] - others).argmax())


@pytest.mark.parametrize("name", [*VARIANTS, "dflash2"])
def test_whole_generations(name, tmp_path, monkeypatch, record_property):
    """Every token, and how many each round took."""
    peer, (reference, lm), took = pytest.importorskip("dflash.model"), target(), []
    monkeypatch.setattr(peer, "_cuda_time", lambda: 0.0)
    for i, prompt in enumerate(PROMPTS):
        line, mask = stuck(tuple(prompt))
        theirs = zlab(name, mask, 0.03)
        path = tmp_path / str(i)
        loaded(theirs, name, path)
        stats = peer.dflash_generate(theirs, reference, torch.tensor([prompt]), 30, None, return_stats=True)
        assert stats.output_ids[0].tolist() == line
        method, option = ("dflash2", {}) if name == "dflash2" else ("dflash", {"anchor_first": False})
        own = load_drafter(method, lm, num_draft=4, weights=str(path), **option)
        first = len(prompt) + 1  # they begin with a token of the target's own
        [(got, emitted, _)] = generated(own, lm, [line[:first]], 29)
        assert got == line
        whole = [n for n, end in zip(stats.acceptance_lengths, np.cumsum(stats.acceptance_lengths), strict=True) if end <= 24]
        assert emitted[: len(whole)] == whole
        took += whole
    record_property("tokens a round", f"{np.mean(took):.2f}")
    assert 1 < np.mean(took) < 5 and len(set(took)) > 2


def generated(own, lm, prompts, new):
    """(tokens, how many each round gave, the first draft) of each prompt at temperature 0, in one program."""
    params, drafter, n = Params(lm.params, own.params), own.drafter, np.asarray([len(prompt) for prompt in prompts])
    tokens = np.zeros((len(n), decode.capacity_for(int(n.max()) + new, drafter)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    static = dict(target=lm.model, drafter=drafter)

    @jax.jit
    def go(params, tokens, n):
        law = sampling.stack([SamplingParams()] * len(n), V)
        key, stop = keys.request_keys(jax.random.key(0), jnp.arange(len(n))), jnp.full((len(n), 1), -1, jnp.int32)
        state = decode.start(params, tokens, n, n + new, stop, key, law, **static)
        state = decode.prefill(params, state, chunk=4, **static)
        look = lambda draft, log_p, verdict: draft.tokens
        return decode.run(params, state, jnp.asarray(new), rule=RULES["rejection"], max_rounds=new, probe=look, **static)

    state, log = go(params, jnp.asarray(tokens), jnp.asarray(n, jnp.int32))
    rows = zip(np.asarray(state.tokens), n, np.asarray(log.emitted), np.asarray(log.probed[:, 0]), strict=True)
    return [(row[: k + new].tolist(), emitted.tolist(), draft.tolist()) for row, k, emitted, draft in rows]


def drafted_by(theirs, reference, line):
    """Their first greedy draft after `line`."""
    peer = pytest.importorskip("dflash.model")
    ids = torch.tensor([line])
    with torch.no_grad():
        states = reference(ids[:, :-1], output_hidden_states=True).hidden_states
        block = torch.tensor([[line[-1]] + [theirs.mask_token_id] * 4])
        scale = theirs.config.dflash_config.get("input_embedding_scale", 1.0)
        hidden = theirs(
            position_ids=torch.arange(len(line) + 4)[None], noise_embedding=peer._raw_input_embeddings(reference, block, scale),
            target_hidden=peer.extract_context_feature(states, theirs.target_layer_ids),
        )[:, 1:]  # fmt: skip
        if hasattr(theirs, "candidate_selector"):
            return theirs.propose(hidden, block[:, 0], reference.lm_head, 0.0)[0][0].tolist()
        return theirs.compute_logits(hidden, reference.lm_head).argmax(-1)[0].tolist()


# SpecForge.


def online(name, kind):
    """(their training model, in float64; its drafter)."""
    pytest.importorskip("specforge")
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel, OnlineDSparkModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.modeling.draft.dspark import DSparkDraftModel

    reference, _ = target()
    shared = reference.lm_head, reference.get_input_embeddings()
    how = dict(mask_token_id=9, block_size=5, attention_backend="sdpa", num_anchors=999, loss_decay_gamma=4.0)
    if kind is None:
        own = random_weights(DFlashDraftModel(config_of(9, VARIANTS[name], {})), 0.3)
        return OnlineDFlashModel(own, *shared, **how), own
    heads = {"projector_type": "dspark", "markov_rank": 6, "markov_head_type": kind, "enable_confidence_head": True}
    heads |= {"confidence_head_with_markov": kind != "gated", "attention_mode": "gqa"}
    own = random_weights(DSparkDraftModel(config_of(9, VARIANTS[name], heads)), 0.3)
    return OnlineDSparkModel(own, *shared, **how), own


CASES = [("full", None), ("windows", None), ("full", "vanilla"), ("full", "gated"), ("windows", "rnn")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_losses_and_gradients(name, kind, tmp_path, record_property):
    """Of two rows, whose first tokens are a prompt; blocks at every token that they take, also where the row ends."""
    model, own = online(name, kind)
    (reference, lm), method = target(), "dflash" if kind is None else "dspark"
    written(own, tmp_path, type(own).__name__)
    found = block_files.read(tmp_path, lm, method, anchor_first=False if kind is None else None)
    rng, mask = np.random.default_rng(2), np.ones((2, T), np.float32)
    mask[:, :4] = 0
    tokens, states = rng.integers(0, V, (2, T)), rng.standard_normal((2, T, D), np.float32)
    features = rng.standard_normal((2, T, len(TAPS), D), np.float32)
    model.double()
    anchors, kept = model._sample_anchor_positions(T, torch.from_numpy(mask), torch.device("cpu"))
    given = [torch.from_numpy(x) for x in (tokens, features.reshape(2, T, -1).astype(np.float64), mask.astype(np.float64))]
    loss, *_ = model(*given, *([] if kind is None else [torch.from_numpy(states).double()]))
    loss.backward()
    own_gradient = {n: x.grad.numpy() for n, x in own.named_parameters()}
    reference.float()

    output = Output(jnp.zeros(()), jnp.asarray(states), jnp.asarray(features))
    batch = Batch(jnp.asarray(tokens), jnp.asarray(mask > 0), jnp.zeros((2, T), jnp.int32), output)
    blocks, k = block_loss.Blocks(jnp.asarray(anchors.numpy()), jnp.asarray(kept.numpy())), 4 if kind is None else 5

    @jax.jit
    @jax.value_and_grad
    def ours(own):
        how = dict(num_draft=k, vocabulary=None)
        inputs = lm.model, found.config, Params(lm.params, own), batch, blocks
        if kind is None:
            scored = block_loss.scores(*inputs, objective=hard, **how)
        else:
            inputs = *inputs[:2], found.head, *inputs[2:]
            scored = [s for s, _ in dspark.scores(*inputs, text=0.1, law=0.9, confidence=1.0, **how)]
        w = np.exp(-np.arange(k) / 4)
        return sum(w[i] * total(s.nats, s.weights) for i, s in enumerate(scored)) / sum(
            w[i] * s.weights.sum() for i, s in enumerate(scored)
        )

    value, gradient = ours(found.params)
    close("loss", float(loss.detach()), float(value), record_property)
    markov, checked = getattr(found.head, "markov", ""), set()
    for path, x in files.flat(gradient).items():
        names = split(found.config, markov, path, np.asarray(x))
        expected = join(found.config, path, [own_gradient[n] for n in names])
        close(path, expected, x, record_property, size=5e-5)  # of what is left of terms that cancel
        assert np.abs(expected).max() > 1e-4, path
        checked |= set(names)
    assert checked == set(own_gradient)

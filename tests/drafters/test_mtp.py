"""MTP: the recursion by hand, labels that a copying model proves, both flags."""

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references as ref
from safetensors.numpy import save_file

from specjax import load_drafter
from specjax.drafters import files, mtp, objectives
from specjax.models.load import LM
from specjax.types import Params, Sequences

K = 3
SHARES = np.asarray([1, 0.6, 0.36]) / 1.96


FLAGS = [(True, True), (False, False)]


@pytest.mark.parametrize(("embedding_first", "recycle_normed"), FLAGS)
@pytest.mark.parametrize("name", ["hard", "soft"])
def test_loss_and_gradient(name, embedding_first, recycle_normed):
    c = h.MTP_CONFIG._replace(embedding_first=embedding_first, recycle_normed=recycle_normed)
    recipe = mtp.recipe(h.TARGET, num_draft=K, config=c, objective=getattr(objectives, name))
    hidden, head = ref.hidden(), np.asarray(h.target_params()["head"], np.float64)
    embedding = np.asarray(h.target_params()["embedding"], np.float64)

    def reference(p):
        found = {}
        for b, part in ref.DOCUMENTS:
            for t, row in enumerate(ref.entries(p, c, embedding, ref.TOKENS[b, part], hidden[b, part], K)):
                found |= {(b, part.start + t, j): x @ head for j, x in enumerate(row)}
        return ref.pooled(lambda *at: found[at], SHARES, getattr(ref, name))

    ref.check(recipe, h.trained("mtp"), reference)


@pytest.mark.parametrize(("embedding_first", "recycle_normed"), FLAGS)
def test_propose_by_hand(embedding_first, recycle_normed):
    """Flags change the draft, and it is what entry by entry gives."""
    c = h.MTP_CONFIG._replace(embedding_first=embedding_first, recycle_normed=recycle_normed)
    drafter, params = mtp.mtp(h.TARGET, num_draft=K, config=c), Params(h.target_params(), h.trained("mtp"))
    state = h.generate(drafter, "coupled", [ref.TOKENS[0].tolist()], params=params, rounds=0).state
    heat = state.sampling._replace(temperature=jnp.ones(1))
    noise = lambda depth, width=1: jax.random.gumbel(jax.random.fold_in(jax.random.key(1), depth), (1, width, h.V))
    sequences = Sequences(state.tokens, state.length, state.cache, heat)
    draft = jax.jit(lambda p, d, s: drafter.propose(noise, p, d, s)[0])(params, state.drafter, sequences)
    text = [*ref.TOKENS[0].tolist(), *np.asarray(draft.tokens)[0].tolist()]
    full = h.TARGET.apply(h.target_params(), jnp.asarray([text]), h.TARGET.init_cache(1, len(text)))[0].hidden
    embedding, head = (np.asarray(h.target_params()[name], np.float64) for name in ("embedding", "head"))
    full = np.asarray(full[0], np.float64)
    row = ref.entries(ref.double(h.trained("mtp")), c, embedding, text, full, K)[len(ref.TOKENS[0]) - 2]
    np.testing.assert_allclose(np.exp(draft.log_q[0]), ref.softmax(np.asarray(row) @ head), rtol=1e-3, atol=1e-6)


def test_a_perfect_predictor_costs_the_entropy():
    """Step j moves the counter of the token it is given by one; of the state it is given, it is wrong."""
    target, batch = ref.known()
    d = target.width
    c = mtp.MTPConfig(d, 2, 1, 4, 8)
    recipe = mtp.recipe(target, num_draft=K, config=c, decay=1.0)
    params = jax.jit(recipe.init)(jax.random.key(0), {})
    params = {**params, "attention": {**params["attention"], "out": {"kernel": jnp.zeros((8, d))}}}
    params = {**params, "mlp": {**params["mlp"], "down": {"kernel": jnp.zeros((8, d))}}}
    loss_of = jax.jit(lambda p: recipe.loss(p, (), batch, jax.random.key(0)))
    for wrong in (0, 1):
        halves = [ref.later(1), jnp.zeros((d, d))]
        proj = {"kernel": jnp.concatenate(halves[::-1] if wrong else halves)}
        loss, metrics = loss_of({**params, "proj": proj})
        assert float(loss) > 10 if wrong else abs(float(loss) - np.log(2)) < 1e-5
    assert float(metrics["accuracy_1"]) == 0


def test_a_module_begins_as_the_targets_last_layer():
    params = jax.jit(mtp.recipe(h.TARGET, num_draft=2, config=mtp.config_of(h.CONFIG)).init)(
        jax.random.key(0), h.target_params()
    )
    for name in ("attention", "mlp", "attention_norm", "mlp_norm"):
        same = jax.tree.map(lambda a, b: bool((a == b).all()), params[name], h.target_params()["layer_1"][name])
        assert all(jax.tree.leaves(same))
    other = jax.jit(mtp.recipe(h.TARGET, num_draft=2, config=mtp.config_of(h.CONFIG, hidden=24)).init)(
        jax.random.key(0), h.target_params()
    )
    assert other["mlp"]["down"]["kernel"].shape == (24, 16)


def test_a_prompt_of_one_token_drafts_nothing_at_first():
    result = h.run("mtp", "rejection", rounds=2)
    assert result.drafted[1].tolist()[:2] == [0, K] and (result.drafted[[0, 2, 3, 4], 0] == K).all()


# Published modules.


def published(naming, prefix):
    """Tensors under a publisher's names, [out, in], beside one of the target's, which is none of the module's business."""
    params, found = jax.tree.map(np.asarray, h.trained("mtp")), {}
    put = lambda name, x: found.update({f"{prefix}{name}": np.array(x, order="C")})
    for ours, theirs in (("embed_norm", naming.embed_norm), ("hidden_norm", naming.hidden_norm), ("norm", naming.norm)):
        put(f"{theirs}.weight", params[ours]["scale"] - naming.shift)
    put(f"{naming.proj}.weight", params["proj"]["kernel"].T)
    at, own = naming.layer, params["attention"]
    put(f"{at}input_layernorm.weight", params["attention_norm"]["scale"] - naming.shift)
    put(f"{at}post_attention_layernorm.weight", params["mlp_norm"]["scale"] - naming.shift)
    kernel = own["qkv"]["kernel"].reshape(16, 2, 4, 8)
    for name, part in (("q", kernel[:, :, :2]), ("k", kernel[:, :, 2]), ("v", kernel[:, :, 3])):
        put(f"{at}self_attn.{name}_proj.weight", part.reshape(16, -1).T)
    put(f"{at}self_attn.o_proj.weight", own["out"]["kernel"].T)
    for name in ("q_norm", "k_norm"):
        put(f"{at}self_attn.{name}.weight", own[name]["scale"] - naming.shift)
    for name, part in zip(("gate", "up"), np.split(params["mlp"]["gate_up"]["kernel"], 2, 1), strict=True):
        put(f"{at}mlp.{name}_proj.weight", part.T)
    put(f"{at}mlp.down_proj.weight", params["mlp"]["down"]["kernel"].T)
    for name in naming.copies:
        put(name, np.zeros((17, 16), np.float32))
    return {**found, "model.layers.0.mlp.up_proj.weight": np.zeros((32, 16), np.float32)}


PREFIXES = {"MiMo": "model.mtp_layers.0.", "DeepSeek-V3": "model.layers.2.", "Qwen3-Next": "mtp."}


@pytest.mark.parametrize("name", files.NAMINGS)
def test_published_modules(name, tmp_path):
    """Each publisher's names, in two shards; what is left over or missing is an error."""
    lm = LM(h.TARGET, h.target_params(), None, h.CONFIG._replace(qk_norm=True))
    naming, tensors = files.NAMINGS[name], published(files.NAMINGS[name], PREFIXES[name])
    parts = list(tensors.items())
    for i, part in enumerate((parts[:5], parts[5:])):
        save_file(dict(part), tmp_path / f"model-0000{i}.safetensors")
    loaded = load_drafter("mtp", lm, num_draft=K, weights=str(tmp_path))
    for path, x in files.flat(h.trained("mtp")).items():
        np.testing.assert_allclose(files.flat(loaded.params)[path], x, atol=1e-6, err_msg=path)
    assert loaded.drafter is mtp.mtp(
        h.TARGET, num_draft=K, config=h.MTP_CONFIG._replace(embedding_first=naming.embedding_first)
    )
    at = f"{PREFIXES[name]}{naming.layer}"
    save_file({**dict(parts[5:]), f"{at}mlp.gate.weight": np.zeros(3, np.float32)}, tmp_path / "model-00001.safetensors")
    with pytest.raises(ValueError, match="1 not used: .*mlp.gate.weight") as error:
        load_drafter("mtp", lm, num_draft=K, weights=str(tmp_path))
    assert "\n" not in str(error.value)
    rest = {n: x for n, x in parts[5:] if not n.endswith("mlp.down_proj.weight")}
    save_file(rest, tmp_path / "model-00001.safetensors")
    with pytest.raises(ValueError, match="1 missing: .*mlp.down_proj.weight"):
        load_drafter("mtp", lm, num_draft=K, weights=str(tmp_path))

"""Programs compiled for eight simulated devices: their results, what they exchange, and what each device is given."""

import functools
import sys
import types
from pathlib import Path

import helpers
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from meshes import FULLY, mesh, placed, table

from specjax import decode, keys, sampling
from specjax.types import Draft
from specjax.verify import RULES

sys.path.append(str(Path(__file__).parents[1] / "experiments"))
import sharded_scaling  # noqa: E402
import sharded_sizes  # noqa: E402

RULES_OF_CHAINS = helpers.CHAIN_RULES
ROUND = {  # outside the target's layers: of a round of 4 drafted tokens, batch 8, over model=8
    "eagle3": {"all-gather": 1, "all-reduce": 53, "all-to-all": 24, "collective-permute": 1, "reduce-scatter": 0},
    "dspark": {"all-gather": 1, "all-reduce": 32, "all-to-all": 0, "collective-permute": 1, "reduce-scatter": 0},
}
GIGABYTES = {  # of arguments on each of eight devices, two layers of the target
    ("Llama-3.3-70B", "eagle3"): 2.050, ("Llama-3.3-70B", "dspark"): 3.293,
    ("Qwen3-32B", "eagle3"): 1.352, ("Qwen3-32B", "dspark"): 2.018,
    ("Gemma-3-27B", "eagle3"): 1.589, ("Gemma-3-27B", "dspark"): 1.889,
}  # fmt: skip
CI_SIZES = [("Llama-3.3-70B", "eagle3"), ("Qwen3-32B", "dspark"), ("Gemma-3-27B", "eagle3")]


def passed(model, tokens, params):
    """Logits and cache of a pass over a prompt."""
    out, cache = model.apply(params, tokens, model.init_cache(len(tokens), 16))
    return out.logits, cache


def logits(where):
    """Logits (D05); caches by row and KV head; two sums over `model` in each layer and nothing else; matrices cut over all
    devices but those of `data`.
    """
    t, (target, own, notes) = table(), placed(where)
    assert notes == ()
    size, rows = mesh(where).shape, 8 // (mesh(where).shape["data"] * mesh(where).shape["fsdp"])
    for path, x in jax.tree_util.tree_leaves_with_path(own):
        parts = x.size // np.prod(x.sharding.shard_shape(x.shape))
        assert parts == (size["model"] * size["fsdp"] if x.ndim > 1 else 1), f"{path}: {parts} parts"
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, t.V, (8, 11)), jnp.int32)
    program = jax.jit(functools.partial(passed, target, tokens)).lower(own).compile()
    found, cache = program(own)
    assert found.sharding.shard_shape(found.shape) == (rows, 11, t.V // size["model"])
    held = cache.k[0].sharding.shard_shape(cache.k[0].shape)
    assert held[:2] == (rows, t.CONFIG.kv_heads // size["model"]), f"a device has keys {held}"
    np.testing.assert_allclose(found, jax.jit(functools.partial(passed, t.TARGET, tokens))(t.target_params())[0], atol=1e-5)
    sent = sharded_sizes.collectives(program.as_text())
    layers = [[c.kind for c in sent if sharded_sizes.layer_of(c) == i] for i in range(t.CONFIG.layers)]
    if where != FULLY:  # whose matrices are gathered, which is what it is for
        assert layers == [["all-reduce"] * 2 * (size["model"] > 1)] * t.CONFIG.layers, f"a layer sends {layers}"


def scores():
    """Logits [B, N+1, V] and drafts, chains of 3, some of which are accepted."""
    logits, law = 2 * np.random.default_rng(0).standard_normal((2, 8, 4, 24)).astype(np.float32)
    log_q = jax.nn.log_softmax(jnp.asarray(logits[:, :-1] + law[:, :-1]))
    parents = jnp.broadcast_to(jnp.arange(-1, 2, dtype=jnp.int32), (8, 3))
    return jnp.asarray(logits), Draft(jnp.argmax(log_q, -1).astype(jnp.int32), parents, log_q)


def decided(rule, logits, draft):
    """The verdict of a round, greedily for every other row, of two tokens in three for the rest."""
    laws = [helpers.SamplingParams(), helpers.SamplingParams(1.0, top_p=0.9)] * 4
    state = types.SimpleNamespace(
        sampling=sampling.stack(laws, 24), tokens=jnp.zeros((8, 9), jnp.int32), length=jnp.full(8, 3),
        prompt_length=jnp.full(8, 2), key=keys.request_keys(jax.random.key(2), jnp.arange(8)),
    )  # fmt: skip
    noise = decode.noise_source(state, RULES[rule], 24)
    seen = jnp.broadcast_to(jnp.tril(jnp.ones((4, 4), bool)), (8, 4, 4))
    log_p = decode.log_probs(state, draft, seen, logits)
    return decode.decide(state, draft, log_p, noise, rule=RULES[rule], depth=3)


@functools.cache
def decided_alone(rule):
    return jax.jit(functools.partial(decided, rule))(*scores())


def verdicts(rule, where):
    """Logits cut by row and vocabulary are warped, verified and drawn from as whole ones are."""
    wanted, (logits, draft) = decided_alone(rule), scores()
    assert 0 < wanted.num_accepted.sum() < 24
    cut = lambda x: jax.device_put(x, NamedSharding(mesh(where), PartitionSpec("data", None, "model")))
    found = jax.jit(functools.partial(decided, rule))(cut(logits), draft._replace(log_q=cut(draft.log_q)))
    for row, n in enumerate(wanted.num_accepted):
        said = f"tokens of row {row}"
        np.testing.assert_array_equal(found.tokens[row, : n + 1], wanted.tokens[row, : n + 1], said)
    np.testing.assert_array_equal(found.num_accepted, wanted.num_accepted)


def hold(row):
    """Bytes as predicted; two sums a layer and nothing else; no weight gathered, nor logits [B, N, V]."""
    pair = row.target, row.drafter
    assert abs(row.compiled / row.predicted - 1) < 0.05, pair
    assert row.per_layer == {"all-reduce": [2] * row.layers}, pair
    assert list(row.notes) == [] and row.largest_gather < row.smallest_weight / 5


def hold_at_two_layers(row):
    hold(row)
    assert round(row.compiled / 1e9, 3) == GIGABYTES[row.target, row.drafter], row.compiled
    assert row.others == ROUND[row.drafter], row.others


def sizes(target, drafter):
    hold_at_two_layers(sharded_sizes.measured(target, drafter, 2, mesh("1x8")))


def scaling(target):
    """What the roofline says of 1, 2, 4 and 8 devices is what the compiled pass has: bytes held, and sent in a layer; but sums
    are of float32, and the roofline counts 2 bytes for each number.
    """
    for row in sharded_scaling.scaling(target, 2):
        assert abs(row.compiled / row.resident - 1) < 0.001, row
        assert row.kinds == ({"all-reduce": 2 * row.layers} if row.devices > 1 else {}), row
        assert row.compiled_link == 2 * row.link and set(row.dtypes) <= {"f32"}, row

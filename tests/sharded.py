"""What `test_sharding.py` runs in one process of its own: the library on eight simulated devices, against itself on one.

python tests/sharded.py CHECK...      prints {"CHECK": what went wrong, or null} as JSON
"""

import os

if __name__ == "__main__":  # before jax is imported
    os.environ["XLA_FLAGS"] = (
        "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
        # as in conftest.py
        + " --xla_cpu_use_fusion_emitters=false"
        * __import__("importlib.metadata").metadata.version("jaxlib").startswith("0.10.")
    )

import contextlib
import functools
import io
import json
import sys
import tempfile
import time
import traceback
import types
import warnings
from pathlib import Path

import conftest  # noqa: F401 - its strictness
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import sharded_faults
import sharded_files
import sharded_programs
import sharded_training
import tiny_model
from meshes import FULLY, HEAT, MESHES, PROMPTS, mesh, placed, table

from specjax import api, cli, sharding
from specjax.drafters.small import trunk
from specjax.engine import Engine
from specjax.engine import slots as device
from specjax.models.load import LM
from specjax.models.transformer import TransformerConfig, language_model
from specjax.types import Params
from specjax.verify import RULES


@functools.cache
def plain():
    t = table()
    return t.generate(t.drafter("plain"), "coupled", PROMPTS, params=Params(t.target_params()), temperature=HEAT)


def on_mesh(drafter, where):
    """All prompts with a drafter of the table, under the coupled rule."""
    t, (target, target_params, _) = table(), placed(where)
    loaded = types.SimpleNamespace(drafter=t.drafter(drafter), params=t.drafter_params(drafter))
    both = Params(t.target_params(), loaded.params)
    state = jax.eval_shape(lambda both: loaded.drafter.init(both, 1, 1), both)
    own, _ = sharding.place(loaded.params, mesh(where), kv_heads=sharding.heads_of(state))
    over = sharding.drafter_over(loaded.drafter, mesh(where))
    return t.generate(over, "coupled", PROMPTS, params=Params(target_params, own), target=target, temperature=HEAT)


def same_tokens(drafter, where):
    expected, found = plain(), on_mesh(drafter, where)
    assert found.tokens == expected.tokens, f"{found.tokens} != {expected.tokens}"
    assert found.reasons == expected.reasons
    k = found.state.cache.k[0]
    assert k.sharding.shard_shape(k.shape)[:2] == (8 // mesh(where).shape["data"], 8 // mesh(where).shape["model"])


def same_drafts(drafter, where):
    """The drafts themselves, too: tokens would be right whatever was drafted."""
    t = table()
    same_tokens(drafter, where)
    both = Params(t.target_params(), t.drafter_params(drafter))
    alone = t.generate(t.drafter(drafter), "coupled", PROMPTS, params=both, temperature=HEAT)
    found = on_mesh(drafter, where)
    np.testing.assert_array_equal(found.accepted, alone.accepted)
    np.testing.assert_array_equal(found.drafted, alone.drafted)


@functools.cache
def of_heads(kv_heads):
    """(target, parameters) of a layer with so many KV heads, two query heads each, 17 tokens, 40 hidden units."""
    config = TransformerConfig(17, 24, 1, 2 * kv_heads, kv_heads, 8, 40, 64, attention_bias=True, qk_norm=True)
    target, rng = language_model(config), np.random.default_rng(0)
    draw = lambda x: jnp.asarray(rng.standard_normal(x.shape) / 3, x.dtype)
    return target, jax.tree.map(draw, jax.eval_shape(target.init, jax.random.key(0)))


def heads_that_do_not_divide(kv_heads, where):
    """2 or 3 KV heads over 8 devices: what is whole is said, and no leaf is cut within a head (D01)."""
    _, params = of_heads(kv_heads)
    own, notes = sharding.place(params, mesh(where), kv_heads=(kv_heads,))
    size = mesh(where).shape["model"]
    qkv = own["layer_0"]["attention"]["qkv"]["kernel"]
    assert (qkv.sharding.shard_shape(qkv.shape)[1] < qkv.shape[1]) == (size > 1 and kv_heads % size == 0), "cut within a head"
    assert any(f"{kv_heads} KV heads do not divide by model={size}" in note for note in notes) == bool(kv_heads % size), notes
    assert any(f"17 does not divide by model={size}" in note for note in notes) == (size > 1), notes
    gate_up = own["layer_0"]["mlp"]["gate_up"]["kernel"]
    assert gate_up.sharding.shard_shape(gate_up.shape) == (24, 2, 40 // size)
    return own


def logits_of_heads(kv_heads, where):
    target, params = of_heads(kv_heads)
    own = heads_that_do_not_divide(kv_heads, where)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 17, (4, 9)), jnp.int32)
    run = lambda model: jax.jit(lambda p: model.apply(p, tokens, model.init_cache(4, 16))[0].logits)
    np.testing.assert_allclose(run(sharding.model_over(target, mesh(where)))(own), run(target)(params), atol=1e-5)


def whole_calls(where):
    """`generate` over a mesh, in pieces of any number of rounds: the same completions, and one compilation (P01)."""
    t = table()
    lm = LM(t.TARGET, t.target_params(), None, t.CONFIG)
    how = dict(key=jax.random.key(1), max_new_tokens=12, rule="coupled")
    law = api.SamplingParams(1.0)
    drafter = api.load_drafter("early_exit", lm, num_draft=2)
    wanted = api.generate(lm, drafter, PROMPTS, **how, sampling=law)
    before = api.run._cache_size(), api.prefill._cache_size()
    assert api.generate(lm, drafter, PROMPTS, **how, sampling=law, mesh=mesh(where)) == wanted
    over = sharding.lm_over(lm, mesh(where))
    session = api.begin(over, drafter, PROMPTS, **how, params=law, stop=())
    for _ in api.advance(session, 1):
        pass
    assert [api.complete(session, row) for row in range(8)] == wanted
    more = api.run._cache_size() - before[0], api.prefill._cache_size() - before[1]
    assert more == (1, 1), more


def slots(where):
    """Requests through an engine's slots over a mesh: the tokens that they have alone, and nothing compiled after warm-up."""
    t, law, own = table(), api.SamplingParams(1.0), jax.random.split(jax.random.key(5), len(PROMPTS))
    alone = LM(t.TARGET, t.target_params(), None, t.CONFIG)
    over, how = sharding.lm_over(alone, mesh(where)), dict(max_new_tokens=12, sampling=law)
    loaded = api.load_drafter("early_exit", over, num_draft=2)
    both, sizes = Params(over.params, loaded.params), dict(slots=4, capacity=32, chunk=4)
    engine = Engine(both, target=over.model, drafter=loaded.drafter, rule=RULES["coupled"], **sizes)
    compiled = lambda: [program._cache_size() for program in (device.admit, device.fill, device.rounds)]
    before = compiled()
    asked = [engine.submit(prompt, key=key, **how) for prompt, key in zip(PROMPTS, own, strict=True)]
    engine.drain()
    assert compiled() == before, compiled()
    drafter = api.load_drafter("early_exit", alone, num_draft=2)
    wanted = api.generate(alone, drafter, PROMPTS, key=own, rule="coupled", **how)
    assert [one.result.tokens for one in asked] == [one.tokens for one in wanted]


def command(where):
    """`specjax generate --mesh` with a drafter that has no file says what does not divide, and answers as without (U07)."""
    with tempfile.TemporaryDirectory() as folder:
        path, said, out = tiny_model.save(Path(folder) / "model"), {}, {}
        words = ["generate", "w1 w2 w1 w2", "--model", str(path), "--method", "ngram", "--max-new-tokens", "6"]
        for flags in ((), ("--mesh", MESHES[where])):
            error = io.StringIO()
            with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
                assert cli.main([*words, "--json", f"{folder}/out.json", *flags]) == 0, error.getvalue()
            said[flags], out[flags] = error.getvalue(), json.loads(Path(f"{folder}/out.json").read_text())["prompts"]
        (alone, over), both = said.values(), list(out.values())
        assert both[0] == both[1]
        assert "does not divide by model=" in over and "divide" not in alone, over


def trunk_of_an_lm():
    """Parameters placed once are left alone; on another mesh they are refused."""
    t = table()
    lm = sharding.lm_over(LM(t.TARGET, t.target_params(), None, t.CONFIG), mesh("2x4"))
    assert sharding.lm_over(lm, mesh("2x4")) is lm and sharding.mesh_of(lm.params) == mesh("2x4")
    assert lm.model is sharding.model_over(t.TARGET, mesh("2x4")) and trunk(lm.model, 1).num_layers == 1
    try:
        sharding.lm_over(lm, mesh("8x1"))
    except ValueError as error:
        assert "load it again" in str(error)
    else:
        raise AssertionError("a second mesh was taken")
    there = sharding.whole(lm.params)
    jax.tree.map(np.testing.assert_array_equal, there, t.target_params())


def meshes_of_others():
    """A mesh that the caller made, of some axes in any order, with Explicit ones (D05), is the one that a text names."""
    made = jax.make_mesh((4, 2), ("model", "data"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    found = sharding.as_mesh(made)
    assert found is not None and found.axis_names == sharding.AXES and dict(found.shape) == dict(data=2, fsdp=1, model=4)
    assert set(found.axis_types) == {jax.sharding.AxisType.Auto} and (found.devices[:, 0] == made.devices.T).all()
    assert sharding.as_mesh(mesh("2x4")) is mesh("2x4")
    try:
        sharding.as_mesh(jax.make_mesh((8,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,)))
    except ValueError as error:
        assert "no axis 'heads'" in str(error) and "\n" not in str(error)
    else:
        raise AssertionError("a mesh with another axis was taken")


CI_DRAFTERS = {"1x8": "eagle3", "2x4": "medusa, sampled"}
DRAFTERS = [name for name in helpers.BUILDERS if name != "plain" and not name.startswith("script")]
UNEVEN = [(kv_heads, m) for kv_heads in (2, 3) for m in ("1x8", "2x4", "8x1")]
part = functools.partial

QUICK = {
    **{f"logits {m}": part(sharded_programs.logits, m) for m in MESHES},
    "fully sharded": part(sharded_programs.logits, FULLY),
    **{f"verdicts {r} {m}": part(sharded_programs.verdicts, r, m) for r, m in (("coupled", "1x8"), ("rejection", "2x4"))},
    **{f"{d} {m}": part(same_tokens, d, m) for m, d in CI_DRAFTERS.items()},
    **{f"{g} KV heads {m}": part(heads_that_do_not_divide, g, m) for g, m in UNEVEN},
    **{f"logits of {g} KV heads {m}": part(logits_of_heads, g, m) for g, m in ((2, "1x8"), (3, "2x4"))},
    **{f"gradients {m}": part(sharded_training.gradients, "medusa", m) for m in ("2x4", "8x1")},
    "restores": part(sharded_training.restores, "2x4", ("8x1", "1x1", "model=2", "4x2")),
    "goes on": part(sharded_training.goes_on, "medusa", ("2x4", FULLY)),
    "calls": part(whole_calls, "4x2"),
    "slots": part(slots, "2x4"),
    "command": part(command, "2x4"),
    "lm": trunk_of_an_lm,
    "meshes of others": meshes_of_others,
    "reads qwen2": part(sharded_files.reads, "qwen2"),
    "reads gemma3": part(sharded_files.reads, "gemma3_new"),
    "reads 2 KV heads": part(sharded_files.reads, "llama", num_key_value_heads=2),
    "reads gguf": part(sharded_files.reads_gguf, "llama", "Q8_0"),
    "reads gguf, biases": part(sharded_files.reads_gguf, "qwen2", "F16", num_key_value_heads=2),
    "host peak": part(sharded_files.host_peak, "1x8"),
    "host peak, gguf": part(sharded_files.host_peak_gguf, "1x8"),
    **{f"sizes {t} {d}": part(sharded_programs.sizes, t, d) for t, d in sharded_programs.CI_SIZES},
    "scaling": part(sharded_programs.scaling, "Llama-3.3-70B"),
}
"""Checks for CI."""

FAULTS = {
    f"fault: {name}": part(sharded_faults.found, fault, QUICK[fault.check]) for name, fault in sharded_faults.FAULTS.items()
}
"""Planted faults, each of which makes a check of CI fail."""

SLOW = {
    **{f"drafts of {d} {m}": part(same_drafts, d, m) for d in DRAFTERS for m in MESHES},
    **{f"gradients of {r} {m}": part(sharded_training.gradients, r, m) for r in helpers.RECIPES for m in (*MESHES, FULLY)},
    **{f"logits of {g} KV heads {m}": part(logits_of_heads, g, m) for g, m in UNEVEN},
    **{f"verdicts {r} {m}": part(sharded_programs.verdicts, r, m) for r in sharded_programs.RULES_OF_CHAINS for m in MESHES},
    "goes on, mtp": part(sharded_training.goes_on, "mtp", ("2x4", "8x1", FULLY)),
}
"""Every drafter, recipe and rule on every mesh."""


def main(names):
    found = {}
    warnings.simplefilter("error")
    for name in names:
        begin = time.process_time()
        try:
            {**QUICK, **FAULTS, **SLOW}[name]()
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
        took = f"{time.process_time() - begin:.1f} s of processors"
        print(f"{name}: {'ok' if found[name] is None else found[name]}, {took}", file=sys.stderr, flush=True)
        if name.startswith("drafts of"):
            jax.clear_caches()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])

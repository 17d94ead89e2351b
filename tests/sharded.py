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

import functools
import json
import sys
import tempfile
import traceback
import tracemalloc
import types
import warnings
from pathlib import Path

import conftest  # noqa: F401 - its strictness
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
from golden import make_families as golden

from specjax import api, checkpoint, sharding
from specjax.drafters.recipe import Batch
from specjax.drafters.small import trunk
from specjax.models.huggingface import read_directory
from specjax.models.load import LM
from specjax.models.transformer import TransformerConfig, language_model
from specjax.train import loop
from specjax.train.packing import Batches
from specjax.types import Params

MESHES = {"1x8": "model=8", "2x4": "data=2,model=4", "4x2": "data=4,model=2", "8x1": "data=8"}
FULLY = "data=2,fsdp=2,model=2"


@functools.cache
def mesh(name):
    return sharding.parse_mesh(MESHES.get(name, name))


@functools.cache
def table():
    """tests/helpers.py with a target of which eight devices divide every axis: 8 KV heads, 24 tokens."""
    source = Path(helpers.__file__).read_text()
    for old, new in {"V = 17\n": "V = 24\n", "(V, 16, 2, 4, 2, 8, 32, 64,": "(V, 16, 2, 16, 8, 8, 32, 64,"}.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    module = types.ModuleType("wide_helpers")
    exec(compile(source, helpers.__file__, "exec"), module.__dict__)
    return module


PROMPTS = [*helpers.PROMPTS[:4]] * 2
HEAT = [helpers.GREEDY] * 4 + [helpers.HOT] * 4


@functools.cache
def plain(t):
    return t.generate(t.drafter("plain"), "coupled", PROMPTS, params=Params(t.target_params()), temperature=HEAT)


@functools.cache
def placed(t, name):
    """The target's parameters on a mesh."""
    return sharding.place(t.target_params(), mesh(name), kv_heads=(t.CONFIG.kv_heads,))


def on_mesh(t, drafter, where):
    """All prompts with a drafter of the table, under the coupled rule."""
    loaded = types.SimpleNamespace(drafter=t.drafter(drafter), params=t.drafter_params(drafter))
    both = Params(t.target_params(), loaded.params)
    state = jax.eval_shape(lambda both: loaded.drafter.init(both, 1, 1), both)
    own, _ = sharding.place(loaded.params, mesh(where), kv_heads=sharding.heads_of(state))
    return t.generate(
        sharding.drafter_over(loaded.drafter, mesh(where)), "coupled", PROMPTS, params=Params(placed(t, where)[0], own),
        target=sharding.model_over(t.TARGET, mesh(where)), temperature=HEAT,
    )  # fmt: skip


def same_tokens(drafter, where):
    t = table()
    found = on_mesh(t, drafter, where)
    assert found.tokens == plain(t).tokens, f"{found.tokens} != {plain(t).tokens}"
    assert found.reasons == plain(t).reasons
    k = found.state.cache.k[0]
    assert k.sharding.shard_shape(k.shape)[:2] == (8 // mesh(where).shape["data"], 8 // mesh(where).shape["model"])


def same_drafts(drafter, where):
    """The drafts themselves, too: tokens would be right whatever was drafted."""
    t = table()
    same_tokens(drafter, where)
    alone = t.generate(
        t.drafter(drafter), "coupled", PROMPTS, params=Params(t.target_params(), t.drafter_params(drafter)), temperature=HEAT
    )
    found = on_mesh(t, drafter, where)
    np.testing.assert_array_equal(found.accepted, alone.accepted)
    np.testing.assert_array_equal(found.drafted, alone.drafted)


def does_not_divide(kv_heads, heads, where, drafter=None):
    """Logits of 2 or 3 KV heads over 8 devices; what is whole is said; and no leaf is cut within a head."""
    config = TransformerConfig(17, 24, 2, heads, kv_heads, 8, 40, 64, attention_bias=True, qk_norm=True)
    target = language_model(config)
    params = jax.jit(target.init)(jax.random.key(0))
    own, notes = sharding.place(params, mesh(where), kv_heads=(kv_heads,))
    size = mesh(where).shape["model"]
    assert any(f"{kv_heads} KV heads do not divide by model={size}" in note for note in notes) == bool(kv_heads % size), notes
    assert any(f"17 does not divide by model={size}" in note for note in notes) == (size > 1), notes
    qkv = own["layer_0"]["attention"]["qkv"]["kernel"]
    assert (qkv.sharding.shard_shape(qkv.shape)[1] < qkv.shape[1]) == (size > 1 and kv_heads % size == 0)
    gate_up = own["layer_0"]["mlp"]["gate_up"]["kernel"]
    assert gate_up.sharding.shard_shape(gate_up.shape) == (24, 2, 40 // size)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 17, (4, 9)), jnp.int32)
    run = lambda model: jax.jit(lambda p: model.apply(p, tokens, model.init_cache(4, 16))[0].logits)
    np.testing.assert_allclose(run(sharding.model_over(target, mesh(where)))(own), run(target)(params), atol=1e-5)


def logits(where):
    t = table()
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, t.V, (8, 11)), jnp.int32)
    run = lambda model: jax.jit(lambda p: model.apply(p, tokens, model.init_cache(8, 16))[0].logits)
    own, notes = placed(t, where)
    assert notes == ()
    found = run(sharding.model_over(t.TARGET, mesh(where)))(own)
    rows, _, words = found.sharding.shard_shape(found.shape)
    assert (rows, words) == (8 // mesh(where).shape["data"], t.V // mesh(where).shape["model"])
    np.testing.assert_allclose(found, run(t.TARGET)(t.target_params()), atol=1e-5)


def fully():
    """Nothing is whole over `fsdp` but vectors; logits are the same."""
    t = table()
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, t.V, (8, 11)), jnp.int32)
    run = lambda model: jax.jit(lambda p: model.apply(p, tokens, model.init_cache(8, 16))[0].logits)
    own, notes = placed(t, FULLY)
    assert notes == ()
    for path, x in jax.tree_util.tree_leaves_with_path(own):
        parts = x.size // np.prod(x.sharding.shard_shape(x.shape))
        assert parts == (4 if x.ndim > 1 else 1), (path, x.sharding)
    np.testing.assert_allclose(
        run(sharding.model_over(t.TARGET, mesh(FULLY)))(own), run(t.TARGET)(t.target_params()), atol=1e-5
    )


def batch(t, rows=8, step=0):
    rng = np.random.default_rng(step)
    tokens = jnp.asarray(rng.integers(0, t.V, (rows, 12)), jnp.int32)
    mask = jnp.asarray(rng.random((rows, 12)) < 0.8)
    return Batch(tokens, mask, jnp.asarray(np.repeat([[0] * 7 + [1] * 5], rows, 0), jnp.int32))


def one_step(recipe, target, target_params, params, parts, places=None):
    """Gradients, which `optax.trace` keeps, and metrics of a training step."""
    keep = optax.trace(0.0)
    step = functools.partial(loop.train_step, recipe=table().RECIPES[recipe](3), target=target, optimizer=keep)
    state = loop.Train(params, keep.init(params), jnp.zeros((), jnp.int32))
    state, metrics = jax.jit(step, out_shardings=places)(state, target_params, parts, jax.random.key(5))
    return state.optimizer.trace, metrics


def parts():
    """Two parts of four rows."""
    return jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), batch(table()))


@functools.cache
def gradients_alone(recipe):
    t = table()
    return one_step(recipe, t.TARGET, t.target_params(), t.trained(recipe), parts())


def gradients(recipe, where):
    t, params = table(), table().trained(recipe)
    like = jax.eval_shape(lambda p: loop.Train(p, optax.trace(0.0).init(p), jnp.zeros((), jnp.int32)), params)
    places = sharding.placement(like, mesh(where), rules=sharding.TRAINED).shardings
    own, over = jax.device_put(params, places.params), sharding.model_over(t.TARGET, mesh(where))
    fed = sharding.fed(parts(), mesh(where))
    found, metrics = one_step(recipe, over, placed(t, where)[0], own, fed, (places, None))
    wanted, expected = gradients_alone(recipe)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(found), strict=True):
        scale = np.abs(x).max() or 1.0
        np.testing.assert_allclose(y / scale, x / scale, atol=1e-5, err_msg=jax.tree_util.keystr(path))


def restores(where, goals):
    """A checkpoint saved on one mesh lies as asked on others, or on one device, with the same values."""
    t = table()
    how, numbers = t.RECIPES["eagle3"](3), loop.Settings(4)
    with tempfile.TemporaryDirectory() as folder:
        saved = loop.begin(how, placed(t, where)[0], numbers, Path(folder), mesh(where))
        checkpoint.save(Path(folder) / "checkpoints", 1, saved)
        for goal in goals:
            one = goal == "1x1"
            params = t.target_params() if one else placed(t, goal)[0]
            found = loop.begin(how, params, numbers, Path(folder), None if one else mesh(goal))
            jax.tree.map(np.testing.assert_array_equal, found, saved)
            spread = {len(x.sharding.device_set) for x in jax.tree.leaves(found)}
            assert spread == ({1} if one else {8}), spread


def goes_on(places):
    """A run that is stopped and goes on, on another mesh each time, ends with the parameters of one that was not."""
    t = table()
    how = t.RECIPES["mtp"](3)
    numbers = loop.Settings(len(places) + 1, peak=0.01, warmup=1, log_every=1, save_seconds=0.0)
    rows = Batches(lambda n: batch(t, step=n), lambda n: np.arange(8), lambda n: f"batch {n}", 8)
    fit = functools.partial(loop.fit, how, rows)

    class Stop(Exception):
        pass

    def stopped(after, report):  # the step before was saved
        if report.step == after + 2 and report.step <= len(places):
            raise Stop

    with tempfile.TemporaryDirectory() as folder:
        alone = fit(numbers, Path(folder) / "alone", target=t.TARGET, target_params=t.target_params())
        for done, where in enumerate(places):
            over = sharding.model_over(t.TARGET, mesh(where))
            try:
                found = fit(
                    numbers, Path(folder) / "meshes", target=over, target_params=placed(t, where)[0], mesh=mesh(where),
                    progress=functools.partial(stopped, done),
                )  # fmt: skip
            except Stop:
                continue
        assert checkpoint.steps(Path(folder) / "meshes" / "checkpoints")[-1] == numbers.steps
    for x, y in zip(jax.tree.leaves(alone), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def whole_calls(where):
    """`generate` over a mesh, in pieces of any number of rounds: the same completions, and one compilation."""
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


def command(where):
    """`specjax generate --mesh` says what does not divide, and answers as without."""
    import contextlib
    import io

    import tiny_model

    from specjax import cli

    with tempfile.TemporaryDirectory() as folder:
        path, said, out = tiny_model.save(Path(folder) / "model"), {}, {}
        for flags in ((), ("--mesh", MESHES[where])):
            words = ["generate", "w1 w2", "--model", str(path), "--max-new-tokens", "6", "--json", f"{folder}/out.json", *flags]
            error = io.StringIO()
            with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
                assert cli.main(words) == 0, error.getvalue()
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


def published(folder, family, **sizes):
    """A checkpoint directory of a family, of sizes that eight devices divide."""
    wide = dict(vocab_size=64, num_attention_heads=16, num_key_value_heads=8, head_dim=4, intermediate_size=64, hidden_size=32)
    config = {**golden.CONFIGS[family], **wide, **sizes}
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in golden.shapes(config)}
    return golden.save(Path(folder) / "model", config, tensors)


def reads(family, **sizes):
    """A file read into the parts of devices is what was read whole and then placed."""
    with tempfile.TemporaryDirectory() as folder:
        path = published(folder, family, **sizes)
        _, config, params = read_directory(path, dtype=jnp.bfloat16)
        for name in ("1x8", FULLY, "2x4"):
            _, _, found = read_directory(path, dtype=jnp.bfloat16, mesh=mesh(name))
            wanted, _ = sharding.place(params, mesh(name), kv_heads=(config.kv_heads,))
            jax.tree.map(np.testing.assert_array_equal, found, wanted)
            assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding == y.sharding, found, wanted))


def host_peak(where):
    """While a model is read for a mesh the host never holds more than its largest tensor and one part of it.

    `tracemalloc` sees NumPy's arrays and not the devices'.  Large arrays must not become a CPU device's own memory, which they
    do where they happen to be aligned: see MALLOC_MMAP_THRESHOLD_ in test_sharding.py.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = published(folder, "llama", vocab_size=8192, hidden_size=128, head_dim=8, intermediate_size=1024)
        read_directory(path, mesh=mesh(where))  # whatever is made once
        tracemalloc.start()
        _, _, params = read_directory(path, mesh=mesh(where))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    largest = 8192 * 128 * 4
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    print(f"host peak {peak / 1e6:.2f} MB of {size / 1e6:.2f} MB, largest tensor {largest / 1e6:.2f} MB", file=sys.stderr)
    assert size > 2 * largest and peak <= largest + largest / mesh(where).shape["model"], (peak, largest, size)


CI_DRAFTERS = {"1x8": ["eagle3"], "2x4": ["medusa, sampled", "dspark"], "4x2": ["eagle3, dynamic", "small"], "8x1": ["mtp"]}
DRAFTERS = [name for name in helpers.BUILDERS if name != "plain" and not name.startswith("script")]

QUICK = {
    **{f"logits {m}": functools.partial(logits, m) for m in MESHES},
    **{f"{d} {m}": functools.partial(same_tokens, d, m) for m, several in CI_DRAFTERS.items() for d in several},
    "fully sharded": fully,
    **{
        f"{g} KV heads {m}": functools.partial(does_not_divide, g, h, m)
        for g, h in ((2, 4), (3, 6))
        for m in ("1x8", "2x4", "8x1")
    },
    **{f"gradients {m}": functools.partial(gradients, "eagle3", m) for m in ("2x4", "8x1")},  # every mesh, and recipe: SLOW
    "restores": functools.partial(restores, "2x4", ("8x1", "1x1", "1x8", "4x2")),
    "goes on": functools.partial(goes_on, ("2x4", "8x1", FULLY)),
    "calls": functools.partial(whole_calls, "2x4"),
    "command": functools.partial(command, "2x4"),
    "lm": trunk_of_an_lm,
    "reads qwen2": functools.partial(reads, "qwen2"),
    "reads gemma3": functools.partial(reads, "gemma3_new"),
    "reads 2 KV heads": functools.partial(reads, "llama", num_key_value_heads=2),
    "host peak": functools.partial(host_peak, "1x8"),
}
"""Checks for CI."""

SLOW = {
    **{f"drafts of {d} {m}": functools.partial(same_drafts, d, m) for d in DRAFTERS for m in MESHES},
    **{f"gradients of {r} {m}": functools.partial(gradients, r, m) for r in helpers.RECIPES for m in (*MESHES, FULLY)},
}
"""Every drafter and every recipe on every mesh."""


def main(names):
    found = {}
    warnings.simplefilter("error")
    for name in names:
        try:
            {**QUICK, **SLOW}[name]()
            found[name] = None
        except Exception:
            found[name] = traceback.format_exc()
        print(f"{name}: {'ok' if found[name] is None else found[name]}", file=sys.stderr, flush=True)
        if name.startswith("drafts of"):
            jax.clear_caches()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])

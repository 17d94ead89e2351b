"""Which slots a token sees, and that every way to split a pass gives the same output: windows, wide masks, a context cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import trees
from specjax.cache import rewind
from specjax.models.layers import Columns, Segment, attend, committed, rope, rope_frequencies, visible
from specjax.models.transformer import TransformerConfig, language_model
from specjax.types import KVCache

CONFIG = TransformerConfig(19, 16, 3, 4, 2, 8, 24, 64, window=4, sliding=(True, False, True), rope_theta_sliding=500.0)
MODEL = language_model(CONFIG)
apply = jax.jit(MODEL.apply, static_argnames="features")
TOKENS = jax.random.randint(jax.random.key(1), (2, 12), 0, 19)


@pytest.fixture(scope="module")
def params():
    return jax.jit(MODEL.init)(jax.random.key(0))


def close(a, b):
    np.testing.assert_allclose(a, b, atol=2e-5)


def reference(length, positions, slots, mask, window, offset):
    """By the words of the docstring, slot by slot."""
    b, t = positions.shape
    mask = np.tril(np.ones((t, t), bool)) if mask is None else np.asarray(mask)
    mask = np.broadcast_to(mask, (b, *mask.shape[-2:]))
    width = mask.shape[-1]
    out = np.zeros((b, t, slots), bool)
    for row in range(b):
        first_new, end = length[row], length[row] + t
        for i in range(t):
            for slot in range(slots):
                if slot < end - width:  # committed before the mask
                    out[row, i, slot] = window is None or positions[row, i] - (slot + offset[row]) < window
                elif slot < end:
                    near = window is None or slot < first_new or positions[row, i] - positions[row, slot - first_new] < window
                    out[row, i, slot] = mask[row, i, slot - (end - width)] and near
    return out


@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("kind", ["causal", "tree", "wide", "ragged wide"])
def test_visible(kind, window):
    rng = np.random.default_rng(0)
    length = np.array([0, 3, 7]) if kind in ("causal", "tree") else np.array([4, 5, 7])
    t, slots = 3, 12
    positions = length[:, None] + np.array([0, 1, 1] if kind == "tree" else [0, 1, 2])[None]
    mask = {
        "causal": None,
        "tree": np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool),
        "wide": rng.random((t, t + 4)) < 0.5,
        "ragged wide": rng.random((3, t, t + 2)) < 0.5,
    }[kind]
    offset = np.array([0, 2, 5])
    got = visible(
        jnp.asarray(length),
        jnp.asarray(positions + offset[:, None]),
        slots,
        None if mask is None else jnp.asarray(mask),
        window,
        jnp.asarray(offset),
    )
    expected = reference(length, positions + offset[:, None], slots, mask, window, offset)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("chunks", [[1] * 12, [5, 4, 3], [8, 4], [2, 9, 1]])
def test_chunks_equal_one_pass(params, chunks):
    whole = apply(params, TOKENS, MODEL.init_cache(2, 16))[0].logits
    cache, at, parts = MODEL.init_cache(2, 16), 0, []
    for n in chunks:
        out, cache = apply(params, TOKENS[:, at : at + n], cache)
        at += n
        cache = rewind(cache, jnp.full(2, at))
        parts.append(out.logits)
    close(jnp.concatenate(parts, 1), whole)


@pytest.mark.parametrize("tied", [True, False])
def test_a_narrow_head_gives_the_same_logits(tied):
    model = language_model(CONFIG._replace(tied=tied))
    own, ids = jax.jit(model.init)(jax.random.key(1)), jnp.asarray([3, 0, 11])
    hidden = jax.random.normal(jax.random.key(2), (2, 5, model.width))
    close(model.unembed(model.narrow(own, ids), hidden), model.unembed(own, hidden)[..., ids])


def test_tokens_are_looked_up_in_place():
    """A loop over lookups makes no float32 copy of a bfloat16 table (113 MB for 49,152 tokens), and gradients reach it."""
    model = language_model(CONFIG._replace(vocab_size=211), dtype=jnp.bfloat16)
    params = jax.jit(model.init)(jax.random.key(0))

    def looked_up(params):
        return jax.lax.scan(lambda total, row: (total + model.embed(params, row).sum(), None), 0.0, TOKENS)[0]

    program = jax.jit(looked_up).lower(params).compile().as_text().splitlines()
    loops = [line for line in program if " while(" in line]
    assert loops and not any("f32[211,16]" in line for line in loops)  # it would be carried along
    gradient = jax.grad(looked_up)(params)["embedding"]
    np.testing.assert_array_equal(gradient[:, 0].astype(jnp.float32), np.bincount(TOKENS.ravel(), minlength=211))


def test_the_window_hides_what_is_old(params):
    """Three layers, two of them with a window of 4: only through the full layer does the first token reach the last."""
    short = MODEL.truncate(1)
    base = short.apply(params, TOKENS, short.init_cache(2, 12))[0].logits
    other = short.apply(params, TOKENS.at[:, 0].add(1) % 19, short.init_cache(2, 12))[0].logits
    changed = np.abs(np.asarray(base - other)).max((0, 2)) > 1e-6
    assert changed.tolist() == [True] * 4 + [False] * 8
    two = MODEL.truncate(2)
    far = (
        two.apply(params, TOKENS.at[:, 0].add(1) % 19, two.init_cache(2, 12))[0].logits
        - two.apply(params, TOKENS, two.init_cache(2, 12))[0].logits
    )
    assert (np.abs(np.asarray(far)).max((0, 2)) > 1e-6).all()


def test_C09_tree_rows_equal_linear_passes(params):
    """Position = committed + depth, whatever the order of nodes; the window counts along the path."""
    parents = jnp.asarray([-1, -1, 0, 1, 1, 4, 5, 2], jnp.int32)
    paths = [[], [0], [1], [0, 2], [1, 3], [1, 4], [1, 4, 5], [1, 4, 5, 6], [0, 2, 7]]
    seen = trees.ancestors(parents)
    prefix = jnp.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    nodes = jax.random.randint(jax.random.key(5), (2, 8), 0, 19)
    _, cache = apply(params, prefix, MODEL.init_cache(2, 20))
    block = jnp.concatenate([prefix[:, -1:], nodes], 1)
    positions = jnp.broadcast_to(4 + seen.sum(-1)[None] - 1, (2, 9))
    out, _ = apply(params, block, rewind(cache, jnp.full(2, 4)), positions=positions, mask=seen)
    for row, path in enumerate(paths):
        line = jnp.concatenate([prefix, nodes[:, jnp.asarray(path, jnp.int32)]], 1)
        close(out.logits[:, row], apply(params, line, MODEL.init_cache(2, 20))[0].logits[:, -1])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_token_reaches_only_the_rows_that_see_it(params, value):
    """A token whose embedding is NaN or inf is drafted and refused: its siblings and ancestors are as they were."""
    broken = {**params, "embedding": params["embedding"].at[7].set(value)}
    parents = jnp.asarray([-1, -1, 1, 0], jnp.int32)
    seen, positions = trees.ancestors(parents), jnp.asarray([[0, 1, 1, 2, 2]])
    go = lambda p, token: apply(p, jnp.asarray([[3, token, 4, 5, 6]]), MODEL.init_cache(1, 8), positions=positions, mask=seen)
    (out, cache), (clean, _) = go(broken, 7), go(params, 8)
    close(out.logits[0, [0, 2, 3]], clean.logits[0, [0, 2, 3]])
    assert not np.isfinite(out.logits[0, 1]).any() and not np.isfinite(out.logits[0, 4]).any()
    later, _ = apply(broken, jnp.asarray([[9]]), rewind(cache, jnp.ones(1, jnp.int32)))  # its slot is past the length
    close(later.logits, apply(params, jnp.asarray([[3, 9]]), MODEL.init_cache(1, 8))[0].logits[:, 1:])


def test_a_tree_grown_level_by_level(params):
    """A mask wider than the new tokens: the second level sees the first through it (full layers only)."""
    model = language_model(CONFIG._replace(window=None, sliding=()))
    model = model._replace(apply=jax.jit(model.apply))
    prefix, first, second = TOKENS[:, :4], TOKENS[:, 4:6], TOKENS[:, 6:9]
    _, cache = model.apply(params, prefix, model.init_cache(2, 16))
    eye = jnp.eye(2, dtype=bool)
    _, cache = model.apply(params, first, rewind(cache, jnp.full(2, 4)), positions=jnp.full((2, 2), 4), mask=eye)
    parent = np.array([1, 0, 1])
    mask = jnp.concatenate([jnp.asarray(np.eye(2, dtype=bool)[parent]), jnp.eye(3, dtype=bool)], 1)
    out, _ = model.apply(params, second, rewind(cache, jnp.full(2, 6)), positions=jnp.full((2, 3), 5), mask=mask)
    for i in range(3):
        line = jnp.concatenate([prefix, first[:, parent[i]][:, None], second[:, i : i + 1]], 1)
        close(out.logits[:, i], model.apply(params, line, model.init_cache(2, 16))[0].logits[:, -1])


def test_a_read_only_context_equals_one_cache(params):
    """Ragged contexts, and a window that reaches into them."""
    _, context = apply(params, TOKENS, MODEL.init_cache(2, 16))
    context = rewind(context, jnp.asarray([9, 3]))
    own, logits = MODEL.init_cache(2, 4), []
    new = jax.random.randint(jax.random.key(9), (2, 3), 0, 19)
    for i in range(3):
        out, own = apply(params, new[:, i : i + 1], own, context=context)
        own = rewind(own, own.length + 1)
        logits.append(out.logits[:, 0])
    for row, n in enumerate((9, 3)):
        line = jnp.concatenate([TOKENS[row : row + 1, :n], new[row : row + 1]], 1)
        expected = apply(params, line, MODEL.init_cache(1, 16))[0].logits[0, n:]
        close(jnp.stack(logits, 1)[row], expected)


def test_committed():
    context = KVCache((jnp.zeros((2, 1, 1, 5)),), (jnp.zeros((2, 1, 5, 1)),), jnp.asarray([2, 4]))
    positions = jnp.asarray([[2, 3], [4, 5]])
    assert committed(context, positions).sum(-1).tolist() == [[2, 2], [4, 4]]
    assert committed(context, positions, 3)[1].tolist() == [
        [False, False, True, True, False],
        [False, False, False, True, False],
    ]


def test_truncate_is_the_first_layers_with_the_same_head(params):
    short = MODEL.truncate(2)
    assert short.num_layers == 2 and len(short.init_cache(1, 4).k) == 2
    whole, cache = apply(params, TOKENS, MODEL.init_cache(2, 12), features=(0, 1, 2))
    out, part = short.apply(params, TOKENS, short.init_cache(2, 12), features=(1, 0))
    close(out.features[:, :, 0], whole.features[:, :, 1])
    close(out.features[:, :, 1], whole.features[:, :, 0])
    close(part.k[1], cache.k[1])
    close(out.logits, MODEL.unembed(params, out.hidden))
    close(MODEL.truncate(3).apply(params, TOKENS, MODEL.init_cache(2, 12))[0].logits, whole.logits)
    for bad in (0, 4):
        with pytest.raises(ValueError, match=f"cannot keep {bad} layers of a model of 3"):
            MODEL.truncate(bad)
    with pytest.raises(ValueError, match=r"feature layers \[3\] do not exist"):
        apply(params, TOKENS, MODEL.init_cache(2, 12), features=(0, 3))


def test_attend_is_softmax_attention():
    """Two segments, grouped queries, float64 NumPy."""
    rng = np.random.default_rng(0)
    b, t, g, r, d, sizes = 2, 3, 2, 2, 4, (5, 3)
    q = rng.normal(size=(b, t, g, r, d)).astype(np.float32)
    keys, values = [[rng.normal(size=(b, g, s, d)).astype(np.float32) for s in sizes] for _ in range(2)]
    seen = [rng.random((b, t, s)) < 0.6 for s in sizes]
    seen[0][..., 0] = True
    segments = tuple(
        Segment(jnp.asarray(k.swapaxes(2, 3)), jnp.asarray(v), jnp.asarray(m))
        for k, v, m in zip(keys, values, seen, strict=True)
    )
    got = attend(jnp.asarray(q), segments, 0.3)
    k, v, m = np.concatenate(keys, 2), np.concatenate(values, 2), np.concatenate(seen, 2)
    scores = np.where(m[:, None, None], np.einsum("btgrd,bgsd->bgrts", q, k).astype(np.float64) * 0.3, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(got, np.einsum("bgrts,bgsd->btgrd", weights, v), atol=1e-5)


def test_rope_turns_by_position_only():
    """Scores depend on the difference of positions, norms not at all."""
    x = jax.random.normal(jax.random.key(0), (1, 2, 1, 8))
    frequency = rope_frequencies(8, 10_000.0)
    dot = lambda i, j: float((rope(x[:, :1], jnp.array([[i]]), frequency) * rope(x[:, 1:], jnp.array([[j]]), frequency)).sum())
    assert dot(3, 7) == pytest.approx(dot(103, 107), abs=1e-4) and dot(3, 7) != pytest.approx(dot(3, 8), abs=1e-3)
    close(jnp.linalg.norm(rope(x, jnp.array([[5, 900]]), frequency), axis=-1), jnp.linalg.norm(x, axis=-1))
    np.testing.assert_allclose(frequency, [1, 0.1, 0.01, 0.001], rtol=1e-5)


def test_columns_are_keys_that_one_query_alone_sees():
    """Like a segment of T x J keys of which each query sees its own J."""
    rng, (b, t, g, r, d, j, s) = np.random.default_rng(0), (2, 4, 2, 3, 8, 2, 5)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    q, first = normal(b, t, g, r, d), Segment(normal(b, g, d, s), normal(b, g, s, d), jnp.asarray(rng.random((b, t, s)) < 0.5))
    columns = Columns(normal(b, t, g, j, d), normal(b, t, g, j, d))
    k, v = (x.transpose(0, 2, 1, 3, 4).reshape(b, g, t * j, d) for x in columns)
    own = jnp.broadcast_to(jnp.repeat(jnp.eye(t, dtype=bool), j, 1)[None], (b, t, t * j))
    expected = attend(q, (first, Segment(jnp.swapaxes(k, 2, 3), v, own)), 0.3)
    close(attend(q, (first,), 0.3, columns), expected)
    assert np.abs(expected - attend(q, (first,), 0.3)).max() > 0.1

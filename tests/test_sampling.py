"""`warp` against NumPy in float64 with sorts; `threshold`, `stack`, and the one place that draws a token from a law."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax import sampling
from specjax.sampling import History, SamplingParams, stack, threshold, warp
from specjax.verify import draw

V, S, N = 11, 9, 3


# The reference: float64, one row at a time, sorts, dictionaries.


def reference(logits, params, history=(), output=()):
    """Probabilities [V] of one row; `history` is prompt and output, `output` what the request has produced."""
    x = np.asarray(logits, np.float64).copy()
    for t in set(history):
        r = params.repetition_penalty or 1.0
        x[t] = x[t] / r if x[t] > 0 else x[t] * r
    for t in output:
        x[t] -= params.frequency_penalty or 0.0
    for t in set(output):
        x[t] -= params.presence_penalty or 0.0
    for t, b in (params.logit_bias or {}).items():
        x[t] += b
    if params.temperature == 0:
        return np.eye(len(x))[int(np.argmax(x))]
    x = x / params.temperature
    keep = np.ones(len(x), bool)
    if params.top_k is not None:
        keep &= x >= np.sort(x)[::-1][min(params.top_k, len(x)) - 1]
    if params.top_p is not None:
        p = softmax(np.where(keep, x, -np.inf))
        order = np.argsort(-p, kind="stable")
        size = int(np.searchsorted(np.cumsum(p[order]), params.top_p - 1e-12)) + 1
        keep &= p >= p[order[min(size, len(x)) - 1]]
    if params.min_p is not None:
        p = softmax(x)
        keep &= p >= params.min_p * p.max() * (1 - 1e-12)
    return softmax(np.where(keep, x, -np.inf))


def softmax(x):
    w = np.exp(x - x.max())
    return w / w.sum()


def law(logits, params, prompt=(0,), output=(), drafted=(), seen=None):
    """`warp` of one request: rows [R, V] -> probabilities [R, V]."""
    tokens = np.zeros(S, np.int32)
    line = [*prompt, *output]
    tokens[: len(line)] = line
    tokens[len(line) :] = 7  # junk that nobody may count
    drafted = np.asarray(drafted, np.int32)
    seen = np.tril(np.ones((len(drafted) + 1,) * 2, bool)) if seen is None else seen
    history = History(
        jnp.asarray(tokens), jnp.array(len(line)), jnp.array(len(prompt)), jnp.asarray(drafted), jnp.asarray(seen)
    )
    one = jax.tree.map(lambda x: x[0], stack([params], np.shape(logits)[-1]))
    return np.exp(np.asarray(jax.jit(warp)(one, jnp.asarray(logits), history)))


GRID = [
    dict(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in itertools.product((0.0, 0.3, 1.0, 2.5), (None, 1, 3, 99), (None, 0.05, 0.7, 1.0), (None, 0.0, 0.2, 1.0))
]


def test_warp_equals_sorting():
    """Every combination of temperature, top-k, top-p and min-p, at their ends too, on 20 random rows."""
    logits = np.random.default_rng(0).normal(0, 2, (20, V)).astype(np.float32)
    params = [
        SamplingParams(**{**g, "top_k": g["top_k"] or 99, "top_p": g["top_p"] or 1.0, "min_p": g["min_p"] or 0.0}) for g in GRID
    ]
    stacked = stack(params, V)
    history = History(jnp.zeros(S, jnp.int32), jnp.array(1), jnp.array(1), jnp.zeros(0, jnp.int32), jnp.ones((1, 1), bool))
    all_rows = jax.jit(jax.vmap(lambda s: warp(s, jnp.asarray(logits), history)))(stacked)
    for p, mine in zip(params, np.exp(np.asarray(all_rows)), strict=True):
        np.testing.assert_allclose(mine, [reference(row, p) for row in logits], atol=2e-6, err_msg=str(p))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-3, 3), min_size=V, max_size=V),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(1, V),
    st.sampled_from([0.1, 0.5, 0.9]),
)
def test_ties_at_a_cut_all_stay(values, temperature, k, p):
    """Integers as logits tie often; the cut of top-p must hold at least p, and less than p without its last tie."""
    params = SamplingParams(temperature=temperature, top_k=k, top_p=p)
    mine = law(np.asarray([values], np.float32), params)[0]
    if temperature == 0:
        assert mine.tolist() == np.eye(V)[int(np.argmax(values))].tolist()
        return
    x = np.asarray(values, np.float64) / temperature
    left = softmax(np.where(x >= np.sort(x)[::-1][k - 1], x, -np.inf))
    kept = mine > 0
    assert left[kept].min() >= left[~kept].max(initial=0), "a cut, not a choice among equals"
    assert left[kept].sum() >= p - 1e-6
    assert left[kept & (left > left[kept].min() * (1 + 1e-9))].sum() < p + 1e-6
    np.testing.assert_allclose(mine[kept], left[kept] / left[kept].sum(), atol=2e-6)


def test_greedy_takes_the_lowest_id_of_a_tie_exactly():
    rows = np.asarray([[1, 5, 5, 0], [5, 5, 5, 5], [-5, -5, -7, -6], [0.0, -0.0, -1, -2]], np.float32)
    got = law(rows, SamplingParams(), seen=np.tril(np.ones((4, 4), bool)), drafted=[0, 0, 0])
    assert got.tolist() == np.eye(4)[[1, 0, 0, 0]].tolist()
    full = law(rows, SamplingParams(top_k=2, top_p=0.3, min_p=0.5), seen=np.tril(np.ones((4, 4), bool)), drafted=[0, 0, 0])
    assert full.tolist() == got.tolist()


def test_top_k_1_at_temperature_1_is_greedy_unless_tied():
    rows = np.random.default_rng(1).normal(0, 1, (4, V)).astype(np.float32)
    shape = dict(drafted=[0] * 3, seen=np.tril(np.ones((4, 4), bool)))
    one = law(rows, SamplingParams(temperature=1.0, top_k=1), **shape)
    np.testing.assert_allclose(one, law(rows, SamplingParams(), **shape), atol=1e-6)
    assert law(np.asarray([[3, 3, 0, 0]], np.float32), SamplingParams(temperature=1.0, top_k=1)).tolist() == [[0.5, 0.5, 0, 0]]


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 2e-38, 1e-30, 1e-6])
def test_a_tiny_temperature_is_greedy_not_nan(temperature):
    got = law(np.asarray([[1, 30, 20, -40]], np.float32), SamplingParams(temperature=temperature))
    assert got.tolist() == [[0, 1, 0, 0]]


@pytest.mark.parametrize("top_p", [1e-46, 1e-40, 1e-30, 1e-8])
def test_a_tiny_top_p_keeps_the_best(top_p):
    assert law(np.asarray([[1, 30, 20, -40]], np.float32), SamplingParams(temperature=1.0, top_p=top_p)).tolist() == [
        [0, 1, 0, 0]
    ]


def test_impossible_tokens_stay_impossible():
    """-inf logits and biases under every transform, more of them than top-k lets through."""
    rows = np.asarray([[0, -np.inf, 1, -np.inf, -np.inf, 2]], np.float32)
    for params in (
        SamplingParams(temperature=1.0, top_k=5, top_p=0.999999, min_p=1e-9, repetition_penalty=1.5, frequency_penalty=-3.0),
        SamplingParams(temperature=0.3, presence_penalty=-9.0, logit_bias={1: 50.0}),
        SamplingParams(),
    ):
        got = law(rows, params, prompt=(1, 3), output=(4, 1))
        assert got[0, [1, 3, 4]].tolist() == [0, 0, 0] and got.sum() == pytest.approx(1)
    assert law(rows, SamplingParams(logit_bias={5: -np.inf})).tolist() == [[0, 0, 1, 0, 0, 0]]


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, top_k=2, top_p=0.5, min_p=0.1)])
def test_a_row_without_a_law_has_no_support(params, value):
    rows = np.stack([np.full(V, value), np.arange(V)]).astype(np.float32)
    got = law(rows, params, drafted=[0])
    assert not (got[0] > 0).any()
    assert got[1].sum() == pytest.approx(1)


PENALTIES = [
    SamplingParams(temperature=1.0, repetition_penalty=1.7),
    SamplingParams(temperature=1.0, repetition_penalty=0.6),
    SamplingParams(temperature=0.8, presence_penalty=0.9),
    SamplingParams(temperature=1.0, frequency_penalty=-0.7),
    SamplingParams(temperature=1.0, repetition_penalty=1.2, presence_penalty=-0.3, frequency_penalty=0.5, logit_bias={2: 1.5}),
    SamplingParams(repetition_penalty=3.0, frequency_penalty=2.0),
]


@pytest.mark.parametrize("params", PENALTIES)
def test_penalties_count_what_each_row_of_a_tree_sees(params):
    """Nodes 0 and 1 are siblings, node 2 is a child of 1: row 3 has drafted 5 twice, and nothing of node 0."""
    logits = np.random.default_rng(2).normal(0, 2, (4, V)).astype(np.float32)
    prompt, output, drafted = [3, 3, 8], [5, 8, 5], [2, 5, 5]
    seen = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)
    got = law(logits, params, prompt, output, drafted, seen)
    for row, path in enumerate(([], [2], [5], [5, 5])):
        expected = reference(logits[row], params, prompt + output + path, output + path)
        np.testing.assert_allclose(got[row], expected, atol=2e-6)


def test_the_order_of_transforms():
    """Bias comes after penalties and before temperature; top-p sees what top-k left, renormalised."""
    logits = np.asarray([[2.0, 1.0, 0.0, -1.0]], np.float32)
    got = law(logits, SamplingParams(temperature=2.0, repetition_penalty=2.0, logit_bias={0: 1.0}), prompt=(0,))
    np.testing.assert_allclose(got[0], softmax(np.array([2.0, 1.0, 0.0, -1.0]) / 2), atol=1e-6)
    p = softmax(logits[0].astype(np.float64))  # .64 .24 .09 .03
    both = law(logits, SamplingParams(temperature=1.0, top_k=2, top_p=0.74))
    np.testing.assert_allclose(both[0], [p[0] / (p[0] + p[1]), p[1] / (p[0] + p[1]), 0, 0], atol=1e-6)
    assert (law(logits, SamplingParams(temperature=1.0, top_k=2, top_p=0.7))[0] > 0).sum() == 1, "0.644 / 0.881 = 0.731"


def test_values_by_row_equal_rows_alone():
    """Parameters of one request do not leak: neutral values in a mixed batch change nothing."""
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.6, logit_bias={4: 2.0}),
        SamplingParams(temperature=1.0, min_p=0.3, repetition_penalty=1.4),
        SamplingParams(temperature=2.0, frequency_penalty=0.4, logit_bias={0: -np.inf, 1: 1.0, 2: 3.0}),
    ]
    logits = np.random.default_rng(3).normal(0, 2, (1, V)).astype(np.float32)
    history = History(
        jnp.asarray([4, 4, 0, 0], jnp.int32), jnp.array(2), jnp.array(1), jnp.zeros(0, jnp.int32), jnp.ones((1, 1), bool)
    )
    mixed = jax.vmap(lambda s: warp(s, jnp.asarray(logits), history))(stack(params, V))
    for p, row in zip(params, np.exp(np.asarray(mixed)), strict=True):
        np.testing.assert_allclose(row[0], reference(logits[0], p, [4, 4], [4]), atol=2e-6)


def test_unused_fields_are_compiled_out():
    stacked = stack([SamplingParams(), SamplingParams(temperature=1.0, top_k=4)], V)
    assert [f for f in SamplingParams._fields if getattr(stacked, f) is None] == [
        "top_p", "min_p", "logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty",
    ]  # fmt: skip
    assert stacked.top_k.tolist() == [2**31 - 1, 4] and stacked.top_k.dtype == jnp.int32
    bias = stack([SamplingParams(logit_bias={3: 1.0, 4: 2.0, 5: 3.0}), SamplingParams()], V).logit_bias
    assert bias.ids.tolist() == [[3, 4, 5, V], [V] * 4], "padded to a power of two with an id that is dropped"


BAD = [
    (dict(temperature=-0.1), "temperature=-0.1"),
    (dict(temperature=np.inf), "temperature=inf"),
    (dict(temperature=np.nan), "temperature=nan"),
    (dict(temperature=None), "temperature=None"),
    (dict(temperature="hot"), "temperature='hot'"),
    (dict(top_k=0), "top_k=0"),
    (dict(top_k=2.5), "top_k=2.5"),
    (dict(top_p=0.0), "top_p=0.0"),
    (dict(top_p=1.01), "top_p=1.01"),
    (dict(min_p=-1e-9), "min_p=-1e-09"),
    (dict(min_p=1.5), "min_p=1.5"),
    (dict(repetition_penalty=0.0), "repetition_penalty=0.0"),
    (dict(presence_penalty=np.inf), "presence_penalty=inf"),
    (dict(frequency_penalty=np.nan), "frequency_penalty=nan"),
    (dict(logit_bias={V: 1.0}), f"token {V}"),
    (dict(logit_bias={-1: 1.0}), "token -1"),
    (dict(logit_bias={2: np.inf}), "token 2 is inf"),
    (dict(logit_bias={2: 1e39}), "token 2 is 1e+39"),
    (dict(logit_bias={2: np.nan}), "token 2 is nan"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[m for _, m in BAD])
def test_values_that_make_no_sense_are_named(fields, message):
    with pytest.raises(ValueError) as error:
        stack([SamplingParams(), SamplingParams(**fields)], V)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_values_at_the_ends_of_their_ranges_are_taken():
    stack(
        [
            SamplingParams(1e9, 1, 1.0, 1.0, {0: -np.inf, V - 1: 0}, 1e-6, -5, 5),
            SamplingParams(np.float32(0.5), np.int64(3), 1e-9, 0),
        ],
        V,
    )


# Numbers.


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.floats(-50, 50, width=32) | st.sampled_from([0.0, -0.0, 1.0, -np.inf]), min_size=6, max_size=6),
    st.lists(st.integers(0, 4), min_size=6, max_size=6),
    st.integers(1, 24),
)
def test_threshold_is_the_largest_value_that_keeps_enough(values, weights, needed):
    """Integer weights add exactly, so the cut is exact: any larger value keeps too little."""
    y, w = np.asarray([values], np.float32), np.asarray([weights], np.float32)
    needed = min(needed, int(w.sum()))
    if needed == 0:
        return
    t = float(threshold(jnp.asarray(y), jnp.asarray(w), jnp.full((1, 1), needed, jnp.float32))[0, 0])
    assert w[y >= t].sum() >= needed
    assert t in y.tolist()[0], "the cut is one of the values"
    assert w[y > t].sum() < needed


def test_threshold_in_float64():
    with jax.enable_x64(True):
        y = jnp.asarray([[1.0, 1.0 + 1e-12, 1.0 - 1e-12, -3.0]])
        cut = lambda k: float(threshold(y, jnp.ones_like(y), jnp.full((1, 1), float(k)))[0, 0])
        assert [cut(k) for k in (1, 2, 3, 4)] == [1.0 + 1e-12, 1.0, 1.0 - 1e-12, -3.0]


@pytest.mark.parametrize(
    "params", [PENALTIES[4], PENALTIES[2], PENALTIES[3], SamplingParams(0.7, 5, 0.8, 0.05), SamplingParams()]
)
def test_warp_in_float64_is_exact_to_float64(params):
    logits = np.random.default_rng(4).normal(0, 2, (2, V))
    with jax.enable_x64(True):
        got = law(logits, params, [1, 2], [3], [3])
    assert got.dtype == np.float64
    for row, path in enumerate(([], [3])):
        as_stored = SamplingParams(*(np.float64(np.float32(x)) if isinstance(x, float) else x for x in params))
        expected = reference(logits[row], as_stored, [1, 2, 3, *path], [3, *path])
        np.testing.assert_allclose(got[row], expected, atol=1e-14)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [([1.0, 3.0, 3.0], 1), ([-np.inf, -np.inf, 0.0], 2), ([np.nan, 1.0, 2.0], 3), ([-np.inf] * 3, 3), ([np.inf, 1, np.inf], 0)],
)
def test_first_argmax(rows, expected):
    assert int(sampling.first_argmax(jnp.asarray(rows))) == expected


def test_tempered_is_one_hot_at_0():
    logits = jnp.asarray([[1.0, 4.0, 4.0], [1.0, 2.0, 3.0]])
    got = np.exp(np.asarray(sampling.tempered(logits, jnp.asarray([0.0, 0.5]))))
    np.testing.assert_allclose(got, [[0, 1, 0], softmax(np.array([2.0, 4, 6]))], atol=1e-6)


# Drawing from a law.

ULP = float(np.nextafter(np.float32(1), np.float32(0)))


@pytest.mark.parametrize(
    ("weights", "u", "expected"),
    [
        ([0.0, 1.0, 0.0, 1.0, 0.0], 0.0, 1),  # a coin of 0 finds the first token that can be
        ([0.0, 1.0, 0.0, 1.0, 0.0], 0.5, 3),  # cumulative weight must exceed u
        ([0.0, 1.0, 0.0, 1.0, 0.0], float(np.nextafter(np.float32(0.5), np.float32(0))), 1),
        ([0.0, 1.0, 0.0, 1.0, 0.0], ULP, 3),  # and the largest coin never runs past the last
        ([1e-30, 0.0, 0.0], ULP, 0),
        ([1.0, 1e-9, 0.0], ULP, 0),
        ([0.0, 0.0, 2.0], 0.7, 2),
    ],
)
def test_invert_at_the_boundaries(weights, u, expected):
    assert int(draw.invert(jnp.asarray(weights, jnp.float32), jnp.float32(u))) == expected


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1e-30, 1e-8, 0.1, 0.3, 1.0]), min_size=8, max_size=8).filter(any),
    st.sampled_from([0.0, 0.25, 0.5, 0.999, ULP]),
)
def test_invert_never_finds_a_weight_of_0(weights, u):
    index = int(draw.invert(jnp.asarray(weights, jnp.float32), jnp.float32(u)))
    assert weights[index] > 0
    total = np.cumsum(np.asarray(weights, np.float64))
    assert total[index] >= u * total[-1] * (1 - 1e-6) and total[index] - weights[index] <= u * total[-1] * (1 + 1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000])
def test_sample_has_the_law(size):
    """Chi-square of 50k draws (cells of 5 or more), alpha 1e-6; sizes that leave the last block of the two stages short."""
    rng = np.random.default_rng(size)
    p = rng.dirichlet(np.full(size, 0.5))
    p[rng.random(size) < 0.2] = 0
    p = np.full(size, 1 / size) if p.sum() == 0 else p / p.sum()
    with np.errstate(divide="ignore"):
        log_law = jnp.asarray(np.log(p) - 3.0, jnp.float32)  # an unnormalised law will do
    draws = 50_000
    tokens = np.asarray(jax.jit(jax.vmap(lambda k: draw.sample(k, log_law)))(jax.random.split(jax.random.key(0), draws)))
    counts = np.bincount(tokens, minlength=size)
    assert counts.shape == (size,) and (counts[p == 0] == 0).all()
    big = p * draws >= 5
    chi = ((counts - p * draws) ** 2 / np.where(big, p * draws, 1))[big].sum()
    df = max(int(big.sum()) - 1, 1)
    assert chi < df + 5 * np.sqrt(2 * df) + 25


def test_sample_in_float64():
    with jax.enable_x64(True):
        p = np.array([0.0, 0.2, 0.8])
        with np.errstate(divide="ignore"):
            tokens = jax.vmap(lambda k: draw.sample(k, jnp.log(jnp.asarray(p))))(jax.random.split(jax.random.key(1), 20_000))
        assert np.bincount(np.asarray(tokens), minlength=3)[0] == 0 and abs((np.asarray(tokens) == 2).mean() - 0.8) < 0.015


def test_a_coin_of_0_accepts_nothing_of_probability_0():
    plan = draw.Plan(jnp.asarray([0.0, 1.0]), jnp.asarray([1, 4]), jnp.asarray([2, 3]), lambda row: row)
    assert draw.follow(plan, jnp.asarray([0.0, ULP])).tolist() == [2, 4]

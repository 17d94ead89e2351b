"""Pathwise equality: speculative decoding gives the tokens of plain decoding, greedily and coupled, whatever the drafter.

Plain decoding is held against an oracle without cache, and every drafter and rule against plain decoding, on a random
tiny transformer with a sliding window and grouped queries.  The whole product over K is `slow`; its result is committed
as tests/golden/equality_table.md (made by experiments/equality_table.py).
"""

import functools
import importlib
import re
from pathlib import Path

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import GREEDY, HOT, MIXED, PROMPTS, drafter, mixed, reference, run

from specjax import decode, keys, trees
from specjax.drafters.small import small
from specjax.sampling import SamplingParams
from specjax.types import Params
from specjax.verify import RULES, draw


def rows(result, which):
    return [result.tokens[i] for i in which]


def assert_equal_to_plain(result, rule, plain=None):
    plain = plain or reference()
    assert rows(result, range(5)) == rows(plain, range(5)), "greedy"
    if RULES[rule].coupled:
        assert rows(result, range(5, 10)) == rows(plain, range(5, 10)), "temperature 1"
    else:  # the tokens are its own there; the count is not
        assert [len(t) for t in result.tokens] == [h.NEW] * 10


def test_plain_equals_an_oracle_without_cache():
    """20 tokens of ten rows: the lengths run over the window of 6 and the chunk of 8 in every alignment."""
    assert reference().tokens == h.oracle(MIXED, h.MIXED_HEAT, range(10))
    assert rows(mixed("plain", "rejection"), range(5)) == rows(reference(), range(5))
    assert reference().tokens[:5] != reference().tokens[5:]


@pytest.mark.parametrize(("name", "rule"), h.PAIRS)
def test_every_drafter_and_rule_equals_plain(name, rule):
    result = mixed(name, rule)
    assert_equal_to_plain(result, rule)
    rate = result.accepted.sum() / result.drafted.sum()
    lossless_copy = name in ("small = target", "early_exit, all layers")
    assert 0.02 < rate < 0.9 or (lossless_copy and rate > 0.5)
    assert (result.accepted <= result.drafted).all()

    order = np.random.default_rng(0).permutation(10)
    other = mixed_rows(name, rule, order)
    assert [other.tokens[i] for i in np.argsort(order)] == result.tokens, "in another order"
    for alone in (1, 8):  # among nine copies of it, which finish when it does
        assert mixed_rows(name, rule, [alone] * 10).tokens == [result.tokens[alone]] * 10


def mixed_rows(name, rule, order, **settings):
    heat = [h.MIXED_HEAT[i] for i in order]
    return run(name, rule, [MIXED[i] for i in order], temperature=heat, ids=list(order), **settings)


@pytest.mark.parametrize("name", ["plain", "ngram, order 1", "small", "early_exit, 1 layer"])
def test_a_row_alone_equals_the_row_in_a_batch(name):
    """A batch of one is another program; ragged mates, their budgets and their order change nothing."""
    batch = mixed(name, "rejection")
    for row in (1, 9):
        assert mixed_rows(name, "rejection", [row]).tokens == [batch.tokens[row]]


@pytest.mark.parametrize("k", [1, 2, 5, 8])
@pytest.mark.parametrize("name", h.METHODS)
def test_every_k_equals_plain(name, k):
    result = mixed(name, "coupled", k=k)
    assert_equal_to_plain(result, "coupled")
    assert result.drafted.max() == k and result.accepted.max() >= 1


@pytest.mark.slow
def test_the_whole_product_equals_plain(monkeypatch):
    """The committed table has every pair of drafter and rule; counts at temperature 1 may move with a float, marks may not."""
    root = Path(__file__).parents[1]
    monkeypatch.syspath_prepend(root / "experiments")
    table = importlib.import_module("equality_table")
    marks = lambda text: re.sub(r"\d+/\d+", "", text).strip()
    golden = (root / "tests" / "golden" / "equality_table.md").read_text()
    assert marks(table.markdown(table.cells())) == marks(golden) and "NO" not in golden
    assert len(golden.splitlines()) == 2 + sum(len(h.fitting(name)) for name in table.DRAFTERS)


# Forced acceptance counts.

ROUNDS = 21


def counts(seed, k=3):
    """Per row and round: how many nodes exist and how many of them are right, every pair among them."""
    rng = np.random.default_rng(seed)
    count = rng.integers(0, k + 1, (10, ROUNDS))
    return np.minimum(rng.integers(0, k + 1, (10, ROUNDS)), count), count


PATTERNS = {
    "all right": lambda: (np.full((10, ROUNDS), 3), np.full((10, ROUNDS), 3)),
    "all wrong": lambda: (np.full((10, ROUNDS), 0), np.full((10, ROUNDS), 3)),
    "alternating": lambda: (np.tile(np.arange(ROUNDS) % 2 * 3, (10, 1)), np.full((10, ROUNDS), 3)),
    "ragged": lambda: counts(0),
    "ragged 2": lambda: counts(1),
    "no draft": lambda: (np.zeros((10, ROUNDS)), np.zeros((10, ROUNDS))),
}


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        *(("script", r) for r in h.fitting("script")),
        *(("script, soft", r) for r in ("rejection", "block", "traversal", "k_seq")),
    ],
)
def test_forced_counts(name, rule):
    """Every acceptance count from 0 to K follows every other, in rows side by side; `soft` is case S05."""
    for pattern in PATTERNS.values():
        right, count = pattern()
        params = Params(h.target_params(), h.chain_script(right, count))
        result = h.generate(drafter(name), rule, MIXED, params=params, temperature=h.MIXED_HEAT)
        assert_equal_to_plain(result, rule)
        assert_counts(result, right, range(10) if RULES[rule].coupled else range(5))


def assert_counts(result, right, which):
    for row in which:
        left = h.NEW
        for r, (accepted, emitted) in enumerate(zip(result.accepted[row], result.emitted[row], strict=True)):
            assert emitted == min(left, right[row, r] + 1 if left else 0) and accepted == min(
                emitted, right[row, r] if left else 0
            )
            left -= emitted
            if not left:
                break


def random_tree(rng):
    """Parents before children, depth at most 3, some nodes absent (then their children are too)."""
    parents, level = [], []
    for i in range(h.TREE_NODES):
        choices = [-1] + [j for j in range(i) if level[j] in (1, 2)]
        parent = -2 if rng.random() < 0.2 else int(rng.choice(choices))
        parents.append(parent)
        level.append(0 if parent == -2 else 1 if parent == -1 else level[parent] + 1)
    return parents


def expected_walk(parents, wrong):
    """Accepted tokens: go down to the first child that is right, as long as there is one."""
    at, accepted = -1, 0
    while True:
        hit = [i for i, p in enumerate(parents) if p == at and wrong[i] == 0]
        if not hit:
            return accepted
        at, accepted = hit[0], accepted + 1


BINARY = [-1, -1, 0, 0, 1, 1, 4]


@pytest.mark.parametrize("rule", h.fitting("script, tree"))
def test_forced_trees(rule):
    """A binary tree with the right path in every leaf, and random trees; accepted nodes rarely lie side by side."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        parents = [[BINARY if seed == 0 else random_tree(rng) for _ in range(ROUNDS)] for _ in range(10)]
        wrong = rng.integers(0, 2 if seed < 3 else 3, (10, ROUNDS, h.TREE_NODES))
        script = h.Script(h.truth(MIXED, reference()), jnp.asarray(wrong, jnp.int32), jnp.asarray(parents, jnp.int32))
        result = h.generate(
            drafter("script, tree"), rule, MIXED, params=Params(h.target_params(), script), temperature=h.MIXED_HEAT
        )
        assert_equal_to_plain(result, rule)
        right = np.array(
            [[expected_walk(p, w) for p, w in zip(ps, ws, strict=True)] for ps, ws in zip(parents, wrong, strict=True)]
        )
        assert_counts(result, right, range(10) if RULES[rule].coupled else range(5))
        assert set(np.unique(right)) == {0, 1, 2, 3}


WIDE_TREES = {
    "k-ary": trees.k_ary([3, 2, 2]),
    "Medusa-63": trees.from_paths(h.MEDUSA_63).parents,
    "three chains": trees.from_paths([(r,) * (d + 1) for d in range(5) for r in (0, 1, 2)][:13]).parents,
}


@functools.cache
def wide(name):
    parents = WIDE_TREES[name]
    depth = int(np.asarray(trees.ancestors(jnp.asarray(parents))).sum(1).max()) - 1
    return h.scripted(len(parents), depth, chain=False)


@pytest.mark.parametrize("rule", ["target_match", "coupled"])
@pytest.mark.parametrize("name", WIDE_TREES)
def test_wide_trees(name, rule):
    """One child in four is right, so that right paths of every length stand anywhere among up to 63 nodes."""
    parents = np.tile(WIDE_TREES[name], (10, ROUNDS, 1))
    wrong = np.random.default_rng(1).integers(0, 4, parents.shape)
    script = h.Script(h.truth(MIXED, reference()), jnp.asarray(wrong, jnp.int32), jnp.asarray(parents, jnp.int32))
    params = Params(h.target_params(), script)
    result = h.generate(wide(name), rule, MIXED, params=params, temperature=h.MIXED_HEAT, longest=23 + h.NEW)
    assert_equal_to_plain(result, rule)
    right = np.array([[expected_walk(p, w) for p, w in zip(*row, strict=True)] for row in zip(parents, wrong, strict=True)])
    assert_counts(result, right, range(10) if RULES[rule].coupled else range(5))
    assert right.max() >= 3


# What is cached.


def cached(cache, row, length):
    """K and V of every layer below `length`, slots last."""
    return [np.asarray(k[row, :, :, :length]) for k in cache.k] + [np.asarray(v[row, :, :length]) for v in cache.v]


def prefilled(name, prompts, k=3):
    """Caches of a fresh prefill: (target's, drafter's)."""
    state = run(name, "coupled", prompts, k=k, rounds=0).state
    return state.cache, state.drafter


def assert_same_cache(cache, fresh, lengths):
    for row, n in enumerate(lengths):
        for mine, theirs in zip(cached(cache, row, n), cached(fresh, row, n), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("name", ["script", "script, tree"])
def test_cached_keys_and_values_after_every_count_equal_a_fresh_prefill(name):
    """C01: after each round the target holds every committed token but the last, as if nothing had been rejected."""
    n = drafter(name).num_nodes
    rng = np.random.default_rng(5)
    if name == "script":
        right = (np.arange(10)[:, None] + np.arange(ROUNDS)[None]) % 4
        script = h.chain_script(right, np.full((10, ROUNDS), 3))
    else:
        parents = jnp.asarray(np.tile(BINARY, (10, ROUNDS, 1)), jnp.int32)
        script = h.Script(h.truth(MIXED, reference()), jnp.asarray(rng.integers(0, 2, (10, ROUNDS, n)), jnp.int32), parents)
    seen = set()
    for rounds in (1, 2, 3):
        params = Params(h.target_params(), script)
        result = h.generate(drafter(name), "coupled", MIXED, params=params, temperature=h.MIXED_HEAT, rounds=rounds)
        length = np.asarray(result.state.length)
        seen |= set(result.accepted[:, rounds - 1].tolist())
        assert (np.asarray(result.state.cache.length) == length - 1).all()
        fresh, _ = prefilled("plain", [[*p, *t] for p, t in zip(MIXED, result.tokens, strict=True)])
        assert_same_cache(result.state.cache, fresh, length - 1)
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize("name", ["small", "small = target"])
def test_the_drafter_cache_equals_a_fresh_prefill(name):
    """All but the last two committed tokens, at least: after an all-accepted round the last draft was never run."""
    for rounds in (1, 2, 4):
        result = mixed(name, "coupled", rounds=rounds)
        length = np.asarray(result.state.length)
        target, mine = prefilled(name, [[*p, *t] for p, t in zip(MIXED, result.tokens, strict=True)])
        assert_same_cache(result.state.cache, target, length - 1)
        assert_same_cache(result.state.drafter, mine, np.maximum(length - 2, 0))


def test_slots_past_the_length_are_never_read():
    """Between rounds everything past the committed tokens is overwritten with junk, in both caches and in the tokens."""
    name, static = "small", dict(target=h.TARGET, drafter=drafter("small"))
    params = Params(h.target_params(), h.small_params())
    step = jax.jit(lambda s: decode.round(params, s, rule=RULES["coupled"], **static)[0])
    state = mixed(name, "coupled", rounds=0).state
    slots = jnp.arange(state.tokens.shape[1])

    def spoil(cache, start):
        free = slots[None] >= start[:, None]
        k = tuple(jnp.where(free[:, None, None], 1e3, x) for x in cache.k)
        return cache._replace(k=k, v=tuple(jnp.where(free[:, None, :, None], -1e3, x) for x in cache.v))

    for _ in range(h.NEW):
        state = state._replace(
            tokens=jnp.where(slots[None] >= state.length[:, None], 13, state.tokens),
            cache=spoil(state.cache, state.cache.length),
            drafter=spoil(state.drafter, jnp.maximum(state.length - 2, 0)),
        )
        state = step(state)
    new = [np.asarray(state.tokens)[i, len(p) : len(p) + h.NEW].tolist() for i, p in enumerate(MIXED)]
    assert new == reference().tokens


# A scheduler's lengths.


def by_length(draft, state):
    """0..K nodes, another number in every row and round."""
    return (state.length * 5 + jnp.arange(state.length.shape[0]) * 3) % 4


@pytest.mark.parametrize(("name", "rule"), [("small", "coupled"), ("ngram, order 1", "block"), ("script, tree", "coupled")])
def test_a_schedulers_limit_changes_no_token(name, rule):
    params = Params(h.target_params(), h.drafter_params(name))
    if name == "script, tree":
        parents = jnp.asarray(np.tile(BINARY, (10, ROUNDS, 1)), jnp.int32)
        params = Params(
            h.target_params(), h.Script(h.truth(MIXED, reference()), jnp.zeros((10, ROUNDS, 7), jnp.int32), parents)
        )
    result = h.generate(drafter(name), rule, MIXED, params=params, temperature=h.MIXED_HEAT, limit=by_length)
    assert_equal_to_plain(result, rule)
    assert set(np.unique(result.drafted)) <= {0, 1, 2, 3} and len(np.unique(result.drafted)) >= 3


# Cases.


@pytest.mark.parametrize(
    ("name", "k"), [("small = target", 1), ("small = target", 3), ("small = target", 6), ("early_exit, all layers", 3)]
)
def test_C05_a_perfect_drafter_is_accepted_in_every_round(name, k):
    """Also in the round after an all-accepted one, whose last draft the drafter has never run."""
    result = mixed(name, "coupled", k=k)
    assert_equal_to_plain(result, "coupled")
    assert_counts(result, np.full((10, ROUNDS), k), range(10))


def test_C01_an_all_rejected_round_rolls_back():
    right = np.zeros((10, ROUNDS))
    params = Params(h.target_params(), h.chain_script(right, np.full((10, ROUNDS), 3)))
    for rounds in (1, 5):
        result = h.generate(drafter("script"), "rejection", MIXED, params=params, rounds=rounds)
        assert (np.asarray(result.state.cache.length) == [len(p) + rounds - 1 for p in MIXED]).all()
        assert result.tokens[:5] == [t[:rounds] for t in reference().tokens[:5]]


def test_C03_C11_every_prompt_length_around_window_and_chunk():
    """Window 6, chunk 8, right and wrong alternately: prompts of 1 to 24 tokens, ten at a time."""
    rng = np.random.default_rng(3)
    for lengths in (range(1, 11), range(8, 18), range(14, 24)):
        prompts = [rng.integers(0, h.V, n).tolist() for n in lengths]
        plain = run("plain", "coupled", prompts)
        right = np.tile(np.arange(ROUNDS) % 2 * 3, (10, 1))
        script = h.chain_script(right, np.full((10, ROUNDS), 3), prompts=prompts, result=plain)
        result = h.generate(drafter("script"), "rejection", prompts, params=Params(h.target_params(), script))
        assert result.tokens == plain.tokens
        assert_counts(result, right, range(10))
        assert run("small", "coupled", prompts).tokens == plain.tokens
        assert run("ngram, order 1", "coupled", prompts).tokens == plain.tokens


def test_S05_temperature_0_is_not_soft():
    """The draft a is the drafter's top with q .2, and p(a) .3 > q(a), but p(b) .5: greedy refuses a."""
    p, q = np.array([0.3, 0.5, 0.1, 0.1], np.float32), np.array([0.2, 0.2, 0.1, 0.1], np.float32)
    model = h.table_model(4)
    params = Params(jnp.log(jnp.tile(jnp.asarray(p)[None], (5, 1))), jnp.log(jnp.tile(jnp.asarray(q)[None], (5, 1))))
    for rule in h.CHAIN_RULES:
        result = h.generate(table_drafter(4), rule, [[2]], target=model, params=params, longest=8, new=6)
        assert result.tokens == [[1] * 6] and result.accepted.sum() == 0 and result.drafted[0, 0] == 2


def table_drafter(vocab_size, k=2):
    return TABLE_DRAFTERS.setdefault((vocab_size, k), small(h.table_model(vocab_size), num_draft=k))


TABLE_DRAFTERS = {}


@pytest.mark.parametrize("rule", h.CHAIN_RULES)
def test_S09_the_first_draft_is_verified_too(rule):
    """Prompt 1 1 1: the n-gram drafter proposes 1; the target's argmax is 2."""
    params = Params(h.successor_table({1: 2, 2: 2}, 4), ())
    lookup = drafter("ngram, order 1", 1)
    result = h.generate(lookup, rule, [[1, 1, 1], [1]], target=h.table_model(4), params=params, longest=10, new=4)
    assert result.tokens == [[2, 2, 2, 2]] * 2
    assert result.drafted[0, 0] == 1 and result.accepted[:, 0].tolist() == [0, 0]


TRANSFORMS = [
    SamplingParams(frequency_penalty=-2.0),
    SamplingParams(frequency_penalty=2.0),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(presence_penalty=1.5, temperature=1.0),
    SamplingParams(min_p=0.2, temperature=1.0),
    SamplingParams(logit_bias={3: 4.0, 5: -np.inf}, temperature=0.7),
    SamplingParams(top_k=3, top_p=0.8, temperature=1.5),
    SamplingParams(top_k=1, temperature=1.0),
    SamplingParams(),
    SamplingParams(repetition_penalty=0.8, frequency_penalty=0.7, presence_penalty=-0.5, top_p=0.9, temperature=1.0),
]


@pytest.mark.parametrize("name", ["ngram, order 1", "small", "script, tree"])
def test_S11_every_transform_holds_under_speculation(name):
    """Ten rows with parameters of their own, penalties that look at drafted tokens on their own path among them."""
    prompts = [[4] * 6, *([[4, 4, 4]] * 9)]
    plain = run("plain", "coupled", prompts, temperature=TRANSFORMS)
    params = Params(h.target_params(), h.drafter_params(name))
    if name == "script, tree":
        rng = np.random.default_rng(1)
        parents = jnp.asarray([[random_tree(rng) for _ in range(ROUNDS)] for _ in range(10)], jnp.int32)
        wrong = jnp.asarray(rng.integers(0, 2, (10, ROUNDS, 7)), jnp.int32)
        params = Params(h.target_params(), h.Script(h.truth(prompts, plain), wrong, parents))
    result = h.generate(drafter(name), "coupled", prompts, params=params, temperature=TRANSFORMS)
    assert result.tokens == plain.tokens
    assert result.accepted.sum() > 10
    assert 5 not in plain.tokens[5]
    assert plain.tokens[7] == run("plain", "coupled", prompts, temperature=GREEDY).tokens[7], "top_k=1 is greedy"
    assert len({tuple(t) for t in plain.tokens}) >= 8, "the transforms do something"


def test_S15_keys_belong_to_requests():
    """Equal prompts with keys of their own differ; a row's tokens follow its key through batches and orders."""
    prompts = [PROMPTS[3]] * 10
    one = run("small", "rejection", prompts, temperature=HOT, ids=range(10))
    assert len({tuple(t) for t in one.tokens}) == 10
    back = run("small", "rejection", prompts, temperature=HOT, ids=list(range(10))[::-1])
    assert back.tokens == one.tokens[::-1]
    own = jnp.stack([jax.random.fold_in(jax.random.key(3), 5 - i % 2) for i in range(10)])
    twins = run("small", "rejection", prompts, temperature=HOT, request_keys=own)
    assert twins.tokens == [twins.tokens[0], twins.tokens[1]] * 5 and twins.tokens[0] != twins.tokens[1]


@pytest.mark.parametrize("k", [2, 8])
def test_S17_logits_do_not_depend_on_the_width_of_a_pass(k):
    """One pass of K + 1 tokens against K + 1 passes of one: float32 logits to 1e-5 of their size."""
    tokens = jnp.asarray([[1, 2, 3, 4, 5, 6, 7, 8, 9][: k + 1]], jnp.int32)
    apply, params = jax.jit(h.TARGET.apply), h.target_params()
    wide, _ = apply(params, tokens, h.TARGET.init_cache(1, 16))
    cache, narrow = h.TARGET.init_cache(1, 16), []
    for i in range(k + 1):
        out, cache = apply(params, tokens[:, i : i + 1], cache)
        cache = cache._replace(length=cache.length + 1)
        narrow.append(out.logits)
    np.testing.assert_allclose(np.concatenate(narrow, 1), wide.logits, atol=1e-5 * float(jnp.abs(wide.logits).max()))


def test_a_draft_of_a_broken_token_changes_nothing():
    """Target weights hold NaN for a token that its text never meets; the drafter proposes it in every round."""
    free = min(set(range(h.V)) - {t for p, line in zip(MIXED, reference().tokens, strict=True) for t in (*p, *line)})
    broken = {**h.target_params(), "embedding": h.target_params()["embedding"].at[free].set(jnp.nan)}
    script = h.chain_script(np.full((10, ROUNDS), 3), np.full((10, ROUNDS), 3))
    here = jnp.asarray([len(p) for p in MIXED])
    wrong = script.wrong.at[:, :, 1].set(
        (free - script.truth[jnp.arange(10)[:, None], here[:, None] + 2 * jnp.arange(ROUNDS)[None] + 1]) % h.V
    )
    params = Params(broken, script._replace(wrong=wrong))
    result = h.generate(drafter("script"), "coupled", MIXED, params=params, temperature=h.MIXED_HEAT)
    assert result.tokens == reference().tokens and result.reasons == ["length"] * 10
    assert_counts(result, np.full((10, ROUNDS), 1), range(10))


def test_64_bit_mode_gives_the_same_tokens():
    """A process with jax_enable_x64 can use the library: greedily, it says the same."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        result = run("small", "block")
    assert result.tokens == reference().tokens[:5]


def test_U05_a_seed_changes_nothing_at_temperature_0():
    each = [mixed("small", "rejection", seed=s).tokens for s in range(10)]
    assert [t[:5] for t in each] == [each[0][:5]] * 10
    assert all(len({str(t[row]) for t in each}) == 10 for row in range(5, 10))


PINNED = {
    "ngram, order 1": (0.30, 0.13, 0.10),
    "small": (0.32, 0.15, 0.08),
    "early_exit, 1 layer": (0.38, 0.23, 0.10),
}


@pytest.mark.parametrize("name", PINNED)
def test_P05_acceptance_is_pinned(name):
    """Verification hides a drafter's faults in the tokens, so acceptance by depth is held too (greedy rows)."""
    result = mixed(name, "coupled")
    accepted, steps = result.accepted[:5], (result.emitted[:5] > 0).sum()
    assert steps >= 45
    np.testing.assert_allclose([(accepted > d).sum() / steps for d in range(3)], PINNED[name], atol=0.05)


# The law, through the whole of decoding.

ROWS = 100_000
CRITICAL = 131.4
"""Chi-square of 63 degrees of freedom at alpha = 1e-6: `scipy.stats.chi2.isf(1e-6, 63)`."""


def random_table(seed):
    return jax.nn.log_softmax(jax.random.normal(jax.random.key(seed), (5, 5, 4)), -1)


def chi_square(tokens, law):
    counts = np.zeros(law.shape)
    np.add.at(counts, tuple(tokens.T), 1)
    expected = len(tokens) * law
    assert expected.min() > 5
    return ((counts - expected) ** 2 / expected).sum()


def three_tokens(rule):
    """[ROWS, 3] tokens after the prompt 0 1, drawn by decoding with a table as drafter, K = 2; and their law."""
    model = h.table_model(4, 2)
    target, little = random_table(11), random_table(13)
    draws = small(model, num_draft=2)
    result = h.generate(
        draws, rule, [[0, 1]] * ROWS, target=model, params=Params(target, little), temperature=HOT, longest=5, new=3
    )
    p = np.exp(np.asarray(target, np.float64))
    first, second = p[0, 1], p[1, :4]
    law = first[:, None, None] * second[:, :, None] * p[:4, :4]
    return np.asarray(result.tokens), law, result


@pytest.mark.parametrize("rule", h.CHAIN_RULES)
def test_the_law_of_three_tokens(rule):
    """Joint chi-square of 64 cells at 100k rows, alpha 1e-6.

    With 63 degrees of freedom and power 0.99 it detects sum (p' - p)^2 / p >= 1.22e-3: 0.0175 of the mass moved
    from one half of it to the other, or 0.0105 from one cell of probability 0.1 to the rest.
    """
    tokens, law, result = three_tokens(rule)
    assert 0.1 < result.accepted.sum() / result.drafted.sum() < 0.9
    assert chi_square(tokens, law) < CRITICAL


def noise_by_position(state, rule, vocab_size):
    """`decode.noise_source` with the draft noise of an absolute position, whichever round asks."""

    def noise(depth, width=1):
        at_position = keys.round_keys(state.key, keys.DRAFT, state.length + depth - 1)
        return keys.gumbel(at_position, 0, (width, vocab_size))

    return noise


def decide_by_position(state, draft, log_p, noise, *, rule, depth):
    """`decode.decide` for block verification, with acceptance coins that belong to absolute positions."""
    n = draft.tokens.shape[1]
    by_node = [keys.round_keys(state.key, keys.ACCEPT, state.length + i) for i in range(n)]
    coins = jnp.stack([jax.vmap(jax.random.uniform)(k) for k in by_node], 1)

    def one(coins, key_emit, draft, log_p):
        plan = rule.plan(draft, log_p)
        row = draw.walk(draw.follow(plan, coins[::-1]))  # decision m is of node n - 1 - m
        return draw.verdict(draft, trees.ancestors(draft.parents), row, draw.sample(key_emit, plan.correction(row)), depth)

    return jax.vmap(one)(coins, keys.round_keys(state.key, keys.EMIT, state.length), draft, log_p)


@pytest.mark.parametrize("fault", [noise_by_position, decide_by_position])
def test_randomness_keyed_by_position_is_caught(monkeypatch, fault):
    """Block verification looks past the place where it stops; the next round would reuse what it has conditioned on.

    Draft noise alone gives a chi-square of 526, coins alone 345, against 64 as it is.
    """
    monkeypatch.setattr(decode, {"noise_by_position": "noise_source", "decide_by_position": "decide"}[fault.__name__], fault)
    monkeypatch.setattr(h, "program", h.program.__wrapped__)  # what is compiled already is right
    tokens, law, _ = three_tokens("block")
    assert chi_square(tokens, law) > 2 * CRITICAL

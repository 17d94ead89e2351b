"""Trees of smaller models: a node's law is the one it was drawn from, merging keeps the target's law, tokens are plain's."""

import functools
import itertools
import re

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import TOLERANCE, distance, table

from specjax import decode, trees
from specjax.drafters import specinfer as module
from specjax.drafters.siblings import SIBLINGS
from specjax.drafters.specinfer import load, specinfer
from specjax.lossless.drawn import DRAWN
from specjax.models.load import LM
from specjax.types import Params, Sequences
from specjax.verify import RULES

EXPANSION = (2, 2, 1)
PARENTS = [-1, -1, 0, 0, 1, 1, 2, 3, 4, 5]
HEAT = [0.0, 1.0, 0.7, 0.0, 1.0]


@functools.cache
def other_params():
    """A second small model: the first one, disturbed anew."""
    own = jax.jit(h.SMALL.init)(jax.random.key(5))
    return jax.tree.map(lambda noise, x: x + 0.1 * noise, own, h.small_params())


def tree(kind, expansion=EXPANSION, models=(h.SMALL,)):
    return specinfer(models, expansion=expansion, siblings=SIBLINGS[kind])


def mixed(drafter, rule, *own, prompts=h.MIXED, temperature=h.MIXED_HEAT, **settings):
    """Greedy rows and rows at temperature 1 in one batch, by models with the parameters `own`."""
    params = Params(h.target_params(), own or (h.small_params(),))
    return h.generate(drafter, rule, prompts, params=params, temperature=temperature, **settings)


# Merging.


def merged_by_paths(tokens, parents):
    """The same with a dictionary of paths."""
    paths, first, out = [], {}, []
    for i, parent in enumerate(parents):
        paths.append(None if parent < -1 else (*(paths[parent] if parent >= 0 else ()), tokens[i]))
        out.append(parent if parent < 0 else first[paths[parent]])
        first.setdefault(paths[i], i)
    return out


def test_a_twins_children_move_to_its_first_copy():
    assert trees.merge(jnp.asarray([5, 5, 7, 7, 8]), jnp.asarray([-1, -1, 0, 1, 3])).tolist() == [-1, -1, 0, 0, 2]
    rng = np.random.default_rng(0)
    every = []
    for _ in range(200):
        parents = [int(rng.integers(-2, i)) for i in range(8)]
        for i, parent in enumerate(parents):
            parents[i] = -2 if parent >= 0 and parents[parent] == -2 else parent
        every.append((rng.integers(0, 2, 8), parents))
    tokens, parents = (jnp.asarray(np.asarray(x), jnp.int32) for x in zip(*every, strict=True))
    got = jax.jit(jax.vmap(trees.merge))(tokens, parents).tolist()
    assert got == [merged_by_paths(*one) for one in every] and got != parents.tolist()


SHAPES = {"two chains": [-1, 0, -1, 2], "2x1 and a chain": [-1, -1, 0, 1, 0]}
FITTING = [(r, d) for r in ("recursive", "traversal", "target_match", "k_seq") for d in DRAWN if d in RULES[r].accepts]


def merging(name):
    plan = RULES[name].plan
    return RULES[name]._replace(plan=lambda d, log_p: plan(d._replace(parents=trees.merge(d.tokens, d.parents)), log_p))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "drawn"), FITTING)
def test_merging_keeps_the_law(name, drawn, shape):
    """Exactly, by enumeration of every draft; and a path that was drawn twice is not wasted."""
    with jax.enable_x64(True):
        q = DRAWN[drawn](table(2, zeros=drawn == "iid"))
        error, accepted = distance(merging(name), SHAPES[shape], q, point=drawn == "point")
        assert error < TOLERANCE
        if (name, drawn) == ("recursive", "iid"):
            assert accepted > distance(RULES[name], SHAPES[shape], q)[1] + 1e-3


# What is proposed.


def noise(depth, width=1):
    return jax.random.gumbel(jax.random.fold_in(jax.random.key(2), depth), (5, width, h.V))


@functools.cache
def prefilled(kind):
    state = mixed(tree(kind), "coupled", prompts=h.PROMPTS * 2, temperature=HEAT * 2, rounds=0).state
    return jax.tree.map(lambda x: x[:5], state)


@functools.cache
def proposal(kind):
    state, params = prefilled(kind), Params(h.target_params(), (h.small_params(),))
    sequences = Sequences(state.tokens, state.length, state.cache, state.sampling)
    return jax.jit(lambda p, d, s: tree(kind).propose(noise, p, d, s)[0])(params, state.drafter, sequences)


@functools.cache
def full():
    return jax.jit(lambda tokens: h.SMALL.apply(h.small_params(), tokens, h.SMALL.init_cache(*tokens.shape))[0].logits)


def fresh_logits(prompts, paths):
    """[len(prompts), len(paths[0]), V] after each prompt and path, from passes over the whole text without a cache."""
    lines = [[*prompt, *path] for prompt, row in zip(prompts, paths, strict=True) for path in row]
    text = np.zeros((len(lines), 32), np.int32)
    for line, tokens in zip(text, lines, strict=True):
        line[: len(tokens)] = tokens
    ends = [len(line) - 1 for line in lines]
    return np.asarray(full()(jnp.asarray(text)), np.float64)[range(len(lines)), ends].reshape(len(prompts), -1, h.V)


def softmax(x):
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def law(logits, heat, gone):
    """q in float64 with the tokens `gone` taken out."""
    left = np.array(logits)
    left[list(gone)] = -np.inf
    return softmax(left / heat) if heat > 0 else np.eye(h.V)[left.argmax()]


def expected_children(kind, logits, heat, rows):
    """(tokens, laws) of two children, written apart from the library; `rows` are the noise of this parent."""
    draw = lambda q, row: int((np.log(np.where(q > 0, q, 1e-300)) + row).argmax())
    best = np.argsort(-logits, kind="stable")
    if kind == "point":
        return best[:2].tolist(), None
    if kind == "sampled_then_top":
        rest = law(logits, heat, best[:1])
        return [draw(rest, rows[0]), int(best[0])], [rest, np.eye(h.V)[best[0]]]
    first = law(logits, heat, ())
    a = draw(first, rows[0])
    second = law(logits, heat, [a] if kind == "without_replacement" else ())
    return [a, draw(second, rows[0 if kind == "without_replacement" else 1])], [first, second]


@pytest.mark.parametrize("kind", SIBLINGS)
def test_every_law_is_the_one_its_node_was_drawn_from(kind):
    """Each node against full passes of the small model over prompt and path; the noise draws exactly these tokens from it."""
    draft = jax.tree.map(np.asarray, proposal(kind))
    tokens = draft.tokens
    assert (draft.parents == [merged_by_paths(row, PARENTS) for row in tokens]).all()
    ways = [[]]  # nodes from the root down to each block row
    for i, parent in enumerate(PARENTS):
        ways.append([*ways[parent + 1], i])
    paths = [[row[way].tolist() if way else [] for way in ways] for row in tokens]
    logits = fresh_logits(h.PROMPTS, paths)
    assert draft.log_q is None if kind == "point" else draft.log_q.shape == (5, 10, h.V)
    per_parent = 2 if kind == "iid" else 1
    noises = [np.asarray(noise(depth, depth * per_parent)).reshape(5, depth, per_parent, h.V) for depth in (1, 2)]
    for row, parent in itertools.product(range(5), (-1, 0, 1)):
        own = noises[parent >= 0][row, max(parent, 0)]
        children = [i for i, p in enumerate(PARENTS) if p == parent]
        expected, laws = expected_children(kind, logits[row, parent + 1], HEAT[row], own)
        assert tokens[row, children].tolist() == expected, (row, parent)
        if laws is not None:
            np.testing.assert_allclose(np.exp(draft.log_q[row, children[0] : children[1] + 1]), laws, atol=2e-5)
    if draft.log_q is not None:
        for row, i in itertools.product(range(5), range(6, 10)):
            np.testing.assert_allclose(np.exp(draft.log_q[row, i]), law(logits[row, PARENTS[i] + 1], HEAT[row], ()), atol=2e-5)


def test_a_chain_of_one_model_is_small():
    """With one child everywhere and the same noise: what `small` proposes, and the same cache."""
    chain, state, own = tree("iid", (1, 1, 1)), prefilled("iid"), h.small_params()
    assert chain.chain and chain.num_nodes == 3
    sequences = Sequences(state.tokens, state.length, state.cache, state.sampling)
    ask = lambda d, own, cache: d.propose(noise, Params(h.target_params(), own), cache, sequences)
    both = jax.jit(lambda own, cache: (ask(chain, (own,), (cache,)), ask(h.drafter("small"), own, cache)))
    (draft, (cache,)), (expected, other) = both(own, state.drafter[0])
    assert draft.tokens.tolist() == expected.tokens.tolist() and draft.parents.tolist() == expected.parents.tolist()
    np.testing.assert_allclose(np.exp(draft.log_q), np.exp(expected.log_q), atol=1e-5)
    assert cache.length.tolist() == other.length.tolist() == (state.length - 1).tolist()


# Siblings.

GONE = -np.inf
LOGITS = [[-0.7, -1.6, -1.6, -2.3], [-1.4, -0.3, GONE, GONE], [GONE] * 4, [np.nan, 0, 0, 0]]
"""An ordinary row, one of two tokens, one without any, one with NaN."""


def draw(kind, logits, heat, count, shape=(1, 4)):
    logits = jnp.asarray(logits, jnp.float32).reshape(*shape, -1)
    rows = lambda depth, width: jax.random.gumbel(jax.random.key(depth), (shape[0], width, logits.shape[-1]), jnp.float32)
    out = SIBLINGS[kind].draw(logits, jnp.full(shape[0], heat, jnp.float32), rows, 1, count)
    return jax.tree.map(np.asarray, out)


@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("kind", SIBLINGS)
def test_children_that_cannot_be_drawn_do_not_exist(kind, heat):
    """Three children where two tokens are left, where none is, where logits hold NaN; laws of the others sum to 1."""
    tokens, log_q, exists = draw(kind, LOGITS, heat, 3)
    alone = {"iid": [1, 1, 1], "sampled_then_top": [0, 1, 1]}.get(kind, [1, 1, 0])
    assert exists[0].tolist() == [[1, 1, 1], alone, [0, 0, 0], [0, 0, 0]]
    assert tokens.dtype == np.int32 and (tokens >= 0).all() and (tokens < 4).all()
    if log_q is not None:
        q = np.exp(log_q)[exists]
        np.testing.assert_allclose(q.sum(-1), 1, atol=1e-6)
        assert (q[range(len(q)), tokens[exists]] > 0).all()
        assert heat or set(np.unique(q)) == {0, 1}
    if kind in ("point", "without_replacement") and not heat:
        assert tokens[0, 0].tolist() == [0, 1, 2] and tokens[0, 1, :2].tolist() == [1, 0]
    if kind == "iid" and not heat:
        assert tokens[0, :2].tolist() == [[0] * 3, [1] * 3]


@pytest.mark.parametrize("kind", ["without_replacement", "sampled_then_top"])
def test_a_law_is_right_where_little_mass_is_left(kind):
    """1e-12 of the mass beside the first token: in float32, 1 - q of it is 0."""
    logits = np.asarray([40.0, 12.0, 11.5, 11.0])
    tokens, log_q, exists = draw(kind, logits, 1.0, 2, (1, 1))
    j = 1 if kind == "without_replacement" else 0
    assert exists.all() and tokens[0, 0, 1 - j] == 0
    np.testing.assert_allclose(np.exp(log_q[0, 0, j]), [0, *softmax(logits[1:])], rtol=1e-5)


def test_without_replacement_draws_what_its_laws_say():
    """Pairs from 60k rows against q(a) q(b) / (1 - q(a)), and one child of sampled_then_top is plain sampling."""
    q = np.asarray([0.5, 0.2, 0.2, 0.1])
    rows = np.tile(np.log(q), (60_000, 1))
    tokens, *_ = draw("without_replacement", rows, 1.0, 2, (60_000, 1))
    counts = np.zeros((4, 4))
    np.add.at(counts, tuple(tokens[:, 0].T), 1)
    expected = 60_000 * q[:, None] * q / (1 - q)[:, None] * (1 - np.eye(4))
    off = expected > 0
    assert counts[~off].sum() == 0
    assert ((counts - expected)[off] ** 2 / expected[off]).sum() < 49.6  # chi-square, 11 degrees, alpha 1e-6: 49.6
    one = draw("sampled_then_top", rows[:50], 1.0, 1, (50, 1))
    assert all((a == b).all() for a, b in zip(one, draw("iid", rows[:50], 1.0, 1, (50, 1)), strict=True))


def test_64_bit_mode():
    with jax.enable_x64(True):
        like = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, 3, 8), (2,))]
        for kind in SIBLINGS.values():
            noise = lambda depth, width: jnp.zeros((2, width, 8), jnp.float64)
            tokens, log_q, exists = jax.eval_shape(lambda a, b, k=kind, n=noise: k.draw(a, b, n, 1, 4), *like)
            assert (tokens.dtype, exists.dtype, tokens.shape) == (jnp.int32, bool, (2, 3, 4))
            assert log_q is None or (log_q.dtype, log_q.shape) == (jnp.float32, (2, 3, 4, 8))


# Tokens.


def assert_equal_to_plain(result, rule):
    which = range(10) if RULES[rule].coupled else range(5)
    assert [result.tokens[i] for i in which] == [h.reference().tokens[i] for i in which]
    assert [len(t) for t in result.tokens] == [h.NEW] * 10
    assert (result.accepted <= 3).all() and 0.02 < result.accepted.sum() / result.drafted.sum() < 0.9


PAIRS = [(kind, "coupled") for kind in SIBLINGS] + [
    ("iid", "recursive"),
    ("iid", "k_seq"),
    ("without_replacement", "traversal"),
    ("point", "target_match"),
    ("sampled_then_top", "greedy_multi_draft"),
]


@pytest.mark.parametrize(("kind", "rule"), PAIRS)
def test_trees_give_plains_tokens(kind, rule):
    result = mixed(tree(kind), rule)
    assert_equal_to_plain(result, rule)
    twins = kind == "iid"
    assert set(np.unique(result.drafted)) == {0, 10} and (result.accepted.max() == 3 or twins)


@pytest.mark.parametrize("kind", ["iid", "without_replacement", "point"])
def test_two_models_give_plains_tokens(kind):
    """And together they need fewer rounds than the first one twice."""
    drafter = tree(kind, (2, 1, 1), (h.SMALL, h.SMALL))
    assert drafter.children == ("point" if kind == "point" else "independent") and drafter.num_nodes == 12
    result = mixed(drafter, "coupled", h.small_params(), other_params())
    assert_equal_to_plain(result, "coupled")
    again = mixed(drafter, "coupled", h.small_params(), h.small_params())
    assert again.tokens == result.tokens and (result.emitted > 0).sum() < (again.emitted > 0).sum()


def test_a_draft_model_that_is_the_target_is_right_in_every_round():
    """Its window of 6 is crossed; the round after an all-accepted one has K + 1 tokens to catch up with."""
    result = mixed(tree("without_replacement", (1, 2, 1), (h.TARGET,)), "coupled", h.target_params())
    assert result.tokens == h.reference().tokens
    for accepted, emitted in zip(result.accepted, result.emitted, strict=True):
        assert emitted[emitted > 0].tolist() == [4] * 5 and accepted[emitted > 0].tolist() in ([3] * 5, [3, 3, 3, 3, 4])


def test_cached_keys_and_values_equal_a_fresh_prefill():
    """The target's of all committed tokens but the last, each model's of all but the last K + 1."""
    drafter, own = tree("without_replacement", (2, 1, 1), (h.SMALL, h.SMALL)), (h.small_params(), other_params())
    seen = set()
    for rounds in (1, 2, 4):
        result = mixed(drafter, "coupled", *own, rounds=rounds)
        seen |= set(result.accepted[:, :rounds].ravel().tolist())
        text = [[*p, *t] for p, t in zip(h.MIXED, result.tokens, strict=True)]
        fresh, length = mixed(drafter, "coupled", *own, prompts=text, rounds=0).state, np.asarray(result.state.length)
        pairs = [(result.state.cache, fresh.cache, length - 1)]
        pairs += [(a, b, np.maximum(length - 4, 0)) for a, b in zip(result.state.drafter, fresh.drafter, strict=True)]
        for mine, theirs, ends in pairs:
            for row, n in enumerate(ends):
                for a, b in zip(mine.k, theirs.k, strict=True):
                    np.testing.assert_allclose(a[row, :, :, :n], b[row, :, :, :n], atol=1e-5)
                for a, b in zip(mine.v, theirs.v, strict=True):
                    np.testing.assert_allclose(a[row, :, :n], b[row, :, :n], atol=1e-5)
    assert seen == {0, 1, 2, 3}


# The law, through the whole of decoding.

ROWS = 40_000
CRITICAL = 131.4
"""Chi-square of 63 degrees of freedom at alpha = 1e-6.  With 40k rows and power 0.99 it detects sum (p' - p)^2 / p >= 3.1e-3:
0.028 of the mass moved from one half of it to the other (see test_decode)."""


def random_table(seed, scale=1.0):
    return jax.nn.log_softmax(scale * jax.random.normal(jax.random.key(seed), (5, 5, 4)), -1)


def chi_square_of_three_tokens(drafter, rule, *own):
    """ROWS requests at temperature 1 with tables as models; the statistic, and how often anything was accepted."""
    target = random_table(11, 0.7)
    params = dict(target=h.table_model(4, 2), params=Params(target, own))
    result = h.generate(drafter, rule, [[0, 1]] * ROWS, temperature=1.0, longest=5, new=3, **params)
    p = np.exp(np.asarray(target, np.float64))
    expected = ROWS * p[0, 1][:, None, None] * p[1, :4][:, :, None] * p[:4, :4]
    counts = np.zeros(expected.shape)
    np.add.at(counts, tuple(np.asarray(result.tokens).T), 1)
    assert expected.min() > 5
    return ((counts - expected) ** 2 / expected).sum(), (result.accepted > 0).sum() / (result.emitted > 0).sum()


LAWS = [
    ("iid", "recursive", 1),
    ("without_replacement", "recursive", 1),
    ("iid", "k_seq", 1),
    ("without_replacement", "traversal", 1),
    ("sampled_then_top", "greedy_multi_draft", 1),
    ("point", "target_match", 1),
    ("iid", "recursive", 2),
]


@pytest.mark.parametrize(("kind", "rule", "count"), LAWS)
def test_S07_the_law_of_three_tokens(kind, rule, count):
    """Each way of drawing children with a rule that fits it keeps the law.

    Joint chi-square of 64 cells; the second model's children go to the first one's nodes, as do those of twins."""
    drafter, own = tree(kind, (2, 1), (h.table_model(4, 2),) * count), (random_table(13), random_table(14))[:count]
    statistic, accepted = chi_square_of_three_tokens(drafter, rule, *own)
    assert statistic < CRITICAL and 0.3 < accepted < 1


def test_models_that_share_their_noise_are_caught(monkeypatch):
    """Two models of one law: their draws would be twins, never a second chance."""
    monkeypatch.setattr(module, "shares", lambda noise, parts: [noise] * parts)
    drafter = specinfer.__wrapped__((h.table_model(4, 2),) * 2, expansion=(2, 1), siblings=SIBLINGS["iid"])
    assert chi_square_of_three_tokens(drafter, "recursive", *[random_table(13)] * 2)[0] > 2 * CRITICAL


# Loading.

TARGET_LM = LM(h.TARGET, h.target_params(), None, h.CONFIG)
SMALL_LM = LM(h.SMALL, h.small_params(), None, None)


def test_load():
    """One model or several; the paper's tree unless another is asked for; the rule that fits."""
    one = load(TARGET_LM, num_draft=5, models=SMALL_LM)
    assert one.rule == "recursive" and one.drafter.num_nodes == 1 + 1 + 3 + 3 + 3 and one.drafter.depth == 5
    assert one.drafter is load(TARGET_LM, num_draft=5, models=[SMALL_LM], expansion=(1, 1, 3, 1, 1)).drafter
    assert load(TARGET_LM, num_draft=2, models=SMALL_LM).drafter.num_nodes == 1 + 3
    both = load(TARGET_LM, num_draft=2, models=(SMALL_LM, SMALL_LM), expansion=[1, 2], children="point")
    assert both.rule == "target_match" and both.drafter.num_nodes == 6 and len(both.params) == 2
    assert both.card.extra_parameters == 2 * one.card.extra_parameters > 0
    for kind in SIBLINGS:
        loaded = load(TARGET_LM, num_draft=3, models=SMALL_LM, children=kind)
        decode.check(h.TARGET, loaded.drafter, RULES[loaded.rule])
        assert loaded.drafter.children == kind


REFUSED = {
    "levels": ({"expansion": (1, 2)}, "expansion (1, 2) has 2 levels != num_draft 3"),
    "no children": ({"expansion": (1, 0, 1)}, "branching (1, 0, 1): need"),
    "too many": ({"expansion": (1, 18, 1)}, "expansion (1, 18, 1) wants 18 children at a node of 17 tokens"),
    "kind": ({"children": "idd"}, "no way to draw children 'idd': did you mean 'iid'"),
    "no models": ({"models": []}, "specinfer got 0 models"),
    "order": ({"models": [SMALL_LM] * 2, "children": "sampled_then_top"}, "2 models draft sampled_then_top: the sampled child"),
    "vocabulary": ({"models": [SMALL_LM, LM(h.table_model(4), (), None, None)]}, "drafter vocabulary 4 != target 17"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name):
    settings, message = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load(TARGET_LM, **{"num_draft": 3, "models": SMALL_LM, **settings})
    assert "\n" not in str(error.value)

"""Where a row ends: end-of-sequence tokens, budgets, the context, stop strings, a target that breaks.

Targets are tables with a known successor of each token, so every round's acceptance is chosen beforehand.  A table's
tokens after the end would go on; nothing of them may be seen.
"""

import itertools

import helpers as h
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import drafter

from specjax import metrics
from specjax.drafters.small import small
from specjax.sampling import SamplingParams
from specjax.types import Params, RoundInfo

V = 32
K = 5
MODEL = h.table_model(V)
DRAFTER = small(MODEL, num_draft=K)
NEXT = h.successor_table({}, V)  # t is followed by t + 1, and V - 1 by 0


def wrong_at(*tokens):
    """A drafter's table that goes astray after these tokens: the round stops there."""
    return h.successor_table({t: (t + 3) % V for t in tokens}, V)


def go(prompts, *, target=NEXT, mine=NEXT, rule="rejection", which=DRAFTER, **settings):
    """The rows of `prompts`, in a batch filled up to eight with copies of the last: one program for any number of them."""
    settings = {"longest": 64, "new": 12, **settings}
    n, missing = len(prompts), max(8 - len(prompts), 0)
    fill = lambda x: [*x, *[x[-1]] * missing] if isinstance(x, list) and len(x) == n > 1 else x
    settings = {name: fill(value) for name, value in settings.items()}
    result = h.generate(
        which, rule, [*prompts, *[prompts[-1]] * missing], target=MODEL, params=Params(target, mine), **settings
    )
    return h.Result(*(x[:n] for x in result[:-1]), result.state)


def upto(first, last):
    return list(range(first, last + 1))


@pytest.mark.parametrize("rule", h.CHAIN_RULES)
def test_E01_end_of_sequence_anywhere_in_a_round(rule):
    """Drafts 1..5 and bonus 6 after token 0: the end is the first, a middle, the last draft, the bonus, in the next round."""
    for eos in range(1, 9):
        result = go([[0]], rule=rule, eos=[[eos, -1]])
        assert result.tokens == [upto(1, eos)] and result.reasons == ["eos"]
        first, second = min(eos, 6), max(eos - 6, 0)
        assert result.emitted[0, :3].tolist() == [first, second, 0]
        assert result.accepted[0, :3].tolist() == [min(eos, 5), min(second, 5), 0]
        assert (np.asarray(result.state.tokens)[0, eos + 1 :] == 0).all(), "what came after is nowhere"


def test_the_token_that_corrects_a_draft_may_end_a_row():
    """The drafter goes astray after 2: drafts 1, 2 stand, 3 is the correction and the end."""
    result = go([[0]], mine=wrong_at(2), eos=[[3, -1]])
    assert result.tokens == [[1, 2, 3]] and result.accepted[0, 0] == 2 and result.reasons == ["eos"]


def test_M01_tokens_after_the_end_are_not_counted():
    """K = 5 and [1, 2, EOS, 4, 5, bonus]: three are emitted, three accepted drafts among them."""
    result = go([[0]], eos=[[3, -1]])
    rounds = metrics.cut(RoundInfo(result.drafted[0], result.accepted[0], result.emitted[0]), 3)
    stats = metrics.statistics(rounds, K)
    assert (stats.num_spec_steps, stats.num_emitted_tokens, stats.num_accepted_draft_tokens) == (1, 3, 3)
    assert stats.tokens_per_step == 3 and stats.acceptance_histogram == (0, 0, 0, 1, 0, 0)


def test_an_end_of_sequence_token_that_was_refused_ends_nothing():
    """The drafter proposes 7 = EOS after 4; the target says 5."""
    result = go([[0]], mine=h.successor_table({4: 7}, V), eos=[[7, -1]])
    assert result.tokens == [[1, 2, 3, 4, 5, 6, 7]] and result.accepted[0, 0] == 4


def test_E07_any_of_several_ends():
    both = [[5, 9], [9, 5], [9, -1], [-1, -1]]
    result = go([[0]] * 4, eos=both)
    assert result.tokens == [upto(1, 5), upto(1, 5), upto(1, 9), upto(1, 12)]
    assert result.reasons == ["eos", "eos", "eos", "length"]


def test_the_padding_of_eos_matches_no_token():
    """-1 never ends a row: not token 0, not the last of the vocabulary, nor the -1 of an absent node."""
    result = go([[29]] * 4, new=6, eos=[[-1, -1]] * 4)
    assert result.tokens == [[30, 31, 0, 1, 2, 3]] * 4 and result.reasons == ["length"] * 4


def test_B01_the_end_token_inside_a_prompt_ends_nothing():
    """Lengths 1, 2, 17; the padding id 0 is an end token too, and both stand in prompts."""
    prompts = [[3], [4, 0], [4, 0, 8] * 5 + [0, 1]]
    batch = go(prompts, eos=[[0, 4]] * 3)
    assert batch.tokens == [[4], upto(1, 4), upto(2, 4)]
    for row, prompt in enumerate(prompts):
        assert go([prompt], eos=[[0, 4]]).tokens == [batch.tokens[row]]


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_B05_rows_that_end_early_disturb_no_other(rule):
    """Ends after 1, 3, 5 and 9 rounds; counters add up to the tokens, and ended rows stay as they were."""
    mine = wrong_at(*range(V))  # every round emits one token
    ends = [[1, -1], [3, -1], [5, -1], [9, -1]]
    batch = go([[0]] * 4, mine=mine, rule=rule, eos=ends)
    assert batch.tokens == [upto(1, n) for n in (1, 3, 5, 9)]
    assert (batch.emitted > 0).sum(1).tolist() == [1, 3, 5, 9]
    assert batch.drafted.sum(1).tolist() == [5, 15, 25, 45]
    assert batch.emitted.sum(1).tolist() == [len(t) for t in batch.tokens]
    for row, end in enumerate(ends):
        solo = go([[0]] * 4, mine=mine, rule=rule, eos=[end] * 4)
        assert solo.tokens[row] == batch.tokens[row]
        for mine_, theirs in zip(
            solo.state.cache.k + solo.state.cache.v, batch.state.cache.k + batch.state.cache.v, strict=True
        ):
            n = len(batch.tokens[row])
            np.testing.assert_array_equal(mine_[row, ..., :n], theirs[row, ..., :n])


@pytest.mark.parametrize("name", ["plain", "ngram, order 1", "small", "early_exit, 1 layer"])
def test_B07_uneven_budgets_and_a_row_that_ends_at_once(name):
    """Budgets 1, 2, 7, 16, 20, a prompt of one token, and an end token that the first row meets in round 1."""
    budgets = [1, 2, 7, 16, 20] * 2
    plain = h.reference()
    eos = [[plain.tokens[5][0], -1]] + [[-1, -1]] * 9
    eos[3] = [plain.tokens[3][0], -1]
    result = h.mixed(name, "coupled", new=budgets, eos=eos)
    expected = [t[:n] for t, n in zip(plain.tokens, budgets, strict=True)]
    expected[3] = plain.tokens[3][:1]
    assert result.tokens == expected
    reasons = ["length"] * 10
    reasons[3] = "eos"
    reasons[0] = "eos" if plain.tokens[0][0] == eos[0][0] else "length"
    assert result.reasons == reasons


@pytest.mark.parametrize("which", [DRAFTER, drafter("ngram, order 1")], ids=["small", "ngram"])
def test_E03_E11_budgets_are_exact(which):
    """Budgets 1 to 17 with a block of 5 (6 with its bonus) and with prompt look-up on a text that repeats; one compilation."""
    prompt = [0, 1, 2, 0, 1, 2, 0, 1]
    cycle = h.successor_table({2: 0}, V)
    budgets = list(range(1, 18))
    result = go([prompt] * 17, target=cycle, mine=cycle if which is DRAFTER else (), which=which, new=budgets)
    whole = list(itertools.islice(itertools.cycle([2, 0, 1]), 17))
    assert result.tokens == [whole[:n] for n in budgets]
    assert result.reasons == ["length"] * 17
    assert (result.accepted <= result.emitted).all()
    longest = which.num_nodes + 1
    assert [int((e > 0).sum()) for e in result.emitted] == [-(-n // longest) for n in budgets]


def test_a_budget_that_ends_on_the_end_token_says_eos():
    result = go([[0]] * 3, new=4, eos=[[4, -1], [3, -1], [5, -1]])
    assert result.reasons == ["eos", "eos", "length"] and [len(t) for t in result.tokens] == [4, 3, 4]


def test_E09_look_ahead_at_the_end_of_the_context():
    """Context 64, K = 5: prompts of 58, 63 and 64 tokens, budget 100.  Nothing before the end is overwritten."""
    prompts = [[i % V for i in range(n)] for n in (58, 63, 64, 1)]
    result = go(prompts, new=100)
    assert [len(t) for t in result.tokens] == [6, 1, 0, 63] and result.reasons == ["length"] * 4
    for row, prompt in enumerate(prompts):
        n = len(prompt) + len(result.tokens[row])
        assert np.asarray(result.state.tokens)[row, :n].tolist() == [i % V for i in range(n)]
        held = np.asarray(result.state.cache.k[0])[row, 0, 0, : n - 1].astype(int).tolist()
        assert held == [i % V for i in range(n - 1)]


def test_E09_a_context_that_ends_in_a_sliding_window():
    """The same on the transformer: prompt and budget fill the capacity to the last slot."""
    prompts = [list(range(15)) + list(range(15)), list(range(16)) + list(range(15)), [1] * 43] + [[2]] * 7
    plain = h.generate(drafter("plain"), "coupled", prompts, new=100)
    for name in ("small", "ngram, order 1"):
        params = Params(h.target_params(), h.drafter_params(name))
        result = h.generate(drafter(name), "coupled", prompts, params=params, new=100)
        assert result.tokens == plain.tokens and [len(t) for t in result.tokens] == [13, 12, 0] + [42] * 7


def test_one_token_for_one_row():
    result = go([[4]], new=1)
    assert result.tokens == [[5]] and result.emitted.sum() == 1 and result.reasons == ["length"]


# A target or a drafter that breaks.


def broken_after(token, value, table=NEXT):
    return table.at[token].set(value)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_S13_a_target_without_a_law_ends_its_row_alone(value, temperature):
    """The row after token 4 is NaN, +inf or all -inf: what came before it stays, it says "error", no mate is harmed.

    Every acceptance count before the break occurs; plain decoding ends at the same token.
    """
    target = broken_after(4, value)
    starts = [[0], [2], [3], [4], [5]]
    expected = [upto(1, 4), upto(3, 4), [4], [], upto(6, 17)]
    for rule in h.CHAIN_RULES:
        for mine in (NEXT, wrong_at(1, 2)):
            result = go(starts, target=target, mine=mine, rule=rule, temperature=temperature)
            assert result.tokens == expected and result.reasons == ["error"] * 4 + ["length"], rule
    plain = h.generate(
        drafter("plain"),
        "rejection",
        starts,
        target=MODEL,
        params=Params(target, ()),
        longest=64,
        new=12,
        temperature=temperature,
    )
    assert plain.tokens == expected and plain.reasons == ["error"] * 4 + ["length"]


def test_one_nan_among_the_logits_is_enough():
    target = NEXT.at[4, 17].set(jnp.nan)
    assert go([[0]], target=target).reasons == ["error"]
    assert go([[0]], target=target, temperature=1.0).tokens == [upto(1, 4)]


@pytest.mark.parametrize("ends", ["eos", "length"])
def test_rows_of_the_block_past_the_end_may_be_broken(ends):
    """Plain decoding never looks at the row after the last token; neither may a NaN there cost a speculative row its tokens."""
    target = broken_after(3, np.nan)
    eos, new = ([[3, -1]], 12) if ends == "eos" else ([[-1, -1]], 3)
    for rule in h.CHAIN_RULES:
        result = go([[0]], target=target, eos=eos, new=new, rule=rule)
        assert result.tokens == [[1, 2, 3]] and result.reasons == [ends]


def test_S13_forbidding_every_token_is_an_error_not_token_0():
    for temperature in (0.0, 1.0):
        banned = SamplingParams(temperature=temperature, logit_bias={t: -np.inf for t in range(V)})
        free = SamplingParams(temperature=temperature, logit_bias={1: -np.inf})
        result = go([[0], [3]], temperature=[banned, free])
        assert result.tokens[0] == [] and result.reasons == ["error", "length"]
        assert result.tokens[1] == upto(4, 15)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rule", h.CHAIN_RULES)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_S13_a_drafter_without_a_law_proposes_nothing(value, rule, temperature):
    """From its first broken row on, nodes are absent; the output is what it was."""
    mine = broken_after(3, value)
    result = go([[0], [3]], mine=mine, rule=rule, temperature=temperature)
    assert result.tokens == [upto(1, 12), upto(4, 15)]
    assert result.drafted[:, 0].tolist() == [3, 0] and result.accepted[:, 0].tolist() == [3, 0]
    one_nan = go([[0], [3]], mine=NEXT.at[3, 9].set(value), rule=rule, temperature=temperature)
    assert one_nan.tokens == result.tokens
    assert one_nan.drafted[0, 0] == (3 if np.isnan(value) else 5)


@pytest.mark.parametrize("rule", h.CHAIN_RULES)
def test_S13_equal_and_disjoint_laws(rule):
    """(a) p = q bit for bit, with tokens of probability 0: all accepted.  (b) top_k = 1 leaves p and q disjoint: p's token."""
    hard = jnp.log(jnp.tile(jnp.asarray([0.5, 0.25, 0.25] + [0] * (V - 3), jnp.float32)[None], (V + 1, 1)))
    result = go([[0]] * 8, target=hard, mine=hard, rule=rule, temperature=1.0)
    assert max(max(t) for t in result.tokens) <= 2
    if rule != "target_match":
        assert result.accepted[:, 0].tolist() == [5] * 8
    other = hard[:, jnp.array([1, 2, 0] + upto(3, V - 1))].at[:, 0].set(-jnp.inf)
    result = go([[0]] * 8, target=hard, mine=other, rule=rule, temperature=[SamplingParams(temperature=1.0, top_k=1)] * 8)
    assert result.tokens == [[0] * 12] * 8 and result.accepted.sum() == 0


@pytest.mark.parametrize("rule", h.CHAIN_RULES)
def test_tokens_of_probability_0_are_never_emitted(rule):
    """Half of the vocabulary has none; the drafter puts most of its mass there."""
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.full(V // 2, 1.0), V + 1)
    target = jnp.log(jnp.asarray(np.hstack([weights, 0 * weights]), jnp.float32))
    mine = jnp.log(jnp.asarray(np.hstack([0.3 * weights, 0.7 * weights[:, ::-1]]), jnp.float32))
    result = go([[0]] * 64, target=target, mine=mine, rule=rule, temperature=1.0)
    assert max(max(t) for t in result.tokens) < V // 2 and 0 < result.accepted.sum() < result.drafted.sum()

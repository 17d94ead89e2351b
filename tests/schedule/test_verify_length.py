"""Lengths by hand, their exact law over random small cases, and decoding with them.

The law: two requests, blocks of two tokens, two words, arbitrary context-dependent targets, drafters and confidences (c_2
looks at x_1), arbitrary costs.  All 16 drafts are listed, the lengths come from the functions themselves, the rest from the
rules' own plans, and the joint of three tokens of both requests is compared with the target's.
"""

import functools
import itertools

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laws import TOLERANCE

from specjax import decode, keys, sampling
from specjax.latency.cost_table import CostTable, cost_table
from specjax.lossless import law
from specjax.schedule import limits, verify_length
from specjax.schedule.confidence import MarginFit
from specjax.schedule.limits import Schedule
from specjax.types import RUNNING, Draft, Drafter, Params, State
from specjax.verify import RULES

ALL = np.ones(2, bool)
NONE = np.asarray(0)


# By hand.


def test_threshold_stops_at_the_first_below():
    c = np.array([[0.9, 0.4, 0.9], [0.3, 1.0, 1.0], [0.9, 0.9, np.nan]])
    assert verify_length.threshold_lengths(c, np.array(0.5)).tolist() == [1, 0, 2]
    assert verify_length.threshold_lengths(c, np.array([0.3, 0.3, 0.95])).tolist() == [3, 3, 0]


def test_budget_takes_the_most_likely_prefixes():
    """Survivals .9 .45 .405 and .6 .54 .27: the order is .9, .6, .54, .45, .405, .27."""
    c = np.array([[0.9, 0.5, 0.9], [0.6, 0.9, 0.5]])
    taken = [verify_length.fixed_budget_lengths(c, np.asarray(n), ALL).tolist() for n in range(8)]
    assert taken == [[0, 0], [1, 0], [1, 1], [1, 2], [2, 2], [3, 2], [3, 3], [3, 3]]


def test_ties_go_by_position_then_request():
    c = np.ones((2, 2))
    assert [verify_length.fixed_budget_lengths(c, np.asarray(n), ALL).tolist() for n in range(5)] == [
        [0, 0], [1, 0], [1, 1], [2, 1], [2, 2],
    ]  # fmt: skip


def test_what_cannot_be_accepted_is_never_verified():
    c = np.array([[0.0, 1.0], [np.nan, 1.0]])
    assert verify_length.fixed_budget_lengths(c, np.asarray(4), ALL).tolist() == [0, 0]
    c = np.ones((2, 2))
    assert verify_length.fixed_budget_lengths(c, np.asarray(4), np.array([False, True])).tolist() == [0, 2]


def test_early_stop_by_hand():
    """One request, survivals .8 and .64: 1/1, 1.8/1.5 = 1.2 > 1, 2.44/2.5 < 1.2."""
    table = cost_table([1, 2, 3], [1.0, 1.5, 2.5])
    c = np.array([[0.8, 0.8]])
    assert verify_length.early_stop_lengths(c, table, np.ones(1, bool), NONE).tolist() == [1]
    draft = cost_table([1, 2, 3], [1.0, 1.5, 2.5], requests=[1], draft=[1.0])  # 1/2, 1.8/2.5 = .72, 2.44/3.5 = .697
    assert verify_length.early_stop_lengths(c, draft, np.ones(1, bool), NONE).tolist() == [1]
    slow = cost_table([1, 2, 3], [1.0, 1.5, 2.5], per_slot=1.0)  # with 10 slots 1/11, 1.8/11.5, 2.44/12.5
    assert verify_length.early_stop_lengths(c, slow, np.ones(1, bool), np.asarray(10)).tolist() == [2]


def test_early_stop_needs_a_gain():
    """A token that leaves the rate as it is is not worth it: 1/1, then 1.5/1.5."""
    table = cost_table([1, 2], [1.0, 1.5], dtype=np.float64)
    assert verify_length.early_stop_lengths(np.array([[0.5]]), table, np.ones(1, bool), NONE).tolist() == [0]


def test_planned_budget_looks_past_a_stair():
    """The first token more costs a stair that only four together pay for: early stop gives up, the planned budget does not."""
    table = cost_table([2, 3, 6], [1.0, 1.6, 1.6], dtype=np.float64)
    c = np.full((2, 2), 0.9)
    assert verify_length.early_stop_lengths(c, table, ALL, NONE).tolist() == [0, 0]
    plan = verify_length.plan_budget(c, table, ALL, NONE)
    assert plan.budget == 4 and plan.rate == pytest.approx((2 + 2 * 0.9 + 2 * 0.81) / 1.6)
    assert plan.plain_rate == pytest.approx(2.0)


def test_numpy_and_jax_agree():
    rng = np.random.default_rng(0)
    c = np.round(rng.random((9, 5)), 1).astype(np.float32)
    live = rng.random(9) < 0.7
    table = cost_table([1, 8, 16, 60], [1.0, 1.05, 1.3, 6.0], requests=[1, 9], draft=[0.1, 0.3])
    on_device = [jnp.asarray(x) for x in (c, live)]
    both = [
        (verify_length.threshold_lengths(c, np.float32(0.4)), verify_length.threshold_lengths(on_device[0], jnp.float32(0.4))),
        (
            verify_length.early_stop_lengths(c, table, live, NONE),
            verify_length.early_stop_lengths(on_device[0], table, on_device[1], jnp.asarray(0)),
        ),
        (
            verify_length.fixed_budget_lengths(c, np.asarray(11), live),
            verify_length.fixed_budget_lengths(*on_device[:1], jnp.asarray(11), on_device[1]),
        ),
    ]
    for host, device in both:
        assert host.dtype == device.dtype == np.int32
        assert host.tolist() == device.tolist()
    assert both[2][0].sum() == 11 and 0 < both[1][0].sum() < 45


# The exact law.

WORDS, K, CASES = 2, 2, 3000
DRAFTS = np.array(list(itertools.product(range(WORDS), repeat=2 * K))).reshape(-1, 2, K)  # [16, request, position]


def random_laws(rng, *shape):
    """[*shape, WORDS]; one in five is certain of a word."""
    p = rng.random(shape)
    p = np.where(rng.random(shape) < 0.2, np.round(p), p)
    return np.stack([p, 1 - p], -1)


class Cases:
    """Arbitrary cases: p[k] [n, 2, 2, .. (k prefix axes), word], q likewise, confidences by what c_k may know, costs."""

    def __init__(self, seed=0, n=CASES):
        rng = np.random.default_rng(seed)
        self.p = [random_laws(rng, n, 2, *(WORDS,) * k) for k in range(K + 1)]
        self.q = [random_laws(rng, n, 2, *(WORDS,) * k) for k in range(K)]
        first, second = rng.random((n, 2)), rng.random((n, 2, WORDS))
        coarse = np.arange(n) % 2 == 0  # every other case: confidences of 0, .5 and 1, so that many tie
        first, second = (np.where(coarse.reshape((n,) + (1,) * (x.ndim - 1)), np.round(2 * x) / 2, x) for x in (first, second))
        x1 = DRAFTS[:, :, 0]
        self.confidence = np.stack(
            [np.broadcast_to(first[:, None], (n, 16, 2)), second[:, np.arange(2)[None], x1]], -1
        )  # [n, 16, request, position]
        self.seconds = 0.2 + rng.random((n, 5))  # of 2..6 tokens, in no order
        self.budget = rng.integers(0, 5, n)
        self.threshold = rng.random(n)
        self.weight = np.prod(
            [self.q[k][(slice(None), r, *(DRAFTS[:, r, j] for j in range(k + 1)))] for r in range(2) for k in range(K)], 0
        )  # [n, 16]


def cost(seconds):
    return CostTable(jnp.arange(2.0, 7), seconds, jnp.ones(1), jnp.zeros(1), jnp.zeros(()))


def emitted_laws(cases, rule):
    """[n, request, x_1, x_2, length, y_1, y_2, y_3]: the law of three tokens when so much of a draft is verified."""
    n = len(cases.budget)
    out = np.zeros((n, 2, WORDS, WORDS, K + 1, WORDS, WORDS, WORDS))

    @jax.vmap
    def numbers(tokens, log_q, log_p, length):
        draft = Draft(tokens[None], jnp.array([[-1, 0]], jnp.int32), log_q[None])
        one = jax.tree.map(lambda x: x[0], decode.keep_nodes(draft, length[None]))
        return law._numbers(rule.plan(one, log_p), K)

    with np.errstate(divide="ignore"):
        log_p, log_q = [np.log(x) for x in cases.p], [np.log(x) for x in cases.q]
    numbers = jax.jit(numbers)
    for r, x1, x2, length in itertools.product(range(2), range(WORDS), range(WORDS), range(K + 1)):
        rows = np.stack([log_p[0][:, r], log_p[1][:, r, x1], log_p[2][:, r, x1, x2]], 1)
        drawn = np.stack([log_q[0][:, r], log_q[1][:, r, x1]], 1)
        tokens = np.tile(np.array([x1, x2], np.int32), (n, 1))
        accept, if_accept, if_reject, correction = map(np.asarray, numbers(tokens, drawn, rows, np.full(n, length)))
        stop = np.stack([law.stop_law(*lists) for lists in zip(accept, if_accept, if_reject, strict=True)])
        here = out[:, r, x1, x2, length]
        here += np.einsum("n,na,nab,nabc->nabc", stop[:, 0], correction[:, 0], cases.p[1][:, r], cases.p[2][:, r])
        here[:, x1] += np.einsum("n,nb,nbc->nbc", stop[:, 1], correction[:, 1], cases.p[2][:, r, x1])
        here[:, x1, x2] += stop[:, 2, None] * correction[:, 2]
    return out


def joint_error(cases, laws, lengths):
    """Total variation [n] of the joint of both requests' three tokens, where draft i of case n has lengths [n, i, 2]."""
    n = np.arange(len(lengths))[:, None]
    each = [
        laws[n, r, DRAFTS[None, :, r, 0], DRAFTS[None, :, r, 1], lengths[:, :, r]].reshape(len(lengths), 16, 8) for r in (0, 1)
    ]
    joint = np.einsum("nd,nda,ndb->nab", cases.weight, *each)
    own = [np.einsum("na,nab,nabc->nabc", *(p[:, r] for p in cases.p)).reshape(-1, 8) for r in (0, 1)]
    return np.abs(joint - own[0][:, :, None] * own[1][:, None]).sum((1, 2)) / 2


def lengths_of(cases, rule_of_lengths):
    """[n, 16, 2] from rule_of_lengths(confidence, tokens, seconds, budget, threshold), vmapped over drafts and cases."""
    over_drafts = jax.vmap(rule_of_lengths, (0, 0, None, None, None))
    over_cases = jax.vmap(over_drafts, (0, None, 0, 0, 0))
    arrays = cases.confidence, DRAFTS, cases.seconds, cases.budget, cases.threshold
    return np.asarray(jax.jit(over_cases)(*map(jnp.asarray, arrays)))


LIVE, NO_SLOTS = jnp.ones(2, bool), jnp.asarray(0)


def threshold(c, x, seconds, budget, bound):
    return verify_length.threshold_lengths(c, bound)


def early_stop(c, x, seconds, budget, bound):
    return verify_length.early_stop_lengths(c, cost(seconds), LIVE, NO_SLOTS)


def fixed_budget(c, x, seconds, budget, bound):
    return verify_length.fixed_budget_lengths(c, budget, LIVE)


def global_argmax(c, x, seconds, budget, bound):
    """The budget of this very round: slot 2 of a request can call its slot 1 back."""
    return verify_length.fixed_budget_lengths(c, verify_length.plan_budget(c, cost(seconds), LIVE, NO_SLOTS).budget, LIVE)


def ties_by_value(c, x, seconds, budget, bound):
    """Of equally likely tokens the greater id goes first."""
    return verify_length.fixed_budget_lengths(c - jnp.where(x == 0, 1e-9, 0.0), budget, LIVE)


def own_token(c, x, seconds, budget, bound):
    """A confidence that has seen the token it speaks of."""
    return verify_length.threshold_lengths(c * jnp.where(x == 0, 0.5, 1.0), bound)


@pytest.fixture(scope="module")
def cases():
    with jax.enable_x64(True):
        made = Cases()
        return made, {name: emitted_laws(made, RULES[name]) for name in ("rejection", "block")}


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("lengths", [threshold, early_stop, fixed_budget])
def test_lengths_keep_the_joint_law(cases, lengths, rule):
    made, laws = cases
    with jax.enable_x64(True):
        chosen = lengths_of(made, lengths)
    assert {0, 1, 2} == set(np.unique(chosen)) and (chosen.std(1).max(1) > 0).mean() > 0.05  # they do look at the drafts
    assert joint_error(made, laws[rule], chosen).max() < TOLERANCE


@pytest.mark.parametrize("fault", [global_argmax, ties_by_value, own_token])
def test_lengths_that_look_ahead_are_caught(cases, fault):
    made, laws = cases
    with jax.enable_x64(True):
        error = joint_error(made, laws["rejection"], lengths_of(made, fault))
    assert error.max() > 0.05


def test_counter_example():
    """DSpark, App. A: c_1 = .8, steps/s 1, .5, .45, p(A) = .7, q(A) = .5; c_2 is 1 after A and 0 after B."""
    table = cost_table([1, 2, 3], [1, 1 / 0.5, 1 / 0.45], dtype=np.float64)
    one, p, q = np.ones(1, bool), np.array([0.7, 0.3]), np.array([0.5, 0.5])

    def probability_of_a(lengths):
        """Token A or B is drawn; verified if the length is not 0: kept with min(1, p/q), else from the residual, which is A."""
        total = 0.0
        for x, c2 in ((0, 1.0), (1, 0.0)):
            if lengths(np.array([[0.8, c2]]))[0] == 0:
                total += q[x] * p[0]
            else:
                kept = min(1, p[x] / q[x])
                total += q[x] * (kept * (x == 0) + (1 - kept))
        return total

    def same_step(c):
        return verify_length.fixed_budget_lengths(c, verify_length.plan_budget(c, table, one, NONE).budget, one)

    assert probability_of_a(same_step) == pytest.approx(0.85, abs=1e-12)
    exact = [
        lambda c: verify_length.early_stop_lengths(c, table, one, NONE),
        lambda c: verify_length.threshold_lengths(c, np.array(0.5)),
        lambda c: verify_length.fixed_budget_lengths(c, np.asarray(1), one),
        lambda c: verify_length.fixed_budget_lengths(c, np.asarray(2), one),
    ]
    assert [probability_of_a(f) for f in exact] == pytest.approx([0.7] * 4, abs=1e-12)


# Decoding with scheduled lengths: a ragged batch, greedy and coupled.

ROUNDS = 24
RNG = np.random.default_rng(5)
CONFIDENCE = RNG.random((10, ROUNDS, 3)).astype(np.float32)
SCRIPT = h.chain_script
TABLE = cost_table([1, 10, 20, 40], [1.0, 1.2, 2.4, 6.0], requests=[1, 10], draft=[0.1, 0.2], per_slot=1e-4)


@functools.cache
def confident(name) -> Drafter:
    """A drafter that says something about its tokens: another thing in every row, and wherever the row stands."""
    plain = h.drafter(name)

    def propose(noise, params, state, sequences):
        draft, state = plain.propose(noise, params, state, sequences)
        at = sequences.length % ROUNDS
        return draft._replace(confidence=jnp.asarray(CONFIDENCE)[jnp.arange(at.shape[0]), at]), state

    return plain._replace(propose=propose)


def scripted_params():
    """Chains of 0 to 3 tokens, right for 0 to 3 of them, another in every row and round."""
    right = RNG.integers(0, 4, (10, ROUNDS))
    count = np.maximum(right, RNG.integers(0, 4, (10, ROUNDS)))
    return Params(h.target_params(), SCRIPT(right, count))


@functools.cache
def program(drafter, limit):
    """(params, schedule, prompts..) -> (State, RoundInfo), compiled, and how often it was traced."""
    traced = []
    static = dict(target=h.TARGET, drafter=drafter)

    def go(params, schedule, tokens, lengths, ends, key, heat):
        traced.append(1)
        eos = jnp.full((tokens.shape[0], 1), -1)
        state = decode.start(params, tokens, lengths, ends, eos, key, heat, schedule=schedule, **static)
        state = decode.prefill(params, state, chunk=8, **static)
        return decode.run(params, state, jnp.asarray(64), rule=RULES["coupled"], limit=limit, max_rounds=48, **static)

    return jax.jit(go), traced


def scheduled(drafter, limit, params, schedule):
    """(new tokens, drafted [B, R], traces) of `h.MIXED`: five prompts greedily and the same at temperature 1."""
    run, traced = program(drafter, limit)
    lengths = np.array([len(p) for p in h.MIXED], np.int32)
    tokens = np.zeros((10, decode.capacity_for(23 + h.NEW, drafter)), np.int32)
    for row, prompt in enumerate(h.MIXED):
        tokens[row, : len(prompt)] = prompt
    heat = sampling.stack([sampling.SamplingParams(temperature=t) for t in h.MIXED_HEAT], h.V)
    key = keys.request_keys(jax.random.key(h.SEED), jnp.arange(10))
    state, log = run(params, schedule, *map(jnp.asarray, (tokens, lengths, lengths + h.NEW)), key, heat)
    out = np.asarray(state.tokens)
    return [out[i, n : n + h.NEW].tolist() for i, n in enumerate(lengths)], np.asarray(log.drafted), len(traced)


SCHEDULES = {
    "threshold": (limits.threshold_limit, [Schedule(threshold=jnp.float32(t)) for t in (0.0, 0.5, 1.1)]),
    "early stop": (limits.early_stop_limit, [Schedule(table=jax.tree.map(jnp.asarray, TABLE._replace(verify=v)))
                                             for v in (TABLE.verify * 0 + 1, TABLE.verify, TABLE.tokens**2)]),
    "fixed budget": (limits.fixed_budget_limit, [Schedule(budget=jnp.int32(n)) for n in (30, 8, 0)]),
}  # fmt: skip
"""A limit and three schedules: one that verifies everything, one that does not, one that verifies nothing."""


@pytest.mark.parametrize("name", SCHEDULES)
def test_scheduled_lengths_change_no_token(name):
    limit, schedules = SCHEDULES[name]
    drafter, params = confident("script"), scripted_params()
    limit = limit(drafter)
    drafted = []
    for schedule in schedules:
        tokens, counts, traces = scheduled(drafter, limit, params, schedule)
        assert tokens == h.reference().tokens
        assert traces == 1  # another schedule is other data
        drafted.append(counts)
    total = [d.sum() for d in drafted]
    assert total[0] > total[1] > total[2] == 0
    first = drafted[1][:, 0]
    assert len(set(first.tolist())) > 1  # the batch is ragged
    if name == "fixed budget":
        assert drafted[1].sum(0).max() == 8 and drafted[0].sum(0).max() > 8


def test_margins_stand_in_for_a_confidence():
    """The small drafter gives laws and no confidence; a steep fit verifies where one token stands out."""
    drafter = h.drafter("small")
    limit = limits.threshold_limit(drafter)
    params = Params(h.target_params(), h.drafter_params("small"))
    fit = MarginFit(jnp.full(3, 2.0), jnp.full(3, -1.0))
    schedule = Schedule(threshold=jnp.float32(0.5), margins=fit, temperatures=jnp.full(3, 2.0))
    tokens, drafted, _ = scheduled(drafter, limit, params, schedule)
    assert tokens == h.reference().tokens
    greedy, hot = drafted[:5], drafted[5:]
    assert set(np.unique(greedy)) <= {0, 3} and 0 < hot.sum() and 0 < (hot[:, 0] < 3).sum()


def test_what_limits_refuse():
    with pytest.raises(ValueError, match="chains"):
        limits.early_stop_limit(h.drafter("script, tree"))
    nothing = dict.fromkeys(State._fields)
    state = State(**{**nothing, "schedule": Schedule(), "status": jnp.full(1, RUNNING)})
    draft = Draft(jnp.zeros((1, 2), jnp.int32), jnp.array([[-1, 0]]))
    limit = limits.threshold_limit(h.drafter("script"))
    with pytest.raises(ValueError, match="gives no confidence"):
        limit(draft, state)
    with pytest.raises(ValueError, match="log_q=None"):
        limit(draft, state._replace(schedule=Schedule(margins=MarginFit(jnp.ones(2), jnp.ones(2)))))
    with pytest.raises(ValueError, match="no threshold"):
        limit(draft._replace(confidence=jnp.ones((1, 2))), state)

"""The simulator by hand, its books, and what loads do to policies."""

import numpy as np
import pytest

from specjax.latency import rounds
from specjax.latency.cost_table import cost_table
from specjax.latency.hardware import HARDWARE
from specjax.latency.roofline import Shape
from specjax.schedule import policies, simulate
from specjax.schedule.simulate import Server, Trace, Workload

FLAT = cost_table([1, 2], [2.0, 2.0], requests=[1], draft=[1.0], dtype=np.float64)  # a pass takes 2 s, a draft 1 s
BY_TOKEN = cost_table([1, 2], [1.0, 2.0], dtype=np.float64)  # a pass takes a second a token
LLAMA_8B = Shape(vocab_size=128_256, width=4096, layers=32, heads=32, kv_heads=8, head_dim=128, hidden=14_336)


def requests(*rows):
    """Rows of (arrival, prompt, output)."""
    arrival, prompt, output = zip(*rows, strict=True)
    return Workload(np.asarray(arrival, float), np.asarray(prompt), np.asarray(output))


def constant_trace(accepted, num_draft=3):
    return Trace(np.full((4, num_draft), 0.5), np.full(4, accepted))


def test_plain_decoding_by_hand():
    made = simulate.simulate(requests((3.0, 1, 5)), constant_trace(3), Server(FLAT, 1), policies.plain())
    assert (made.first[0], made.finish[0], made.throughput) == (5.0, 13.0, 0.5)
    assert made.time_to_first[0] == 2 and made.user_speed[0] == 4 / 8
    assert made.rounds.seconds.tolist() == [2.0] * 5 and made.rounds.verified.sum() == 0 and made.tau == 1


@pytest.mark.parametrize(("verified", "emitted"), [(0, [1] * 8), (1, [2, 2, 2, 2]), (2, [3, 3, 2]), (3, [3, 3, 2])])
def test_fixed_lengths_by_hand(verified, emitted):
    """Two tokens would be accepted; eight are wanted.  Rounds take 3 s whatever is verified: the draft is always paid for."""
    made = simulate.simulate(requests((0.0, 1, 8)), constant_trace(2), Server(FLAT, 1), policies.fixed(verified))
    assert made.rounds.emitted.tolist() == emitted and made.finish[0] == 3 * len(emitted)
    assert made.rounds.accepted.tolist() == [min(verified, 2, e) for e in emitted]
    assert made.rounds.verified.tolist() == [verified] * len(emitted)


def test_prompts_are_read_in_chunks_beside_the_others():
    """A has its prompt; B brings 11 tokens, 10 to read, 4 a round: A's rounds go on, 4 and 2 tokens longer."""
    made = simulate.simulate(
        requests((0, 1, 5), (0, 11, 2)), constant_trace(0), Server(BY_TOKEN, 2, prefill_chunk=4), policies.plain()
    )
    assert made.rounds.read.tolist() == [4, 4, 2, 0, 0]
    assert made.rounds.seconds.tolist() == [5, 5, 3, 2, 2]
    assert made.first.tolist() == [5, 15] and made.finish.tolist() == [17, 17]


def test_a_stretch_is_seen_at_its_end():
    """Four rounds of 2 s, in which nobody comes or goes; the next ends as nobody is left, and both are seen then."""
    made = simulate.simulate(requests((0, 1, 6), (1, 1, 2)), constant_trace(0), Server(FLAT, 2, stride=4), policies.plain())
    assert made.first.tolist() == [8, 12] and made.finish.tolist() == [12, 12]
    assert made.rounds.requests.tolist() == [1] * 4 + [2] * 2 and made.rounds.start.tolist() == [0, 2, 4, 6, 8, 10]
    assert made.inter_token[0] == 4 / 5 and np.isnan(made.inter_token[1])


def test_prompts_are_read_apart():
    """A's 9 tokens by 4, half a second each, and B's 3 beside: who is read to the end decodes at once."""
    server = Server(FLAT, 2, reading=simulate.Reading(chunk=4, passes=2, seconds=0.5))
    made = simulate.simulate(requests((0, 10, 2), (0, 4, 1)), constant_trace(0), server, policies.plain())
    assert made.rounds.read.tolist() == [7, 4, 1, 0] and made.rounds.seconds.tolist() == [3.0, 0.5, 2.5, 2.0]
    assert made.first.tolist() == [6, 3] and made.finish.tolist() == [8, 3]


def test_those_who_find_no_slot_wait_in_turn():
    made = simulate.simulate(requests((0, 1, 2), (0, 1, 2), (1, 1, 1)), constant_trace(0), Server(FLAT, 1), policies.plain())
    assert made.finish.tolist() == [4, 8, 10] and made.rounds.waiting.tolist() == [1, 2, 1, 1, 0]


def test_a_replica_sleeps_until_somebody_comes():
    made = simulate.simulate(requests((0, 1, 1), (10, 1, 1)), constant_trace(0), Server(FLAT, 4), policies.plain())
    assert made.finish.tolist() == [2, 12] and made.rounds.start.tolist() == [0, 10]


def test_the_least_loaded_replica_is_chosen():
    made = simulate.simulate(
        requests((0, 1, 4), (0, 1, 1), (3, 1, 1)), constant_trace(0), Server(FLAT, 1, replicas=2), policies.plain()
    )
    assert made.finish.tolist() == [8, 2, 5]


EVERY = {
    "plain": policies.plain(),
    "fixed": policies.fixed(7),
    "threshold": policies.threshold(0.5),
    "early stop": policies.early_stop(),
    "fixed budget": policies.fixed_budget(),
}


def table(most, num_draft=7):
    return rounds.roofline_table(
        LLAMA_8B, rounds.block(LLAMA_8B, num_draft), HARDWARE["h100"], most_requests=most, most_draft=num_draft, overhead=2e-4
    )


def trace(seed=1, rounds=4096):
    return simulate.made_up_trace(np.random.default_rng(seed), [0.85, 0.82, 0.8, 0.78, 0.76, 0.74, 0.72], rounds=rounds)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("name", EVERY)
def test_the_books_balance(name, replicas):
    workload = simulate.poisson(np.random.default_rng(0), 60, 60.0, prompt=80, output=15)
    server = Server(table(8), 8, replicas=replicas, prefill_chunk=256)
    made = simulate.simulate(workload, trace(), server, EVERY[name])
    r = made.rounds
    assert r.emitted.sum() == workload.output.sum() and r.read.sum() == (workload.prompt - 1).sum()
    assert (made.first > workload.arrival).all() and (made.finish >= made.first).all()
    assert r.requests.max() <= 8 and (r.accepted <= r.verified).all() and (r.emitted <= r.requests + r.accepted).all()
    ends = r.start + r.seconds
    overlaps = (r.start[None] < ends[:, None] - 1e-12) & (r.start[:, None] < ends[None] - 1e-12)
    assert overlaps.sum(0).max() <= 2 * replicas and ends.max() == made.finish.max()
    again = simulate.simulate(workload, trace(), server, EVERY[name])
    np.testing.assert_array_equal(again.finish, made.finish)


def test_tau_is_the_traces():
    """2,500 rounds and more of a trace without requests that differ: its mean, to three standard errors."""
    t = simulate.made_up_trace(np.random.default_rng(1), [0.8] * 7, spread=0.0)
    workload = simulate.backlog(np.random.default_rng(0), 40, prompt=1, output=400)
    for k in (7, 2):
        made = simulate.simulate(workload, t, Server(table(16), 16), policies.fixed(k))
        emitted = 1 + np.minimum(t.accepted, k)
        error = 3 * emitted.std() / np.sqrt(made.rounds.requests.sum()) + k / 400  # the last round is cut
        assert made.tau == pytest.approx(emitted.mean(), abs=error) and error < 0.2


def test_throughput_of_plain_decoding_is_what_the_table_says():
    costs = cost_table([1, 64], [0.010, 0.073], dtype=np.float64)  # 1 ms a token past 9
    workload = simulate.backlog(np.random.default_rng(0), 200, prompt=1, output=20)._replace(prompt=np.ones(200, int))
    one = simulate.simulate(workload, constant_trace(0), Server(costs, 32), policies.plain())
    assert one.steady_throughput == pytest.approx(32 / (0.010 + 0.063 * 31 / 63))
    two = simulate.simulate(workload, constant_trace(0), Server(costs, 32, replicas=2), policies.plain())
    assert two.steady_throughput == pytest.approx(one.steady_throughput) and two.throughput > 1.6 * one.throughput
    idle = simulate.simulate(requests((0, 1, 3)), constant_trace(0), Server(costs, 32), policies.plain())
    assert np.isnan(idle.steady_throughput)


def test_a_policy_knows_earlier_confidences_only():
    """Confidence r/100 in round r of the trace: before it a policy knows that of round r - lag, and nothing of a newcomer."""
    numbers = np.arange(100.0)[:, None] / 100
    known, asked = [], []

    def spy(view):
        known.append(view.earlier[:, 0])

        def lengths(confidence):
            asked.append(confidence[:, 0])
            return np.zeros(len(confidence), int)

        return lengths

    workload = requests((0, 1, 6), (5.9, 1, 4))  # the second comes during the second round of 3 s
    server = Server(FLAT, 2, lag=2)
    simulate.simulate(workload, Trace(numbers, np.zeros(100, int)), server, spy)
    first = [round(x[0] * 100) for x in asked]
    assert np.diff(first).tolist() == [1] * 5
    assert [round(x[0] * 100) for x in known[2:]] == first[:4] and np.isnan([x[0] for x in known[:2]]).all()
    newcomer = [x[1] for x in known if len(x) == 2]
    assert np.isnan(newcomer[:2]).all() and round(newcomer[2] * 100) == round(asked[2][1] * 100)


LOADS = (1, 16, 128, 512)


@pytest.fixture(scope="module")
def steady():
    """Tokens a second by load and policy, an H100 decoding Llama-3-8B with a block drafter, calibrated confidences."""
    t = trace()
    result = {}
    for slots in LOADS:
        workload = simulate.backlog(np.random.default_rng(2), 20 + 3 * slots, prompt=40, output=40)
        server = Server(table(slots), slots, prefill_chunk=4096)
        result[slots] = {name: simulate.simulate(workload, t, server, p).steady_throughput for name, p in EVERY.items()}
    return result


def test_fixed_lengths_pay_for_one_user_and_cost_a_full_server(steady):
    assert steady[1]["fixed"] > 2.5 * steady[1]["plain"] and steady[512]["fixed"] < 0.9 * steady[512]["plain"]


@pytest.mark.parametrize("slots", LOADS)
def test_schedules_follow_the_load(steady, slots):
    """No load is slower than the better of plain and fixed lengths by more than 3 %, where drafting may be left out.

    Algorithm 1 drafts every round: no load is slower than fixed lengths or a threshold.
    """
    here = steady[slots]
    assert here["fixed budget"] > 0.97 * max(here["plain"], here["fixed"])
    assert here["early stop"] > 0.99 * max(here["fixed"], here["threshold"])


def test_while_prompts_wait_drafts_take_a_share_of_the_round():
    """A token costs .01 s here and a pass 1 s: of 2 % of a round of 1.02 s two tokens are bought, if drafting is free."""
    costs = cost_table([1, 1000], [1.01, 11.0])
    view = policies.View(costs, np.full((2, 5), 0.99), np.asarray(0), quiet=1, unread=40)
    assert [policies.affordable(view, share, drafted=False) for share in (0.02, 1.0)] == [2, 10]
    dear = view._replace(table=cost_table([1, 1000], [1.01, 11.0], draft=[0.05]))
    assert [policies.affordable(dear, 0.06, drafted=on) for on in (False, True)] == [1, 6]
    policy, drafted = policies.fixed_budget(slack=0.02), np.full((2, 5), 0.99)
    assert policy(view)(drafted).sum() == 2 and policy(view._replace(unread=0))(drafted).sum() == 10
    assert policy(dear) is None and policy(dear._replace(quiet=64))(drafted).sum() == 2  # drafts so as to look
    blind = view._replace(earlier=np.full((2, 5), np.nan), unread=0)
    assert policy(blind)(drafted).sum() == 2  # and so it does before it knows any


def test_a_budget_looks_after_quiet_rounds():
    """Hardly ever accepted: two rounds until that is known, then one in 11, or for a tenth of the time; hopeless ones never."""
    trace, asked = Trace(np.full((4, 3), 0.01), np.zeros(4, int)), requests((0, 1, 60))
    for draft, drafted in ((1.0, [0, 1, 12, 23, 34, 45, 56]), (3.0, [0, 1, 17, 33, 49]), (7.0, [])):
        costs = cost_table([1, 2], [2.0, 2.0], draft=[draft], dtype=np.float64)
        made = simulate.simulate(
            asked, trace, Server(costs, 1), policies.fixed_budget(probe_every=10, probe_share=0.1, slack=0.1)
        )
        assert np.flatnonzero(made.rounds.seconds > 2).tolist() == drafted


def test_a_policy_is_told_what_is_read():
    """Prompts of 5 and 4 tokens, of which all but the last are read beforehand, 3 a round."""
    told = []

    def spy(view):
        told.append((len(view.earlier), view.read, view.unread))

    one = requests((0, 1, 9), (0, 5, 1), (0, 4, 1))
    simulate.simulate(one, constant_trace(0), Server(FLAT, 3, prefill_chunk=3), spy)
    assert told[:3] == [(1, 3, 4), (1, 3, 1), (2, 1, 0)]


def test_four_thousand_requests():
    workload = simulate.backlog(np.random.default_rng(3), 4096, prompt=16, output=6)
    made = simulate.simulate(workload, trace(), Server(table(4096), 4096, prefill_chunk=1 << 16), policies.early_stop())
    assert made.rounds.requests.max() > 3900 and made.rounds.emitted.sum() == workload.output.sum()


def test_made_up_confidences_are_right():
    t = trace(rounds=1 << 15)
    reached = t.accepted[:, None] >= np.arange(7)[None]
    for low, high in ((0.3, 0.5), (0.7, 0.8), (0.9, 0.95)):
        inside = reached & (t.confidence > low) & (t.confidence < high)
        accepted = (t.accepted[:, None] > np.arange(7)[None])[inside]
        assert accepted.mean() == pytest.approx(t.confidence[inside].mean(), abs=0.02)
    stretches = t.confidence[:, 0].reshape(-1, 64)
    assert stretches.mean(1).std() > 0.08  # requests differ


def test_what_is_refused():
    for bad in (requests((1, 1, 1), (0, 1, 1)), requests((0, 0, 1)), requests((0, 1, 0))):
        with pytest.raises(ValueError, match="arrivals ascend"):
            simulate.simulate(bad, constant_trace(0), Server(FLAT, 1), policies.plain())
    for server in (Server(FLAT, 0), Server(FLAT, 1, stride=0), Server(FLAT, 1, reading=simulate.Reading(0, 1, 0.5))):
        with pytest.raises(ValueError, match="1 or more of each"):
            simulate.simulate(requests((0, 1, 1)), constant_trace(0), server, policies.plain())

"""Rounds with drafts, with fewer, and without: which are run, what they cost, and that no token depends on it."""

import functools

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import decode, sampling
from specjax.engine import Engine, Plan, PolicyPlanner, Rows, costs
from specjax.engine import slots as device
from specjax.engine.costs import Told
from specjax.engine.replay import Asked, replay, summary
from specjax.latency.cost_table import cost_table
from specjax.sampling import SamplingParams
from specjax.schedule import policies
from specjax.types import Params
from specjax.verify import RULES

TABLE = jax.nn.log_softmax(jax.random.normal(jax.random.key(3), (33, 32)) * 2, -1)
NEAR = jax.nn.log_softmax(TABLE + jax.random.normal(jax.random.key(4), TABLE.shape), -1)
LM = h.text_lm(TABLE)
DRAFTING = specjax.load_drafter("small", LM, num_draft=3, model=h.text_lm(NEAR))


def engine_of(planner, **settings):
    settings = {"slots": 4, "capacity": 96, "chunk": 8, "tokenizer": LM.tokenizer, "drafter": DRAFTING.drafter, **settings}
    params = Params(LM.params, DRAFTING.params)
    return Engine(params, target=LM.model, rule=RULES["coupled"], planner=planner, **settings)


class Script:
    """A planner that says one plan after the other, and then the last for ever."""

    def __init__(self, *plans):
        self.plans = list(plans)

    def admit(self, slots, rows):
        return np.ones(len(slots), bool)

    def plan(self, rows):
        return self.plans.pop(0) if len(self.plans) > 1 else self.plans[0]

    def learn(self, drafted, accepted):
        pass


class Roving(Script):
    """Any plan, by chance."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def admit(self, slots, rows):
        return self.rng.random(len(slots)) < 0.7

    def plan(self, rows):
        kind = self.rng.integers(0, 6)
        return Plan(self.rng.integers(0, 4, len(rows.active)) if kind < 4 else None, keep_up=kind != 5)


# No token depends on the plan.

SAMPLINGS = (SamplingParams(), SamplingParams(0.7), SamplingParams(1.0, top_p=0.8))


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_requests_are_as_if_alone_whatever_is_planned(count):
    """Poisson arrivals, mixed sampling, a tenth cancelled, 2 % invalid; every output is that of its solo run."""
    rng = np.random.default_rng(count)
    asked, invalid = [], set(rng.choice(count, max(1, count // 50), replace=False).tolist())
    for i, at in enumerate(np.cumsum(rng.exponential(0.02, count))):
        request = dict(
            prompt=[int(x) for x in rng.integers(0, 31, rng.integers(1, 20))], max_new_tokens=int(rng.integers(1, 30)),
            sampling=SAMPLINGS[i % 3], key=jax.random.key(i),
        )  # fmt: skip
        broken = {"max_new_tokens": 0} if i in invalid else {}
        asked.append(Asked(float(at), {**request, **broken}, 0.01 if i % 10 == 3 else None))
    served = replay(engine_of(Roving(count)), asked)
    total = summary(served)
    assert total.invalid == len(invalid) and total.refused == total.failed == 0
    assert total.finished + total.cancelled == count - len(invalid) and total.finished >= 0.8 * count
    for one, was in zip(asked, served, strict=True):
        if was.request is not None:
            own, result = dict(one.request), was.request.result
            settings = {name: own[name] for name in ("max_new_tokens", "sampling")}
            alone = specjax.generate(LM, DRAFTING, [own["prompt"]], key=own["key"][None], rule="coupled", **settings)[0]
            n = len(result.tokens) if result.finish_reason == "cancelled" else None
            assert result.tokens == alone.tokens[:n]


FIRST = ["small", "mtp"]
"""One that keeps up by proposing, and one that `commit` keeps up; for others run with `slow`."""
CHAINS = [n for n in h.BUILDERS if not n.startswith("script") and n != "plain" and h.drafter(n).chain]


@functools.cache
def quiet_then_drafting(drafter):
    """(params, tokens, length, rounds without drafts) -> (State, RoundInfo of each of the two), compiled."""
    static = dict(target=h.TARGET, rule=RULES["coupled"])

    def go(params, tokens, length, end, quiet):
        heat, key = sampling.stack([SamplingParams(1.0)], h.V), jax.random.split(jax.random.key(7), 1)
        state = decode.start(params, tokens, length, end, jnp.full((1, 1), -1), key, heat, target=h.TARGET, drafter=drafter)
        state = decode.prefill(params, state, target=h.TARGET, drafter=drafter, chunk=8)
        silent = device.keeping_up(drafter, h.TARGET)
        state, first = decode.run(params, state, quiet, drafter=silent, max_rounds=8, **static)
        state, rest = decode.run(params, state, jnp.asarray(64), drafter=drafter, max_rounds=32, **static)
        return state, first, rest

    return jax.jit(go)


@pytest.mark.parametrize("name", FIRST + [pytest.param(n, marks=pytest.mark.slow) for n in CHAINS if n not in FIRST])
def test_a_drafter_keeps_up_in_plain_rounds(name):
    """After rounds without drafts, drafts are those for the longer prompt: as many are accepted, round by round."""
    params, go = Params(h.target_params(), h.drafter_params(name)), quiet_then_drafting(h.drafter(name))
    prompt, quiet = list(h.PROMPTS[-1]), 5
    end = len(prompt) + 26

    def run(text, rounds):
        tokens = jnp.zeros((1, end + 8), jnp.int32).at[0, : len(text)].set(jnp.asarray(text))
        state, *logs = go(params, tokens, jnp.asarray([len(text)]), jnp.asarray([end]), jnp.asarray(rounds))
        return np.asarray(state.tokens[0, :end]).tolist(), *(np.stack([np.asarray(x[0]) for x in log[:3]]) for log in logs)

    tokens, first, rest = run(prompt, quiet)
    longer, none, drafted = run(tokens[: len(prompt) + quiet], 0)
    assert first[:, :quiet].tolist() == [[0] * quiet, [0] * quiet, [1] * quiet] and not none.any()
    assert tokens == longer and rest.tolist() == drafted.tolist() and drafted[0].sum() > 9


def test_a_row_left_behind_is_not_drafted_for_again():
    """After one round without upkeep its rounds are plain; whoever has the slot next is drafted for."""
    engine = engine_of(Script(Plan(np.full(4, 3)), Plan(None, keep_up=False), Plan(np.full(4, 3))))
    first = engine.submit("abc", max_new_tokens=20, eos_ids=(), key=jax.random.key(0))
    engine.drain()
    second = engine.submit("abc", max_new_tokens=20, eos_ids=(), key=jax.random.key(0))
    engine.drain()
    drafted = [np.concatenate(r._rounds, 1)[0] for r in (first, second)]
    assert drafted[0][0] == 3 and not drafted[0][1:].any() and (drafted[1][:-1] > 0).all()
    assert first.tokens == second.tokens


WORK = []


@functools.cache
def counted():
    """The drafter, telling of everything it is asked to do."""

    def telling(name):
        own = getattr(DRAFTING.drafter, name)

        def call(*args):
            jax.debug.callback(lambda: WORK.append(name))
            return own(*args)

        return call

    return DRAFTING.drafter._replace(**{name: telling(name) for name in ("absorb", "propose", "commit")})


def worked(act):
    """Names of what the drafter did during `act()`."""
    jax.effects_barrier()
    before = len(WORK)
    act()
    jax.effects_barrier()
    return set(WORK[before:])


class Switch(Script):
    """Whole drafts, or nothing of the drafter."""

    on = True

    def admit(self, slots, rows):
        return np.full(len(slots), self.on)

    def plan(self, rows):
        return Plan(np.full(4, 3)) if self.on else Plan(None, keep_up=False)


def test_drafting_is_switched_off_and_on_in_mid_stream():
    """While it is off the drafter does nothing, neither for prompts nor in rounds; tokens are those of solo runs throughout."""
    switch = Switch()
    engine, held = engine_of(switch, drafter=counted()), []
    sizes = [program._cache_size() for program in (device.fill, device.rounds)]

    def submit(prompt, new):
        settings = dict(sampling=SAMPLINGS[len(held) % 3], max_new_tokens=new)
        held.append((prompt, settings, engine.submit(prompt, eos_ids=(), key=jax.random.key(len(held)), **settings)))

    def steps(count):
        for _ in range(count):
            engine.step()

    submit([3] * 20, 40), submit([5] * 9, 12)
    assert worked(lambda: steps(5)) == {"absorb", "propose", "commit"}
    switch.on = False
    submit([7] * 30, 30)
    assert worked(lambda: steps(6)) == set()
    switch.on = True
    submit([9] * 18, 20)
    assert worked(engine.drain) == {"absorb", "propose", "commit"}
    drafted = [request.result.stats.num_draft_tokens for *_, request in held]
    assert drafted[2] == 0 and min(drafted[0], drafted[1]) > 0 and drafted[3] > 20
    for i, (prompt, settings, request) in enumerate(held):
        alone = decoded(prompt, settings, jax.random.key(i))
        assert request.tokens == alone
    assert [program._cache_size() for program in (device.fill, device.rounds)] == sizes, "nothing compiles after construction"


def decoded(prompt, settings, key):
    """Tokens of one request by itself, which no end cuts."""
    lm = LM._replace(tokenizer=None)
    return specjax.generate(lm, DRAFTING, [prompt], key=key[None], rule="coupled", **settings)[0].tokens


def test_rounds_without_drafts_do_not_draft(monkeypatch):
    """A plan of zeros runs the plain program, as none does, and nothing compiles after construction."""
    engine, ran = engine_of(Script(Plan(np.zeros(4, int)), Plan(None), Plan(np.ones(4, int)), Plan(None, False))), []
    real = device.rounds

    def rounds(*args, build, unused):
        ran.append((build.drafter.num_nodes, build.drafter.commit is DRAFTING.drafter.commit))
        return real(*args, build=build, unused=unused)

    sizes = real._cache_size()
    monkeypatch.setattr(device, "rounds", rounds)
    engine.submit("abc", max_new_tokens=9, eos_ids=())
    engine.drain()
    assert ran[:5] == [(0, True), (0, True), (3, True), (0, False), (0, False)] and real._cache_size() == sizes


def test_a_planner_is_for_chains_and_alone():
    with pytest.raises(ValueError, match="in place of a limit"):
        engine_of(Told(), limit=lambda draft, state: 0)


def test_several_prompts_are_read_in_a_step():
    engine = engine_of(Told(0), fills=2)
    held = [engine.submit("a" * 17, max_new_tokens=2) for _ in range(3)]
    engine.step()
    assert [r.left for r in held] == [8, 8, 16]
    with pytest.raises(ValueError, match="fills=0"):
        engine_of(Told(), fills=0)


# What rounds cost.


def test_an_engine_is_timed_and_left_empty(monkeypatch):
    """A clock that counts tokens of passes: plain rounds cost their rows, rounds with drafts what they verify and 10 more."""
    told = Told()
    engine = engine_of(told)

    class Clock:
        now = 0.0

    real = engine.step

    def step():
        waiting, _, running, _ = engine.load
        Clock.now += 100 * waiting + (running if told.count is None else running * (1 + told.count) + 10)
        return real()

    monkeypatch.setattr(engine, "step", step)
    monkeypatch.setattr(costs.time, "perf_counter", lambda: Clock.now)
    table = costs.measured_costs(engine, told, slots=4, num_draft=3, stride=1, capacity=96, sweeps=1, steps=3)
    assert engine.load == (0, 0, 0, 4)
    assert np.interp([1, 2, 4, 16], table.tokens, table.verify) == pytest.approx([1, 2, 4, 16], rel=1e-3)
    assert np.interp([1, 2, 4], table.requests, table.draft) == pytest.approx([10] * 3, rel=1e-3)
    read = lambda: costs.reading_seconds(engine, chunk=8, num_draft=3, stride=1, repeats=3)
    told.count = 3
    assert read() == 100 and engine.load == (0, 0, 0, 4), "beside the round of the other"


# What a policy makes of costs and of what was accepted.


def planner(draft, *, policy=None, verify=(1.0, 1.0)):
    """Two slots, K = 3; a pass costs 1 up to 8 tokens unless said otherwise, drafting `draft`."""
    costs = cost_table([1, 8], verify, draft=[draft], dtype=np.float64)
    return PolicyPlanner(
        policy or policies.fixed_budget(probe_every=10, probe_share=0.1, slack=0.1), costs, slots=2, num_draft=3
    )


BOTH, SECOND = np.ones(2, bool), np.asarray([False, True])
OFF = Plan(None, keep_up=False)


def rows(able=BOTH, active=BOTH, **more):
    return Rows(held=BOTH, active=active, able=able, cached=np.full(2, 10.0), **more)


def taught(one, accepted, rounds=200):
    """It has seen rounds in which so many of three tokens were accepted, of each slot."""
    for _ in range(rounds):
        one.learn(np.full((2, 1), 3), np.broadcast_to(np.asarray(accepted), 2)[:, None])
    return one


def let_in(one, slot, at):
    """Whether a request that comes alone to a slot is drafted for."""
    return bool(one.admit([slot], at)[0])


def test_it_drafts_while_that_pays_and_stops_when_not():
    """Drafting costs half a pass: with everything accepted it pays, with nothing it does not."""
    one = planner(0.5)
    assert let_in(one, 0, rows()) and one.plan(rows()).lengths.tolist() == [3, 3], "all is taken to be accepted at first"
    assert taught(one, 3, 20).plan(rows()).lengths.tolist() == [3, 3]
    assert taught(one, 0).plan(rows()) == OFF and not let_in(one, 0, rows())


def test_who_comes_when_drafting_does_not_pay_comes_without():
    """After 10 stretches without drafts the next request is a probe, and no other until it was looked at."""
    one = taught(planner(0.5), 0)
    assert {one.plan(rows()) for _ in range(9)} == {OFF} and not let_in(one, 1, rows())
    assert one.plan(rows(~BOTH)) == OFF and let_in(one, 1, rows()) and not let_in(one, 0, rows())
    assert one.plan(rows(~BOTH, active=~SECOND)) == OFF, "its prompt is not in yet"
    assert one.plan(rows(SECOND)).lengths.tolist() == [0, 3] and one.plan(rows(SECOND)) == OFF
    assert [one.plan(rows(~BOTH)) for _ in range(8)] == [OFF] * 8 and not let_in(one, 1, rows())
    assert one.plan(rows(~BOTH)) == OFF and let_in(one, 0, rows())


def test_who_comes_together_is_asked_for_once():
    """All with drafters where it pays, none where it does not, and one probe of them: a policy takes host time."""
    one, asked = planner(0.5), []
    policy = one._policy
    one._policy = lambda view: asked.append(view) or policy(view)
    assert one.admit([0, 1], rows()).tolist() == [True, True]
    assert taught(one, 3).admit([1, 0], rows()).tolist() == [True, True]
    asked.clear()
    assert taught(one, 0).admit([0, 1], rows()).tolist() == [False, False] and len(asked) == 1
    assert {one.plan(rows()) for _ in range(10)} == {OFF}
    assert one.admit([1, 0], rows()).tolist() == [True, False] and one.admit([0], rows()).tolist() == [False]
    assert one.plan(rows(SECOND)).lengths.tolist() == [0, 3], "slot 1 was the probe"


def test_a_probe_that_goes_is_replaced():
    one = taught(planner(0.5), 0)
    for _ in range(10):
        one.plan(rows())
    assert let_in(one, 1, rows()) and let_in(one, 1, rows()), "the first was cancelled, and its slot given to another"
    assert let_in(one, 0, rows()._replace(held=~SECOND)), "that too, and its slot is free"


def test_looking_takes_a_share_of_the_time():
    """Drafting takes half a round: at a share of 2 % that is once in 25, whatever a round may be longer by."""
    one = taught(planner(0.5, policy=policies.fixed_budget(probe_every=10, probe_share=0.02, slack=1.0)), 0)
    assert {one.plan(rows()) for _ in range(24)} == {OFF} and not let_in(one, 0, rows())
    assert one.plan(rows()) == OFF and let_in(one, 0, rows())


def test_probes_change_its_mind():
    """Only the probes are seen to be accepted, one stretch in 11: then all come with drafters, who keep up until it pays."""
    one, asked = taught(planner(0.5), 0), []
    for _ in range(4000):
        asked.append(let_in(one, 1, rows()))
        able = SECOND & asked[-1]
        plan = one.plan(rows(able))
        if plan.lengths is not None:
            one.learn(plan.lengths[:, None], plan.lengths[:, None])
    assert sum(asked[:500]) == 45 and all(asked[-100:])
    assert one.plan(rows(BOTH)).lengths.tolist() == [3, 3]


def test_where_no_draft_could_pay_nobody_is_looked_at():
    """Drafting costs four passes: four tokens for five passes are a loss, though all were accepted."""
    one = planner(4.0)
    assert {one.plan(rows()) for _ in range(50)} == {OFF} and not let_in(one, 0, rows())


def test_who_is_left_behind_is_not_drafted_for():
    """And where it would pay if the others were able too, the drafters of those who are keep up."""
    one = planner(0.5)
    assert one.plan(rows(SECOND)).lengths.tolist() == [0, 3] and one.plan(rows(~BOTH)) == OFF
    assert planner(2.0).plan(rows(SECOND)) == Plan(None, keep_up=True), "2.5 tokens each for 3 passes"


def test_while_prompts_are_left_over_drafts_wait():
    """A token costs a twentieth of a pass, of which 2 % are allowed: nobody drafts, and drafters keep up."""
    one = planner(0.1, verify=(1.0, 1.35), policy=policies.fixed_budget(slack=0.02))
    assert one.plan(rows()).lengths.any() and one.plan(rows(unread=40)) == Plan(None, keep_up=True)
    assert one.plan(rows(unread=40, read=200)).lengths.any(), "beside that much reading a token is cheap"


def test_each_request_has_its_own_acceptance():
    """The one whose drafts are refused is given fewer; the next in its slot is as all were together."""
    one = taught(planner(0.1, verify=(1.0, 1.7)), [3, 0], 40)
    assert one.plan(rows()).lengths.tolist() == [3, 0]
    let_in(one, 1, rows())
    assert one.plan(rows()).lengths[1] > 0


def test_a_threshold_is_a_policy_too():
    """It drafts every round: where it would verify nothing, one token of each is, or nothing more were learnt."""
    one = taught(planner(0.1, policy=policies.threshold(0.5)), 1, 40)
    assert one.plan(rows()).lengths.tolist() == [1, 1]
    assert taught(one, 0).plan(rows()).lengths.tolist() == [1, 1] and let_in(one, 0, rows())

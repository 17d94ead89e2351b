"""Continuous batching: every request as if it were alone, whatever the others do, and nothing lost or left over.

Requests bring their own keys; "alone" is `generate` or `decode` of that request by itself, with the same key.
"""

import functools
import random

import helpers as h
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.engine import Engine, QueueFull
from specjax.engine import slots as device
from specjax.sampling import SamplingParams
from specjax.types import Params
from specjax.verify import RULES

TABLE = jax.nn.log_softmax((jax.random.normal(jax.random.key(3), (33, 33, 32)) * 2).at[..., 31].add(-2), -1)  # it may end
NEAR = jax.nn.log_softmax(TABLE + jax.random.normal(jax.random.key(4), TABLE.shape), -1)
NEXT = jnp.broadcast_to(h.successor_table({25: 0}, 32)[None], TABLE.shape)  # a, b, .., z, a
MODEL = h.table_model(32, order=2)

TRACED = []


@functools.cache
def counting():
    """The model of these tables, counting its traces."""

    def apply(*args, **settings):
        TRACED.append(1)
        return MODEL.apply(*args, **settings)

    return MODEL._replace(apply=apply)


def text_lm(params=TABLE):
    return h.text_lm(params)._replace(model=counting())


@functools.cache
def drafting(method="small"):
    settings = dict(model=h.text_lm(NEAR)._replace(model=MODEL)) if method == "small" else {}
    return specjax.load_drafter(method, text_lm(), num_draft=3, **settings)


def engine_of(lm=None, loaded=None, *, rule="coupled", params=None, **settings):
    lm, loaded = lm or text_lm(), loaded or drafting()
    settings = {"slots": 4, "capacity": 96, "chunk": 8, "max_bias": 31, "tokenizer": lm.tokenizer, **settings}
    params = Params(lm.params, loaded.params) if params is None else params
    return Engine(params, target=lm.model, drafter=loaded.drafter, rule=RULES[rule], **settings)


def alphabet(model=None, **settings):
    """One that says the alphabet, four letters a round."""
    return engine_of(text_lm(NEXT)._replace(model=model or counting()), drafting()._replace(params=NEXT), **settings)


def key(i):
    return jax.random.key(1000 + i)


def same(completion, result):
    assert result.text == completion.text and result.tokens == completion.tokens
    assert result.finish_reason == completion.finish_reason and result.prompt_tokens == completion.prompt_tokens
    assert result.stats == completion.stats, "it was drafted for and verified as if alone"


class Clock:
    """Seconds that pass when told."""

    now = 0.0

    def __call__(self):
        return self.now


# Many requests.

EVERYTHING = dict(top_k=9, min_p=0.01, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1)
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(0.7),
    SamplingParams(1.3),
    SamplingParams(1.0, top_p=0.8),
    SamplingParams(0.0, top_p=0.8),
    SamplingParams(0.9, top_p=0.9, logit_bias={4: 2.0, 7: -9.0}, **EVERYTHING),
    SamplingParams(0.0, top_p=0.9, logit_bias={5: -1.0}, **EVERYTHING),
]
INVALID = [
    (dict(prompt=[]), "empty"),
    (dict(prompt=[1, 32]), "the prompt holds id 32: 0 to 31 exist"),
    (dict(prompt=[1.5]), "1.5"),
    (dict(prompt="a" * 90), "capacity="),
    (dict(prompt=3), "int"),
    (dict(max_new_tokens=0), "max_new_tokens=0"),
    (dict(max_new_tokens=2.5), "max_new_tokens=2.5"),
    (dict(sampling=SamplingParams(-1.0)), "temperature=-1.0"),
    (dict(sampling=SamplingParams(logit_bias={40: 1.0})), "logit_bias names token 40"),
    (dict(sampling=SamplingParams(logit_bias=dict.fromkeys(range(32), 1.0))), "max_bias=32"),
    (dict(sampling=0.7), "SamplingParams"),
    (dict(stop="x"), "stop must be a list"),
    (dict(eos_ids=range(9)), "max_eos=9"),
    (dict(eos_ids=[-1]), "end token -1"),
    (dict(key=7), "jax.random.key"),
]


def requests(n, seed):
    """n requests: (arrival step, what to submit)."""
    draw = random.Random(seed)
    out = []
    for _ in range(n):
        prompt = "".join(draw.choice(h.ALPHABET) for _ in range(draw.choice([1, 2, 5, 9, 17, 30])))
        settings = dict(sampling=draw.choice(SAMPLINGS), max_new_tokens=draw.choice([1, 2, 7, 20, 33]))
        settings["stop"] = draw.choice([(), (), ["e", "zz"], ["ab", "q t"]])
        out.append((draw.randrange(60), prompt, settings))
    return out


def alone(lm, loaded, prompt, settings, request_key, rule="coupled"):
    return specjax.generate(lm, loaded, [prompt], key=request_key[None], rule=rule, **settings)[0]


def serve(engine, asked, cancelled, invalid):
    """Submit as steps pass, cancel some after a few steps; {index: Request}, and what the invalid ones were told."""
    held, told, step = {}, [], 0
    while engine.step() or step <= 60:
        for i, (arrival, prompt, settings) in enumerate(asked):
            if arrival == step:
                held[i] = engine.submit(prompt, key=key(i), **settings)
            if cancelled.get(i) == step - arrival:
                engine.cancel(held[i])
        for settings, words in invalid.get(step, ()):
            with pytest.raises(ValueError, match=words) as caught:
                engine.submit(**{"prompt": "abc", "max_new_tokens": 5, **settings})
            told.append(str(caught.value))
        step += 1
    return held, told


@pytest.mark.parametrize("stride", [1, 3])
def test_every_request_is_as_if_alone(stride):
    """70 requests of mixed sampling, stops and lengths in 4 slots, 8 cancelled, 15 refused."""
    asked = requests(70, seed=stride)
    cancelled = {i: i % 5 for i in range(3, 70, 9)}
    invalid = {4 * n: [case] for n, case in enumerate(INVALID)}
    engine = engine_of(stride=stride)
    traced = len(TRACED)
    held, told = serve(engine, asked, cancelled, invalid)
    assert len(TRACED) == traced, "nothing compiles after construction"
    assert len(held) == 70 and len(told) == len(INVALID) and all("\n" not in words for words in told)
    assert all(request.result is not None for request in held.values()) and engine.load == (0, 0, 0, 4)
    assert sum(engine.ended.values()) == 70 and 2 <= engine.ended["cancelled"] <= len(cancelled)
    assert min(engine.ended[reason] for reason in ("eos", "length", "stop")) > 0, "all ways to end were met"
    for i, request in held.items():
        _, prompt, settings = asked[i]
        expected = alone(text_lm(), drafting(), prompt, settings, key(i))
        if request.result.finish_reason != "cancelled":
            same(expected, request.result)
        else:
            n = len(request.result.tokens)
            assert i in cancelled and request.result.tokens == expected.tokens[:n]
            assert expected.text.startswith(request.result.text) and request.result.stats.num_emitted_tokens == n


FIRST = ["small", "eagle3, dynamic"]
"""A chain and a tree with caches of their own; for others run with `slow`."""


@functools.cache
def transformer_engine(name, **settings):
    params = Params(h.target_params(), h.drafter_params(name))
    settings = {"slots": 3, "capacity": 64, "chunk": 4, "packs": (8,), **settings}
    return Engine(params, target=h.TARGET, drafter=h.drafter(name), rule=RULES["coupled"], **settings)


SCRIPTED = [name for name in h.BUILDERS if name.startswith("script")]  # what they propose depends on the row of the batch


@pytest.mark.parametrize(
    "name", FIRST + [pytest.param(n, marks=pytest.mark.slow) for n in h.BUILDERS if n not in FIRST + SCRIPTED]
)
def test_drafters_see_one_request(name):
    """Drafted for as if alone, and not only verified: while a row is filled in chunks of 4 its neighbours go on, and back.

    Rounds of one or two short drafts run packed, three do not.  Counts of each round would tell of any state that leaks
    from row to row, or from a request to the next in its slot.
    """
    engine = transformer_engine(name)
    prompts, heat = h.MIXED, h.MIXED_HEAT
    ask = lambda i: engine.submit(prompts[i], max_new_tokens=h.NEW, sampling=SamplingParams(heat[i]), key=row_keys[i])
    row_keys = specjax.keys.request_keys(jax.random.key(h.SEED), jnp.arange(len(prompts)))
    held = []
    for i in range(len(prompts)):
        held.append(ask(i))
        engine.step()
        engine.step()
    engine.drain()
    expected = h.mixed(name, "coupled")
    for i, request in enumerate(held):
        counts = np.concatenate(request._rounds, 1)
        live = expected.emitted[i] > 0
        assert request.result.tokens == expected.tokens[i]
        assert counts[0][counts[2] > 0].tolist() == expected.drafted[i][live].tolist()
        assert counts[2][counts[2] > 0].tolist() == expected.emitted[i][live].tolist()


def test_coins_belong_to_a_request_too():
    """Under `rejection` and without a limit rounds start where they start alone, so that tokens are the same as well."""
    engine = engine_of(rule="rejection")
    held = [engine.submit("abc" * i + "x", sampling=SamplingParams(1.0), max_new_tokens=9 + i, key=key(i)) for i in range(9)]
    engine.drain()
    for i, request in enumerate(held):
        settings = dict(sampling=SamplingParams(1.0), max_new_tokens=9 + i)
        same(alone(text_lm(), drafting(), "abc" * i + "x", settings, key(i), rule="rejection"), request.result)


# Text.


def test_streams_in_turns():
    """Four streams read by turns: no piece shows the beginning of a stop string, and together they are the text."""
    engine = alphabet()
    stops = [["klm", "zz"], ["fgh", "nop"], [], ["zab"]]
    held = [engine.submit(p, max_new_tokens=30, stop=s) for p, s in zip("abcx", stops, strict=True)]
    streams, pieces = dict(enumerate(map(engine.stream, held))), [[] for _ in held]
    while streams:
        for i in list(streams):
            piece = next(streams[i], None)
            pieces[i].append(piece or "")
            if piece is None:
                del streams[i]
    texts = ["bcdefghij", "cde", "defghijklmnopqrstuvwxyzabcdefg", "y"]
    assert ["".join(parts) for parts in pieces] == [r.result.text for r in held] == texts
    assert [r.result.finish_reason for r in held] == ["stop", "stop", "length", "stop"]
    assert not [p for parts, stop in zip(pieces, stops, strict=True) for p in parts for s in stop if s[0] in p]
    assert len(pieces[0]) > 2 and len(pieces[2]) > 7


def test_end_tokens_are_a_requests_own():
    engine = alphabet()
    ends = [(5,), (7, 9), (), (31,)]
    held = [engine.submit("a", max_new_tokens=12, eos_ids=e) for e in ends]
    engine.drain()
    assert [r.result.tokens[-1] for r in held] == [5, 7, 12, 12]
    assert [r.result.finish_reason for r in held] == ["eos", "eos", "length", "length"]


def test_without_a_tokenizer():
    engine = alphabet(tokenizer=None)
    request = engine.submit(np.asarray([3, 4]), max_new_tokens=4)
    assert list(engine.stream(request)) == [] and request.result.tokens == [5, 6, 7, 8] and request.result.text == ""
    for settings, words in ((dict(prompt="abc"), "without a tokenizer"), (dict(prompt=[1], stop=["a"]), "need a tokenizer")):
        with pytest.raises(ValueError, match=words):
            engine.submit(**settings)


def test_a_chat_goes_through_the_template():
    engine = engine_of()
    with pytest.raises(ValueError, match="no chat template"):
        engine.submit([{"role": "user", "content": "abc"}], max_new_tokens=4)


# Queue, cancelling, faults.


def test_the_queue_has_an_end():
    engine = alphabet(max_waiting=2)
    held = [engine.submit("a", max_new_tokens=8) for _ in range(2)]
    with pytest.raises(QueueFull, match="2 requests are waiting.*max_waiting"):
        engine.submit("a", max_new_tokens=8)
    engine.step()
    held += [engine.submit("a", max_new_tokens=8) for _ in range(2)]
    engine.drain()
    assert [r.result.text for r in held] == ["bcdefghi"] * 4 and engine.ended == {"length": 4}


def test_cancelling_at_every_stage():
    """Waiting, being filled, running, ended: what it has stays, its slot serves another, and nobody else notices."""
    engine = alphabet()
    others = [engine.submit("a", max_new_tokens=60) for _ in range(2)]
    running, filling = engine.submit("a", max_new_tokens=40), engine.submit("z" * 30, max_new_tokens=20)
    waiting, last = engine.submit("b", max_new_tokens=9), engine.submit("c" * 20, max_new_tokens=9)
    engine.step()
    engine.step()
    assert engine.load == (2, 1, 3, 0)
    assert [engine.cancel(r) for r in (waiting, filling, waiting)] == [True, True, False]
    assert engine.load == (1, 0, 3, 1)
    for _ in range(3):
        engine.step()
    assert running.result is None and engine.cancel(running) and engine.load == (0, 0, 3, 1)
    assert waiting.result.tokens == filling.result.tokens == [] and waiting.result.times.admitted is None
    assert running.tokens == list(range(1, 21)) and running.result.text == h.ALPHABET[1:21]
    engine.drain()
    assert last.result.text == "defghijkl" and engine.ended == {"cancelled": 3, "length": 3}
    assert [r.result.text for r in others] == [(h.ALPHABET[:26] * 3)[1:61]] * 2
    assert list(engine.stream(running)) == [running.result.text] and not engine.cancel(last)
    with pytest.raises(ValueError, match="request 0 is not in this engine"):
        engine.cancel(alphabet().submit("a", max_new_tokens=1))


def test_a_broken_row_breaks_alone():
    """The target has no law after "m": who comes there ends with an error, and what it had; the slot is sound again."""
    broken = NEXT.at[:, 12].set(jnp.nan)
    engine = engine_of(text_lm(broken))
    prompts = ["i", "n", "k", "nmn", "q", "m"]
    held = [engine.submit(p, max_new_tokens=8, key=key(0)) for p in prompts]
    engine.drain()
    assert [r.result.text for r in held] == ["jklm", "opqrstuv", "lm", "opqrstuv", "rstuvwxy", ""]
    assert [r.result.finish_reason for r in held] == ["error", "length", "error", "length", "length", "error"]
    assert engine.ended == {"error": 3, "length": 3} and engine.load == (0, 0, 0, 4)


def many(n):
    """n requests of one token through an engine of 8 slots, in bursts of 100 of which every tenth is cancelled."""
    engine = engine_of(text_lm(NEXT), drafting("plain"), slots=8, capacity=16, max_waiting=100)
    for burst in range(n // 100):
        held = [engine.submit([i % 26], max_new_tokens=1) for i in range(100)]
        if burst % 2:
            engine.step()
        gone = [engine.cancel(request) for request in held[:: 10 if burst % 3 else 9]]
        engine.drain()
        assert engine.load == (0, 0, 0, 8) and all(request.result for request in held)
        ended = [r.result for r in held if r.result.finish_reason == "length"]
        assert [r.tokens for r in ended] == [[(r.prompt_tokens[0] + 1) % 26] for r in ended]
        assert engine.ended["cancelled"] >= burst and engine.ended["length"] >= 85 * burst and any(gone)
    assert sum(engine.ended.values()) == n


def test_no_slot_leaks():
    many(500)


@pytest.mark.slow
def test_no_slot_leaks_in_ten_thousand():
    many(10_000)


# Time and work.


def test_a_long_prompt_stalls_nobody():
    """While 64 tokens of prompt are filled in 8 chunks, the other has tokens after every step."""
    engine = alphabet()
    short, long = engine.submit("a", max_new_tokens=60), engine.submit("b" * 65, max_new_tokens=5)
    for step in range(7):
        engine.step()
        assert len(short.tokens) == 4 * (step + 1) and long.left == 8 * (7 - step) and not long.tokens
    engine.step()
    assert long.tokens == [2, 3, 4, 5] and len(short.tokens) == 32


def test_times():
    clock = Clock()
    engine = alphabet(clock=clock)
    first, *_ = [engine.submit("a", max_new_tokens=10) for _ in range(4)]
    second = engine.submit("b" * 17, max_new_tokens=1)
    while engine.step():
        clock.now += 1
    times, late = first.result.times, second.result.times
    assert times == (0.0, 0.0, (0.0,) * 4 + (1.0,) * 4 + (2.0,) * 2, 2.0)
    assert times.to_first_token() == 0 and times.between_tokens() == 2 / 9
    assert (late.submitted, late.admitted, late.ended) == (0, 3, 4) and late.to_first_token() == 4
    assert late.between_tokens() is None
    gone = engine.submit("a", max_new_tokens=2)
    engine.cancel(gone)
    assert gone.result.times.to_first_token() is None


RUN = []


@functools.cache
def measuring():
    """A table that tells of every pass that really ran: slots, width, tokens of the dense layers."""

    def apply(params, tokens, *rest, **settings):
        pack = settings.get("pack")
        dense = tokens.size if pack is None else pack.size
        jax.debug.callback(lambda: RUN.append((*tokens.shape, dense)))
        return MODEL.apply(params, tokens, *rest, **settings)

    return MODEL._replace(apply=apply)


def as_told(draft, state):
    """A limit: `state.schedule` [B] nodes of each row."""
    return state.schedule


def told(allowed):
    return np.broadcast_to(np.asarray(allowed, np.int32), 4)


def test_short_lengths_cost_narrow_passes():
    """Widths 1, 2 and 4 of a draft of 3: a round runs the one that holds what the limit allows, and no program is new."""
    engine = alphabet(measuring(), limit=as_told, schedule=told(3))
    for allowed, width in ((3, 4), (0, 1), (1, 2), (2, 4)):
        engine.reschedule(told(allowed))
        sizes, before = device.rounds._cache_size(), len(RUN)
        request = engine.submit("a", max_new_tokens=12)
        engine.drain()
        jax.effects_barrier()
        assert set(RUN[before:]) == {(4, width, 4 * width)} and len(RUN) - before == 12 // (allowed + 1)
        assert request.result.text == "bcdefghijklm"
        assert request.result.stats.num_draft_tokens == allowed * 12 // (allowed + 1)
        assert device.rounds._cache_size() == sizes
    with pytest.raises(ValueError, match="schedule of shapes"):
        engine.reschedule((1, 2))


def test_lengths_change_no_token():
    """Coupled: neither the lengths of a row nor those of its neighbours."""
    lm = text_lm()._replace(model=measuring())
    engine = engine_of(lm, limit=as_told, schedule=told([0, 1, 2, 3]))
    settings = dict(sampling=SamplingParams(1.0), max_new_tokens=15)
    held = [engine.submit("abc" * i + "x", key=key(i), **settings) for i in range(6)]
    while engine.step():
        engine.reschedule(np.roll(engine._state.schedule, 1))
    for i, request in enumerate(held):
        assert request.result.tokens == alone(text_lm(), drafting(), "abc" * i + "x", settings, key(i)).tokens


def test_tokens_are_packed():
    """Slots that are free or short of drafts cost nothing: each round runs the smallest pack that holds what is verified."""
    engine = alphabet(measuring(), limit=as_told, schedule=told(3), packs=(2, 4, 8), widths=(1,))
    for count, allowed, dense in ((1, 3, 4), (1, 0, 2), (2, 3, 8), (3, 3, 16), (4, 0, 4), (4, [3, 1, 0, 0], 8), (2, 1, 4)):
        engine.reschedule(told(allowed))
        sizes, before = device.rounds._cache_size(), len(RUN)
        held = [engine.submit("a", max_new_tokens=4) for _ in range(count)]
        engine.step()
        jax.effects_barrier()
        width = 1 if allowed == 0 and count == 4 else 4
        assert RUN[before:] == [(4, width, dense)], (count, allowed)
        engine.drain()
        assert [r.result.text for r in held] == ["bcde"] * count and device.rounds._cache_size() == sizes


@pytest.mark.parametrize("features", [(), (1,)])
def test_what_a_pack_gives_is_what_a_whole_pass_gives(features):
    """Every token of a pack as in the whole pass, keys and values too; nothing of the tokens that were left out."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, h.V, (3, 4)), jnp.int32)
    real = np.asarray([[1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]], bool)
    pack = jnp.asarray([*np.flatnonzero(real), 12, 12], jnp.int32)
    cache = h.TARGET.init_cache(3, 16)._replace(length=jnp.asarray([5, 0, 9], jnp.int32))
    cache = jax.tree.map(lambda x: x + 0.1 if x.ndim > 1 else x, cache)
    params = h.target_params()
    run = jax.jit(lambda **how: h.TARGET.apply(params, tokens, cache, features=features, **how))
    (whole, filled), (part, held) = run(), run(pack=pack)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(part), strict=True):
        np.testing.assert_allclose(a[real], b[real], atol=2e-5)
        assert not b[~real].any() and (not a.size or a[~real].any())
    for row, slots in ((0, slice(0, 8)), (2, slice(0, 10))):
        for a, b in zip(filled.v, held.v, strict=True):
            np.testing.assert_allclose(a[row, :, slots], b[row, :, slots], atol=2e-5)


def test_a_second_engine_compiles_nothing():
    engine_of()
    before = len(TRACED)
    engine = alphabet(max_waiting=7, key=jax.random.key(9))
    one, two = engine.submit("a", max_new_tokens=3, sampling=SamplingParams(2.0)), engine.submit("b" * 30, max_new_tokens=3)
    engine.drain()
    assert len(TRACED) == before and one.result.finish_reason == two.result.finish_reason == "length"
    assert before > 0, "the counter counts"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(slots=0), "slots=0.*at least 1"),
        (dict(chunk=1), "chunk=1.*at least 2"),
        (dict(stride=0), "stride=0.*at least 1"),
        (dict(capacity=5), "capacity=5: with a draft of 3 give at least 6"),
        (dict(rule="greedy_multi_draft"), "exact for children"),
    ],
)
def test_what_cannot_be_built(settings, words):
    with pytest.raises(ValueError, match=words):
        engine_of(**settings)

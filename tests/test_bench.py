"""Measuring: what is pooled, compared and resampled, and that nothing compiles inside a measurement."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import bench, load_drafter, timing
from specjax.api import Completion
from specjax.metrics import cut, merge, statistics
from specjax.models.load import LM
from specjax.models.table import table
from specjax.sampling import SamplingParams
from specjax.types import RoundInfo

KEY = jax.random.key(0)
PROMPTS = [[1, 2, 3, 1, 2], [4, 5, 4, 5, 4], [7, 7, 1]]


@pytest.fixture(scope="module")
def lm():
    model = table(8, order=1)
    return LM(model, model.init(jax.random.key(1)) * 3, None, None)


def contender(lm, rule="rejection", method="ngram"):
    return bench.Contender(method, load_drafter(method, lm, num_draft=3), rule)


def sample(seconds, tokens):
    stats = statistics(RoundInfo(*np.zeros((3, 0), int)), 0)
    return bench.Sample([Completion("", list(range(tokens)), "length", [1], stats)], seconds / 4, seconds * 3 / 4)


def test_speedup_is_a_ratio_of_sums_with_an_interval_over_prompts():
    plain = [sample(2.0, 10), sample(6.0, 10)]
    assert bench.speedup(plain, [sample(1.0, 10), sample(3.0, 10)]) == pytest.approx((2.0, 2.0, 2.0))
    assert bench.speedup(plain, [sample(2.0, 20), sample(6.0, 20)]).mean == pytest.approx(2.0)  # per token, not per call
    several = [sample(float(s), 10) for s in (1, 2, 4, 1, 2, 4)]
    mean, low, high = bench.speedup([sample(2.0, 10)] * 6, several)
    assert mean == pytest.approx(12 / 14)
    assert 0.5 < low < 0.75 and 1.1 < high < 1.6  # 0.5, 2 are the extremes; the middle 95 % lies inside
    assert bench.speedup([sample(2.0, 10)] * 6, several) == (mean, low, high)  # a fixed seed


def test_speedup_of_decoding_leaves_the_prompt_out():
    def shared(decoding):
        return bench.Sample([sample(0, 10).completions[0]], 4.0, decoding)

    plain, fast = [shared(4.0), shared(4.0)], [shared(2.0), shared(2.0)]
    assert bench.speedup(plain, fast).mean == pytest.approx(8 / 6)
    assert bench.speedup(plain, fast, lambda s: s.decode_seconds) == pytest.approx((2.0, 2.0, 2.0))


def test_tau_has_an_interval_over_prompts():
    def answered(*accepted):
        stats = statistics(RoundInfo(*np.asarray([[3] * len(accepted), accepted, [a + 1 for a in accepted]])), 3)
        return bench.Sample([Completion("", [], "length", [1], stats)], 1, 1)

    mean, low, high = bench.tau([answered(3, 3), answered(0), answered(0, 0, 0)] * 4)
    assert mean == 1 + 6 / 6
    assert 1 < low < 1.8 and 2.2 < high < 3.2
    assert bench.tau([answered(2, 1, 0), answered(1, 1)]) == (2.0, 2.0, 2.0)


def test_same_tokens():
    assert bench.same_tokens([sample(1, 3), sample(1, 2)], [sample(2, 3), sample(1, 2)])
    assert not bench.same_tokens([sample(1, 3), sample(1, 2)], [sample(1, 3), sample(1, 1)])


def test_merge_pools_the_rounds():
    rounds = [RoundInfo(*np.asarray(r)) for r in ([[3, 2], [3, 0], [4, 1]], [[3, 3, 0], [1, 2, 0], [2, 3, 1]])]
    parts = [statistics(cut(r, 100), 3) for r in rounds]
    assert merge(parts) == statistics([cut(r, 100) for r in rounds], 3)
    assert merge(parts).mean_acceptance_length == 1 + 6 / 5  # not the mean of 2.5 and 2
    assert merge(parts).per_position_acceptance_rate == (3 / 5, 2 / 5, 1 / 5)
    with pytest.raises(ValueError, match=r"num_spec_tokens \[0, 3\] cannot be pooled"):
        merge([parts[0], statistics(RoundInfo(*np.zeros((3, 0), int)), 0)])
    with pytest.raises(ValueError, match="cannot be pooled"):
        merge([])


def test_what_does_not_fit_is_refused_before_anything_is_measured(lm):
    tree = bench.Contender("tree", load_drafter("specinfer", lm, num_draft=2, models=[lm], expansion=(2, 1)), "block")
    with pytest.raises(ValueError, match="tree with rule block: this rule verifies chains only"):
        bench.compare(lm, [contender(lm), tree], bench.Work(PROMPTS, KEY, 8), progress=lambda *now: pytest.fail("measured"))


def test_compare_greedy(lm, monkeypatch):
    """Plain first; same tokens; pooled statistics; each shape is warmed once and never compiles again."""
    calls, seen, measure = [], [], bench._measure
    monkeypatch.setattr(bench, "_measure", lambda lm, c, batch: calls.append(c.method) or measure(lm, c, batch))
    work = bench.Work(PROMPTS, KEY, 24)
    plain, ngram = bench.compare(lm, [contender(lm)], work, progress=lambda *now: seen.append(now))
    assert calls == ["plain", "plain", "ngram", "ngram", "plain", "ngram", "plain", "ngram"]
    assert seen == [
        (0, 6, "plain"),
        (1, 6, "ngram"),
        (2, 6, "plain"),
        (3, 6, "ngram"),
        (4, 6, "plain"),
        (5, 6, "ngram"),
        (6, 6, "done"),
    ]
    assert plain.contender.method == "plain" and plain.speedup == (1.0, 1.0, 1.0) and plain.stats.mean_acceptance_length == 1
    assert ngram.same_tokens_as_plain is True and ngram.lossless and ngram.temperature == 0
    assert [len(s.completions[0].tokens) for s in ngram.samples] == [24, 24, 24]
    assert ngram.stats.num_emitted_tokens == 72 and ngram.stats.mean_acceptance_length > 1.5
    assert ngram.tokens_per_second == pytest.approx(72 / sum(s.seconds for s in ngram.samples))
    assert ngram.itl_ms == pytest.approx(1e3 * sum(s.decode_seconds for s in ngram.samples) / 72)
    assert plain.itl_speedup == (1.0, 1.0, 1.0) and ngram.itl_speedup.mean == pytest.approx(plain.itl_ms / ngram.itl_ms)


def test_compare_says_only_what_a_rule_promises(lm):
    hot = bench.Work(PROMPTS, KEY, 16, SamplingParams(temperature=1.0))
    both = [contender(lm, "coupled"), contender(lm, "rejection")]
    plain, coupled, rejection = bench.compare(lm, both, hot)
    assert (coupled.same_tokens_as_plain, rejection.same_tokens_as_plain) == (True, None)
    assert not bench.same_tokens(plain.samples, rejection.samples)  # with other coins it would be a wonder
    batched = bench.compare(lm, [], hot._replace(batch_size=2))[0]
    alone = bench.compare(lm, [], hot)[0]
    assert [len(s.completions) for s in batched.samples] == [2, 1]
    tokens = [[c.tokens for s in r.samples for c in s.completions] for r in (batched, alone)]
    assert tokens[0] == tokens[1]  # a prompt's key is its own


def test_temperature_is_not_greedy_in_disguise(lm):
    """Case M07: T = 1 differs from T = 0 unless top_k = 1 was asked."""
    run = lambda **law: bench.compare(lm, [], bench.Work(PROMPTS, KEY, 16, SamplingParams(**law)))[0].samples
    greedy = run()
    assert not bench.same_tokens(greedy, run(temperature=1.0))
    assert bench.same_tokens(greedy, run(temperature=1.0, top_k=1))


def test_pass_times(lm):
    work = bench.Work(PROMPTS, KEY, 16, SamplingParams(temperature=1.0))
    ngram, plain = (bench.pass_times(lm, contender(lm, method=m), work) for m in ("ngram", "plain"))
    assert ngram.draft_ms > 0 and ngram.verify_ms > 0 and plain.draft_ms == 0 and plain.verify_ms > 0


def halfway(lm, method):
    """(drafter and rule, params, state, what is drafted there, with no node absent)."""
    one = contender(lm, method=method)
    session = bench.prepare(lm, one, bench.split(lm, bench.Work(PROMPTS[:1], KEY, 8))[0])
    static = dict(drafter=one.loaded.drafter, rule=session.rule)
    draft, _ = timing.proposed(session.params, session.state[0], target=lm.model, **static)
    return static, session.params, session.state[0], timing.full(draft)


def test_the_whole_verdict_is_timed(lm):
    """What is carried from turn to turn knows the emitted token: without it the vocabulary head would be dead code."""
    static, params, state, draft = halfway(lm, "plain")

    def emitted(token):
        def apply(*given, **how):
            out, cache = lm.model.apply(*given, **how)
            return out._replace(logits=out.logits.at[..., token].add(1e3)), cache

        carry = (state.cache, jnp.zeros((), jnp.int32))
        return int(timing.verify_once(params, state, draft, carry, target=lm.model._replace(apply=apply), **static)[1])

    assert (emitted(1), emitted(3)) == (1, 3)


def test_a_block_is_timed_whole(lm):
    static, _, _, draft = halfway(lm, "ngram")
    assert draft.parents.tolist() == [list(range(-1, static["drafter"].num_nodes - 1))]


def test_milliseconds_times_every_repetition():
    """A step that takes 20 ms, because the host sleeps in it."""
    import time

    def step(held, carry):
        return (
            jax.pure_callback(
                lambda x: time.sleep(held) or x, jax.ShapeDtypeStruct((), jnp.int32), carry, vmap_method="sequential"
            )
            + 1
        )

    step_of = lambda seconds: lambda held, carry: step(seconds, carry)
    found = timing.milliseconds(step_of(0.02), None, jnp.zeros((), jnp.int32), repeats=3, calls=2)
    assert 19 < found < 60


def test_bad_input(lm):
    with pytest.raises(ValueError, match="batch_size=0"):
        bench.compare(lm, [], bench.Work(PROMPTS, KEY, batch_size=0))
    with pytest.raises(ValueError, match="no prompts"):
        bench.compare(lm, [], bench.Work([], KEY))
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        bench.compare(lm, [], bench.Work([[1], []], KEY))
    broken = lm._replace(params=lm.params * jnp.nan)
    with pytest.raises(FloatingPointError, match="NaN"):
        bench.compare(broken, [], bench.Work(PROMPTS, KEY, 4))

"""Every rung passes on a sound subject and can fail; a whole climb, its controls and its arithmetic."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import keys
from specjax.lossless import finding as findings_of
from specjax.lossless.bias import bias
from specjax.lossless.built_in import VOCABULARY, built_in
from specjax.lossless.evidence import expected_acceptance
from specjax.lossless.finding import FAIL, INCONCLUSIVE, PASS, SKIPPED
from specjax.lossless.lab import FALSE_ALARM, STATISTICAL, Lab, Settings, judge, settings
from specjax.lossless.ladder import CONTROLS, RUNGS, climb, worst
from specjax.lossless.rungs import sampled
from specjax.lossless.rungs.endings import bad_end
from specjax.lossless.subject import decoded, laws, without_drafts
from specjax.sampling import SamplingParams
from specjax.types import EOS, LENGTH, Draft, Params

SIZES = Settings(rows=2048, new=6, batch=2048, wanted=0.05, few=64, short=16, pairs=256)
TINY = SIZES._replace(rows=1024)


@functools.cache
def lab(method="small", rule=None, how=SIZES, **options):
    return Lab(built_in(method, rule, **options), how)


SUBJECTS = {
    "small": lambda: lab(),
    "ngram": lambda: lab("ngram"),
    "specinfer": lambda: lab("specinfer"),
    "block": lambda: lab("small", "block"),
    "coupled": lambda: lab("small", "coupled"),
    "early_exit": lambda: lab("early_exit", how=TINY),
}

SKIPS = {
    "small": {"coupled equality"},
    "ngram": {"coupled equality"},
    "specinfer": {"coupled equality"},
    "block": {"coupled equality", "acceptance"},
    "coupled": {"exact law", "boundary coins", "acceptance"},
    "early_exit": {"coupled equality"},
}


@pytest.mark.parametrize("name", ["small", "coupled"])
@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_passes_on_a_sound_subject(name, rung):
    finding = RUNGS[rung](SUBJECTS[name]())
    skipped = rung in SKIPS[name] or (rung == "joint law" and finding.status == SKIPPED)
    assert finding.status == (SKIPPED if skipped else PASS), finding
    assert finding.rung == rung and finding.looked_at and finding.saw
    assert 0 <= finding.false_alarm <= FALSE_ALARM / STATISTICAL
    if finding.false_alarm:
        assert finding.test.samples > 100 and 0 < finding.test.effect < 1


@pytest.mark.parametrize("name", ["ngram", "specinfer", "block", "early_exit"])
def test_rungs_pass_on_drafters_of_every_kind(name):
    """Those that read the draft; the statistics behind them are the same."""
    for rung in (
        "exact law",
        "boundary coins",
        "random streams",
        "endings",
        "most probable token",
        "drafted token",
        "acceptance",
    ):
        finding = RUNGS[rung](SUBJECTS[name]())
        assert finding.status == (SKIPPED if rung in SKIPS[name] else PASS), finding


def test_the_rungs_of_the_table_are_complete():
    """The statistical rungs are as many as the false-alarm rate was split by."""
    assert sum(RUNGS[r](lab()).false_alarm > 0 for r in RUNGS) == STATISTICAL
    assert set(CONTROLS) <= set(RUNGS)


@pytest.mark.parametrize("rule", ["typical", "threshold"])
def test_a_lossy_rule_fails_with_its_bias_stated(rule):
    finding = RUNGS["exact law"](lab("small", rule))
    assert finding.status == FAIL and "total variation 0." in finding.saw


def test_the_planted_bias_is_found_and_has_its_size():
    """TV .05 per token: the mean of 1[y = top] - p(top) is -.05 wherever p(top) >= .05 and there is a runner-up."""
    planted = Lab(bias(lab().subject, 0.05), SIZES)
    finding = sampled.top(planted)
    assert finding.status == FAIL
    e = planted.evidence
    mean = (e.is_top - e.top_p).mean()
    assert mean == pytest.approx(-0.05, abs=4 * 0.5 / np.sqrt(len(e.y)))
    assert sampled.any_time(planted).status == FAIL


def test_greedy_subjects_skip_what_has_no_chance_in_it():
    cold = Lab(lab().subject._replace(sampling=SamplingParams()), SIZES)
    statuses = {name: RUNGS[name](cold).status for name in RUNGS if name in CONTROLS or RUNGS[name] in vars(sampled).values()}
    assert statuses.pop("acceptance") == PASS  # at temperature 0 it is exact: kept or not
    assert set(statuses.values()) == {SKIPPED}


def test_penalties_and_cuts():
    """p depends on everything emitted: rows are recomputed with the history of each position."""
    warped = built_in("small", sampling=SamplingParams(temperature=0.7, top_p=0.8, presence_penalty=0.8))
    bench = Lab(warped, SIZES)
    for rung in ("joint law", "bets on tokens", "support", "most probable token", "drafted token", "acceptance"):
        assert RUNGS[rung](bench).status == PASS, rung
    without = bench.evidence.top_p.mean()
    plain = Lab(warped._replace(sampling=SamplingParams(temperature=0.7)), SIZES)
    plain.__dict__["taken"] = bench.taken  # the same tokens under other parameters
    assert plain.evidence.top_p.mean() != pytest.approx(without, abs=0.02)
    assert sampled.support(bench).status == PASS and sampled.top(plain).status == FAIL


def test_rows_are_those_of_plain_decoding():
    """A table's rows are its own entries."""
    subject = lab().subject
    tokens = np.asarray([[1, 2, 3, 4, 5, 6]], np.int32)
    log_p = laws(subject, tokens, np.asarray([1], np.int32), 5)[0]
    table = np.asarray(subject.params.target)
    expected = [table[VOCABULARY, 1], table[1, 2], table[2, 3], table[3, 4], table[4, 5]]
    np.testing.assert_allclose(log_p, expected, atol=1e-5)


def test_a_short_last_batch_changes_no_row():
    """7 rows, 3 at a time, are the first 7 of 8 at once."""
    from specjax.lossless.subject import sample

    subject, key = lab().subject, jax.random.key(0)
    apart, together = sample(subject, key=key, rows=7, new=4, batch=3), sample(subject, key=key, rows=8, new=4)
    assert [apart.new(i) for i in range(7)] == [together.new(i) for i in range(7)]


@pytest.mark.parametrize("name", ["rejection", "target_match"])
def test_expected_acceptance_is_the_closed_form(name):
    """A chain: 1 - TV, or sum p q; a second sibling meets what the first has left."""
    p, q = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.1, 0.2, 0.3, 0.4])
    log = lambda *rows: jnp.log(jnp.asarray(np.stack(rows), jnp.float32))
    both = Draft(jnp.asarray([2, 2], jnp.int32), jnp.asarray([-1, -1], jnp.int32), log(q, q))
    found = np.asarray(expected_acceptance(name, both, log(p, p, p)))
    residual, without = np.maximum(p - q, 0) / 0.5, np.array([0.5, 0.3, 0, 0]) / 0.8
    first, second = ((p * q).sum(), (without * q).sum())
    if name == "rejection":
        first, second = np.minimum(p, q).sum(), np.minimum(residual, q).sum()
    np.testing.assert_allclose(found, [first, second], atol=1e-6)


def test_witnesses_belong_to_their_tokens():
    """n-gram drafts are deterministic: where a token is drafted it is the witness, and an accepted token equals it."""
    bench = lab("ngram")
    e, info = bench.evidence, bench.taken.info
    assert len(e.y) == info.emitted.sum() == (bench.taken.length - bench.taken.start).sum()
    hits = ((e.y == e.witness) & (e.witness >= 0)).sum()
    assert info.accepted.sum() == hits > 100


def test_greedy_equality_tells_ties_from_faults():
    """A target whose two best tokens tie to the last bit, and one that is simply another model."""
    from specjax.lossless.rungs.greedy import equal, margin

    subject = lab().subject
    plain = without_drafts(subject._replace(sampling=SamplingParams()))
    other = plain._replace(params=Params(subject.params.target[..., ::-1]))
    finding = equal(lab(), "greedy equality", "", other, plain)
    assert finding.status == FAIL and "margin" in finding.saw
    tied = plain._replace(params=Params(jnp.zeros_like(subject.params.target)))
    assert margin(tied, [1, 2], 0, 1, jax.random.key(0), 0) == 0
    nudged = plain._replace(params=Params(subject.params.target + 1e-7 * jax.random.normal(jax.random.key(0), (9, 9, 8))))
    assert equal(lab(), "greedy equality", "", nudged, plain).status == PASS


def test_ends_are_examined():
    ends = [7, 3]
    assert bad_end([1, 2, 7], ends, 5, EOS) == [] and bad_end([1, 2], ends, 2, LENGTH) == []
    assert bad_end([1, 7, 2], ends, 5, EOS) and bad_end([1, 2, 4], ends, 2, LENGTH)
    assert bad_end([1, 2], ends, 5, LENGTH) and bad_end([1, 7], ends, 2, LENGTH)
    assert bad_end([1, 2, 4, 7, 1], ends, 9, EOS)


def test_a_finding_says_what_it_could_not_see():
    dull = findings_of.Test(0.1, 0.5, 20, 0.3, "TV of a token")
    assert judge("r", "", dull, SIZES, wanted=0.05).status == INCONCLUSIVE
    assert judge("r", "", dull, SIZES).status == PASS
    assert judge("r", "", dull._replace(p_value=1e-9), SIZES, wanted=0.05).status == FAIL
    assert judge("r", "", dull._replace(e_value=1e9), SIZES).status == FAIL
    assert worst([PASS, SKIPPED, INCONCLUSIVE]) == INCONCLUSIVE and worst([PASS, FAIL]) == FAIL and worst([SKIPPED]) == SKIPPED


def test_a_climb_goes_up_in_order_and_can_be_resumed():
    seen = []
    done = [rung for rung in RUNGS if rung not in ("exact law", "support")]
    findings = climb(built_in("plain"), quick=True, progress=lambda *step: seen.append(step), done=done)
    assert [f.rung for f in findings] == ["exact law", "support"]
    assert seen == [(0, len(RUNGS), "exact law"), (list(RUNGS).index("support"), len(RUNGS), "support")]


def test_climbing_twice_gives_the_same_findings():
    done = [r for r in RUNGS if r not in ("most probable token", "acceptance")]
    one, two = (list(climb(built_in("small"), quick=True, done=done)) for _ in range(2))
    assert one == two


def test_sizes_follow_the_cost_of_a_token():
    small = lab().subject
    large = small._replace(params=Params(jnp.zeros(3_000_001)))
    quick, full = settings(large, quick=True, seed=0), settings(large, quick=False, seed=0)
    assert 2_000 <= quick.rows * quick.new <= 4_000 and full.rows * full.new >= 15_000
    assert settings(small, quick=False, seed=0).rows * settings(small, quick=False, seed=0).new >= 200_000


def test_unknown_methods_are_refused_in_one_line():
    with pytest.raises(ValueError, match="'heads' comes built in"):
        built_in("heads")


def test_requests_have_keys_of_their_own():
    """Request 5 has the same tokens wherever it stands, and none of its neighbours'."""
    subject = lab().subject
    state, _ = decoded(subject, [subject.prompts[0]] * 64, key=jax.random.key(1), new=8, ids=[5] * 32 + list(range(32)))
    tokens = np.asarray(state.tokens)
    assert (tokens[:32] == tokens[32 + 5]).all() and len(np.unique(tokens[32:], axis=0)) > 30
    assert keys.request_keys(jax.random.key(1), jnp.arange(2, dtype=jnp.int32)).shape == (2,)

"""The bench: biases worked out by hand come out exactly and in draws, sound samplers pass, foreign code can be put on it."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "experiments"))

import audit_known_bugs as bugs  # noqa: E402

from specjax.lossless.audit import audit, rule_sampler  # noqa: E402
from specjax.lossless.drawn import iid, point, random_law, truncated  # noqa: E402
from specjax.lossless.finding import FAIL, INCONCLUSIVE, PASS  # noqa: E402
from specjax.lossless.statistics import binomial_interval  # noqa: E402
from specjax.verify import RULES  # noqa: E402

V = 4
PLANNED = [f for f in bugs.FAULTS if bugs.exactly(f)]
DRAWN = [f for f in bugs.FAULTS if not bugs.exactly(f)]


@pytest.mark.parametrize("fault", [*PLANNED, *bugs.SOUND], ids=lambda f: f.name)
def test_known_faults_have_the_law_worked_out_by_hand(fault):
    seen, _ = bugs.exactly(fault)
    np.testing.assert_allclose(seen, fault.by_hand, atol=1e-12)
    assert (bugs.bias(fault, seen) > 1e-3) == (fault in bugs.FAULTS)


def test_accepted_tokens_of_the_toy():
    """10/9 token by token and 11/9 in blocks (Sun et al. 2024); 5/9 if a block stops at the first failure, 12/9 if uncapped."""
    named = {f.name: bugs.exactly(f)[1] for f in PLANNED}
    assert named["block verification, stops at the first failure"] == pytest.approx(5 / 9, abs=1e-12)
    assert named["joint ratio not capped at the end"] == pytest.approx(12 / 9, abs=1e-12)


@pytest.mark.parametrize("fault", [*DRAWN, PLANNED[0], PLANNED[4], PLANNED[6]], ids=lambda f: f.name)
def test_known_faults_fail_on_the_bench(fault):
    """Every probability worked out by hand lies in its interval, of level 1 - 1e-6."""
    report = bugs.on_the_bench(fault)
    assert report.finding.status == FAIL
    by_hand = np.asarray(fault.by_hand, float)
    seen = bugs.first_tokens(report.law_seen, by_hand.ndim)
    for share, probability in zip(seen.ravel(), by_hand.ravel(), strict=True):
        low, high = binomial_interval(round(share * bugs.DRAWS), bugs.DRAWS, 1 - 1e-6)
        assert low <= probability <= high


@pytest.mark.parametrize("way", [iid, point, lambda q: truncated(q, 2)], ids=["sampled", "point", "top 2"])
@pytest.mark.parametrize("name", ["rejection", "block", "coupled"])
def test_our_rules_pass(name, way):
    kw = dict(p=random_law(1, V), q=way(random_law(2, V)), vocab_size=V, num_draws=100_000, key=jax.random.key(3))
    report = audit(rule_sampler(RULES[name]), **kw)
    assert report.finding.status == PASS, report.finding.saw
    assert report.tv < 2 * report.noise and report.law_seen.sum() == pytest.approx(1)


def test_our_rules_pass_on_a_tree():
    fault = bugs.SOUND[1]
    assert bugs.on_the_bench(fault).finding.status == PASS


def theirs(key, draft_tokens, p_rows, q_rows, row_after_refusal=0):
    """A sampler of another library: NumPy, a coin at a time, a list of tokens."""
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    out = []
    for i, x in enumerate(draft_tokens):
        if rng.random() * q_rows[i, x] < p_rows[i, x]:
            out.append(int(x))
            continue
        left = np.maximum(p_rows[i + row_after_refusal] - q_rows[i], 0).astype(float)
        return [*out, rng.choice(V, p=left / left.sum())]
    return [*out, rng.choice(V, p=p_rows[-1].astype(float) / p_rows[-1].sum(dtype=float))]


def off_by_one(*arguments):
    return theirs(*arguments, row_after_refusal=1)


def past_the_vocabulary(key, draft_tokens, p_rows, q_rows):
    return [V]


def bench(sampler, q=iid, num_draws=3000, **facts):
    facts = dict(p=random_law(1, V), vocab_size=V, key=jax.random.key(0)) | facts
    return audit(sampler, q=q(random_law(2, V)), num_draws=num_draws, **facts)


def test_code_that_jax_cannot_trace():
    sound, faulty, broken = bench(theirs), bench(off_by_one), bench(past_the_vocabulary)
    assert sound.finding.status == INCONCLUSIVE and sound.finding.test.p_value > 1e-3  # 3,000 rounds cannot see .02
    assert bench(theirs, smallest=0.2).finding.status == PASS
    assert faulty.finding.status == FAIL and faulty.tv > 3 * faulty.noise
    assert broken.finding.status == FAIL and "3000 outputs" in broken.finding.saw


def test_a_false_report_of_q_is_seen():
    """A sound rule that is told the wrong law of the draft is biased: transformers #47932."""
    told = iid(random_law(2, V))
    report = bench(rule_sampler(RULES["rejection"]), lambda q: truncated(q, 2), 20_000, told=told)
    assert report.finding.status == FAIL
    with pytest.raises(ValueError, match="100000"):
        bench(theirs, parents=np.arange(-1, 9))

"""Rungs: equality with plain decoding, token by token, and what tells a tie of floats from a fault.

Blocks of K + 1 rows and single rows are summed in another order, so two logits that differ by rounding may change places.
At the first difference both tokens are scored again by an independent full pass: within `TIE` it was a tie, above it a bug.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from specjax import keys
from specjax.lossless.finding import Finding
from specjax.lossless.lab import Lab, exactly, judge, skipped
from specjax.lossless.rungs.streams import rows_of
from specjax.lossless.statistics import two_sample
from specjax.lossless.subject import Subject, decoded, laws, varied, without_drafts
from specjax.verify import RULES

TIE = 1e-3
"""Difference of two log-probabilities that rounding explains in float32; 30 times as much in bfloat16."""

PERMUTATIONS = 19_999


def greedy(lab: Lab) -> Finding:
    """Temperature 0, everything else as the subject has it."""
    name, looked = "greedy equality", "tokens at temperature 0 against plain decoding, request by request"
    cold = lab.subject._replace(sampling=lab.subject.sampling._replace(temperature=0.0))
    return equal(lab, name, looked, cold, without_drafts(cold))


def coupled(lab: Lab) -> Finding:
    """The subject's rule if it is coupled; the tokens are then the request's own at any temperature."""
    name, looked = "coupled equality", "tokens under the request's own noise against plain decoding, request by request"
    if not lab.subject.rule.coupled:
        return skipped(name, looked, f"the rule {lab.subject.names.rule} throws coins of its own")
    if lab.subject.sampling.temperature == 0:
        return skipped(name, looked, "temperature 0: see greedy equality")
    return equal(lab, name, looked, lab.subject, without_drafts(lab.subject)._replace(rule=RULES["coupled"]))


def equal(lab: Lab, name: str, looked: str, subject: Subject, plain: Subject) -> Finding:
    """Compare two subjects that must give the same tokens, and triage every first difference."""
    few, new = lab.how.few, lab.how.short
    prompts = varied(subject, few)
    mine, theirs = (rows_of(decoded(s, prompts, key=lab.key(4), new=new)) for s in (subject, plain))
    faults, ties = [], []
    for row, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if a == b:
            continue
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        if at >= min(len(a), len(b)):
            faults.append(f"request {row} ends after {len(a)} tokens, plain decoding after {len(b)}")
            continue
        gap = margin(plain, [*prompts[row], *b[:at]], b[at], a[at], lab.key(4), row)
        where = f"request {row}, token {at}: {a[at]} instead of {b[at]}, margin {gap:.3g}"
        (ties if gap <= tolerance(subject) else faults).append(where)
    total, tied = sum(map(len, mine)), f"; {len(ties)} ties, such as {ties[0]}" if ties else ""
    return exactly(name, looked, faults, f"{few} requests, {total} tokens: equal{tied}", total > 0)


def tolerance(subject: Subject) -> float:
    """How far two logits may lie apart and still be a tie."""
    narrow = any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(subject.params.target))
    return 30 * TIE if narrow else TIE


def margin(plain: Subject, prefix: list[int], right: int, wrong: int, key, row: int) -> float:
    """By how much plain decoding prefers `right`, scored anew without a cache: warped logits, plus the request's noise."""
    each = plain.sampling
    hot = each.temperature > 0
    soft = plain._replace(sampling=each if hot else each._replace(temperature=1.0, top_k=None, top_p=None, min_p=None))
    line = np.asarray([[*prefix, right]], np.int32)
    padded = np.pad(line, ((0, 0), (0, -line.shape[1] % 64)))  # few shapes, few compilations
    score = laws(soft, padded, np.asarray([len(prefix)], np.int32), 1)[0, 0]
    if hot:
        own = keys.request_keys(key, jnp.asarray([row], jnp.int32))
        score = score + np.asarray(keys.gumbel_at(own, jnp.asarray([len(prefix)], jnp.int32), len(score)))[0]
    with np.errstate(invalid="ignore"):
        return float(score[right] - score[wrong])


def two_samples(lab: Lab) -> Finding:
    """Whole sequences against plain decoding with other keys: neither law need be known."""
    name, looked = "two samples", "sequences against plain decoding with other keys: MMD of shared n-grams, within prompts"
    if lab.subject.sampling.temperature == 0:
        return skipped(name, looked, "temperature 0: see greedy equality")
    ours, plain, count = lab.taken, lab.plain, min(lab.how.pairs, len(lab.taken.start))
    sequences = [[s.new(i) for i in range(count)] for s in (ours, plain)]
    strata = [i % len(lab.subject.prompts) for i in range(count)] * 2
    test = two_sample(*sequences, seed=lab.how.seed, permutations=PERMUTATIONS, alpha=lab.how.alpha, strata=strata)
    return judge(name, looked, test, lab.how)

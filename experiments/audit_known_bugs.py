"""How biased was the output of verification faults that shipped, and does the bench see them?

    python experiments/audit_known_bugs.py

Each fault is re-created from its public description (issue, pull request or paper; not by running their code) on the smallest
input on which it can be worked out by hand; the working stands in `FAULTS`.  Three columns must agree: the total variation by
hand, by exact enumeration of the plan (`lossless.law`; faults of randomness have no plan), and over 100,000 audited rounds.
About a minute on 2 CPU cores.  Expected: by hand = exact to 12 digits, the audited law within its interval, every fault
FAIL, and the three sound samplers at the end `pass`.  The same numbers are a test, tests/lossless/test_audit.py.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import trees
from specjax.lossless import law
from specjax.lossless.audit import audit, rule_sampler
from specjax.lossless.drawn import iid, point, without_replacement
from specjax.types import CHILDREN, Plan, Rule
from specjax.verify import RULES, block, recursive, rejection, target_match
from specjax.verify.common import at_tokens, normalised, ratio, residual, top_down
from specjax.verify.draw import invert

DRAWS = 100_000


def rule(plan, **facts):
    """A faulty plan as a Rule."""
    return Rule(plan, accepts=CHILDREN, **facts)


def told(q, right=rejection):
    """The rule is told q [V] for every node, whatever the draft was drawn from."""

    def plan(draft, log_p):
        log_q = jnp.broadcast_to(jnp.log(jnp.asarray(q, log_p.dtype)), (draft.tokens.shape[0], len(q)))
        return right.plan(draft._replace(log_q=log_q), log_p)

    return rule(plan)


def wrong_target(p):
    """The rule verifies against p [V] in place of the rows that plain decoding samples from."""
    return rule(lambda draft, log_p: rejection.plan(draft, jnp.broadcast_to(jnp.log(jnp.asarray(p, log_p.dtype)), log_p.shape)))


def accepting(accept):
    """`rejection` with other acceptance probabilities: (draft, log_p, right ones) -> [N]."""

    def plan(draft, log_p):
        right = rejection.plan(draft, log_p)
        return right._replace(accept=accept(draft, log_p, right.accept).astype(log_p.dtype))

    return rule(plan)


def correcting(correction):
    """`rejection` with another law after a refusal: (draft, log_p, row, right law) -> log law."""

    def plan(draft, log_p):
        right = rejection.plan(draft, log_p)
        return right._replace(correction=lambda row: correction(draft, log_p, row, right.correction(row)))

    return rule(plan)


def twice(draft, log_p, accept):
    """`same_token or u q < p`: the target's own sample gives the draft a second chance."""
    node = jnp.arange(draft.tokens.shape[0], dtype=jnp.int32)
    return 1 - (1 - accept) * (1 - at_tokens(log_p, node, draft.tokens))


def unscaled(draft, log_p):
    """Block verification's thresholds with the residual of token verification."""
    return block.plan(draft, log_p)._replace(correction=rejection.plan(draft, log_p).correction)


def first_failure(draft, log_p):
    """Block verification that stops at the first coin that fails, not at the last that holds."""
    right = block.plan(draft, log_p)
    return top_down(draft, right.accept[::-1], right.correction)


def uncapped(draft, log_p):
    """A backward scan on joint ratios R_i = p(x^i)/q(x^i): keep all with min(1, R_L), else stop at i with
    (min(1, R_i) - S_i) / (1 - S_i), S_i = sum min(R_i p, q); and then the target as it is, not the residual of the block."""
    n = draft.tokens.shape[0]
    node = jnp.arange(n, dtype=jnp.int32)
    q = jnp.exp(draft.log_q)
    r = at_tokens(log_p, node, draft.tokens) / at_tokens(draft.log_q, node, draft.tokens)
    r = jnp.concatenate([jnp.ones(1, log_p.dtype), jnp.cumprod(r)])
    s = jnp.minimum(r[:n, None] * jnp.exp(log_p[:n]), q).sum(-1)
    stop = ratio(jnp.minimum(1, r[:n]) - s, 1 - s)
    accept = jnp.append(jnp.minimum(1, r[n]), stop[:0:-1])

    def correction(row):
        p = jnp.exp(log_p[row])
        left = normalised(jnp.maximum(r[row] * p - q[jnp.minimum(row, n - 1)], 0), p)
        return jnp.log(jnp.where(row < n, left, p))

    deepest = n - 1 - node
    return Plan(accept, n + deepest + 1, jnp.where(node == n - 1, n, node + 1), correction)


def merged(draft, log_p):
    """Two draws of one token are made one attempt."""
    twin = trees.twins(draft.tokens, draft.parents)
    return recursive.plan(draft._replace(parents=jnp.where(twin, -2, draft.parents)), log_p)


def shared_noise(key, tokens, p, q):
    """The Gumbel noise that drew the draft also draws the emitted token.  Draws its own draft: the bench's has no noise."""
    key_noise, key_coin = jax.random.split(key)
    noise = jax.random.gumbel(key_noise, p.shape)
    x = jnp.argmax(jnp.log(q[0]) + noise[0]).astype(jnp.int32)
    kept = jax.random.uniform(key_coin) < ratio(p[0], q[0])[x]
    y = jnp.argmax(jnp.log(residual(p[0], q[0])) + noise[0])
    return jnp.array([jnp.where(kept, x, y), jnp.argmax(jnp.log(p[1]) + noise[1])]), 1 + kept.astype(jnp.int32)


def shared_coin(key, tokens, p, q):
    """The coin that refused the draft also draws from the residual, by inverting its distribution function."""
    key_coin, key_bonus = jax.random.split(key)
    u, x = jax.random.uniform(key_coin), tokens[0]
    kept = u < ratio(p[0], q[0])[x]
    y = jnp.where(kept, x, invert(residual(p[0], q[0]), u))
    return jnp.array([y, jax.random.categorical(key_bonus, jnp.log(p[1]))]), 1 + kept.astype(jnp.int32)


def weak_inequality(key, tokens, p, q):
    """`u <= ratio` with a coin of 8 bits, so that 0 comes once in 256 (once in 2^23 or 2^24 with float32)."""
    key_coin, key_emit = jax.random.split(key)
    u, x = jax.random.randint(key_coin, (), 0, 256).astype(jnp.float32) / 256, tokens[0]
    kept = u <= ratio(p[0], q[0])[x]
    y = jax.random.categorical(key_emit, jnp.log(jnp.where(kept, p[1], residual(p[0], q[0]))))
    return jnp.array([jnp.where(kept, x, y), y]), 1 + kept.astype(jnp.int32)


class Fault(NamedTuple):
    """A fault, where it was, an input that shows it, and its output law worked out by hand."""

    name: str
    source: str
    faulty: Rule | Callable  # a plan, or a sampler where the fault is one of randomness
    p: Callable
    q: Callable
    by_hand: np.ndarray  # the law of the first tokens, one axis each
    parents: tuple[int, ...] = (-1,)


def always(*row):
    """One row for all contexts."""
    return lambda prefix: np.array(row, float)


def by_depth(*rows):
    """A row for each depth, the last one for all beyond."""
    return lambda prefix: np.array(rows[min(len(prefix), len(rows) - 1)], float)


HALF, P3, Q3 = always(0.5, 0.5), always(0.1, 0.6, 0.3), always(0.5, 0.25, 0.25)
THIRDS, UNEVEN = (always(1 / 3, 2 / 3), iid(always(2 / 3, 1 / 3))), ((1 / 9, 2 / 9), (1 / 3, 1 / 3))
BY_RATIO = iid(Q3)  # refused only when 0 was drawn, .5 (1 - .1/.5) = .4; the residual is (0, .35, .05)/.4 = (0, .875, .125)

FAULTS = [
    # The draft is always 0; kept with (1/2)/(3/4) = 2/3; the residual of (1/2, 1/2) - (3/4, 1/4) is all on 1.
    Fault(
        "argmax draft, softmax q", "transformers #32867", told([0.75, 0.25]), HALF, point(always(0.75, 0.25)), [2 / 3, 1 / 3]
    ),
    # A draft of top-k 1 reported with its raw law, here p itself: p/q = 1, always kept.
    Fault("top-k draft, raw q", "transformers #47932", told([0.5, 0.5]), HALF, point(HALF), [1, 0]),
    # 0 refused: T = E_0/.5 is exponential of rate 1, and by lack of memory E_i = T/4 + F_i.  Token 2 wins iff
    # E_1/.875 > E_2/.125, F_1 > 7 F_2 + 1.5 T: probability (1/8)(1/2.5) = .05, not .125.  1: .25 + .4 (.95) = .63.
    Fault("one Gumbel noise for draft and emission", "vLLM #47386", shared_noise, P3, BY_RATIO, [0.1, 0.63, 0.27]),
    # Right: T first, p^2 = (16, 9, 4, 1)/30, top-p .8 keeps 2: (.64, .36).  Wrong: .4 + .3 < .8 keeps 3: (16, 9, 4)/29.
    Fault(
        "top-p before temperature (T .5, top-p .8)",
        "tpu-inference, by reading",
        wrong_target([16 / 29, 9 / 29, 4 / 29, 0]),
        always(0.64, 0.36, 0, 0),
        iid(always(0.25, 0.25, 0.25, 0.25)),
        [16 / 29, 9 / 29, 4 / 29, 0],
    ),
    # Kept with 1 - (1 - 1/2)^2 = 3/4; the residual of a point mass at 0 is all on 1.
    Fault("same token or ratio", "rtp-llm #1295", accepting(twice), HALF, point(always(1, 0)), [3 / 4, 1 / 4]),
    # x_1 = 0, P_1 = 1/2.  Scaled, max(P_1 p - q, 0) = (0, 0, 1/4): Z_1 = 1/4, h_1 = 1/3.  x_2 = 1 (1/4) has P_2 = 1: kept.
    # x_2 = 0 (3/4) has P_2 = 0: 1/3 of it, 1/4, keep x_1 and emit 2; unscaled, (0, 1/4, 1/2) emits 1 for 1/12 of them.
    Fault(
        "block verification, residual not scaled",
        "vllm-ascend #7807",
        rule(unscaled),
        by_depth((0.5, 0.5, 0), (0, 0.5, 0.5)),
        iid(by_depth((1, 0, 0), (0.75, 0.25, 0))),
        [[0, 1 / 4 + 1 / 12, 1 / 4 - 1 / 12], [0, 1 / 4, 1 / 4], [0, 0, 0]],
        (-1, 0),
    ),
    # Kept 1/2; refused 1/2, then the next row (3/4, 1/4) emits: 1/2 + 3/8.
    Fault(
        "the next row after a refusal",
        "openvino.genai #4190",
        correcting(lambda draft, log_p, row, right: log_p[jnp.minimum(row + 1, log_p.shape[0] - 1)]),
        by_depth((0.5, 0.5), (0.75, 0.25)),
        point(always(1, 0)),
        [7 / 8, 1 / 8],
    ),
    # Children 0 and 1 for certain.  0 kept with .2/.5; the residual is all on 2, so 1 is never kept and 2 is emitted.
    Fault(
        "softmax q on top-k children",
        "a trap of top-k trees",
        told([0.5, 0.3, 0.2], recursive),
        always(0.2, 0.3, 0.5),
        point(always(0.5, 0.3, 0.2)),
        [0.4, 0, 0.6],
        (-1, -1),
    ),
    # p(0) = 0 yet the coin 0, 1 of 256, keeps it.
    Fault("u <= ratio", "SGLang #35771", weak_inequality, always(0, 1), point(always(1, 0)), [1 / 256, 255 / 256]),
    # Every draft is kept: the law is q.
    Fault(
        "a coin that is always 0",
        "vllm-ascend #13730",
        accepting(lambda d, p, a: jnp.ones_like(a)),
        P3,
        BY_RATIO,
        [0.5, 0.25, 0.25],
    ),
    # h_1 is 1 after x_1 = 1, and after 0 (P_1 = 1/2, Z_1 = 0) it is 0: then 1 is emitted, so 0 never comes out first; after
    # 1, P_2 = 1/2 for x_2 = 0, else 1: as p has it, (1/3, 2/3).  E[tau] = 1/3 + (1/3)(2/3)(1/2) + (1/3)(1/3) = 5/9.
    Fault(
        "block verification, stops at the first failure",
        "a trap of this rule",
        rule(first_failure),
        *THIRDS,
        [[0, 0], [1 / 3, 2 / 3]],
        (-1, 0),
    ),
    # R = p/q joint is 1/4, 1, 1, 4 for 00, 01, 10, 11, drawn 4, 2, 2, 1 of 9.  Kept: 1, 2, 2, 1 of them.
    # The other 3 stop at i = 1 with (1/2 - 1/2)/(1/2) = 0, so all at 0, and emit 1 first: (1/9, 2/9, 2/9 + 1/9, 1/9 + 2/9).
    Fault("joint ratio not capped at the end", "HSD, arXiv 2601.05724", rule(uncapped), *THIRDS, UNEVEN, (-1, 0)),
    # Kept sum min(p, q) = .6: (.1, .25, .25), and .4 p.
    Fault(
        "the target in place of the residual",
        "a classic",
        correcting(lambda d, p, row, r: p[row]),
        P3,
        BY_RATIO,
        [0.14, 0.49, 0.37],
    ),
    # Second draws 0, 1, 2 with .5, .25, .25 after the refusal of 0: the twin 0 is not tried, so (0, .875, .125) emits; 1 is
    # kept, 2 is kept with 1/2 and else 1 is emitted.  1: .5 (.875) + .25 + .125 = .8125, where .875 is right.
    Fault("twins merged", "a trap of i.i.d. trees", rule(merged), P3, BY_RATIO, [0.1, 0.575, 0.325], (-1, -1)),
    # The second draw comes from (0, .5, .5) but is verified with (.5, .25, .25): 2 is kept with 1/2 and else 1 is emitted.
    Fault(
        "q not renewed without replacement",
        "a trap of such trees",
        told([0.5, 0.25, 0.25], recursive),
        P3,
        without_replacement(Q3),
        [0.1, 0.25 + 0.4 * 0.75, 0.25 + 0.4 * 0.25],
        (-1, -1),
    ),
    # 0 refused means u uniform on [.2, 1): token 1 comes for u < .875, (.875 - .2)/.8 = .84375.
    Fault("the coin reused for the residual", "SGLang #7207", shared_coin, P3, BY_RATIO, [0.1, 0.5875, 0.3125]),
    # p(x) is set to 0 before the test that uses it: never kept, and the residual is all on 1.
    Fault("p zeroed before the test", "vllm-ascend #2881", accepting(lambda d, p, a: 0 * a), HALF, point(always(1, 0)), [0, 1]),
]

SOUND = [
    Fault("rejection", "", RULES["rejection"], P3, BY_RATIO, [0.1, 0.6, 0.3]),
    Fault("without replacement", "", recursive, P3, without_replacement(Q3), [0.1, 0.6, 0.3], (-1, -1)),
    # z-lab/dflash #74 and others called this biased; it is not where the target's own sample is emitted on both branches.
    Fault("exact match with the target's sample", "", target_match, P3, BY_RATIO, [0.1, 0.6, 0.3]),
]


def first_tokens(joint, depth):
    """The law of the first `depth` tokens."""
    return joint.sum(tuple(range(depth, joint.ndim)))


def exactly(fault):
    """The exact law of as many tokens as the hand's, and E[accepted]; None for a fault of randomness."""
    if not isinstance(fault.faulty, Rule):
        return None
    with jax.enable_x64(True):
        result = law.exact(fault.faulty, np.asarray(fault.parents, np.int32), fault.p, fault.q, np.shape(fault.by_hand)[-1])
    return first_tokens(result.joint, np.ndim(fault.by_hand)), result.accepted


def on_the_bench(fault, num_draws=DRAWS, seed=0):
    """The audit of a fault."""
    parents = np.asarray(fault.parents, np.int32)
    sampler = rule_sampler(fault.faulty, parents) if isinstance(fault.faulty, Rule) else fault.faulty
    size = np.shape(fault.by_hand)[-1]
    return audit(sampler, p=fault.p, q=fault.q, vocab_size=size, num_draws=num_draws, key=jax.random.key(seed), parents=parents)


def bias(fault, seen):
    """Total variation from the target's own law of the first tokens."""
    by_hand = np.asarray(fault.by_hand, float)
    return np.abs(seen - law.truth(fault.p, by_hand.shape[-1], by_hand.ndim)).sum() / 2


def table():
    """The whole comparison, as markdown."""
    lines = ["| fault | where | TV by hand | TV exact | TV audited | p-value | verdict |", "|---" * 7 + "|"]
    for seed, fault in enumerate([*FAULTS, *SOUND]):
        exact, report = exactly(fault), on_the_bench(fault, seed=seed)
        audited = bias(fault, first_tokens(report.law_seen, np.ndim(fault.by_hand)))
        sure = f"{bias(fault, exact[0]):.4f}" if exact else "no plan"
        p_value = f"{report.finding.test.p_value:.1g}" if report.finding.test.p_value > 0 else "< 1e-300"
        numbers = (f"{bias(fault, np.asarray(fault.by_hand)):.4f}", sure, f"{audited:.4f}", p_value)
        lines.append(f"| {' | '.join((fault.name, fault.source, *numbers, report.finding.status))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())

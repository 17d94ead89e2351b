"""Methods side by side with plain decoding: the same prompts, one after the other, on the same machine.

    for each batch of prompts: plain, method 1, method 2, ...      so that whatever else the machine does hits all alike

The first run of every shape compiles and is thrown away.  A run's seconds are those of the whole call, prompt included.
`itl_ms` and `itl_speedup` leave the prompt out, which costs all methods alike and weighs the more the shorter answers are.
The target's pass and the drafter's work are timed apart, on a state halfway through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import api, decode, keys, timing
from specjax.api import Completion, Prompt
from specjax.drafters.base import LoadedDrafter
from specjax.metrics import Statistics, merge
from specjax.models.load import LM
from specjax.sampling import SamplingParams
from specjax.timing import PassTimes
from specjax.types import Array

Progress = Callable[[int, int, str], None]  # (done, total, what comes next)


class Contender(NamedTuple):
    """A method as it is measured."""

    method: str
    loaded: LoadedDrafter
    rule: str  # a key of RULES


class Work(NamedTuple):
    """What every contender is given."""

    prompts: Sequence[Prompt]
    key: Array  # typed; each prompt's own is folded from it by its index, whatever the batch size
    max_new_tokens: int = 128
    sampling: SamplingParams = SamplingParams()
    stop: Sequence[str] = ()
    batch_size: int = 1  # prompts decoded together


class Interval(NamedTuple):
    """A ratio of sums and the 95 % percentile bootstrap interval over prompts (or batches, where these are larger)."""

    mean: float
    low: float
    high: float


class Sample(NamedTuple):
    """One contender on one batch of prompts."""

    completions: list[Completion]
    prefill_seconds: float  # the prompt's passes
    decode_seconds: float  # all rounds, and the text

    @property
    def seconds(self) -> float:
        """The whole call."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def num_tokens(self) -> int:
        """Tokens emitted."""
        return sum(len(c.tokens) for c in self.completions)


class Result(NamedTuple):
    """What was measured of one contender."""

    contender: Contender
    temperature: float
    stats: Statistics  # pooled over all rounds of all prompts
    tau: Interval  # its mean_acceptance_length
    tokens_per_second: float  # of whole calls
    prefill_ms: float  # mean of a batch
    itl_ms: float  # decoding time per emitted token
    speedup: Interval  # of seconds per token, over plain
    itl_speedup: Interval  # the same of decoding alone
    same_tokens_as_plain: bool | None  # None where the rule does not promise it
    lossless: bool
    samples: list[Sample]  # one a batch, in the order of the prompts
    passes: PassTimes | None = None  # where they were asked for


def compare(
    lm: LM, contenders: Sequence[Contender], work: Work, *, progress: Progress = lambda done, total, label: None
) -> list[Result]:
    """Measure plain decoding and every contender; results in that order, plain first.

    `progress` is called before every run and at the end.  Raises ValueError for bad input and FloatingPointError where the
    target's logits hold NaN or inf, one line each.
    """
    coupled = any(api.find_rule(c.rule).coupled for c in contenders)  # then plain has to read the same noise
    field = [Contender("plain", api.load_drafter("plain", lm), "coupled" if coupled else "rejection"), *contenders]
    for contender in contenders:  # before anything is measured
        check(lm, contender)
    batches = split(lm, work)
    samples: list[list[Sample]] = [[] for _ in field]
    warm = set()
    for number, batch in enumerate(batches):
        for i, contender in enumerate(field):
            progress(number * len(field) + i, len(batches) * len(field), contender.method)
            sample, shape = _measure(lm, contender, batch)
            if (i, *shape) not in warm:
                warm.add((i, *shape))
                sample, _ = _measure(lm, contender, batch)
            samples[i].append(sample)
    progress(len(batches) * len(field), len(batches) * len(field), "done")
    return [_result(c, s, samples[0], work.sampling) for c, s in zip(field, samples, strict=True)]


def check(lm: LM, contender: Contender) -> None:
    """Raise ValueError, naming the method, where decoding cannot be built of a contender."""
    try:
        decode.check(lm.model, contender.loaded.drafter, api.find_rule(contender.rule))
    except ValueError as error:
        raise ValueError(f"{contender.method} with rule {contender.rule}: {error}") from None


def split(lm: LM, work: Work) -> list[Work]:
    """Batches, with token ids for prompts and a key a prompt.  All faults of prompts are found here, before the first run."""
    if work.batch_size < 1:
        raise ValueError(f"batch_size={work.batch_size}: decode at least 1 prompt at a time")
    ids = [api.encode(lm, prompt, i) for i, prompt in enumerate(work.prompts)]
    if not ids:
        raise ValueError("no prompts: give at least one")
    own = keys.request_keys(work.key, jnp.arange(len(ids)))
    parts = [slice(i, i + work.batch_size) for i in range(0, len(ids), work.batch_size)]
    return [work._replace(prompts=ids[part], key=own[part]) for part in parts]


def prepare(lm: LM, contender: Contender, batch: Work) -> api.Session:
    """A session in which the batch's prompts have been read and nothing is generated yet."""
    options = dict(key=batch.key, max_new_tokens=batch.max_new_tokens, params=batch.sampling, stop=batch.stop)
    return api.begin(lm, contender.loaded, batch.prompts, rule=contender.rule, **options)


def _measure(lm: LM, contender: Contender, batch: Work) -> tuple[Sample, tuple[int, int]]:
    """One call, timed, and the shape it compiled for: (batch, capacity)."""
    begin = perf_counter()
    session = prepare(lm, contender, batch)
    jax.block_until_ready(session.state[0].cache)
    middle = perf_counter()
    for _ in api.advance(session, api.STOP_STRIDE if batch.stop else session.capacity):
        pass
    completions = [api.complete(session, row) for row in range(len(batch.prompts))]
    end = perf_counter()
    api.require_sound(completions)
    return Sample(completions, middle - begin, end - middle), (len(batch.prompts), session.capacity)


def _result(contender: Contender, samples: list[Sample], plain: list[Sample], sampling: SamplingParams) -> Result:
    rule = api.find_rule(contender.rule)
    tokens = max(1, sum(s.num_tokens for s in samples))
    promised = rule.lossless and (rule.coupled or sampling.temperature == 0)
    return Result(
        contender=contender,
        temperature=sampling.temperature,
        stats=merge([c.stats for s in samples for c in s.completions]),
        tau=tau(samples),
        tokens_per_second=tokens / sum(s.seconds for s in samples),
        prefill_ms=1e3 * sum(s.prefill_seconds for s in samples) / len(samples),
        itl_ms=1e3 * sum(s.decode_seconds for s in samples) / tokens,
        speedup=speedup(plain, samples),
        itl_speedup=speedup(plain, samples, lambda sample: sample.decode_seconds),
        same_tokens_as_plain=same_tokens(plain, samples) if promised else None,
        lossless=rule.lossless,
        samples=samples,
    )


def speedup(
    plain: Sequence[Sample], samples: Sequence[Sample], of: Callable[[Sample], float] = lambda sample: sample.seconds
) -> Interval:
    """Seconds per token of `plain` over those of `samples`, batch by batch the same prompts; `of` says which seconds."""
    seconds = np.asarray([[of(s) for s in several] for several in (plain, samples)])  # [2, batches]
    tokens = np.asarray([[s.num_tokens for s in several] for several in (plain, samples)])

    def ratio(index):  # [..., batches] -> [...]
        cost = seconds[:, index].sum(-1) / np.maximum(tokens[:, index].sum(-1), 1)
        return cost[0] / cost[1]

    return interval(ratio, len(plain))


def tau(samples: Sequence[Sample]) -> Interval:
    """Mean acceptance length: 1 + accepted drafts over rounds."""
    each, names = [[c.stats for c in s.completions] for s in samples], ("num_accepted_draft_tokens", "num_spec_steps")
    accepted, steps = (np.asarray([sum(getattr(one, name) for one in batch) for batch in each]) for name in names)
    return interval(lambda index: 1 + accepted[index].sum(-1) / np.maximum(steps[index].sum(-1), 1), len(samples))


def interval(ratio: Callable, count: int, *, draws: int = 2000, seed: int = 0) -> Interval:
    """`ratio` of all `count` batches, and its percentiles where they are drawn anew, with replacement, `draws` times."""
    each = np.arange(count)
    low, high = np.percentile(ratio(np.random.default_rng(seed).integers(0, count, (draws, count))), [2.5, 97.5])
    return Interval(float(ratio(each)), float(low), float(high))


def same_tokens(plain: Sequence[Sample], samples: Sequence[Sample]) -> bool:
    """Whether every prompt got the tokens that plain decoding gave it."""
    pairs = zip(plain, samples, strict=True)
    return all([c.tokens for c in a.completions] == [c.tokens for c in b.completions] for a, b in pairs)


def pass_times(lm: LM, contender: Contender, work: Work) -> PassTimes:
    """Time the two parts of a round, on the state that decoding the first batch is in about halfway."""
    drafter = contender.loaded.drafter
    session = prepare(lm, contender, split(lm, work)[0])
    next(api.advance(session, max(1, work.max_new_tokens // 2 // (drafter.depth + 1))))
    return timing.pass_times(session.params, session.state[0], target=lm.model, drafter=drafter, rule=session.rule)


def record(result: Result) -> dict:
    """A result as it is written to JSON: no texts, no samples; times of passes are null where they were not taken."""
    stats, passes = result.stats, result.passes
    return {
        "method": result.contender.method,
        "rule": result.contender.rule,
        "num_draft": result.contender.loaded.drafter.depth,
        "temperature": result.temperature,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "tokens_per_step": stats.tokens_per_step,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "per_position_acceptance_rate": stats.per_position_acceptance_rate,
        "tokens_per_second": result.tokens_per_second,
        "t_draft_ms": passes and passes.draft_ms,
        "t_verify_ms": passes and passes.verify_ms,
        "itl_ms": result.itl_ms,
        "prefill_ms": result.prefill_ms,
        "speedup": result.speedup._asdict(),
        "itl_speedup": result.itl_speedup._asdict(),
        "tau": result.tau._asdict(),
        "same_tokens_as_plain": result.same_tokens_as_plain,
        "lossless": result.lossless,
        "num_prompts": sum(len(s.completions) for s in result.samples),
        "num_tokens": sum(s.num_tokens for s in result.samples),
    }

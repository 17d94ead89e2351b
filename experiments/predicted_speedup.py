"""Is the speed-up that was predicted the one that is measured, and is the predicted best K the best one?

Question: for each method, batch and K on this machine: predicted from a fit of passes timed at some of the K and batches, one
overhead of plain decoding's rounds, and acceptance by position and the share of rounds that draft at all, measured once, at
the largest K of batch 1; against decoding itself.  K = 0, not to speculate, is one of the choices.

Command:    python experiments/predicted_speedup.py --model testbed --out predicted.md --figure predicted.png
            ... --model smollm2-135m --weights-dtype bfloat16 --prompts SPEC_BENCH.jsonl --methods ngram,medusa,eagle3
            ... --count 4 --new-tokens 16 --batches 1 --drafts 1,3 --timed-batches 1        # smaller
Run time:   half a minute of one core for each method, K and batch on SmolLM2, most of it compiling
Expected:   README.md beside this file has SmolLM2 with ngram, medusa, eagle3 and dspark, T = 1: median error 2.5 %, worst 6.4 %

Speed is that of full slots: tau over the seconds of a round, as an engine has it that refills them.  A batch that ends with
its slowest request is slower, which is no matter of passes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from trained_methods import contender, loaded_source, source

import specjax
from specjax import bench
from specjax.latency import calibrate
from specjax.sampling import SamplingParams


class Point(NamedTuple):
    """One method, K and batch."""

    method: str
    batch: int
    num_draft: int
    tau: float
    predicted: float  # speed-up over plain decoding
    measured: bench.Interval
    draft_ms: float  # as fitted
    verify_ms: float


def round_seconds(sample):
    """Seconds of a round of a batch: it runs as many as its slowest request."""
    return sample.decode_seconds / max(c.stats.num_spec_steps for c in sample.completions)


def full_slots(plain, samples):
    """Speed-up of slots that never run empty, with its interval over batches."""
    seconds = np.asarray([[round_seconds(s) for s in several] for several in (plain, samples)])
    each = [[c.stats for c in s.completions] for s in samples]
    accepted = np.asarray([sum(one.num_accepted_draft_tokens for one in batch) for batch in each])
    steps = np.asarray([sum(one.num_spec_steps for one in batch) for batch in each])

    def ratio(index):
        tau = 1 + accepted[index].sum(-1) / steps[index].sum(-1)
        return tau * seconds[0, index].mean(-1) / seconds[1, index].mean(-1)

    return bench.interval(ratio, len(samples))


def fits(lm, methods, drafts, works):
    """(PassFit of the target, {method: DraftFit}) from passes timed at these K and in these works, one a batch.

    Methods verify blocks of one width each in their own time, plain decoding its own as often: medians go into the fit, or one
    moment in which the machine did something else would bend it.
    """
    target, own = [], {name: [] for name in methods}
    for batch, work in works.items():
        context = len(bench.split(lm, work)[0].prompts[0]) + work.max_new_tokens // 2
        passes = defaultdict(list)

        def timed(label, one, batch=batch, work=work, passes=passes):
            cost = bench.pass_times(lm, one, work)
            passes[one.loaded.drafter.num_nodes + 1].append(cost.verify_ms)
            print(f"batch {batch} {label}: {cost.draft_ms:.2f} + {cost.verify_ms:.2f} ms", file=sys.stderr, flush=True)
            return cost.draft_ms

        for name in methods:
            timed("plain", bench.Contender("plain", specjax.load_drafter("plain", lm), "rejection"))
            for k in drafts:
                milliseconds = timed(f"{name} K={k}", contender(lm, name, k))
                own[name].append(calibrate.Timing(k, batch, context, 1e-3 * milliseconds))
        target += [calibrate.Timing(width, batch, context, 1e-3 * np.median(ms)) for width, ms in passes.items()]
    return calibrate.fit_pass(target), {name: calibrate.fit_draft(timings) for name, timings in own.items()}


def measure(lm, methods, drafts, work):
    """plain's Result and {(method, K): Result}, prompt by prompt side by side."""
    pairs = [(name, k) for name in methods for k in drafts]
    field = [contender(lm, name, k)._replace(method=f"{name} K={k}") for name, k in pairs]
    show = lambda done, total, label: print(f"{done}/{total} {label}", end="\r", file=sys.stderr, flush=True)
    plain, *results = bench.compare(lm, field, work, progress=show)
    return plain, dict(zip(pairs, results, strict=True))


def share_found(result):
    """The share of rounds in which anything was drafted; 1 where the drafter names no narrow block for the others."""
    if not result.contender.loaded.drafter.widths:
        return 1.0
    return 1 - sum(result.stats.acceptance_histogram_by_draft_length[0]) / result.stats.num_spec_steps


def points(lm, methods, drafts, works, fitted):
    """Predicted and measured, for every method, K and batch."""
    verify, own = fitted
    found, survival, finds = [], {}, {}
    for batch, work in works.items():
        plain, results = measure(lm, methods, drafts, work)
        context = len(bench.split(lm, work)[0].prompts[0]) + work.max_new_tokens // 2
        overhead = np.median([round_seconds(s) for s in plain.samples]) - calibrate.predict(verify, 1, batch, context)
        for name in methods:
            if name not in survival:
                survival[name] = results[name, max(drafts)].stats.per_position_acceptance_rate
                finds[name] = share_found(results[name, max(drafts)])
            tokens = 1 + np.cumsum([0.0, *survival[name]])
            how = dict(batch=batch, context=context, overhead=max(overhead, 0.0), finds=finds[name])
            best = calibrate.predict_speedups(verify, own[name], tokens, **how)
            for k in drafts:
                result = results[name, k]
                draft = calibrate.predict_draft(own[name], k, batch, context)
                passes = calibrate.predict(verify, k + 1, batch, context)
                fast = full_slots(plain.samples, result.samples)
                found.append(Point(name, batch, k, result.tau.mean, best.speedups[k], fast, 1e3 * draft, 1e3 * passes))
    return found


def markdown(found):
    """A line a point, then how far off they are and what the wrong choice of K would cost."""
    lines = ["| method | batch | K | tau | draft + verify ms | predicted | measured [95 %] | error |", "|---" * 8 + "|"]
    for p in found:
        fast = f"{p.measured.mean:.2f} [{p.measured.low:.2f}, {p.measured.high:.2f}]"
        cells = [p.method, p.batch, p.num_draft, f"{p.tau:.2f}", f"{p.draft_ms:.2f} + {p.verify_ms:.2f}"]
        lines.append(
            "| "
            + " | ".join(map(str, [*cells, f"{p.predicted:.2f}", fast, f"{p.predicted / p.measured.mean - 1:+.0%}"]))
            + " |"
        )
    all_of = calibrate.check([p.predicted for p in found], [p.measured.mean for p in found])
    inside = np.mean(np.abs(all_of.error) <= 0.15)
    lines += ["", f"Errors: median {all_of.median:.1%}, worst {all_of.worst:.1%}; {inside:.0%} of points within 15 %.", ""]
    lines += ["| method | batch | predicted best K | measured best K | speed lost by the choice |", "|---" * 5 + "|"]
    for name, batch in dict.fromkeys((p.method, p.batch) for p in found):
        mine = [p for p in found if (p.method, p.batch) == (name, batch)]
        ks, predicted = [0, *(p.num_draft for p in mine)], [1.0, *(p.predicted for p in mine)]
        measured = [1.0, *(p.measured.mean for p in mine)]
        regret = calibrate.check(predicted, measured).regret
        lines.append(f"| {name} | {batch} | {ks[int(np.argmax(predicted))]} | {ks[int(np.argmax(measured))]} | {regret:.1%} |")
    return "\n".join(lines) + "\n"


def figure(found, path):
    """Predicted against measured."""
    import matplotlib.pyplot as plt

    drawing, axis = plt.subplots(figsize=(5, 5))
    for name in dict.fromkeys(p.method for p in found):
        mine = [p for p in found if p.method == name]
        x, y = [p.measured.mean for p in mine], [p.predicted for p in mine]
        spread = np.transpose([[p.measured.mean - p.measured.low, p.measured.high - p.measured.mean] for p in mine])
        axis.errorbar(x, y, xerr=np.maximum(spread, 0), fmt="o", label=name)
    ends = np.asarray(axis.get_xlim())
    for slope in (0.85, 1.0, 1.15):
        axis.plot(ends, slope * ends, color="0.6", linestyle="-" if slope == 1 else ":")
    axis.set(xlabel="measured speed-up", ylabel="predicted speed-up")
    axis.legend()
    drawing.savefig(path, bbox_inches="tight")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source(parser, count=12, new_tokens=48)
    parser.add_argument(
        "--methods", default="ngram,medusa+tree=chain,mtp", help="chains: NAME or NAME+OPTION=VALUE+..., by commas"
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--batches", default="1,2,4")
    parser.add_argument("--drafts", default="1,2,4", help="every K that is decoded with")
    parser.add_argument("--timed-batches", default="1,4", help="those whose passes are timed")
    parser.add_argument(
        "--out", type=Path, default=Path("predicted_speedup.md"), help="the table; .json beside it has the rest"
    )
    parser.add_argument("--figure", type=Path, default=None)
    args = parser.parse_args()
    numbers = lambda text: [int(x) for x in text.split(",")]
    drafts, methods = numbers(args.drafts), args.methods.split(",")
    lm, rows = loaded_source(args)
    prompts = [prompt for _, prompt in rows]
    law = SamplingParams(temperature=args.temperature)
    work = bench.Work(prompts, jax.random.key(0), args.new_tokens, law)
    at = lambda batches: {b: work._replace(batch_size=b) for b in numbers(batches)}
    ends = sorted({drafts[0], drafts[-1]})
    found = points(lm, methods, drafts, at(args.batches), fits(lm, methods, ends, at(args.timed_batches)))
    args.out.write_text(markdown(found), "utf-8")
    points_found = [{**p._asdict(), "measured": p.measured._asdict()} for p in found]
    args.out.with_suffix(".json").write_text(json.dumps(points_found, indent=1) + "\n", "utf-8")
    print(markdown(found))
    if args.figure is not None:
        figure(found, args.figure)


if __name__ == "__main__":
    main()

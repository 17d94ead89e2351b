"""Does the simulator say what the engine does?

Question: throughput and median time between tokens of requests with Poisson arrivals, without drafts and with all K verified:
the simulator, given costs and acceptance that were measured, against the engine.

Command:    python experiments/engine_simulator.py
Run time:   6 minutes of one core beside other work, of which 2 compile
Expected:   the figures of README.md beside this file

On a clock of costs the two agree to the last digit (`tests/engine/test_simulated.py`): what is left here is how well costs are
known.  On a busy machine they move: they are measured before and after each run, and what is said is the mean of both.
"""

from __future__ import annotations

import argparse

import numpy as np
from engine_case import CAPACITY, CHUNK, FILLS, SLOTS, engine_of, kept, loaded_case, requests, source

from specjax.engine.costs import Told, measured_costs, reading_seconds
from specjax.engine.replay import Asked, replay, summary
from specjax.sampling import SamplingParams
from specjax.schedule import policies
from specjax.schedule.simulate import Reading, Server, Trace, Workload, simulate


def servers(case, engine, told, stride, fields):
    """A simulated server for each of `fields` {name: drafted tokens}, as costs are now."""
    common = dict(num_draft=case.num_draft, stride=stride, sampling=SamplingParams(0.8))
    costs, out = measured_costs(engine, told, slots=SLOTS, capacity=CAPACITY, sweeps=1, **common), {}
    for name, told.count in fields.items():
        reading = Reading(CHUNK, FILLS, reading_seconds(engine, chunk=CHUNK, **common))
        out[name] = Server(costs, SLOTS, stride=stride, reading=reading)
    return out


def trace_of(histogram, seed):
    """A trace of rounds in which so many had 0, 1, .. K accepted, in any order."""
    counts = np.asarray(histogram)
    accepted = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    kept = counts[::-1].cumsum()[::-1]
    return Trace(np.broadcast_to(kept[1:] / np.maximum(kept[:-1], 1), (len(accepted), len(counts) - 1)), accepted)


def predicted(server, policy, arrivals, asked, trace, seed):
    """(tokens a second, median seconds between tokens)."""
    prompts, outputs = (np.asarray(x) for x in zip(*((len(q["prompt"]), q["max_new_tokens"]) for q in asked), strict=True))
    report = simulate(Workload(arrivals, prompts, outputs), trace, server, policy, seed=seed)
    return report.throughput, float(np.nanmedian(report.inter_token))


def compared(case, runs, count, rate, new, stride):
    """By field: [real, simulated tokens a second, real, simulated seconds between tokens] of each run, and their errors."""
    told, num_draft = Told(), case.num_draft
    engine = engine_of(case, planner=told, stride=stride)
    policy = {"plain": policies.plain(), "fixed": policies.fixed(num_draft)}
    fields, out = {"plain": None, "fixed": num_draft}, {name: [] for name in policy}
    before = servers(case, engine, told, stride, fields)
    for r in range(runs):
        rng, asked, real = np.random.default_rng(r), requests(case.lm, count, 200 + r, new), {}
        arrivals = np.cumsum(rng.exponential(1 / rate, count))
        for name, told.count in fields.items():
            real[name] = replay(engine, [Asked(float(a), q) for a, q in zip(arrivals, asked, strict=True)])
        after = servers(case, engine, told, stride, fields)
        for name, served in real.items():
            histogram = np.sum([s.request.result.stats.acceptance_histogram for s in served], 0)
            trace = trace_of(histogram, r)
            guess = np.mean([predicted(s[name], policy[name], arrivals, asked, trace, r) for s in (before, after)], 0)
            total = summary(served)
            out[name].append([total.tokens_per_second, guess[0], total.inter_token["p50"], guess[1]])
        before = after
    return {name: errors(rows) for name, rows in out.items()}


def errors(rows):
    """Of the means, and of the worst run."""
    real, guess, gap, gap_guess = np.mean(rows, 0)
    of_runs = np.asarray(rows)[:, 1::2] / np.asarray(rows)[:, ::2] - 1
    return {
        "tokens_per_second": real, "simulated": guess, "error": guess / real - 1, "inter_token_ms": 1e3 * gap,
        "simulated_ms": 1e3 * gap_guess, "inter_token_error": gap_guess / gap - 1,
        "worst_run": np.abs(of_runs).max(0).tolist(), "runs": rows,
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source(parser, "engine_simulator.json")
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--requests", type=int, default=48, help="of a run")
    parser.add_argument("--rate", type=float, default=8.0, help="arrivals a second")
    parser.add_argument("--new", type=int, default=48, help="tokens of each request")
    parser.add_argument("--stride", type=int, default=4)
    args = parser.parse_args()
    case = loaded_case(args)
    kept(args.out, compared(case, args.runs, args.requests, args.rate, args.new, args.stride))


if __name__ == "__main__":
    main()

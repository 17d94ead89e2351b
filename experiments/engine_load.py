"""Does the load decide rightly whether to draft?

Question: plain decoding, all K verified, and lengths by a budget from measured costs (`policies.fixed_budget`), with 1 to 8
requests at once: is the last ever slower than the better of the others, by more than 3 %?

Command:    python experiments/engine_load.py --method eagle3
            ... --repeats 4 --loads 1,8                                                    # smaller
Run time:   8 minutes of one core beside other work, of which 3 compile
Expected:   the figures of README.md beside this file

Times of a busy machine: contenders come in a new order each time, ratios are paired, and plain decoding runs twice over:
its ratio to itself ("null") says what an interval here is worth.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from engine_case import CAPACITY, SLOTS, engine_of, kept, loaded_case, ratio, requests, source, speed

from specjax.engine import PolicyPlanner
from specjax.engine.costs import Told, measured_costs
from specjax.latency.cost_table import draft_seconds, pass_seconds
from specjax.sampling import SamplingParams
from specjax.schedule import policies


def held_seconds(engine, asked, at_once):
    """(seconds, tokens) of requests of which `at_once` are in the engine, the next coming as one ends."""
    begin, left, held = time.perf_counter(), list(reversed(asked)), []
    while left or any(r.result is None for r in held):
        while left and sum(r.result is None for r in held) < at_once:
            held.append(engine.submit(**left.pop()))
        engine.step()
    return time.perf_counter() - begin, sum(len(r.result.tokens) for r in held)


def costs_of(case, stride, sweeps):
    """Measured costs of an engine's rounds."""
    told = Told()
    engine = engine_of(case, planner=told, stride=stride)
    return measured_costs(
        engine, told, slots=SLOTS, num_draft=case.num_draft, stride=stride, capacity=CAPACITY, sampling=SamplingParams(0.8),
        sweeps=sweeps,
    )  # fmt: skip


def by_load(case, costs, loads, repeats, new, stride):
    """The contenders at several loads, in a new order each time: load-aware lengths over the better of the others."""
    planner = PolicyPlanner(policies.fixed_budget(), costs, slots=SLOTS, num_draft=case.num_draft)
    field = {
        "plain": engine_of(case, case.plain, stride=stride),
        "fixed": engine_of(case, stride=stride),
        "load-aware": engine_of(case, planner=planner, stride=stride),
        "plain again": engine_of(case, case.plain, stride=stride),
    }
    out, rng = {}, np.random.default_rng(0)
    for at_once in loads:
        taken = {name: [] for name in field}
        for r in range(repeats + 1):  # the first warms up
            asked = requests(case.lm, max(3, 3 * at_once // 2), 100 + r, new)
            for name in rng.permutation(list(field)).tolist():
                taken[name] += [held_seconds(field[name], asked, at_once)]
        taken = {name: t[1:] for name, t in taken.items()}
        rows = {name: speed(t) for name, t in taken.items()}
        better = max(("plain", "fixed"), key=rows.__getitem__)
        out[at_once] = {"tokens_per_second": rows, "better": better, "ratio": ratio(taken["load-aware"], taken[better])}
        out[at_once]["fixed_over_plain"] = ratio(taken["fixed"], taken["plain"])
        out[at_once]["null"] = ratio(taken["plain again"], taken["plain"])
    return out


def shown(costs):
    """A table of costs in milliseconds."""
    one = lambda f, n: round(1e3 * float(f(n)), 3)
    verify = {
        n: one(lambda n: pass_seconds(costs, np.asarray(n), np.asarray(60 * min(n, SLOTS))), n) for n in (1, 2, 4, 8, 20, 40)
    }
    return {"verify_ms": verify, "draft_ms": {n: one(lambda n: draft_seconds(costs, np.asarray(n)), n) for n in (1, 2, 4, 8)}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source(parser, "engine_load.json")
    parser.add_argument("--loads", default="1,2,4,8", help="requests at once")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--sweeps", type=int, default=3, help="how often costs are measured")
    parser.add_argument("--new", type=int, default=48, help="tokens of each request")
    parser.add_argument("--stride", type=int, default=4)
    args = parser.parse_args()
    case = loaded_case(args)
    costs, loads = costs_of(case, args.stride, args.sweeps), [int(x) for x in args.loads.split(",")]
    kept(args.out, {"costs": shown(costs), "by_load": by_load(case, costs, loads, args.repeats, args.new, args.stride)})


if __name__ == "__main__":
    main()

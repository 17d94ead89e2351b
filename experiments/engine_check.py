"""Is a request in a busy engine the request alone, is the engine faster than one by one, and does the load decide rightly?

Question: (1) 200 requests with Poisson arrivals, mixed sampling, a tenth cancelled and 2 % invalid, in 8 slots, by a planner
that drafts, drafts less and stops drafting at random: is every output that of its solo run?  (2) Tokens a second against
serving the same requests one by one, in the same run.  (3) Plain decoding, all K verified, and lengths by a budget from
measured costs (`policies.fixed_budget`), with 1 to 8 requests at once: is the last ever slower than the better of the others?
(4) The simulator, given the measured costs and acceptance, against the engine on one load.

Command:    python experiments/engine_check.py --json engine.json
            ... --parts equality --requests 20                                         # smaller
Run time:   15 minutes of one core beside other work, of which 8 compile
Expected:   the figures of README's section "Serving"

On the testbed with its packaged `mtp`.  Times of a busy machine: contenders take turns, ratios are paired.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax import bench, keys
from specjax.console import keep_compiled
from specjax.engine import Engine, Plan, PolicyPlanner
from specjax.engine.costs import Told, measured_costs
from specjax.engine.replay import Asked, replay, summary
from specjax.latency.cost_table import draft_seconds, pass_seconds
from specjax.models.fetch import cache_dir
from specjax.sampling import SamplingParams
from specjax.schedule import policies
from specjax.schedule.simulate import Server, Trace, Workload, simulate
from specjax.types import Params
from specjax.verify import RULES

SLOTS, CAPACITY, PACKS, NUM_DRAFT = 8, 256, (1, 2, 5, 10, 20), 4
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(0.7),
    SamplingParams(1.0),
    SamplingParams(1.0, top_p=0.9),
    SamplingParams(0.8, top_k=40, repetition_penalty=1.1),
)
INVALID = ({"prompt": []}, {"max_new_tokens": 0}, {"sampling": SamplingParams(-1.0)}, {"prompt": [1, 1 << 20]})
SNIPPETS = (
    "import os\n\ndef main(args):\n",
    "class Node:\n    def __init__(self, value",
    "for i in range(",
    "try:\n    import json\nexcept ImportError:\n",
    "def read(path):\n    with open(path) as f:\n",
    "    if not isinstance(x, int):\n        raise TypeError(",
    '    """Return the',
    "from collections import",
)


class Case(NamedTuple):
    """A target with a drafter."""

    lm: specjax.models.load.LM
    loaded: specjax.drafters.base.LoadedDrafter


class Roving:
    """A planner that draws what to do: whole drafts, part of them, none, and none with the drafter left behind."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def plan(self, active, able, cached):
        kind = self.rng.integers(0, 6)
        lengths = self.rng.integers(0, NUM_DRAFT + 1, len(active)) if kind < 4 else None
        return Plan(lengths, keep_up=kind != 5 or self.rng.random() < 0.8)

    def learn(self, drafted, accepted):
        pass

    def admit(self, slot):
        pass


def engine_of(case, *, rule, planner=None, stride=1, slots=SLOTS):
    """An engine; those of one rule, stride and drafter share their programs."""
    lm, loaded = case
    return Engine(
        Params(lm.params, loaded.params), target=lm.model, drafter=loaded.drafter, rule=RULES[rule], tokenizer=lm.tokenizer,
        slots=slots, capacity=CAPACITY, stride=stride, packs=PACKS, planner=planner, max_waiting=1 << 20,
    )  # fmt: skip


def prompt(lm, i, rng):
    """Token ids of a snippet, cut at random: prompts of 1 to some 20 tokens."""
    ids = lm.tokenizer.encode(SNIPPETS[i % len(SNIPPETS)])
    return ids[: int(rng.integers(1, len(ids) + 1))]


# 1. Equality.


def equality(case, count, rate, seed):
    """Requests through a busy engine, then each alone."""
    rng, lm = np.random.default_rng(seed), case.lm
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    asked, invalid = [], set(rng.choice(count, max(1, count // 50), replace=False).tolist())
    for i, at in enumerate(arrivals):
        request = dict(
            prompt=prompt(lm, i, rng), sampling=SAMPLINGS[int(rng.integers(len(SAMPLINGS)))], key=jax.random.key(i),
            max_new_tokens=int(rng.choice([1, 8, 24, 48])),
        )  # fmt: skip
        cancel = float(rng.exponential(0.1)) if i not in invalid and rng.random() < 0.1 else None
        broken = INVALID[i % len(INVALID)] if i in invalid else {}
        asked.append(Asked(float(at), {**request, **broken}, cancel))
    served = replay(engine_of(case, rule="coupled", planner=Roving(seed)), asked)
    total, differ = summary(served), []
    for i, (one, was) in enumerate(zip(asked, served, strict=True)):
        if was.request is None:
            continue
        own, result = one.request, was.request.result
        alone = specjax.generate(
            lm, case.loaded, [own["prompt"]], key=own["key"][None], max_new_tokens=own["max_new_tokens"], rule="coupled",
            sampling=own["sampling"],
        )[0]  # fmt: skip
        n = len(result.tokens) if result.finish_reason == "cancelled" else len(alone.tokens)
        if result.tokens != alone.tokens[:n]:
            differ.append({"request": i, **margin(case, own, alone.tokens, result.tokens)})
    accounted = total.finished + total.cancelled + total.failed + total.invalid + total.refused
    return {
        "requests": count,
        "accounted": accounted,
        "finished": total.finished,
        "cancelled": total.cancelled,
        "invalid": total.invalid,
        "expected_invalid": len(invalid),
        "tau": total.tau,
        "different": differ,
    }


def margin(case, own, alone, other):
    """At the first difference: by how much what each took is apart, logit over temperature plus the request's noise."""
    lm, text = case.lm, list(own["prompt"])
    at = next((i for i, (a, b) in enumerate(zip(alone, other, strict=False)) if a != b), min(len(alone), len(other)))
    if at >= min(len(alone), len(other)):
        return {"at": at, "margin": None}
    tokens = jnp.asarray([text + alone[:at]])
    logits = lm.model.apply(lm.params, tokens, lm.model.init_cache(1, tokens.shape[1]))[0].logits[0, -1]
    heat = own["sampling"].temperature
    noise = keys.gumbel_at(own["key"][None], jnp.asarray([tokens.shape[1]]), lm.model.vocab_size)[0]
    score = np.asarray(logits / heat + noise if heat else logits)
    return {"at": at, "margin": float(abs(score[alone[at]] - score[other[at]])), "temperature": heat}


# 2. Against one by one.


def batch_of(lm, count, seed, new):
    """Requests that are there at once, half of them greedy."""
    rng = np.random.default_rng(seed)
    return [
        dict(prompt=prompt(lm, i, rng), sampling=SamplingParams(0.8 * (i % 2)), key=jax.random.key(i), max_new_tokens=new,
             eos_ids=())
        for i in range(count)
    ]  # fmt: skip


def engine_seconds(engine, asked):
    """(seconds, tokens) of requests that are there at once."""
    begin = time.perf_counter()
    held = [engine.submit(**request) for request in asked]
    engine.drain()
    return time.perf_counter() - begin, sum(len(r.result.tokens) for r in held)


def solo_seconds(case, asked):
    """(seconds, tokens) of the same requests one by one."""
    begin, tokens = time.perf_counter(), 0
    for one in asked:
        done = specjax.generate(
            case.lm, case.loaded, [one["prompt"]], key=one["key"][None], max_new_tokens=one["max_new_tokens"],
            sampling=one["sampling"], rule="rejection",
        )  # fmt: skip
        tokens += len(done[0].tokens)
    return time.perf_counter() - begin, tokens


def ratio(first, other):
    """Tokens a second of `first` over those of `other`, [(seconds, tokens)] run by run, with a paired interval."""
    a, b = (np.asarray(x, np.float64) for x in (first, other))
    speed = lambda x, i: x[i, 1].sum(-1) / x[i, 0].sum(-1)
    return bench.interval(lambda i: speed(a, i) / speed(b, i), len(a))._asdict()


def one_by_one(case, plain, repeats, count, new):
    """Engines of 8 slots against `generate` of one prompt at a time, by turns."""
    out = {}
    for name, one in (("plain", plain), ("mtp", case)):
        engines = {f"stride {s}": engine_of(one, rule="rejection", stride=s) for s in (1, 4)}
        taken = {n: [] for n in ("alone", *engines)}
        for r in range(repeats + 1):  # the first warms up
            asked = batch_of(one.lm, count, r, new)
            times = {"alone": solo_seconds(one, [{k: v for k, v in x.items() if k != "eos_ids"} for x in asked])}
            times |= {n: engine_seconds(engine, asked) for n, engine in engines.items()}
            for n, t in times.items():
                taken[n] += [t] if r else []
        rows = {n: float(np.sum([x[1] for x in t]) / np.sum([x[0] for x in t])) for n, t in taken.items()}
        out[name] = {"tokens_per_second": rows, **{n: ratio(taken[n], taken["alone"]) for n in engines}}
    return out


def passes(lm, calls=60):
    """Milliseconds of a target's pass [batch, width], median and least: what an engine's rounds cannot be faster than."""
    run = jax.jit(lambda p, tokens, cache: lm.model.apply(p, tokens, cache), donate_argnames="cache")
    out = {}
    for width in (1, NUM_DRAFT + 1):
        for batch in (1, SLOTS):
            cache = lm.model.init_cache(batch, CAPACITY)._replace(length=jnp.full(batch, 60))
            tokens, times = jnp.ones((batch, width), jnp.int32), []
            for _ in range(calls):
                begin = time.perf_counter()
                given, cache = run(lm.params, tokens, cache)
                jax.block_until_ready(given.logits)
                times.append(1e3 * (time.perf_counter() - begin))
            out[f"[{batch}, {width}]"] = {"median": float(np.median(times[3:])), "least": float(min(times[3:]))}
    return out


# 3. By load.


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
    engine = engine_of(case, rule="rejection", planner=told, stride=stride)
    return measured_costs(
        engine, told, slots=SLOTS, num_draft=NUM_DRAFT, stride=stride, capacity=CAPACITY, sampling=SamplingParams(0.8),
        sweeps=sweeps,
    )  # fmt: skip


def by_load(case, plain, costs, repeats, new, stride):
    """Plain, all K, and a planner, at several loads by turns; the planner over the better of the others."""
    planner = lambda: PolicyPlanner(policies.fixed_budget(probe_every=1 << 30), costs, slots=SLOTS, num_draft=NUM_DRAFT)
    field = {
        "plain": engine_of(plain, rule="rejection", stride=stride),
        "fixed": engine_of(case, rule="rejection", stride=stride),
        "load-aware": engine_of(case, rule="rejection", planner=planner(), stride=stride),
    }
    out = {}
    for at_once in (1, 2, 4, 8):
        taken = {name: [] for name in field}
        for r in range(repeats + 1):
            asked = batch_of(case.lm, max(3, 3 * at_once // 2), 100 + r, new)
            for name in sorted(field, key=lambda n, r=r: (list(field).index(n) + r) % len(field)):
                taken[name].append(held_seconds(field[name], asked, at_once))
        taken = {name: t[1:] for name, t in taken.items()}
        rows = {name: float(np.sum([x[1] for x in t]) / np.sum([x[0] for x in t])) for name, t in taken.items()}
        better = max(("plain", "fixed"), key=rows.__getitem__)
        out[at_once] = {"tokens_per_second": rows, "better": better, "ratio": ratio(taken["load-aware"], taken[better])}
        out[at_once]["fixed_over_plain"] = ratio(taken["fixed"], taken["plain"])
    return out


# 4. The simulator.


def simulated(case, plain, rounds, count, rate, new, stride):
    """Throughput and median inter-token latency on Poisson arrivals: engine, simulator, error; costs measured in between."""
    field = {
        "plain": (engine_of(plain, rule="rejection", stride=stride), policies.plain()),
        "fixed": (engine_of(case, rule="rejection", stride=stride), policies.fixed(NUM_DRAFT)),
    }
    out = {name: [] for name in field}
    for r in range(rounds + 1):
        costs, rng = costs_of(case, stride, 1), np.random.default_rng(r)
        arrivals = np.cumsum(rng.exponential(1 / rate, count))
        requests = batch_of(case.lm, count, 200 + r, new)
        for name, (engine, policy) in field.items():
            served = replay(engine, [Asked(float(a), q) for a, q in zip(arrivals, requests, strict=True)])
            total = summary(served)
            done = [s.request.result.stats.acceptance_histogram for s in served]
            guess = predicted(costs, policy, arrivals, requests, np.sum(done, 0) if name == "fixed" else None, engine, r)
            if r:
                out[name].append([total.tokens_per_second, guess[0], total.inter_token["p50"], guess[1]])
    table = {}
    for name, rows in out.items():
        real, guess, gap, gap_guess = np.mean(rows, 0)
        table[name] = {
            "tokens_per_second": real, "simulated": guess, "error": guess / real - 1, "inter_token_ms": 1e3 * gap,
            "simulated_ms": 1e3 * gap_guess, "inter_token_error": gap_guess / gap - 1, "runs": rows,
        }  # fmt: skip
    return table


def predicted(costs, policy, arrivals, requests, histogram, engine, seed):
    """(tokens a second, median seconds between tokens) of the simulator."""
    counts = np.ones(NUM_DRAFT + 1, int) if histogram is None else np.asarray(histogram)
    accepted = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    kept = counts[::-1].cumsum()[::-1]
    trace = Trace(np.broadcast_to(kept[1:] / np.maximum(kept[:-1], 1), (len(accepted), NUM_DRAFT)), accepted)
    prompts, outputs = (
        np.asarray([f(q) for q in requests]) for f in (lambda q: len(q["prompt"]), lambda q: q["max_new_tokens"])
    )
    report = simulate(
        Workload(arrivals, prompts, outputs), trace, Server(costs, SLOTS, prefill_chunk=4 * 64), policy, seed=seed
    )
    return report.throughput, float(1 / np.nanmedian(report.user_speed))


def shown(costs):
    """A table of costs in milliseconds."""
    one = lambda f, n: round(1e3 * float(f(n)), 3)
    verify = {
        n: one(lambda n: pass_seconds(costs, np.asarray(n), np.asarray(60 * min(n, SLOTS))), n) for n in (1, 2, 4, 8, 20, 40)
    }
    return {"verify_ms": verify, "draft_ms": {n: one(lambda n: draft_seconds(costs, np.asarray(n)), n) for n in (1, 2, 4, 8)}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="equality,passes,one_by_one,by_load,simulated")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=40.0, help="arrivals a second of the equality part")
    parser.add_argument("--load-rate", type=float, default=8.0, help="arrivals a second against the simulator")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--stride", type=int, default=4, help="of by_load and simulated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path("engine.json"))
    args = parser.parse_args()
    keep_compiled(cache_dir() / "compiled")
    lm = specjax.load("testbed")
    case = Case(lm, specjax.load_drafter("mtp", lm, num_draft=NUM_DRAFT))
    plain, parts, out = Case(lm, specjax.load_drafter("plain", lm)), args.parts.split(","), {}

    def keep(name, value):
        out[name] = value
        args.json.write_text(json.dumps(out, indent=1) + "\n", "utf-8")
        print(name, json.dumps(value), flush=True)

    if "equality" in parts:
        keep("equality", equality(case, args.requests, args.rate, args.seed))
    if "passes" in parts:
        keep("passes", passes(lm))
    if "one_by_one" in parts:
        keep("one_by_one", one_by_one(case, plain, args.repeats, 16, args.new))
    if "by_load" in parts:
        costs = costs_of(case, args.stride, 3)
        keep("costs", shown(costs))
        keep("by_load", by_load(case, plain, costs, args.repeats, args.new, args.stride))
    if "simulated" in parts:
        keep("simulated", simulated(case, plain, 3, 48, args.load_rate, args.new, args.stride))


if __name__ == "__main__":
    main()

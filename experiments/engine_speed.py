"""Is the engine faster than serving one by one?

Question: tokens a second of an engine of 8 slots against `generate` of one prompt at a time, in the same run, with and without
a drafter, the host looking every round and every four; and what a target's pass takes, which rounds cannot be faster than.

Command:    python experiments/engine_speed.py
Run time:   5 minutes of one core beside other work
Expected:   the figures of README.md beside this file

Times of a busy machine: contenders take turns, ratios are paired.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from engine_case import CAPACITY, SLOTS, engine_of, kept, loaded_case, ratio, requests, source, speed

import specjax


def engine_seconds(engine, asked):
    """(seconds, tokens) of requests that are there at once."""
    begin = time.perf_counter()
    held = [engine.submit(**request) for request in asked]
    engine.drain()
    return time.perf_counter() - begin, sum(len(r.result.tokens) for r in held)


def solo_seconds(lm, loaded, asked):
    """(seconds, tokens) of the same requests one by one."""
    begin, tokens = time.perf_counter(), 0
    for one in asked:
        done = specjax.generate(
            lm, loaded, [one["prompt"]], key=one["key"][None], max_new_tokens=one["max_new_tokens"],
            sampling=one["sampling"], rule="rejection",
        )  # fmt: skip
        tokens += len(done[0].tokens)
    return time.perf_counter() - begin, tokens


def one_by_one(case, loaded, repeats, count, new):
    """Engines of 8 slots against one prompt at a time, by turns."""
    engines = {f"stride {s}": engine_of(case, loaded, stride=s) for s in (1, 4)}
    taken = {name: [] for name in ("alone", *engines)}
    for r in range(repeats + 1):  # the first warms up
        asked = requests(case.lm, count, r, new)
        times = {"alone": solo_seconds(case.lm, loaded, asked)}
        times |= {name: engine_seconds(engine, asked) for name, engine in engines.items()}
        for name, t in times.items():
            taken[name] += [t] if r else []
    rows = {name: speed(t) for name, t in taken.items()}
    return {"tokens_per_second": rows, **{name: ratio(taken[name], taken["alone"]) for name in engines}}


def passes(lm, num_draft, calls=60):
    """Milliseconds of a target's pass [batch, width], median and least."""
    run = jax.jit(lambda p, tokens, cache: lm.model.apply(p, tokens, cache), donate_argnames="cache")
    out = {}
    for width in (1, num_draft + 1):
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source(parser, "engine_speed.json")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--requests", type=int, default=16, help="of a run")
    parser.add_argument("--new", type=int, default=48, help="tokens of each")
    args = parser.parse_args()
    case = loaded_case(args)
    contenders = {"plain": case.plain, args.method: case.loaded}
    found = {name: one_by_one(case, one, args.repeats, args.requests, args.new) for name, one in contenders.items()}
    kept(args.out, {"passes": passes(case.lm, case.num_draft), **found})


if __name__ == "__main__":
    main()

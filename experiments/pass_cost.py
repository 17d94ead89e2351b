"""What does a target pass cost by its width, and what does a round spend outside it?

Question: milliseconds of one pass of SmolLM2-135M-Instruct over 1, 2, 4, 8 and 16 tokens (batch 1, about 200 tokens of
context, fp32 and bf16 weights): the table that decides every method.  Then the same widths as whole rounds, drafting
width - 1 arbitrary tokens, for several sampling settings: the difference is what warp, rule, coins and bookkeeping cost.

Command:    python experiments/pass_cost.py
Run time:   about 9 minutes on 2 cores, mostly compiling.
Expected:   width 1 near memory bandwidth (538 MB of fp32 weights a token), a greedy round at most 10 % above its pass.
"""

from __future__ import annotations

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax import decode, keys, sampling, trees
from specjax.drafters.plain import plain
from specjax.types import Draft, Params
from specjax.verify import RULES

SLOTS, CONTEXT = 384, 200
SETTINGS = {
    "greedy": (dict(), "rejection"),
    "T=1": (dict(temperature=1.0), "rejection"),
    "T=.8 top-p .9": (dict(temperature=0.8, top_p=0.9), "rejection"),
    "T=1 coupled": (dict(temperature=1.0), "coupled"),
}


def arbitrary(num_draft):
    """A drafter of fixed tokens: its rounds always verify the full width."""

    def propose(noise, params, state, sequences):
        batch = sequences.length.shape[0]
        parents = jnp.broadcast_to(jnp.asarray(trees.chain(num_draft))[None], (batch, num_draft))
        return Draft(jnp.full((batch, num_draft), 7, jnp.int32), parents), state

    return plain()._replace(propose=propose, num_nodes=num_draft, depth=num_draft)


def passes(lm, width, repeats):
    """A compiled program of `repeats` passes and its arguments."""

    def once(i, carry):
        cache, peak = carry
        tokens = jnp.where(peak == jnp.inf, i, jnp.full((1, width), 5, jnp.int32))
        out, cache = lm.model.apply(lm.params, tokens, cache)
        return cache, out.logits.max()

    program = jax.jit(lambda carry: jax.lax.fori_loop(0, repeats, once, carry), donate_argnums=0)
    cache = lm.model.init_cache(1, SLOTS)._replace(length=jnp.full(1, CONTEXT, jnp.int32))
    return program, (cache, jnp.zeros(()))


def rounds(lm, width, repeats, setting):
    """The same for rounds; the row's length is set back each time, so that all see the same context."""
    drafter = plain() if width == 1 else arbitrary(width - 1)
    kwargs, rule = SETTINGS[setting]
    params = Params(lm.params)
    state = decode.start(
        params, jnp.ones((1, SLOTS), jnp.int32), jnp.full(1, CONTEXT + 1, jnp.int32), jnp.full(1, SLOTS - 20, jnp.int32),
        jnp.full((1, 1), -1), keys.request_keys(jax.random.key(0), jnp.arange(1)),
        sampling.stack([sampling.SamplingParams(**kwargs)], lm.model.vocab_size), target=lm.model, drafter=drafter,
    )  # fmt: skip
    state = state._replace(cache=state.cache._replace(length=jnp.full(1, CONTEXT, jnp.int32)))

    def once(_, state):
        after, _ = decode.round(params, state, target=lm.model, drafter=drafter, rule=RULES[rule])
        back = after.cache._replace(length=state.cache.length)
        return after._replace(length=state.length, status=state.status, cache=back)

    return jax.jit(lambda s: jax.lax.fori_loop(0, repeats, once, s), donate_argnums=0), state


def medians(programs, repeats, turns):
    """Median milliseconds a repetition of each program; they take turns."""
    carries = {name: jax.block_until_ready(program(carry)) for name, (program, carry) in programs.items()}
    times = {name: [] for name in programs}
    for _ in range(turns):
        for name, (program, _) in programs.items():
            began = time.perf_counter()
            carries[name] = jax.block_until_ready(program(carries[name]))
            times[name].append(time.perf_counter() - began)
    return {name: 1e3 * float(np.median(t)) / repeats for name, t in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", default="1,2,4,8,16")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    widths = [int(w) for w in args.widths.split(",")]
    for dtype in ("float32", "bfloat16"):
        lm = specjax.load("smollm2-135m", weights_dtype=dtype)
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(lm.params)) / 1e6
        measure = functools.partial(medians, repeats=args.repeats, turns=args.turns)
        cost = measure({w: passes(lm, w, args.repeats) for w in widths})
        print(f"\n{dtype}, {size:.0f} MB of weights: {size / cost[widths[0]]:.1f} GB/s at width {widths[0]}\n")
        print("| width | " + " | ".join(map(str, widths)) + " |\n|---" + "|---" * len(widths) + "|")
        print("| pass, ms | " + " | ".join(f"{cost[w]:.1f}" for w in widths) + " |")
        print("| in tokens of width 1 | " + " | ".join(f"{cost[w] / cost[widths[0]]:.2f}" for w in widths) + " |")
        for setting in SETTINGS if dtype == "float32" else ["greedy"]:
            programs = {("pass", w): passes(lm, w, args.repeats) for w in widths}
            both = measure(programs | {("round", w): rounds(lm, w, args.repeats, setting) for w in widths})
            extra = [100 * (1 - both["pass", w] / both["round", w]) for w in widths]
            print(f"| round outside the pass, {setting} | " + " | ".join(f"{x:.0f} %" for x in extra) + " |", flush=True)


if __name__ == "__main__":
    main()

"""What does a verification rule cost, in softmaxes, and does its memory grow with the square of the draft?

Question: the time of plan and coins alone, given log_p and log_q, at V = 151,936 (Qwen) and 64 drafted nodes, as a multiple
of one float32 softmax over the same logits [B, 65, V] in the same run; chain rules on a chain, tree rules on a tree of 4, 3
and 4 children.  Warping the logits and the noise that drafting and coupled decoding need stand apart.  Then the temporary
memory of each compiled rule for 16, 32 and 64 nodes, in rows of V floats: what grows with the square would double twice.

Command:    python experiments/rule_cost.py
Run time:   1.5 minutes on 2 free cores (--repeats 3); 10 minutes where five others share them.
Expected:   asserted: at most 8 for rejection, block and target_match.  On free cores, batch 1 and 8: rejection, target_match
            and threshold below .1, block .8 and .9, recursive, traversal and greedy_multi_draft .5, typical 1.0 and .6, k_seq
            4.5 and 5.3, coupled 2.0 and 1.8 given its noise; temperature 2.2 and 3.2, top-p 9, noise 6 and 7.  On shared
            cores what takes 64 steps one after the other waits at each: recursive and traversal 3 to 6.  Temporaries: 3 rows
            for every rule but coupled (195 at 64 nodes, 3 a row of the block) and typical (65).
"""

from __future__ import annotations

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from specjax import keys, sampling, trees
from specjax.types import Draft
from specjax.verify import RULES
from specjax.verify.draw import draw

BRANCHING = (4, 3, 4)
LIMITED = ("rejection", "block", "target_match")
LIMIT = 8.0


def topologies(nodes):
    """Parents and depth of a chain and of a tree of that many nodes (the beginning of the widest one that is needed)."""
    tree = trees.k_ary(BRANCHING)[:nodes]
    if len(tree) < nodes:
        raise ValueError(f"{nodes} nodes > {len(tree)}, the tree of {BRANCHING}: ask for fewer")
    return {"chain": (trees.chain(nodes), nodes), "tree": (tree, len(BRANCHING))}


def cases():
    """(rule, topology) pairs: chain rules on a chain, tree rules on a tree, what takes both on both."""
    both = ("target_match", "coupled")
    return [(n, s) for n, r in RULES.items() for s in ("chain", "tree") if n in both or (s == "chain") == r.chain]


def program(name, shape, nodes):
    """Rule `name` as decoding runs it: (accept keys, emit keys, noise [B, K+1, V] or None, tokens, log_q, log_p) -> Verdict."""
    parents, depth = topologies(nodes)[shape]

    def one(key_accept, key_emit, noise, tokens, log_q, log_p):
        return draw(RULES[name], key_accept, key_emit, noise, Draft(tokens, jnp.asarray(parents), log_q), log_p, depth)

    return jax.jit(jax.vmap(one)), depth


def temporaries(name, shape, nodes, vocab):
    """Bytes of temporaries of the compiled rule, over one row [V] of float32."""
    run, depth = program(name, shape, nodes)
    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    floats = lambda *dims: jax.ShapeDtypeStruct((1, *dims, vocab), jnp.float32)
    noise = floats(depth + 1) if RULES[name].coupled else None
    tokens = jax.ShapeDtypeStruct((1, nodes), jnp.int32)
    memory = run.lower(key, key, noise, tokens, floats(nodes), floats(nodes + 1)).compile().memory_analysis()
    return memory.temp_size_in_bytes / (4 * vocab)


def timed(run, *args):
    """Seconds of one call."""
    began = time.perf_counter()
    jax.block_until_ready(run(*args))
    return time.perf_counter() - began


def against(softmax, repeats, run, *args):
    """Median seconds of `run`, over the median of `softmax` in turn with it, so that a busy machine slows both."""
    timed(run, *args)  # compiles
    both = [(timed(softmax), timed(run, *args)) for _ in range(repeats)]
    return float(np.median([r for _, r in both]) / np.median([s for s, _ in both]))


def around(key, logits, measure):
    """What stands around the rule: (name, softmaxes)."""
    batch, rows, vocab = logits.shape
    for label, field in (("warp, temperature", {}), ("warp, top-p", dict(top_p=0.9))):
        params = sampling.stack([sampling.SamplingParams(temperature=0.8, **field)] * batch, vocab)
        yield label, measure(jax.jit(jax.vmap(lambda s, x: sampling.warp(s, x, None))), params, logits)
    noise = jax.jit(functools.partial(keys.gumbel, depth=1, shape=(rows, vocab)))
    yield "noise", measure(noise, jax.random.split(key, batch))


def costs(batch, nodes, vocab, repeats) -> tuple[float, dict]:
    """Milliseconds of a softmax, and everything in softmaxes, at one batch size."""
    key = jax.random.key(batch)
    law = jax.jit(lambda k, n: jax.nn.log_softmax(3 * jax.random.normal(k, (batch, n, vocab))), static_argnums=1)
    log_p, log_q = law(jax.random.fold_in(key, 1), nodes + 1), law(jax.random.fold_in(key, 2), nodes)
    softmax = functools.partial(jax.jit(jax.nn.softmax), log_p)
    timed(softmax)
    measure = functools.partial(against, softmax, repeats)
    found = dict(around(key, log_p, measure))
    tokens = jax.random.randint(key, (batch, nodes), 0, vocab)
    both = jax.random.split(key, (2, batch))
    for name, shape in cases():
        run, depth = program(name, shape, nodes)
        noise = log_p[:, : depth + 1] if RULES[name].coupled else None  # any numbers: drawing them is counted apart
        found[name, shape] = measure(run, both[0], both[1], noise, tokens, log_q, log_p)
    return 1e3 * float(np.median([timed(softmax) for _ in range(repeats)])), found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    batches = [int(b) for b in args.batches.split(",")]
    took, found = zip(*[costs(b, args.nodes, args.vocab, args.repeats) for b in batches], strict=True)
    softmax = ", ".join(f"{ms:.0f} ms at batch {b}" for b, ms in zip(batches, took, strict=True))
    print(f"V = {args.vocab}, {args.nodes} nodes; in units of one softmax over [B, {args.nodes + 1}, V]: {softmax}\n")
    print("| what | on a | " + " | ".join(f"B = {b}" for b in batches) + " |\n|---|---" + "|---" * len(batches) + "|")
    for what in found[0]:
        label = " | ".join(what) if isinstance(what, tuple) else f"{what} | "
        print(f"| {label} | " + " | ".join(f"{f[what]:.2f}" for f in found) + " |")
    sizes = [args.nodes // 4, args.nodes // 2, args.nodes]
    print("\n| rows of V floats held by | on a | " + " | ".join(f"N = {n}" for n in sizes) + " |\n|---|---|---|---|---|")
    for name, shape in cases():
        rows = [temporaries(name, shape, n, args.vocab) for n in sizes]
        print(f"| {name} | {shape} | " + " | ".join(f"{r:.1f}" for r in rows) + " |", flush=True)
        assert rows[2] <= 2.5 * max(rows[1], 2), f"{name}: {rows} rows of temporaries grow faster than the draft"
    for what in [c for c in cases() if c[0] in LIMITED]:
        worst = max(f[what] for f in found)
        assert worst <= LIMIT, f"{what}: {worst:.1f} softmaxes > {LIMIT}"


if __name__ == "__main__":
    main()

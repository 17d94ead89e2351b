"""Is specjax as fast as a public library on the same machine, weights, prompts and threads, and does n-gram pay?

Question: plain decoding against transformers' `generate` (fp32), and `ngram` against plain decoding and against
transformers' `prompt_lookup_num_tokens`, by Spec-Bench category; SmolLM2-135M-Instruct, greedy, 128 new tokens, batch 1.
The methods take turns on each prompt, so that a noisy machine hits all alike.

Command (needs the `parity` extra):
    python experiments/peer_transformers.py --prompts ../shared/data/prompts/spec_bench/question.jsonl --json peer.json

Run time: 7 minutes on 2 cores with --per-category 1, 6 with --no-peer --per-category 4 (two runs).
Expected: plain at least 1.25 times transformers, ngram at least 1.15 times plain
overall and 1.7 times on extraction (README.md beside this file has what came out).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict

import jax
import numpy as np

import specjax
from specjax import decode
from specjax.api import CAPACITIES
from specjax.models.fetch import demo_model_path
from specjax.prompts import load_prompts


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", required=True, help="Spec-Bench question.jsonl")
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--max-prompt-tokens", type=int, default=900)
    parser.add_argument("--num-draft", type=int, default=5)
    parser.add_argument("--weights-dtype", default="float32", help="of specjax; transformers always runs float32")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--json")
    return parser.parse_args()


def ours(lm, drafter, ids, max_new):
    began = time.perf_counter()
    out = specjax.generate(lm, drafter, [ids], key=jax.random.key(0), max_new_tokens=max_new)[0]
    return time.perf_counter() - began, out.tokens, out.stats.tokens_per_step


def peer(model, ids, max_new, lookup):
    import torch

    tokens = torch.tensor([ids])
    began = time.perf_counter()
    with torch.inference_mode():
        extra = {"prompt_lookup_num_tokens": lookup} if lookup else {}
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_new,
            do_sample=False,
            eos_token_id=2,
            pad_token_id=2,
            **extra,
        )
    return time.perf_counter() - began, out[0, len(ids) :].tolist(), float("nan")


def load_peer():
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    path = demo_model_path(None)
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def main():
    args = parse()
    lm = specjax.load("smollm2-135m", weights_dtype=args.weights_dtype)
    drafter = specjax.load_drafter("ngram", lm, num_draft=args.num_draft)
    runs = {
        "specjax plain": lambda ids: ours(lm, None, ids, args.max_new_tokens),
        "specjax ngram": lambda ids: ours(lm, drafter, ids, args.max_new_tokens),
    }
    if not args.no_peer:
        model = load_peer()
        runs["transformers plain"] = lambda ids: peer(model, ids, args.max_new_tokens, None)
        runs["transformers prompt lookup"] = lambda ids: peer(model, ids, args.max_new_tokens, args.num_draft)
    rows, taken, compiled = [], defaultdict(int), set()
    for prompt in load_prompts(args.prompts):
        ids = lm.tokenizer.chat([{"role": "user", "content": prompt.turns[0]}])
        if taken[prompt.category] == args.per_category or len(ids) > args.max_prompt_tokens:
            continue
        taken[prompt.category] += 1
        needed = decode.capacity_for(len(ids) + args.max_new_tokens, drafter.drafter)
        shape = next(size for size in CAPACITIES if size >= needed)
        for run in () if shape in compiled else runs.values():
            run(ids)
        compiled.add(shape)
        for name, run in runs.items():
            seconds, tokens, tau = run(ids)
            who = dict(id=prompt.id, category=prompt.category, method=name, prompt=len(ids))
            rows.append({**who, "seconds": seconds, "tokens": tokens, "tau": tau})
        print(
            prompt.id,
            prompt.category,
            [(r["method"], round(len(r["tokens"]) / r["seconds"], 1)) for r in rows[-len(runs) :]],
            file=sys.stderr,
        )
    report(rows, list(runs))
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"settings": vars(args), "cores": os.cpu_count(), "rows": rows}, file)


def report(rows, methods):
    """Tokens a second by category, ratios with a bootstrap interval over prompts."""
    table = defaultdict(dict)
    for row in rows:
        table[row["id"], row["category"]][row["method"]] = row

    def ratio(a, b, prompts):
        cost = lambda m, p: p[m]["seconds"] / len(p[m]["tokens"])
        return sum(cost(b, p) for p in prompts) / sum(cost(a, p) for p in prompts)

    pairs = [
        ("specjax plain", "transformers plain"),
        ("specjax ngram", "specjax plain"),
        ("specjax ngram", "transformers prompt lookup"),
    ]
    pairs = [pair for pair in pairs if set(pair) <= set(methods)]
    print(
        "| category | "
        + " | ".join(f"{m} tok/s" for m in methods)
        + " | ngram tau | "
        + " | ".join(f"{a} / {b}" for a, b in pairs)
        + " |"
    )
    print("|---" * (2 + len(methods) + len(pairs)) + "|")
    categories = [*dict.fromkeys(c for _, c in table), "all"]
    for category in categories:
        prompts = [p for (_, c), p in table.items() if category in (c, "all")]
        speeds = [sum(len(p[m]["tokens"]) for p in prompts) / sum(p[m]["seconds"] for p in prompts) for m in methods]
        tau = np.mean([p["specjax ngram"]["tau"] for p in prompts])
        cells = [f"{s:.1f}" for s in speeds] + [f"{tau:.2f}"]
        for a, b in pairs:
            rng = np.random.default_rng(0)
            draws = [ratio(a, b, [prompts[i] for i in rng.integers(len(prompts), size=len(prompts))]) for _ in range(2000)]
            low, high = np.percentile(draws, [2.5, 97.5])
            cells.append(f"{ratio(a, b, prompts):.2f} [{low:.2f}, {high:.2f}]")
        print(f"| {category} | " + " | ".join(cells) + " |")
    same = [p["specjax ngram"]["tokens"] == p["specjax plain"]["tokens"] for p in table.values()]
    print(f"\nngram gave plain decoding's tokens on {sum(same)} of {len(same)} prompts")
    if "transformers plain" in methods:
        same = [p["transformers plain"]["tokens"] == p["specjax plain"]["tokens"] for p in table.values()]
        print(f"specjax gave transformers' tokens on {sum(same)} of {len(same)} prompts")


if __name__ == "__main__":
    main()

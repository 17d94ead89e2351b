"""How many tokens a round do trained drafters yield on held-out prompts, and does it pay here?

Question: with one target, the same prompts, K and rules, greedy and at temperature 1: tau of every method with its interval
over prompts, the speed-up on this machine, and the tau at which it would break even with plain decoding.

Command:    python experiments/trained_methods.py --model testbed --out testbed.md                 # held-out modules
            python experiments/trained_methods.py --model smollm2-135m --prompts SPEC_BENCH.jsonl --out smollm2.md
            ... --methods medusa,eagle3,eagle3+tree=dynamic+nodes=16 --count 8 --new-tokens 32     # other settings, smaller
Run time:   testbed 4 minutes on 2 cores shared with other work
Expected:   greedy, every method has plain decoding's tokens ("same").  Testbed, tau at T = 0 / 1: mtp 2.98 / 2.64,
            small 2.17 / 2.28, hydra 1.80 / 1.89, blockwise 1.33 / 1.14, medusa 1.26 / 1.12; ngram 2.08 / 1.04,
            early_exit 1.24 / 1.44

Break-even: a round costs T_draft + T_verify and yields tau tokens, where plain decoding yields one for T_plain; so they are
even at tau = (T_draft + T_verify) / T_plain.  All three are measured here, on a state halfway through a text.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import jax
import numpy as np

import specjax
from specjax import api, bench
from specjax.demo import chat
from specjax.drafters import METHODS
from specjax.drafters.base import parse_options
from specjax.prompts import load_prompts, select
from specjax.sampling import SamplingParams
from specjax.train import stdlib

USUAL = "ngram,early_exit,small,blockwise,medusa,hydra,mtp"


def of_modules(lm, count, length=96):
    """Stretches of held-out modules of the standard library, one a module while there are enough: (category, ids)."""
    rng, found = np.random.default_rng(0), []
    texts = [lm.tokenizer.encode(source.text) for source in stdlib.sources()[1]]
    texts = [ids for ids in texts if len(ids) > 2 * length]
    for n in range(count):
        ids = texts[n % len(texts)]
        begin = int(rng.integers(0, len(ids) - 2 * length))
        found.append(("code", ids[begin : begin + length]))
    return found


def of_file(path, count):
    """First turns, taken from every category in turn, as chats: (category, messages)."""
    return [(row.category, chat(row.turns[0])) for row in select(load_prompts(path), limit=count)]


def source(parser, *, count, new_tokens):
    """Flags that say of which model and on what text something is measured."""
    parser.add_argument("--model", default="testbed")
    parser.add_argument("--weights-dtype", default="float32", help="of the target")
    parser.add_argument("--prompts", type=Path, default=None, help="a file of prompts; held-out modules unless given")
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--new-tokens", type=int, default=new_tokens)


def loaded_source(args):
    """(LM, its prompts by category) of these flags."""
    lm = specjax.load(args.model, weights_dtype=args.weights_dtype)
    return lm, of_modules(lm, args.count) if args.prompts is None else of_file(args.prompts, args.count)


def measure(lm, contenders, prompts, temperature, new_tokens):
    """Rows of one temperature."""
    work = bench.Work([p for _, p in prompts], jax.random.key(0), new_tokens, SamplingParams(temperature=temperature))
    show = lambda done, total, label: print(f"T={temperature:g} {done}/{total} {label}", end="\r", file=sys.stderr, flush=True)
    results = bench.compare(lm, contenders, work, progress=show)
    passes = [bench.pass_times(lm, r.contender, work) for r in results]
    kinds = sorted({kind for kind, _ in prompts})
    rows = []
    for r, cost in zip(results, passes, strict=True):
        each = {k: bench.tau([s for s, (kind, _) in zip(r.samples, prompts, strict=True) if kind == k]).mean for k in kinds}
        even = (cost.draft_ms + cost.verify_ms) / passes[0].verify_ms
        differ, margin = triage(lm, work.prompts, results[0], r) if r.same_tokens_as_plain is False else (0, 0.0)
        facts = {"break_even": even, "tau_by_category": each, "differ": differ, "margin": margin}
        rows.append({**bench.record(r._replace(passes=cost)), **facts})
    return rows


def triage(lm, prompts, plain, result):
    """How many prompts got other tokens than plain decoding gave, and the largest margin by which a full pass would have
    preferred plain's token where they part: one that rounding explains is a tie."""
    score = jax.jit(lambda params, line: lm.model.apply(params, line, lm.model.init_cache(1, line.shape[1]))[0].logits[0])
    gaps = []
    for prompt, mine, theirs in zip(prompts, result.samples, plain.samples, strict=True):
        a, b = mine.completions[0].tokens, theirs.completions[0].tokens
        if a == b:
            continue
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if at is None:  # one ended before the other: no tie
            gaps.append(np.inf)
            continue
        line = np.asarray([[*api.encode(lm, prompt), *b[:at]]], np.int32)
        row = score(lm.params, np.pad(line, ((0, 0), (0, -line.shape[1] % 64))))[line.shape[1] - 1]
        gaps.append(float(row[b[at]] - row[a[at]]))
    return len(gaps), max(gaps, default=0.0)


def markdown(rows):
    """One line a method and temperature."""
    heads = ["T", "method", "rule", "nodes", "parameters", "tau [95 %]", "acceptance by position", "same", "speed-up [95 %]"]
    heads += ["of decoding alone [95 %]", "draft / verify ms", "breaks even at tau"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for r in rows:
        names = ("tau", "speedup", "itl_speedup")
        tau, fast, decoding = ("{mean:.2f} [{low:.2f}, {high:.2f}]".format(**r[name]) for name in names)
        rates = " ".join(f"{x:.2f}" for x in r["per_position_acceptance_rate"])
        parted = f"{r['differ']} differ, by {r['margin']:.3f}"
        same = {True: "yes", False: parted, None: "-"}[r["same_tokens_as_plain"]]
        cells = [f"{r['temperature']:g}", r["method"], r["rule"], r["nodes"], f"{r['parameters']:,}", tau, rates, same, fast]
        cells += [decoding, f"{r['t_draft_ms']:.2f} / {r['t_verify_ms']:.2f}", f"{r['break_even']:.2f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def contender(lm, words, num_draft):
    """A method with options of its own: NAME or NAME+OPTION=VALUE+..."""
    name, *given = words.split("+")
    settings = parse_options(METHODS[name].load, given)
    loaded = specjax.load_drafter(name, lm, num_draft=num_draft, **settings)
    return bench.Contender(words, loaded, loaded.rule)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source(parser, count=48, new_tokens=64)
    parser.add_argument("--methods", default=USUAL, help="NAME or NAME+OPTION=VALUE+..., with commas between them")
    parser.add_argument("--num-draft", type=int, default=4)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--out", type=Path, default=Path("trained_methods.md"), help="the table; .json beside it has the rest")
    args = parser.parse_args()
    lm, prompts = loaded_source(args)
    contenders = [contender(lm, words, args.num_draft) for words in args.methods.split(",")]
    facts = {c.method: (c.loaded.card.extra_parameters, c.loaded.drafter.num_nodes) for c in contenders}
    rows = []
    for temperature in map(float, args.temperatures.split(",")):
        rows += measure(lm, contenders, prompts, temperature, args.new_tokens)
    for row in rows:
        row["parameters"], row["nodes"] = facts.get(row["method"], (0, 0))
    args.out.write_text(markdown(rows), "utf-8")
    args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    print(markdown(rows))


if __name__ == "__main__":
    main()

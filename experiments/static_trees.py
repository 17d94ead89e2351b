"""How many tokens a round does a static tree add to a chain, and which tree?

Question: for heads that give several candidates a position (medusa, hydra, parallel_heads): the rate at which the candidate of
each rank is accepted, the trees built of it (best-first; Sequoia's programme, which sees the mean over depths), and tau of
each on held-out prompts at T = 0 and 1, beside a chain.

Command:    python experiments/static_trees.py --methods medusa,hydra --out trees.md
            python experiments/static_trees.py --methods medusa --weights DIR --nodes 16 --save tree.json   # for --option tree=
Run time:   3 minutes for both methods on the testbed (--count 24 --nodes 8,16,32), 2 cores shared with other work
Expected:   medusa, tau at T = 0 / 1: chain 1.21 / 1.11, 8 nodes 1.45 / 1.26, 32 nodes 1.56 / 1.36; hydra 1.69 / 1.91,
            1.94 / 2.15, 2.27 / 2.63.  Sequoia's tree of 32 nodes is as good as best-first; rates fall with rank and depth

Rates are measured on stretches of training modules (what is reported must not be fitted to), tau on held-out ones.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jax
import numpy as np

import specjax
from specjax import bench, trees
from specjax.api import METHODS, find_rule
from specjax.sampling import SamplingParams
from specjax.train import stdlib
from specjax.train.evaluate import comb, rank_rates
from specjax.types import Params


def stretches(lm, sources, count, length=96, seed=0):
    """Token ids from the middle of modules, one a module."""
    rng, found = np.random.default_rng(seed), []
    texts = [ids for source in sources for ids in [lm.tokenizer.encode(source.text[:20_000])] if len(ids) > 2 * length]
    for n in rng.permutation(len(texts))[:count].tolist():
        begin = int(rng.integers(0, len(texts[n]) - length))
        found.append(texts[n][begin : begin + length])
    return found


def load(method, lm, num_draft, weights, paths, folder):
    """A drafter with the tree `paths`, which goes through a file as users give it."""
    file = folder / "tree.json"
    file.write_text(json.dumps([list(map(int, path)) for path in paths]), "utf-8")
    given = {} if weights is None else {"weights": weights}
    return specjax.load_drafter(method, lm, num_draft=num_draft, tree=str(file), **given)


def tau(lm, loaded, prompts, temperature, new_tokens):
    contender = bench.Contender("tree", loaded, METHODS["medusa"].rule if loaded.drafter.children == "point" else loaded.rule)
    work = bench.Work(prompts, jax.random.key(0), new_tokens, SamplingParams(temperature=temperature), batch_size=4)
    return bench.compare(lm, [contender], work)[1].tau


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="testbed")
    parser.add_argument("--methods", default="medusa,hydra")
    parser.add_argument("--weights", default=None, help="directory of the drafter; the packaged one unless given")
    parser.add_argument("--num-draft", type=int, default=4)
    parser.add_argument("--nodes", default="8,16,32,63")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--count", type=int, default=48, help="prompts, of calibration and of judgement")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--save", type=Path, default=None, help="write the last best-first tree here")
    parser.add_argument("--out", type=Path, default=Path("static_trees.md"))
    args = parser.parse_args()
    lm = specjax.load(args.model)
    train, held = stdlib.sources()
    calibrate, judge = stretches(lm, train, args.count, seed=1), stretches(lm, held, args.count)
    lines = ["| method | tree | nodes | expected, greedy | tau, T=0 | tau, T=1 |", "|---" * 6 + "|"]
    for method in args.methods.split(","):
        k = args.num_draft
        wide = load(method, lm, k, args.weights, comb(k, args.ranks), args.out.parent)
        settings = dict(target=lm.model, rule=find_rule("target_match"), new_tokens=args.new_tokens, temperature=0.0)
        rates = rank_rates(wide.drafter, Params(lm.params, wide.params), calibrate, ranks=args.ranks, **settings)
        rates = np.minimum.accumulate(rates, 1)  # a rarer rank counted oftener is chance
        print(method, np.round(rates, 3), sep="\n")
        several = {"chain": [(0,) * d for d in range(1, k + 1)]}
        for n in map(int, args.nodes.split(",")):
            several[f"best first, {n}"] = trees.best_first(rates, n)
        several[f"Sequoia, {n}"] = trees.sequoia(rates.mean(0), n, k)[0]
        for name, paths in several.items():
            loaded = load(method, lm, k, args.weights, paths, args.out.parent)
            hopes = 1 + sum(np.prod([rates[d, r] for d, r in enumerate(path)]) for path in paths if max(path) < args.ranks)
            both = [tau(lm, loaded, judge, t, args.new_tokens) for t in (0.0, 1.0)]
            cells = [
                method,
                name,
                str(len(paths)),
                f"{hopes:.2f}",
                *(f"{x.mean:.2f} [{x.low:.2f}, {x.high:.2f}]" for x in both),
            ]
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
            if args.save is not None and name.startswith("best"):
                args.save.write_text(json.dumps(paths), "utf-8")
    args.out.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()

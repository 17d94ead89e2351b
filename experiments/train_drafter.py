"""Train a drafter for a target on a corpus, and watch its tau in real decoding while it trains.

Question: how many tokens does a method need, and to what acceptance length does it come?

Command:    python experiments/train_drafter.py medusa --corpus /tmp/testbed/corpus --out /tmp/medusa       # again to go on
            python experiments/train_drafter.py small --steps 400 --corpus /tmp/testbed/corpus --out /tmp/small
            python experiments/train_figure.py /tmp/medusa /tmp/small --out figure.png
Run time:   medusa on the testbed 1,460 tokens a second on two busy cores (1,000 steps of 2,048: 25 minutes), mtp 560
Expected:   tau 1.0 at step 0 for heads; from there on it is the question

--corpus is a directory with train/ and held_out/ (experiments/train_testbed.py makes one), or one corpus, of which the last
twentieth of documents is held out.  Prompts for tau: what stands before a held-out document's first answer; of plain text,
a stretch of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import jax
import numpy as np

import specjax
from specjax.api import find_rule
from specjax.drafters import blockwise, files, hydra, medusa, mtp, small
from specjax.models.transformer import language_model
from specjax.train import corpus
from specjax.train.evaluate import acceptance, held_out
from specjax.train.loop import Report, Settings, fit
from specjax.train.packing import batches


def smaller(lm):
    """A model of the target's family with a quarter of its layers, which starts as the target's first ones."""
    config = lm.config._replace(
        layers=max(1, lm.config.layers // 4), sliding=lm.config.sliding[: max(1, lm.config.layers // 4)]
    )
    return language_model(config)


RECIPES = {
    "small": lambda lm, k: small.recipe(lm.model, smaller(lm), num_draft=k),
    "blockwise": lambda lm, k: blockwise.recipe(lm.model, num_draft=k),
    "medusa": lambda lm, k: medusa.recipe(lm.model, num_draft=k),
    "hydra": lambda lm, k: hydra.recipe(lm.model, num_draft=k),
    "mtp": lambda lm, k: mtp.recipe(lm.model, num_draft=k, config=mtp.config_of(lm.config)),
}


def show(report: Report) -> None:
    wanted = ("loss", "accuracy", "held_out_loss", "tau", "tau_t0", "tau_t1", "tokens_per_second")
    numbers = "  ".join(f"{name} {report.metrics[name]:.4g}" for name in wanted if name in report.metrics)
    left = f"{report.seconds_left / 60:.1f} min left" if report.seconds_left == report.seconds_left else ""
    print(f"{time.strftime('%H:%M:%S')} step {report.step}/{report.steps}  {numbers}  {left}", file=sys.stderr, flush=True)


def split(path: Path) -> tuple[corpus.Corpus, corpus.Corpus]:
    """(to train on, held out)."""
    if (path / "train").is_dir():
        return corpus.read(path / "train"), corpus.read(path / "held_out")
    whole = corpus.read(path)
    border = whole.documents - max(1, whole.documents // 20)
    return whole._replace(starts=whole.starts[: border + 1]), whole._replace(starts=whole.starts[border:])


def prompts_of(held: corpus.Corpus, count: int, length: int) -> list[list[int]]:
    """Held-out prompts of at most `length` tokens; the same every time."""
    rng, found = np.random.default_rng(0), []
    for n in rng.permutation(held.documents)[:count].tolist():
        begin, end = int(held.starts[n]), int(held.starts[n + 1])
        if held.mask is None:
            begin += int(rng.integers(0, max(1, end - begin - length)))
            found.append(held.tokens[begin : min(begin + length, end)].tolist())
        else:
            found.append(held.tokens[begin : begin + int(held.mask[begin:end].argmax())][-length:].tolist())
    return [prompt for prompt in found if prompt]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=RECIPES)
    parser.add_argument("--model", default="testbed")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num-draft", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--batch", type=int, default=8, help="rows of an update")
    parser.add_argument("--prompts", type=int, default=16, help="held-out prompts for tau")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--peak", type=float, default=2e-3)
    parser.add_argument("--evaluate-every", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lm, (train, held) = specjax.load(args.model), split(args.corpus)
    recipe, prompts = RECIPES[args.method](lm, args.num_draft), prompts_of(held, args.prompts, 128)
    settings = Settings(args.steps, args.peak, min(100, args.steps // 10), evaluate_every=args.evaluate_every, seed=args.seed)
    judges = [held_out(recipe, batches(held, length=args.length, batch=8), steps=4, target=lm.model)]
    if recipe.drafter is not None:
        rule = find_rule("rejection" if recipe.drafter.chain else "recursive")
        both = dict(target=lm.model, rule=rule, eos_ids=lm.tokenizer.eos_ids)
        judges += [acceptance(recipe, prompts, temperature=t, **both) for t in (0.0, 1.0)]
    rows = batches(train, length=args.length, batch=args.batch, seed=args.seed)
    params = fit(
        recipe, rows, settings, args.out, target=lm.model, target_params=lm.params, evaluate=judges, progress=show
    )  # fmt: skip
    last = json.loads((args.out / "metrics.jsonl").read_text().splitlines()[-1])
    files.save(args.out / "drafter", params, {"method": args.method, "num_draft": args.num_draft, "model": args.model})
    print(json.dumps({"parameters": sum(x.size for x in jax.tree.leaves(params)), **last}))


if __name__ == "__main__":
    main()

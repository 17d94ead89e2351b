"""Can a drafter's confidence be trusted, and how much does calibrating it help?

Question: of a drafter's chains in real decoding on held-out prompts: expected calibration error, AUROC and Brier score of the
probability that a prefix is accepted, position by position, as the drafter gives it and after sequential temperature scaling
fitted on the other half of the prompts; and of confidences made from the margins of its logits, which any drafter has.

Command:    python experiments/confidence_calibration.py --model testbed --method dspark --num-draft 7 --figure reliability.png
            ... --count 8 --new-tokens 32                                                   # smaller
Run time:   a minute on the testbed
Expected:   the table in README.md beside this file
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from trained_methods import contender, loaded_source, source

from specjax import api
from specjax.schedule import confidence as c
from specjax.train.evaluate import watched
from specjax.types import Params


def halves(lm, loaded, prompts, new_tokens, temperature):
    """Rounds of the odd prompts, and of the even ones: (to fit on, to score)."""
    how = dict(target=lm.model, rule=api.find_rule(loaded.rule), new_tokens=new_tokens, temperature=temperature)
    return [watched(loaded.drafter, Params(lm.params, loaded.params), prompts[i::2], **how) for i in (1, 0)]


def confidences(fit, held):
    """{what: c [R, K]} of the rounds that are scored."""
    found = {}
    if held.confidence is not None:
        temperatures = c.fit_temperatures(c.logits(fit.confidence), fit.outcomes.accepted, fit.outcomes.known)
        found = {"as given": held.confidence, "tempered": c.temper(held.confidence, temperatures)}
    if held.margins is not None:
        line = c.fit_margins(fit.margins, fit.outcomes.accepted, fit.outcomes.reached)
        found["from margins"] = c.margin_confidence(line, held.margins)
    return found


def markdown(found, seen):
    """A line each kind of confidence and score, a column each position."""
    k = seen.accepted.shape[1]
    lines = [f"| confidence | score | {' | '.join(map(str, range(1, k + 1)))} |", "|---" * (k + 2) + "|"]
    rate = np.asarray([seen.accepted[on, i].mean() for i, on in enumerate(seen.known.T)])
    lines.append(f"| | prefix accepted | {' | '.join(f'{x:.2f}' for x in rate)} |")
    for name, sure in found.items():
        scores = c.scores(c.survival(sure), seen.accepted, seen.known)
        for score, row in zip(("ECE", "AUROC", "Brier"), scores[:3], strict=True):
            lines.append(f"| {name} | {score} | {' | '.join(f'{x:.3f}' for x in row)} |")
    return "\n".join(lines) + f"\n\n{len(seen.accepted)} rounds scored.\n"


def figure(found, seen, path):
    """Reliability of the survival of all positions together."""
    import matplotlib.pyplot as plt

    drawing, axis = plt.subplots(figsize=(4.5, 4.5))
    axis.plot([0, 1], [0, 1], color="0.7")
    for name, sure in found.items():
        bins = c.reliability(c.survival(sure)[seen.known], seen.accepted[seen.known], 10)
        axis.plot(bins.predicted, bins.observed, "o-", label=name)
    axis.set(xlabel="probability given", ylabel="share accepted")
    axis.legend()
    drawing.savefig(path, bbox_inches="tight")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source(parser, count=64, new_tokens=96)
    parser.add_argument("--method", default="dspark", help="a chain: NAME or NAME+OPTION=VALUE+...")
    parser.add_argument("--num-draft", type=int, default=7)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--figure", type=Path, default=None)
    args = parser.parse_args()
    lm, rows = loaded_source(args)
    prompts = [api.encode(lm, prompt, i) for i, (_, prompt) in enumerate(rows)]
    loaded = contender(lm, args.method, args.num_draft).loaded
    fit, held = halves(lm, loaded, prompts, args.new_tokens, args.temperature)
    found = confidences(fit, held)
    print(markdown(found, held.outcomes))
    if args.figure is not None:
        figure(found, held.outcomes, args.figure)


if __name__ == "__main__":
    main()

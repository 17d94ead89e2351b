"""Every method through three lenses: how fast, how easy to run, how easy to train.

Question: of one target's packaged drafters, from one table of measurements and their own cards: T_draft, T_verify and tau,
which give the inter-token latency; what a drafter adds to a target in memory; and what it took to train.

Command:    python experiments/trained_methods.py --model testbed --out testbed.md        # measures, writes testbed.json
            python experiments/three_lenses.py --model testbed --measured testbed.json
Run time:   seconds
Expected:   the tables of README.md beside this file

Inter-token latency is (T_draft + T_verify) / tau of full slots, beside plain decoding's pass.  A cache is what a drafter
keeps for each token of context and request, in bytes; the target's own is given below the table.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import jax
from trained_methods import contender

import specjax
from specjax import zoo
from specjax.drafters import METHODS
from specjax.train.cards import SPENT

NO_TRAINING = ("none", "training-free")
FACTS = {"trained": r"\| trained parameters \| ([\d,]*\d)", **SPENT}


def slot_bytes(init):
    """Bytes that one more token of context takes, of `init(capacity)`."""
    size = lambda capacity: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(lambda: init(capacity))))
    return (size(256) - size(128)) / 128


def training(model, method):
    """What a packaged drafter's card says of its training; dashes where it has none."""
    home = zoo.drafter(model, method)
    if home is None:
        return dict.fromkeys(FACTS, "-")
    card = (home / "card.md").read_text("utf-8")
    found = {name: re.search(pattern, card) for name, pattern in FACTS.items()}
    return {name: hit.group(1) if hit else "?" for name, hit in found.items()}


def line(lm, name, rows, num_draft):
    """A method's cells."""
    method = name.split("+")[0]
    loaded = contender(lm, name, num_draft).loaded
    one, hot = (next(r for r in rows if r["method"] == name and r["temperature"] == t) for t in (0, 1))
    itl = [(r["t_draft_ms"] + r["t_verify_ms"]) / r["mean_acceptance_length"] for r in (one, hot)]
    tau = " / ".join("{mean:.2f} [{low:.2f}, {high:.2f}]".format(**r["tau"]) for r in (one, hot))
    kept = slot_bytes(lambda capacity: loaded.drafter.init(loaded.params, 1, capacity))
    facts, kind = training(lm.name, method), METHODS[method].kind
    return [
        name, tau, f"{one['t_draft_ms']:.2f} + {one['t_verify_ms']:.2f}", f"{itl[0]:.2f} / {itl[1]:.2f}",
        f"{loaded.card.extra_parameters:,}", f"{loaded.card.extra_bytes / 1e6:.1f}", f"{kept:.0f}",
        "yes" if kind == "same family" else "no", "-" if kind in NO_TRAINING else kind, *facts.values(),
    ]  # fmt: skip


HEADS = [
    "method", "tau, T = 0 / 1 [95 %]", "draft + verify ms", "ms a token, T = 0 / 1", "parameters", "MB",
    "cache bytes a token", "second model", "trained", "trained parameters", "tokens seen", "hours",
]  # fmt: skip


def markdown(lm, rows, num_draft):
    """The table, and the target's own cache and pass."""
    names = [n for n in dict.fromkeys(r["method"] for r in rows) if n != "plain"]
    cells = [HEADS, ["---"] * len(HEADS), *(line(lm, name, rows, num_draft) for name in names)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in cells)
    plain = [next(r for r in rows if r["method"] == "plain" and r["temperature"] == t) for t in (0, 1)]
    passes = " / ".join(f"{r['t_verify_ms']:.2f}" for r in plain)
    own = slot_bytes(lambda capacity: lm.model.init_cache(1, capacity))
    return f"{table}\n\nPlain decoding: {passes} ms a token; the target keeps {own:.0f} bytes a token of context.\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="testbed")
    parser.add_argument("--weights-dtype", default="float32", help="of the target")
    parser.add_argument(
        "--measured", type=Path, required=True, help="what trained_methods.py wrote beside its table, at T = 0, 1"
    )
    parser.add_argument("--num-draft", type=int, default=4)
    args = parser.parse_args()
    lm = specjax.load(args.model, weights_dtype=args.weights_dtype)
    print(markdown(lm, json.loads(args.measured.read_text("utf-8")), args.num_draft))


if __name__ == "__main__":
    main()

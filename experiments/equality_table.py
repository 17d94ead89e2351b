"""Does speculative decoding give the tokens of plain decoding for every drafter, rule and K?

    python experiments/equality_table.py > tests/golden/equality_table.md

A random tiny transformer (2 layers, one with a sliding window; grouped queries), ten ragged rows: five prompts of 1 to 23
tokens greedily, and the same at temperature 1.  A cell says how many drafted tokens were accepted, and `=` where the
tokens are those of plain decoding: greedy rows for every rule, rows at temperature 1 for `coupled` too; `NO` otherwise.
It builds some 220 programs: 13 minutes of one core.  Rules for trees, which on a chain are what another rule is, run with
K = 3 and 8 alone.  Expected: no `NO` anywhere, acceptance that grows
with K in count and falls in rate, and all drafts accepted for a drafter that is the target (rejection and coupled), but those
the budget cuts off the last round.
The test of it: `pytest -m slow tests/test_decode.py`.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # many programs, little to run
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import helpers as h  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402

from specjax.types import Params  # noqa: E402
from specjax.verify import RULES  # noqa: E402

LENGTHS = (1, 2, 3, 5, 8)
SOME = (3, 8)
DRAFTERS = (
    "ngram", "ngram, order 1", "small", "small = target", "specinfer", "early_exit, 1 layer", "early_exit, all layers",
    "script", "script, soft",
)  # fmt: skip


def lengths(rule):
    """Values of K: a rule for trees is on a chain what another rule is."""
    return LENGTHS if RULES[rule].chain or rule in ("coupled", "target_match") else SOME


def params(name, k):
    """Weights of a drafter; a script has K right tokens in row 0, round 0, one fewer in the next, and so on."""
    if not name.startswith("script"):
        return Params(h.target_params(), h.drafter_params(name))
    right = (k - np.arange(10)[:, None] - np.arange(h.NEW)[None]) % (k + 1)
    return Params(h.target_params(), h.chain_script(right, np.full((10, h.NEW), k), k))


def cell(name, rule, k):
    """One run: (equal to plain decoding, accepted, drafted)."""
    result = h.generate(h.drafter(name, k), rule, h.MIXED, params=params(name, k), temperature=h.MIXED_HEAT)
    rows = range(10) if RULES[rule].coupled else range(5)
    equal = all(result.tokens[i] == h.reference().tokens[i] for i in rows)
    return equal, int(result.accepted.sum()), int(result.drafted.sum())


def cells():
    """{(drafter, rule): {K: cell}} of the whole product."""
    table = {}
    for name in DRAFTERS:
        for rule in h.fitting(name):
            table[name, rule] = {k: cell(name, rule, k) for k in lengths(rule)}
            print(name, rule, file=sys.stderr, flush=True)
        h.program.cache_clear()
        jax.clear_caches()  # about 80 compiled loops in one process exhaust memory maps
    return table


def markdown(table):
    """The table as text."""
    lines = ["| drafter | rule | " + " | ".join(f"K={k}" for k in LENGTHS) + " |", "|---" * (2 + len(LENGTHS)) + "|"]
    for (name, rule), row in table.items():
        marks = {k: f"{'=' if equal else 'NO'} {accepted}/{drafted}" for k, (equal, accepted, drafted) in row.items()}
        words = [marks.get(k, "-") for k in LENGTHS]
        lines.append(f"| {name} | {rule} | " + " | ".join(words) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(cells()))

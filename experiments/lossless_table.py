"""Does every drafter with every rule keep the target's law?  The quick ladder on the whole product.

    python experiments/lossless_table.py --journal /tmp/lossless_table.jsonl > tests/golden/lossless_table.md

Every method that comes built in, each way of drawing children where it has several, with every rule that fits; the target is
a table of known law, or the tiny transformer for methods that read layers.  A cell of a lossless rule says `pass`; one of a
lossy rule says which rungs failed, cheapest first, and the bias that enumeration found.  A pair that decoding refuses is
left out.  The journal keeps finished cells, so that an interrupted run goes on.
Run time: 35 to 55 s a cell of one idle CPU core, 167 cells.  Expected: `pass` for every lossless rule, `fail` for
every lossy one.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # many programs, little to run

import jax  # noqa: E402

from specjax import decode  # noqa: E402
from specjax.lossless.built_in import built_in  # noqa: E402
from specjax.lossless.finding import FAIL, INCONCLUSIVE  # noqa: E402
from specjax.lossless.ladder import climb, worst  # noqa: E402
from specjax.verify import RULES  # noqa: E402

DRAFTERS = {
    "plain": dict(method="plain"),
    "ngram": dict(method="ngram"),
    "small": dict(method="small"),
    "early_exit": dict(method="early_exit"),
    **{f"specinfer, {kind}": dict(method="specinfer", children=kind) for kind in ("without_replacement", "iid", "point")},
    "specinfer, sampled_then_top": dict(method="specinfer", children="sampled_then_top"),
    "blockwise": dict(method="blockwise"),
    **{f"medusa, {kind}": dict(method="medusa", children=kind) for kind in ("point", "iid")},
    "hydra": dict(method="hydra"),
    "parallel_heads": dict(method="parallel_heads"),
    "mtp": dict(method="mtp"),
    **{name: dict(method=name) for name in ("eagle1", "eagle3", "eagle3.1", "peagle", "dflash", "dspark", "dflash2")},
}


def rules(name):
    """Plain decoding is the same under every rule that throws coins."""
    return tuple(RULES) if name != "plain" else ("rejection", "coupled")


def fits(subject):
    try:
        decode.check(subject.target, subject.drafter, subject.rule)
    except ValueError:
        return False
    return True


def cell(subject):
    """(status, rungs that did not pass, what enumeration saw) of one pair."""
    findings = list(climb(subject, quick=True, seed=0))
    bad = [f.rung for f in findings if f.status in (FAIL, INCONCLUSIVE)]
    law = next(f.saw for f in findings if f.rung == "exact law")
    return worst({f.status for f in findings}), bad, law


def cells(journal=None):
    """{(drafter, rule): cell}; finished ones are read from the journal."""
    known = {}
    if journal is not None and journal.exists():
        known = {tuple(x[:2]): x[2:] for x in map(json.loads, journal.read_text().splitlines())}
    for name, options in DRAFTERS.items():
        for rule in rules(name):
            subject = built_in(**options, rule=rule)
            if not fits(subject) or (name, rule) in known:
                continue
            known[name, rule] = cell(subject)
            print(name, rule, known[name, rule][0], file=sys.stderr, flush=True)
            if journal is not None:
                with journal.open("a") as file:
                    file.write(json.dumps([name, rule, *known[name, rule]]) + "\n")
        jax.clear_caches()  # about 80 compiled loops in one process exhaust memory maps
    return known


def markdown(table):
    lines = ["| drafter | rule | marked | report | did not pass | law by enumeration |", "|---" * 6 + "|"]
    for (name, rule), (status, bad, law) in table.items():
        marked = "lossless" if RULES[rule].lossless else "lossy"
        lines.append(f"| {name} | {rule} | {marked} | {status} | {', '.join(bad) or '-'} | {law} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--journal", type=Path)
    print(markdown(cells(parser.parse_args().journal)))

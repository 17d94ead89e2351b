"""The committed table of the quick ladder on every drafter and rule: complete, and right about which rules are lossless."""

import importlib
from pathlib import Path

from specjax.lossless.built_in import built_in
from specjax.verify import RULES

ROOT = Path(__file__).parents[2]


def test_the_table_is_complete_and_says_what_the_rules_say_of_themselves(monkeypatch):
    """A lossless rule passes with every drafter; a lossy one is found, by enumeration first of all."""
    monkeypatch.syspath_prepend(ROOT / "experiments")
    table = importlib.import_module("lossless_table")
    lines = (ROOT / "tests" / "golden" / "lossless_table.md").read_text().splitlines()[2:]
    cells = [[x.strip() for x in line.strip("|").split(" | ")] for line in lines]
    for name, rule, marked, status, bad, _ in cells:
        assert (marked, status) == (("lossless", "pass") if RULES[rule].lossless else ("lossy", "fail")), (name, rule)
        assert bad == "-" if RULES[rule].lossless else "exact law" in bad
    pairs = [(name, rule) for name in table.DRAFTERS for rule in table.rules(name)]
    fitting = [(n, r) for n, r in pairs if table.fits(built_in(**table.DRAFTERS[n], rule=r))]
    assert [tuple(c[:2]) for c in cells] == fitting

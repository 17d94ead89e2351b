"""A report of a ladder: one paragraph for who decides, a table for who checks, figures, and all of it as JSON.

climb ─► findings.jsonl (a line a rung: an interrupted report goes on) ─► report.html, report.md, report.json
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specjax.lossless.figures import bars, dots
from specjax.lossless.finding import FAIL, INCONCLUSIVE, PASS, SKIPPED, Finding, Test
from specjax.lossless.ladder import CONTROLS, worst

MARKS = {PASS: "✓", FAIL: "✗", INCONCLUSIVE: "?", SKIPPED: "–"}


class Report(NamedTuple):
    """What was tested, how, and what came out."""

    about: dict[str, Any]  # target, method, rule, sampling, sizes, seed, machine: everything needed to make it again
    wanted: float  # the bias per token (TV) that had to be visible
    false_alarm: float  # P(any rung fails | lossless)
    lossless: bool  # whether the rule says so of itself
    findings: tuple[Finding, ...]

    @property
    def status(self) -> str:
        """PASS only if every rung that applies passed."""
        return worst({f.status for f in self.findings})


def headline(report: Report) -> str:
    """The verdict in one paragraph that needs no statistics."""
    of = {s: [f.rung for f in report.findings if f.status == s] for s in MARKS}
    tried = len(report.findings) - len(of[SKIPPED])
    what = "{method} drafts verified by {rule} on {target}".format(**report.about)
    if report.status == FAIL:
        own = "" if report.lossless else " The rule says so of itself: it is marked lossy."
        return f"NOT LOSSLESS: {what} does not keep the target's distribution. Found by: {', '.join(of[FAIL])}.{own}"
    if report.status == INCONCLUSIVE:
        return f"INCONCLUSIVE: nothing was found in {what}, but {', '.join(of[INCONCLUSIVE])} could not have seen enough."
    teeth = next((f for f in report.findings if f.rung == CONTROLS[1]), None)
    shown = f" A bias of {report.wanted:g} per token, planted on purpose, was found." if teeth and teeth.status == PASS else ""
    return (
        f"PASSED: {what} gave the target's own distribution in all {tried} tests that apply.{shown} "
        f"A sound drafter fails such a report once in {1 / report.false_alarm:,.0f} times."
    )


def records(report: Report) -> dict[str, Any]:
    """The report as one JSON object."""
    facts = {"status": report.status, "headline": headline(report), "wanted": report.wanted, "false_alarm": report.false_alarm}
    return {**facts, "about": report.about, "findings": [as_dict(f) for f in report.findings]}


def as_dict(finding: Finding) -> dict[str, Any]:
    """A finding as JSON has it."""
    return {**finding._asdict(), "test": finding.test and finding.test._asdict()}


def from_dict(record: dict[str, Any]) -> Finding:
    """The finding that `as_dict` wrote."""
    return Finding(**{**record, "test": record["test"] and Test(**record["test"])})


COLUMNS = ("", "test", "looked at", "saw", "samples", "p or e", "smallest effect found with .99", "false alarms")


def rows(findings: Sequence[Finding]) -> list[tuple[str, ...]]:
    """The statistician's table."""
    lines = []
    for f in findings:
        t = f.test
        number = "" if t is None else f"e = {t.e_value:.3g}" if t.e_value is not None else f"p = {t.p_value:.2g}"
        effect = "" if t is None else f"{t.effect:.2g} {t.unit}"
        false = "exact" if f.false_alarm == 0 and f.status != SKIPPED else f"{f.false_alarm:.2g}" if f.false_alarm else ""
        lines.append(
            (MARKS[f.status], f.rung, f.looked_at, f.saw, "" if t is None else f"{t.samples:,}", number, effect, false)
        )
    return lines


def markdown(report: Report) -> str:
    """report.md."""
    safe = lambda cells: "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"
    table = [safe(COLUMNS), "|---" * len(COLUMNS) + "|", *map(safe, rows(report.findings))]
    about = [f"- {name}: `{value}`" for name, value in report.about.items()]
    legend = "✓ pass, ✗ fail, ? inconclusive, – does not apply"
    return "\n".join(
        ["# Losslessness report", "", headline(report), "", legend, "", *table, "", "## Made with", "", *about, ""]
    )


STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;font-size:13px}
td,th{border-bottom:1px solid #ddd;padding:4px 8px;text-align:left;vertical-align:top}
.pass{color:#17722d}.fail{color:#b3151d;font-weight:bold}.inconclusive{color:#9a6700}.skipped{color:#999}
.headline{font-size:18px;padding:12px 16px;border-left:6px solid currentColor;background:#f6f6f6}code{background:#f2f2f2}"""

CLASSES = {PASS: "pass", FAIL: "fail", INCONCLUSIVE: "inconclusive", SKIPPED: "skipped"}


def page(report: Report) -> str:
    """report.html, with nothing outside itself."""
    cell = lambda tag, x: f"<{tag}>{html.escape(str(x))}</{tag}>"
    head = "".join(cell("th", c) for c in COLUMNS)
    body = "".join(
        f'<tr class="{CLASSES[f.status]}">' + "".join(cell("td", c) for c in line) + "</tr>"
        for f, line in zip(report.findings, rows(report.findings), strict=True)
    )
    about = "".join(
        f"<tr>{cell('td', name)}<td><code>{html.escape(str(x))}</code></td></tr>" for name, x in report.about.items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Losslessness report</title><style>{STYLE}</style>'
        f'<h1>Losslessness report</h1><p class="headline {CLASSES[report.status]}">{html.escape(headline(report))}</p>'
        f"<h2>What each test could have seen</h2>{bars(report.findings, report.wanted)}"
        f"<h2>What it saw</h2>{dots(report.findings)}"
        f"<h2>Every test</h2><table><tr>{head}</tr>{body}</table><h2>Made with</h2><table>{about}</table></html>\n"
    )


def write(report: Report, directory: Path) -> None:
    """report.html, report.md and report.json in `directory`."""
    (directory / "report.json").write_text(json.dumps(records(report), indent=1, default=str) + "\n")
    (directory / "report.md").write_text(markdown(report))
    (directory / "report.html").write_text(page(report))


class Journal:
    """findings.jsonl: the settings, then a finding a line, so that an interrupted report goes on where it was."""

    def __init__(self, path: Path, about: dict[str, Any]):
        """Take up a journal, or begin one; ValueError where it is of another report."""
        self.path, first = path, json.loads(json.dumps(about, default=str))
        self.findings: list[Finding] = []
        if path.exists() and path.read_text().strip():
            lines = path.read_text().splitlines(keepends=True)
            whole = [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may have been cut off
            different = [n for n in first if not whole or whole[0].get(n) != first[n]]
            if different:
                raise ValueError(f"{path} is of a report with another {different[0]}: give another --out, or remove it")
            self.findings = [from_dict(x) for x in whole[1:]]
            path.write_text("".join(line for line in lines if line.endswith("\n")))
        else:
            path.write_text(json.dumps(first) + "\n")

    def add(self, finding: Finding) -> None:
        """Keep a finding, on disk too."""
        self.findings.append(finding)
        with self.path.open("a") as file:
            file.write(json.dumps(as_dict(finding)) + "\n")

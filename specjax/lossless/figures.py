"""Figures of a report as SVG text: a file that has nothing outside itself needs no plotting library to be made."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from specjax.lossless.finding import FAIL, Finding

RED, GREEN, BLUE = "#b3151d", "#17722d", "#5b8def"
LEFT, WIDTH, LINE = 220, 640, 22
"""Pixels: of the names, of the axis, between two lines."""


def bars(findings: Sequence[Finding], wanted: float) -> str:
    """The smallest bias that each test would have found with probability .99, on a log axis; a line where it had to be."""
    shown = [f for f in findings if f.test is not None and 0 < f.test.effect < math.inf and "TV" in f.test.unit]
    effects = [f.test.effect for f in shown if f.test is not None]
    low, high = min([*effects, wanted]) / 2, max([*effects, wanted]) * 2
    parts = [
        f'<rect x="{LEFT}" y="{i * LINE + 3}" width="{_at(e, low, high) - LEFT:.1f}" height="14" fill="{BLUE}"/>'
        + _label(f.rung, i)
        + _text(_at(e, low, high) + 4, i * LINE + 15, f"{e:.2g}")
        for i, (f, e) in enumerate(zip(shown, effects, strict=True))
    ]
    return _frame(parts, len(shown), _at(wanted, low, high), f"TV {wanted:g} has to be seen")


def dots(findings: Sequence[Finding]) -> str:
    """p-values on a log axis (1/e for bets), and the line below which a test fails."""
    shown = [(f, _p(f)) for f in findings if f.test is not None and f.false_alarm > 0]
    alpha = min([f.false_alarm for f, _ in shown], default=1e-4)
    low, high = min([p for _, p in shown] + [alpha]) / 3, 1.5
    parts = [
        f'<circle cx="{_at(p, low, high):.1f}" cy="{i * LINE + 10}" r="5" fill="{RED if f.status == FAIL else GREEN}"/>'
        + _label(f.rung, i)
        for i, (f, p) in enumerate(shown)
    ]
    return _frame(parts, len(shown), _at(alpha, low, high), f"fails below {alpha:.1g}")


def _p(finding: Finding) -> float:
    """A p-value, or 1/e, which bounds one; within what an axis can show."""
    test = finding.test
    assert test is not None
    p = test.p_value if test.p_value is not None else 1 / max(test.e_value or 1, 1)
    return min(1.0, max(p, 1e-30))


def _at(x: float, low: float, high: float) -> float:
    """Pixels of x on a log axis."""
    return LEFT + WIDTH * math.log(x / low) / math.log(high / low)


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    style = f'font-size="12" font-family="sans-serif" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y}" {style}>{html.escape(words)}</text>'


def _label(words: str, line: int) -> str:
    return _text(LEFT - 8, line * LINE + 15, words, "end")


def _frame(parts: Sequence[str], lines: int, mark: float, words: str) -> str:
    """Parts, a dashed line at `mark` pixels, and what it means."""
    height = lines * LINE
    line = f'<line x1="{mark:.1f}" x2="{mark:.1f}" y1="0" y2="{height}" stroke="{RED}" stroke-dasharray="4 3"/>'
    size = f'width="{LEFT + WIDTH + 60}" height="{height + 24}"'
    drawn = "".join(parts) + line + _text(mark, height + 16, words, "middle")
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{drawn}</svg>'

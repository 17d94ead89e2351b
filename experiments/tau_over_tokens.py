"""What would more training give?  tau in decoding over all tokens that a drafter has seen, run after run, from its card.

Question: does tau still rise with the logarithm of the tokens seen, and what would it be at 12 and 20 million if it went on so?

Command:    python experiments/tau_over_tokens.py [specjax/zoo/smollm2-135m/eagle3/card.md ...] --out figure.png
Run time:   a second; needs matplotlib (pip install "specjax[plot]")
Expected:   for each temperature a line a + b log2(tokens) by least squares, from 300k tokens on, with its residual.  A run's
            first point is the one before, judged anew, on other prompts in some.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from specjax.train.cards import JUDGED  # noqa: E402

CARD = Path("specjax/zoo/smollm2-135m/eagle3/card.md")
TAUS = {"greedy": JUDGED["tau_t0"], "T = 1": JUDGED["tau_t1"]}


def runs(card: str) -> list[tuple[int, np.ndarray]]:
    """(prompts, rows of (tokens seen in all, tau greedy, tau at T = 1)) of each run that a card tells of, oldest first."""
    parts, before, found = re.split(r"^Judged on ", card, flags=re.MULTILINE)[1:], 0, []
    for part in reversed(parts):
        prompts = re.search(r"decoding (\d+) prompts", part)
        lines = [[cell.strip() for cell in line.strip("| ").split("|")] for line in part.splitlines() if line.startswith("|")]
        columns = [lines[0].index(name) for name in ("tokens", *TAUS.values())]
        rows = np.array([[float(line[c].replace(",", "")) for c in columns] for line in lines[2:]])
        rows[:, 0] += before
        before = int(rows[-1, 0])
        found.append((int(prompts[1]) if prompts else 0, rows))
    return found


def line(rows: np.ndarray, column: int) -> tuple[float, float, float]:
    """(a, b, root mean square residual) of tau = a + b log2(tokens)."""
    x, y = np.log2(rows[:, 0]), rows[:, column]
    b, a = np.polyfit(x, y, 1)
    return a, b, float(np.sqrt(np.mean((a + b * x - y) ** 2)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cards", nargs="*", type=Path, default=[CARD])
    parser.add_argument("--out", type=Path, default=Path("figure.png"))
    args = parser.parse_args()
    figure, panel = plt.subplots(figsize=(7, 4))
    for card in args.cards:
        found = runs(card.read_text("utf-8"))
        for i, (prompts, rows) in enumerate(found):
            for column, name in enumerate(TAUS, 1):
                seen, style = rows[rows[:, 0] > 0], "os"[column - 1] + "-"
                label = f"{card.parent.name}, {name}, {prompts} prompts"
                panel.plot(seen[:, 0], seen[:, column], style, color=f"C{2 * i + column - 1}", label=label, ms=4)
        rows = np.concatenate([rows for _, rows in found])
        rows = rows[rows[:, 0] >= 3e5]
        for column, name in enumerate(TAUS, 1):
            a, b, off = line(rows, column)
            ahead = ", ".join(f"{a + b * np.log2(n * 1e6):.2f} at {n}M" for n in (12, 20))
            print(f"{card.parent.name}, {name}: {b:+.3f} a doubling, off by {off:.3f}; by the line {ahead}")
            ends = np.array([rows[0, 0], 2e7])
            panel.plot(ends, a + b * np.log2(ends), "k:", lw=1)
    panel.set(xscale="log", xlabel="tokens seen", ylabel="tau, tokens a round (K = 4, held-out answers)")
    panel.legend(fontsize=7)
    panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(args.out, dpi=100)


if __name__ == "__main__":
    main()

"""Draw a training run: losses and, where it decodes, tau, over the tokens it has seen.

Question: has a run saturated, and does tau in decoding follow the teacher-forced loss?

Command:    specjax train drafter medusa --out /tmp/medusa
            python experiments/train_figure.py /tmp/medusa/run [RUN ...] --out figure.png      # RUN holds metrics.jsonl
Run time:   seconds; needs matplotlib (pip install "specjax[plot]")
Expected:   two panels; a run that is saturated is flat over its last third
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


def curves(path: Path) -> dict[str, list[tuple[float, float]]]:
    """(tokens, value) of every metric of a run."""
    found: dict[str, list[tuple[float, float]]] = {}
    for line in (path / "metrics.jsonl").read_text("utf-8").splitlines():
        facts = json.loads(line)
        for name, value in facts.items():
            found.setdefault(name, []).append((facts["tokens"], value))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("figure.png"))
    args = parser.parse_args()
    found = {run: curves(run) for run in args.runs}
    taus = sorted({name for run in found.values() for name in run if name.startswith("tau_")})
    figure, panels = plt.subplots(1, 1 + bool(taus), figsize=(6 * (1 + bool(taus)), 4), squeeze=False)
    for run, metrics in found.items():
        for name, style in (("loss", "-"), ("held_out_loss", "o--")):
            panels[0, 0].plot(*zip(*metrics.get(name, [(0, float("nan"))]), strict=True), style, label=f"{run} {name}", ms=3)
        for name in taus:
            panels[0, 1].plot(*zip(*metrics.get(name, [(0, float("nan"))]), strict=True), "o-", label=f"{run} {name}", ms=3)
    for panel, label in zip(panels[0], ("nats a token", "tau, tokens a round"), strict=False):
        panel.set(xlabel="tokens seen", ylabel=label)
        panel.legend(fontsize=7)
        panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(args.out, dpi=120)


if __name__ == "__main__":
    main()

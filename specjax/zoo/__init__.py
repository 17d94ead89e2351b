"""What ships with the package: models and drafters, each a directory with its weights and a card.

`testbed/` is a Llama-shaped model of 2 million parameters, trained by specjax on the Python standard library.
"""

from __future__ import annotations

from pathlib import Path


def path(name: str) -> Path:
    """Directory of a packaged model or drafter; FileNotFoundError, one line, names those there are."""
    home = Path(__file__).parent
    found = home / name
    if not (found / "config.json").is_file():
        there = sorted(str(p.parent.relative_to(home)) for p in home.rglob("config.json")) or ["none"]
        raise FileNotFoundError(f"no packaged weights {name!r}: there are {', '.join(there)}")
    return found

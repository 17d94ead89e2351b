"""What ships with the package: models and drafters, each a directory with its weights and a card.

`testbed/` is a Llama-shaped model of 2 million parameters, trained by specjax on the Python standard library; its drafters
lie in it, a directory each, named by their method.  `smollm2-135m/` holds drafters for that model, and in corpus/ the answers
that it gave to ShareGPT's prompts, as token ids: what they learnt from.
"""

from __future__ import annotations

from pathlib import Path

HOME = Path(__file__).parent


def path(name: str) -> Path:
    """Directory of a packaged model or drafter; FileNotFoundError, one line, names those there are."""
    found = HOME / name
    if not (found / "config.json").is_file():
        there = sorted(str(p.parent.relative_to(HOME)) for p in HOME.rglob("config.json")) or ["none"]
        raise FileNotFoundError(f"no packaged weights {name!r}: there are {', '.join(there)}")
    return found


def drafter(target: str, method: str) -> Path | None:
    """Directory of the packaged drafter of `method` for the packaged model `target`; None where there is none."""
    found = HOME / target / method
    return found if target and (found / "config.json").is_file() else None


def argument(directory: Path) -> str:
    """What a packaged drafter is given as: "model" where it is a language model by itself, else "weights"."""
    return "model" if (directory / "tokenizer.json").is_file() else "weights"


def corpus(target: str) -> Path | None:
    """Directory of the packaged token ids that drafters for `target` learn from; None where there is none."""
    found = HOME / target / "corpus"
    return found if target and (found / "provenance.json").is_file() else None

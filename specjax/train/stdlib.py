"""Python's standard library as text: the source files of the running interpreter, which every user has.

Left out: tests, what pip installs, files that a build generates (they hold local paths), and two directories that are
tables rather than programs (encodings/, pydoc_data/).  Of files with the same content one is kept.  About one module in
twenty is held out, by a hash of its name, so that another Python version holds out the same ones.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
GENERATED = ("_sysconfigdata", "config-")
HELD_OUT_IN = 20


class Source(NamedTuple):
    """One module."""

    name: str  # path below the library, "email/policy.py"
    text: str


def sources(home: str | Path | None = None) -> tuple[list[Source], list[Source]]:
    """(to train on, held out), each sorted by name.

    Raises:
      FileNotFoundError: the interpreter has no library in source form.
    """
    home = Path(sysconfig.get_paths()["stdlib"] if home is None else home)
    seen, train, held = set(), [], []
    for file in sorted(home.rglob("*.py")):
        name = file.relative_to(home).as_posix()
        if LEFT_OUT & set(name.split("/")) or any(part.startswith(GENERATED) for part in name.split("/")):
            continue
        text = file.read_text("utf-8", errors="replace")
        if not text.strip() or text in seen:
            continue
        seen.add(text)
        (held if is_held_out(name) else train).append(Source(name, text))
    if not train:
        raise FileNotFoundError(f"{home}: no Python source there: use an interpreter that ships its library as .py files")
    return train, held


def is_held_out(name: str) -> bool:
    """By the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % HELD_OUT_IN == 0


def provenance(documents: list[Source]) -> dict:
    """Which interpreter's library, and a digest of exactly these texts."""
    digest = hashlib.sha256()
    for source in documents:
        digest.update(f"{source.name}\0{source.text}\0".encode())
    version = ".".join(str(x) for x in sys.version_info[:3])
    return {"source": f"Python {version} standard library", "modules": len(documents), "sha256": digest.hexdigest()}

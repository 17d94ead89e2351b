"""The command `specjax`: each subcommand is a dataclass of flags (`flags.py`) handed to a function of the library.

Progress and tables go to stderr, generated text to stdout, `--json FILE` (`-` = stdout) gets one object at the very end.
Exit status 0 = done, 2 = bad input, told in one line on stderr.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from specjax import api, bench, demo, keys, metrics, sampling
from specjax.drafters.base import LoadedDrafter, options
from specjax.flags import Bench, Demo, Drafting, Generate, Methods, Prompts, parse, settings
from specjax.models.fetch import cache_dir
from specjax.models.load import LM, load
from specjax.prompts import PromptRow, load_prompts, select

FAULTS = (ValueError, OSError, ImportError, FloatingPointError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (the process's own by default); the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        command = parse(arguments)
        keep_compiled(cache_dir() / "compiled")
        path = getattr(command.output, "json")
        writable(path)
        result = RUNNERS[type(command)](command)
        if path is not None:
            summary = {"command": shlex.join(["specjax", *arguments]), **environment(), **result.pop("summary")}
            write_json(path, {"summary": summary, **result})
        return 0
    except SystemExit as end:  # --help
        return int(end.code or 0)
    except FAULTS as error:
        say(f"specjax: {' '.join(str(error).split())}")
        return 2
    except KeyboardInterrupt:
        return 130


def run_demo(command: Demo) -> dict:
    """`specjax demo`."""
    checked_numbers(command)
    lm = load_model(command.target.model, command.target.weights_dtype)
    write = say_text if command.output.json == "-" else write_text
    with Bars() as bars:
        results = demo.demo(
            lm, num_draft=command.num_draft, max_new_tokens=command.max_new_tokens, write=write, progress=bars.show
        )
    plain, ngram = (r.samples for r in results)
    rows = [["prompt", "kind", "same tokens", "tau", "plain tokens/s", "ngram tokens/s", "speed-up"]]
    for row, a, b in zip(demo.PROMPTS, plain, ngram, strict=True):
        rates = [s.num_tokens / s.seconds for s in (a, b)]
        tau = metrics.merge([c.stats for c in b.completions]).mean_acceptance_length
        same = bench.same_tokens([a], [b])
        rows.append([row.id, row.category, word(same), f"{tau:.2f}", *(f"{r:.1f}" for r in rates), f"{rates[1] / rates[0]:.2f}x"])
    total = results[1]
    rates = [f"{r.tokens_per_second:.1f}" for r in results]
    same = word(total.same_tokens_as_plain)
    rows.append(["all", "", same, f"{total.stats.mean_acceptance_length:.2f}", *rates, f"{total.speedup.mean:.2f}x"])
    say("\n" + table(rows))
    return {"summary": {"settings": settings(command)}, "methods": [bench.record(r) for r in results]}


def run_methods(command: Methods) -> dict:
    """`specjax methods`."""
    if command.draft_model is not None and command.model is None:
        raise ValueError("--draft-model is counted against a target: give --model too")
    lm = command.model and load_model(command.model, "float32")
    items = []
    for name, method in api.METHODS.items():
        known = options(method)
        card = api.load_drafter(name, lm, **drafter_settings(known, command.draft_model)).card if lm and loadable(known, command) else None
        free = method.kind in ("none", "training-free")
        extra = (card.extra_parameters, card.extra_bytes) if card else (0, 0) if free else (None, None)
        items.append(
            {
                "method": name, "kind": method.kind, "extra_parameters": extra[0], "extra_bytes": extra[1],
                "rule": method.rule, "lossless": api.RULES[method.rule].lossless, "options": known, "summary": method.summary,
            }
        )  # fmt: skip
    return {"summary": {"settings": settings(command)}, "methods": items}

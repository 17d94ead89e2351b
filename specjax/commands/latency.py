"""`specjax latency`: which K at which batch, and what it gains, by the roofline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from specjax.commands.common import Write
from specjax.console import say, table
from specjax.flags import Latency, settings
from specjax.latency.calibrate import measure_device
from specjax.latency.hardware import Hardware, find_hardware
from specjax.latency.roofline import Load, Placement, Shape, resident_bytes, shape_of, turning_tokens
from specjax.latency.rounds import DRAFTINGS, Drafting, chain, whole_round
from specjax.latency.yields import best_num_draft, break_even, expected_tokens_by_position
from specjax.models.load import read_config
from specjax.names import unknown


def run(command: Latency, write: Write) -> dict:
    """One row a batch."""
    check(command)
    shape, placed = shape_of(read_config(command.config)), Placement(command.weight_bytes, command.kv_bytes, command.parallel)
    hardware = measure_device() if command.hardware == "here" else find_hardware(command.hardware)
    smaller = None if command.drafter in DRAFTINGS else shape_of(read_config(command.drafter))
    rows = [at_batch(command, shape, smaller, hardware, placed, batch) for batch in command.batch]
    turn = turning_tokens(shape, hardware, placed, context=0)
    say(f"{hardware.name} x {command.parallel}: a pass is bound by compute from {turn} tokens on" if turn else hardware.name)
    write(table([heading(rows[0]), *([shown(x) for x in row.values()] for row in rows)]) + "\n")
    too_large = [row["batch"] for row in rows if row["memory_gb"] * 1e9 > hardware.memory]
    if too_large:
        have = f"{hardware.memory / 1e9:.0f} GB there are"
        say(f"batch {', '.join(map(str, too_large))} needs more than the {have}: it would not run")
    facts = {"hardware": hardware._asdict(), "compute_bound_from_tokens": turn}
    return {"summary": {"settings": settings(command), **facts}, "batches": rows}


def check(command: Latency) -> None:
    """ValueError for numbers that make no sense, and for a drafter that is neither a method nor a model."""
    for name, value in {"parallel": command.parallel, "num-draft": command.num_draft, "batch": min(command.batch)}.items():
        if value < 1:
            raise ValueError(f"--{name} {value}: ask for at least 1")
    if command.hardware == "here" and command.parallel > 1:
        raise ValueError(
            f"--parallel {command.parallel}: one device is measured here; name a chip of the table, or leave it out"
        )
    if not all(0 <= a <= 1 for a in command.acceptance):
        raise ValueError(f"--acceptance {','.join(map(str, command.acceptance))}: each lies within 0 to 1")
    if len(command.acceptance) not in (1, command.num_draft):
        raise ValueError(
            f"--acceptance has {len(command.acceptance)} numbers: give one, or {command.num_draft}, one a position"
        )
    if command.drafter not in DRAFTINGS and not Path(command.drafter).exists():
        raise ValueError(unknown("drafter", command.drafter, DRAFTINGS) + ", or the config.json of a smaller model")


def at_batch(
    command: Latency, shape: Shape, smaller: Shape | None, hardware: Hardware, placed: Placement, batch: int
) -> dict[str, Any]:  # fmt: skip
    """What the best K gives at a batch, beside plain decoding."""
    load, alive = Load(batch, command.context), survivals(command)
    tokens = [1.0, *(expected_tokens_by_position(alive[:k]) for k in range(1, command.num_draft + 1))]
    rounds = [
        whole_round(
            shape,
            drafting(command, shape, smaller, k),
            hardware,
            load,
            num_draft=k,
            tau=tokens[k],
            placed=placed,
            overhead=command.overhead_us * 1e-6,
        )  # fmt: skip
        for k in range(command.num_draft + 1)
    ]
    draft, verify = [r.draft_seconds for r in rounds], [r.verify_seconds for r in rounds]
    best = best_num_draft(tokens, draft, verify)
    k, plain, chosen = best.num_draft, rounds[0], rounds[best.num_draft]
    return {
        "batch": batch,
        "best_k": k,
        "tau": tokens[k],
        "speedup": best.speedup,
        "draft_ms": draft[k] * 1e3,
        "verify_ms": verify[k] * 1e3,
        "plain_ms": plain.seconds * 1e3,
        "tokens_per_second_per_user": chosen.tokens_per_second / batch,
        "tokens_per_second": chosen.tokens_per_second,
        "flops_per_token_over_plain": chosen.flops_per_token / plain.flops_per_token,
        "break_even_acceptance": break_even(max(k, 1), draft[max(k, 1)] / plain.seconds, verify[max(k, 1)] / plain.seconds),
        "memory_gb": resident_bytes(shape, load, placed) / 1e9,
    }


def survivals(command: Latency) -> np.ndarray:
    """[K] the chance that the first k drafted tokens are all accepted."""
    return np.cumprod(np.broadcast_to(command.acceptance, command.num_draft))


def drafting(command: Latency, shape: Shape, smaller: Shape | None, num_draft: int) -> Drafting | None:
    """What the drafter runs in a round; None where that is nothing."""
    if not num_draft:
        return None
    return DRAFTINGS[command.drafter](shape, num_draft) if smaller is None else chain(smaller, num_draft)


def heading(row: dict[str, Any]) -> list[str]:
    """Column names."""
    return [name.replace("tokens_per_second", "tokens/s").replace("_", " ") for name in row]


def shown(value: Any) -> str:
    """A number in the table."""
    return str(value) if isinstance(value, int) else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"

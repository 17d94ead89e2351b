"""`specjax latency`: which K at which batch, and what it gains, by the roofline."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specjax.commands.common import Write
from specjax.console import say, table
from specjax.flags import Chip, Drafts, Latency, settings
from specjax.latency.calibrate import measure_device
from specjax.latency.hardware import Hardware, find_hardware
from specjax.latency.roofline import Load, Placement, Shape, resident_bytes, shape_of, turning_tokens
from specjax.latency.rounds import DRAFTINGS, Drafting, chain, whole_round
from specjax.latency.yields import best_num_draft, break_even, expected_tokens_by_position
from specjax.models.load import read_config
from specjax.names import unknown


class Setting(NamedTuple):
    """What is predicted of, apart from the load."""

    shape: Shape
    placed: Placement
    hardware: Hardware
    smaller: Shape | None  # the drafter, where it is a model by itself
    drafts: Drafts
    overhead: float  # seconds a pass


def run(command: Latency, write: Write) -> dict:
    """One row a batch."""
    if min(command.batch) < 1:
        raise ValueError(f"--batch {min(command.batch)}: ask for at least 1")
    setting = read_setting(command.config, command.drafts, command.chip)
    rows = [at_batch(setting, Load(batch, command.context)) for batch in command.batch]
    hardware, turn = setting.hardware, turning_tokens(setting.shape, setting.hardware, setting.placed, context=0)
    bound = f": a pass is bound by compute from {turn} tokens on" if turn else ""
    say(f"{hardware.name} x {command.chip.parallel}{bound}")
    write(table([heading(rows[0]), *([shown(x) for x in row.values()] for row in rows)]) + "\n")
    too_large = [row["batch"] for row in rows if row["memory_gb"] * 1e9 > hardware.memory]
    if too_large:
        have = f"{hardware.memory / 1e9:.0f} GB there are"
        say(f"batch {', '.join(map(str, too_large))} needs more than the {have}: it would not run")
    facts = {"hardware": hardware._asdict(), "compute_bound_from_tokens": turn}
    return {"summary": {"settings": settings(command), **facts}, "batches": rows}


def read_setting(config: str, drafts: Drafts, chip: Chip) -> Setting:
    """What the flags say; ValueError for numbers that make no sense, and for a drafter that is neither a method nor a model."""
    for name, value in {"parallel": chip.parallel, "num-draft": drafts.num_draft}.items():
        if value < 1:
            raise ValueError(f"--{name} {value}: ask for at least 1")
    if chip.hardware == "here" and chip.parallel > 1:
        raise ValueError(f"--parallel {chip.parallel}: one device is measured here; name a chip of the table, or leave it out")
    said = ",".join(map(str, drafts.acceptance))
    if not all(0 <= a <= 1 for a in drafts.acceptance):
        raise ValueError(f"--acceptance {said}: each lies within 0 to 1")
    if len(drafts.acceptance) not in (1, drafts.num_draft):
        raise ValueError(
            f"--acceptance {said} has {len(drafts.acceptance)} numbers: give one, or {drafts.num_draft}, one a position"
        )
    if drafts.drafter not in DRAFTINGS and not Path(drafts.drafter).exists():
        raise ValueError(unknown("drafter", drafts.drafter, DRAFTINGS) + ", or the config.json of a smaller model")
    hardware = measure_device() if chip.hardware == "here" else find_hardware(chip.hardware)
    smaller = None if drafts.drafter in DRAFTINGS else shape_of(read_config(drafts.drafter))
    placed = Placement(chip.weight_bytes, chip.kv_bytes, chip.parallel)
    return Setting(shape_of(read_config(config)), placed, hardware, smaller, drafts, chip.overhead_us * 1e-6)


def at_batch(setting: Setting, load: Load) -> dict[str, Any]:
    """What the best K gives at a batch, beside plain decoding."""
    alive, most = np.cumprod(acceptances(setting.drafts)), setting.drafts.num_draft
    tokens = [1.0, *(expected_tokens_by_position(alive[:k]) for k in range(1, most + 1))]
    how: dict[str, Any] = dict(placed=setting.placed, overhead=setting.overhead)
    of = lambda k: (setting.shape, drafting(setting, k), setting.hardware, load)
    rounds = [whole_round(*of(k), num_draft=k, tau=tokens[k], **how) for k in range(most + 1)]
    draft, verify = [r.draft_seconds for r in rounds], [r.verify_seconds for r in rounds]
    best = best_num_draft(tokens, draft, verify)
    k, plain, chosen = best.num_draft, rounds[0], rounds[best.num_draft]
    one = max(k, 1)
    return {
        "batch": load.batch,
        "best_k": k,
        "tau": tokens[k],
        "speedup": best.speedup,
        "draft_ms": draft[k] * 1e3,
        "verify_ms": verify[k] * 1e3,
        "plain_ms": plain.seconds * 1e3,
        "tokens_per_second_per_user": chosen.tokens_per_second / load.batch,
        "tokens_per_second": chosen.tokens_per_second,
        "flops_per_token_over_plain": chosen.flops_per_token / plain.flops_per_token,
        "break_even_acceptance": break_even(one, draft[one] / plain.seconds, verify[one] / plain.seconds),
        "memory_gb": resident_bytes(setting.shape, load, setting.placed) / 1e9,
    }


def acceptances(drafts: Drafts) -> np.ndarray:
    """[K] the chance that each drafted token is accepted, those before it having been."""
    return np.broadcast_to(np.asarray(drafts.acceptance), drafts.num_draft)


def drafting(setting: Setting, num_draft: int) -> Drafting | None:
    """What the drafter runs in a round; None where that is nothing."""
    if not num_draft:
        return None
    if setting.smaller is not None:
        return chain(setting.smaller, num_draft)
    return DRAFTINGS[setting.drafts.drafter](setting.shape, num_draft)


def heading(row: dict[str, Any]) -> list[str]:
    """Column names."""
    return [name.replace("tokens_per_second", "tokens/s").replace("_", " ") for name in row]


def shown(value: Any) -> str:
    """A cell of the table."""
    return str(value) if isinstance(value, int | str) else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"

"""`specjax serve-sim`: a server under load, simulated, by how verify lengths are chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from specjax.commands.common import Write
from specjax.commands.latency import Setting, acceptances, drafting, heading, read_setting, shown
from specjax.console import progress_bar, say, table
from specjax.flags import ServeSim, settings
from specjax.latency.rounds import roofline_table
from specjax.names import unknown
from specjax.schedule import policies
from specjax.schedule.policies import Policy
from specjax.schedule.simulate import Server, Trace, backlog, made_up_trace, simulate

POLICIES: dict[str, Callable[[ServeSim, int], Policy]] = {
    "plain": lambda command, most: policies.plain(),
    "fixed": lambda command, most: policies.fixed(most),
    "threshold": lambda command, most: policies.threshold(command.threshold),
    "early_stop": lambda command, most: policies.early_stop(),
    "fixed_budget": lambda command, most: policies.fixed_budget(),
}


def run(command: ServeSim, write: Write) -> dict:
    """A row for each number of requests and each policy."""
    check(command)
    setting, rows = read_setting(command.config, command.drafts, command.chip), []
    trace = read_trace(command)
    with progress_bar("load") as bar:
        for done, concurrency in enumerate(command.concurrency):
            bar(done, len(command.concurrency))
            rows += at_load(command, setting, trace, concurrency)
    chips = f"{setting.hardware.name} x {command.chip.parallel}, {command.replicas} of these"
    say(f"{chips}: {trace.confidence.shape[1]} tokens a draft")
    write(table([heading(rows[0]), *([shown(x) for x in row.values()] for row in rows)]) + "\n")
    return {"summary": {"settings": settings(command), "hardware": setting.hardware._asdict()}, "loads": rows}


def check(command: ServeSim) -> None:
    """ValueError for what cannot be simulated."""
    for name in command.policies:
        if name not in POLICIES:
            raise ValueError(unknown("policy", name, POLICIES))
    numbers = {"concurrency": min(command.concurrency), "replicas": command.replicas, "prompt": command.prompt}
    for name, value in {**numbers, "generated": command.generated}.items():
        if value < 1:
            raise ValueError(f"--{name} {value}: ask for at least 1")
    uneven = [n for n in command.concurrency if n % command.replicas]
    if uneven:
        raise ValueError(f"--concurrency {uneven[0]} over {command.replicas} replicas: give multiples of {command.replicas}")


def read_trace(command: ServeSim) -> Trace:
    """Measured rounds, or made-up ones."""
    if command.trace is None:
        return made_up_trace(np.random.default_rng(command.seed), acceptances(command.drafts).tolist())
    path = Path(command.trace)
    if not path.is_file():
        raise FileNotFoundError(f"--trace {path}: no such file; leave it out to make rounds up")
    try:
        with np.load(path, allow_pickle=False) as found:
            return Trace(found["confidence"].astype(np.float64), found["accepted"].astype(int))
    except (KeyError, ValueError, OSError) as error:
        raise ValueError(f"--trace {path}: no .npz of confidence [R, K] and accepted [R] ({error})") from None


def at_load(command: ServeSim, setting: Setting, trace: Trace, concurrency: int) -> list[dict[str, Any]]:
    """One number of requests under every policy: the same requests, the same luck."""
    slots, most = concurrency // command.replicas, trace.confidence.shape[1]
    costs = roofline_table(
        setting.shape, drafting(setting, most), setting.hardware, most_requests=slots, most_draft=most, placed=setting.placed,
        overhead=setting.overhead,
    )  # fmt: skip
    rng = np.random.default_rng(command.seed)
    work = backlog(rng, max(6 * concurrency, 48), prompt=command.prompt, output=command.generated)
    rows = []
    for name in command.policies:
        server = Server(costs, slots, command.replicas)
        done = simulate(work, trace, server, POLICIES[name](command, most), seed=command.seed)
        rows.append({
            "concurrency": concurrency,
            "policy": name,
            "tokens_per_second": done.steady_throughput * command.replicas,
            "tokens_per_second_per_user": float(np.nanmedian(done.user_speed)),
            "tau": done.tau,
            "verified_a_request": float(done.rounds.verified.sum() / done.rounds.requests.sum()),
        })  # fmt: skip
    return rows

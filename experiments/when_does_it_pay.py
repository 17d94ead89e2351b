"""When does speculation pay, and what should a server do when it does not?

Question: throughput against each user's speed, from 1 to 4,096 requests at once, on an H100 and on four TPU v5e chips: plain
decoding, all seven drafted tokens verified (fixed), Algorithm 1 with early stop, and a budget fixed beforehand.  Where does
fixed fall below plain decoding, and does a schedule ever?

Command:    python experiments/when_does_it_pay.py --figure pays.png --out pays.md
            ... --concurrency 1,64,512 --generated 64                                   # smaller
Run time:   a minute of one idle core
Expected:   the table in README.md beside this file

Qwen3-8B in bfloat16 with a DSpark drafter of five layers, K = 7, whose drafted tokens are accepted with .82 each, as tau 4.73
over seven tokens says (DeepSpec, Qwen3-4B, T = 1); confidences are right.  Costs are the roofline's, with 20 us a pass.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specjax.latency.hardware import Hardware, find_hardware
from specjax.latency.roofline import Load, Placement, Shape, resident_bytes
from specjax.latency.rounds import block, roofline_table
from specjax.schedule import policies
from specjax.schedule.simulate import Server, backlog, made_up_trace, simulate

QWEN3_8B = Shape(vocab_size=151936, width=4096, layers=36, heads=32, kv_heads=8, head_dim=128, hidden=12288)
NUM_DRAFT, ACCEPTANCE, OVERHEAD = 7, 0.82, 20e-6
POLICIES = {
    "plain": policies.plain,
    "fixed": lambda: policies.fixed(NUM_DRAFT),
    "early stop": policies.early_stop,
    "fixed budget": policies.fixed_budget,
}


class Machine(NamedTuple):
    """Chips that hold one copy of the model."""

    chip: Hardware
    parallel: int

    @property
    def name(self) -> str:
        return self.chip.name if self.parallel == 1 else f"{self.parallel} x {self.chip.name}"


MACHINES = (Machine(find_hardware("h100"), 1), Machine(find_hardware("tpu-v5e"), 4))


def sweep(machine, concurrency, prompt, generated, seed):
    """A row a number of requests and policy."""
    placed, rows = Placement(parallel=machine.parallel), []
    trace = made_up_trace(np.random.default_rng(seed), [ACCEPTANCE] * NUM_DRAFT)
    for slots in concurrency:
        costs = roofline_table(
            QWEN3_8B, block(QWEN3_8B, NUM_DRAFT), machine.chip, most_requests=slots, most_draft=NUM_DRAFT, placed=placed,
            overhead=OVERHEAD,
        )  # fmt: skip
        work = backlog(np.random.default_rng(seed), max(6 * slots, 48), prompt=prompt, output=generated)
        fits = resident_bytes(QWEN3_8B, Load(slots, prompt + generated / 2), placed) <= machine.chip.memory
        for name, policy in POLICIES.items():
            done = simulate(work, trace, Server(costs, slots, prefill_chunk=2048), policy(), seed=seed)
            rows.append(
                {
                    "machine": machine.name,
                    "requests": slots,
                    "fits": fits,
                    "policy": name,
                    "tokens_per_second": done.steady_throughput,
                    "per_user": float(np.nanmedian(done.user_speed)),
                    "tau": done.tau,
                    "verified": float(done.rounds.verified.sum() / done.rounds.requests.sum()),
                }
            )
    return rows


def markdown(rows):
    """Throughput relative to plain decoding at the same load, and what was verified."""
    names = list(POLICIES)[1:]
    heads = [
        "machine",
        "requests",
        "plain, tokens/s",
        "a user",
        *(f"{n}, of plain" for n in names),
        "verified a request, " + names[-1],
    ]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for machine, slots in dict.fromkeys((r["machine"], r["requests"]) for r in rows):
        here = {r["policy"]: r for r in rows if (r["machine"], r["requests"]) == (machine, slots)}
        plain = here["plain"]
        note = "" if plain["fits"] else " (does not fit)"
        cells = [machine, f"{slots}{note}", f"{plain['tokens_per_second']:,.0f}", f"{plain['per_user']:.0f}"]
        cells += [f"{here[n]['tokens_per_second'] / plain['tokens_per_second']:.2f}" for n in names]
        lines.append("| " + " | ".join([*cells, f"{here[names[-1]]['verified']:.1f}"]) + " |")
    return "\n".join(lines) + "\n"


def verdicts(rows):
    """Where fixed falls below plain decoding, and the worst that a budget does against the better of the two."""
    for machine in dict.fromkeys(r["machine"] for r in rows):
        of = lambda name, machine=machine: np.asarray(
            [r["tokens_per_second"] for r in rows if (r["machine"], r["policy"]) == (machine, name)]
        )
        slots = [r["requests"] for r in rows if (r["machine"], r["policy"]) == (machine, "plain")]
        lost = [n for n, a, b in zip(slots, of("fixed"), of("plain"), strict=True) if a < b]
        worst = {n: (of(n) / np.maximum(of("plain"), of("fixed"))).min() for n in ("early stop", "fixed budget")}
        said = f"from {lost[0]} requests on" if lost else "nowhere"
        yield f"{machine}: fixed is slower than plain decoding {said}; of the better of both, early stop is never below " + (
            f"{worst['early stop']:.2f}, a fixed budget never below {worst['fixed budget']:.2f}"
        )


def draw(rows, path):
    """Throughput of a chip against each user's speed, a curve a policy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    machines = list(dict.fromkeys(r["machine"] for r in rows))
    figure, axes = plt.subplots(1, len(machines), figsize=(6 * len(machines), 4.5), squeeze=False)
    for axis, machine in zip(axes[0], machines, strict=True):
        for name in POLICIES:
            points = [r for r in rows if (r["machine"], r["policy"]) == (machine, name)]
            axis.loglog([r["per_user"] for r in points], [r["tokens_per_second"] for r in points], "o-", ms=3, label=name)
        axis.set(xlabel="tokens/s of a user (median)", ylabel="tokens/s of the machine", title=machine)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="1,4,16,64,128,256,512,1024,2048,4096")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--generated", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=Path("pays.md"), help="the table; .json beside it has the rest")
    args = parser.parse_args()
    slots = [int(x) for x in args.concurrency.split(",")]
    rows = [row for machine in MACHINES for row in sweep(machine, slots, args.prompt, args.generated, args.seed)]
    args.out.write_text(markdown(rows), "utf-8")
    args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    if args.figure is not None:
        draw(rows, args.figure)
    print(markdown(rows))
    print("\n".join(verdicts(rows)))


if __name__ == "__main__":
    main()

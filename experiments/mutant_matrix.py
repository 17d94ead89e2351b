"""Which rung of the losslessness ladder finds which planted fault.

    python experiments/mutant_matrix.py > tests/golden/mutant_matrix.md

Stops at the first rung that finds a mutant; with --all every rung is tried, which takes hours on two cores instead of half
an hour (with XLA_FLAGS=--xla_backend_optimization_level=0).  Names given as arguments limit it to these.
"""

import sys

import jax

from specjax.lossless.faults.mutants import LADDER, matrix

HEAD = "| mutant | family | what it does | subject | cheapest rung that finds it | samples |"


def line(row, every: bool) -> str:
    """One row of the table."""
    m, found = row.mutant, row.found_by
    samples = "exact" if found and row.samples is None else str(row.samples or "")
    cells = [m.name, m.family, m.story, m.subject, found[0] if found else "SURVIVES", samples]
    cells += [", ".join(found[1:])] if every else []
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> None:
    """Print the table, a line as soon as it is known."""
    every, names = "--all" in sys.argv, [name for name in sys.argv[1:] if name != "--all"]
    print(HEAD + " other rungs that do |" * every)
    print("|---" * (6 + every) + "|", flush=True)
    for index, row in enumerate(matrix(names, enough=len(LADDER) if every else 1)):
        print(line(row, every), flush=True)
        if index % 8 == 7:
            jax.clear_caches()  # many compiled loops in one process exhaust memory maps


if __name__ == "__main__":
    main()

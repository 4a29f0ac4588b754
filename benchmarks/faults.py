"""What happens when things break: fault × phase, each by the real event, in whole runs of the tiny quickstart job.

    python -m benchmarks.faults [--only PATTERN]… [--kills N] [--soak N] [--folder DIR] [key=value …]

A row says how the run ended and how far the newest checkpoint is from the undisturbed run on the same samples. Rows done
before in the same folder are not run again. Root is needed for full disks and shut connections. See docs/faults.md.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import fault_endurance
from benchmarks.fault_cells import Cell, cells
from benchmarks.fault_chain import Chain, Result


def main(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="For every run.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only cells in whose 'fault, phase' this pattern is found.")
    ] = None,
    kills: Annotated[int, typer.Option(help="Instead: kill -9 the run at so many random moments, and resume.")] = 0,
    soak: Annotated[int, typer.Option(help="Instead: train so many updates and watch every process's resources.")] = 0,
    folder: Annotated[Path, typer.Option(help="Where the runs and their results are kept.")] = Path("runs/faults"),
    listing: Annotated[bool, typer.Option("--list", help="Only list the cells.")] = False,
) -> None:
    """Run cells one after another; print the table. Exits 1 when one failed."""
    named = {f"{cell.fault}, {cell.phase}": cell for cell in cells()}
    chosen = list(dict.fromkeys(named[name] for pattern in only or [""] for name in named if re.search(pattern, name)))
    if listing:
        for cell in chosen:
            print(f"{cell.fault}, {cell.phase}")
        return
    chain = Chain(folder.absolute(), overrides or [])
    if kills or soak:
        if not chain.step:
            chain.grow(2)
        sys.exit((kills and show_kills(chain, kills)) or (soak and show_soak(chain, soak)))
    results = run_cells(chain, chosen)
    show(results)
    sys.exit(any(result.outcome.startswith(("FAILED", "NOT STRUCK")) for result in results))


def run_cells(chain: Chain, chosen: list[Cell]) -> list[Result]:
    """Run what has no result yet; each is kept in results.jsonl as soon as it is known."""
    kept = chain.folder / "results.jsonl"
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.is_file() else []
    done = {(row["fault"], row["phase"]): Result(**{**row, "left": tuple(row["left"])}) for row in rows}
    if not chain.step:
        chain.grow(2)
    for cell in chosen:
        if (cell.fault, cell.phase) not in done:
            result = done[cell.fault, cell.phase] = chain.run(cell)
            if not result.outcome.startswith("NOT STRUCK"):
                with kept.open("a") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
            print(
                f"{result.fault}, {result.phase}: {result.outcome} ({result.seconds:.0f} s)",
                file=sys.stderr,
                flush=True,
            )
    return [done[cell.fault, cell.phase] for cell in chosen]


def show_kills(chain: Chain, count: int) -> int:
    """1 when a resumed run has other parameters, or a killed one left processes behind."""
    found = fault_endurance.kills(chain, count, seed=chain.step)
    table = Table("killed at", "s", "newest checkpoint", "gap", "left behind", box=None, padding=(0, 1, 0, 0))
    for kill in found:
        gap = "-" if kill.gap is None else f"{kill.gap:g}"
        table.add_row(kill.doing, f"{kill.seconds:.0f}", str(kill.step), gap, ", ".join(kill.left) or "nothing")
    Console(width=140).print(table)
    return int(any(kill.gap or kill.left for kill in found))


def show_soak(chain: Chain, updates: int) -> int:
    """1 when something grew after warm-up by more than a hundredth, 4 MiB or 2 descriptors; the run folder may."""
    table = Table("held", "after warm-up", "at the end", "growth", box=None, padding=(0, 1, 0, 0))
    grown = False
    for use in fault_endurance.soak(chain, updates):
        early, late = use.values[len(use.values) // 4], use.values[-1]
        table.add_row(use.name, f"{early:.1f}", f"{late:.1f}", f"{use.growth():+.1f}")
        allowed = max(4.0 if use.name.endswith("MiB") else 2.0, early / 100)
        grown |= use.growth() > allowed and not use.name.startswith("run folder")
    Console(width=140).print(table)
    return int(grown)


def show(results: list[Result]) -> None:
    table = Table("fault", "phase", "outcome", "exit", "s", "gap", "left behind", box=None, padding=(0, 1, 0, 0))
    for r in results:
        gap = "-" if r.gap is None else f"{r.gap:g}"
        table.add_row(
            r.fault, r.phase, r.outcome, str(r.status), f"{r.seconds:.0f}", gap, ", ".join(r.left) or "nothing"
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    typer.run(main)

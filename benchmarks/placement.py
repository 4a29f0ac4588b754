"""What it gains to count open groups before outstanding tokens when a new group is placed, in virtual time.

    python -m benchmarks.placement [--json]

Each workload runs twice under `thundersync`, with the same draws and the same learner time (ρ = 0.9 under sync): open groups
first, and tokens first. How the two step times compare is printed, over the whole grid and along each of its directions.
"""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import dataclass, replace
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from skyrl_thundersync.simulate.machines import Machine
from skyrl_thundersync.simulate.virtual_update import direct
from skyrl_thundersync.simulate.workload import Workload
from skyrl_thundersync.stream.placement import Placement
from skyrl_thundersync.stream.release import WorkPolicy

GRID = {"groups": (8, 24, 64), "turns": (4, 20), "skew": (1.0, 3.0), "ranks": (2, 4), "seed": (0, 1)}
RHO = 0.9


@dataclass(frozen=True)
class Row:
    """One workload; `longer`: by how much tokens first lengthens its step, in percent."""

    groups: int
    turns: int
    skew: float
    ranks: int
    seed: int
    longer: float


def step_s(workload: Workload, machine: Machine, seed: int, growing: bool) -> float:
    """T_k of one update under thundersync, placed with open groups first (`growing`) or tokens first."""
    placement = Placement(machine.ranks, growing)
    return direct(workload.rollouts(machine, seed), machine, WorkPolicy("thundersync"), placement).figures.step_s


def compare(groups: int, turns: int, skew: float, ranks: int, seed: int) -> Row:
    workload = Workload(groups=groups, samples=4, turns=turns, skew=skew)
    machine = Machine(ranks=ranks)
    probe = direct(workload.rollouts(machine, seed), machine, WorkPolicy("sync")).figures
    machine = replace(machine, learner_rate=machine.learner_rate * probe.rho / RHO)
    by_groups, by_tokens = (step_s(workload, machine, seed, growing) for growing in (True, False))
    return Row(groups, turns, skew, ranks, seed, 100 * (by_tokens / by_groups - 1))


def main(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Simulate the grid and print how the two ways compare."""
    rows = [compare(*values) for values in itertools.product(*GRID.values())]
    if as_json:
        print(json.dumps([vars(row) for row in rows]))
        return
    table = Table("", "mean", "least", "most", "longer in", "shorter in", box=None)

    def add(name: str, chosen: list[Row]) -> None:
        longer = [row.longer for row in chosen]
        counts = (sum(x > 0.5 for x in longer), sum(x < -0.5 for x in longer))
        table.add_row(name, *(f"{f(longer):+.1f}%" for f in (statistics.fmean, min, max)), *map(str, counts))

    add(f"all {len(rows)}", rows)
    for field, values in GRID.items():
        for value in values if field != "seed" else ():
            add(f"{field} {value:g}", [row for row in rows if getattr(row, field) == value])
    console = Console(width=120)
    console.print("A step with tokens first, against one with open groups first (beyond half a percent either way):")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)

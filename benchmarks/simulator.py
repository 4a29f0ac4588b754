"""How long a simulated update takes, up to 1,024 ranks and a million sources.

    python -m benchmarks.simulator [--schedule thundersync] [--json]

Every size is the same workload on more machines: 49 trajectories a rank, of 20 turns on average, and for eight ranks one
rollout replica and one teacher replica. Time is the process's CPU time, the drawing of the workload included.
"""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from skyrl_thundersync.simulate.machines import Machine
from skyrl_thundersync.simulate.virtual_update import direct
from skyrl_thundersync.simulate.workload import Workload
from skyrl_thundersync.stream.release import WorkPolicy

RANKS = (16, 128, 1024)
TARGET_S = 60.0
"""To reach with the most ranks."""


def simulate(ranks: int, schedule: str) -> dict[str, float]:
    """One update; what was simulated and how long that took."""
    workload = Workload(groups=ranks * 12500 // 1024, samples=4, turns=20)
    machine = Machine(ranks=ranks, replicas=ranks // 8, teachers=ranks // 8)
    begun = time.process_time()
    figures = direct(workload.rollouts(machine, 42), machine, WorkPolicy(schedule)).figures
    seconds = time.process_time() - begun
    return {"ranks": ranks, "sources": figures.sources, "seconds": seconds, "step_s": figures.step_s}


def main(
    schedule: Annotated[str, typer.Option(help="thundersync, group or sync.")] = "thundersync",
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Print time by size; exit 1 when the largest takes longer than a minute."""
    rows = [simulate(ranks, schedule) for ranks in RANKS]
    if as_json:
        print(json.dumps(rows))
    else:
        table = Table("ranks", "sources", "s", "µs a source", "simulated step", box=None)
        for row in rows:
            each = 1e6 * row["seconds"] / row["sources"]
            table.add_row(
                str(row["ranks"]),
                f"{row['sources']:,}",
                f"{row['seconds']:.1f}",
                f"{each:.0f}",
                f"{row['step_s']:.0f} s",
            )
        Console().print(table)
    raise typer.Exit(rows[-1]["seconds"] > TARGET_S)


if __name__ == "__main__":
    typer.run(main)

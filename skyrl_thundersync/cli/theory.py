"""`skyrl theory`: what overlap is worth by the paper's theory, for figures that one gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from skyrl_thundersync.theory import FIGURES, predict

UNITS = (
    "R: time of the rollouts, with --waves of one wave. L: what the learner works for them, ρ = L/R. P: reduction, step and "
    "publication after both, κ = P/R. Ratios have no unit: times R in seconds they are seconds."
)


def command(
    rho: Annotated[float, typer.Option(help="Learner service over rollout time, ρ = L/R.")] = 1.0,
    kappa: Annotated[float, typer.Option(help="Suffix over rollout time, κ = P/R.")] = 0.05,
    objective: Annotated[str, typer.Option(help="Release law: opd or grpo.")] = "opd",
    gamma: Annotated[float, typer.Option(help="Service grows as duration^γ.")] = 1.0,
    skew: Annotated[float, typer.Option(help="Durations are U^skew; more is more heterogeneous.")] = 1.0,
    turns: Annotated[int, typer.Option(help="OPD: turns a trajectory, a.")] = 20,
    group: Annotated[int, typer.Option(help="GRPO: trajectories a group, m.")] = 8,
    share: Annotated[
        float, typer.Option(help="Service that waits: for the trajectory's close (OPD, δ), for its group (GRPO, β).")
    ] = 2 / 3,
    waves: Annotated[int, typer.Option(help="Rollout waves, w; the other figures are then those of one wave.")] = 1,
    plot: Annotated[Path | None, typer.Option(help="Also write the curves as SVG and JSON into this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What overlap is worth by the paper's theory: tail, its bounds, and speed-up over sync."""
    from skyrl_thundersync.report import curves

    try:
        figures = predict(rho, kappa, objective, gamma, skew, turns, group, share, waves)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    files = curves.plot(plot) if plot is not None else []
    if as_json:
        print(json.dumps(figures | {"files": [str(file) for file in files]}))
        return
    table = Table("figure", "", "value", "meaning", box=None, pad_edge=False)
    for name, value in figures.items():
        symbol, meaning = FIGURES[name]
        table.add_row(name.replace("_", " "), symbol, f"{value:.4g}", meaning)
    console = Console()
    console.print(table)
    console.print(f"[dim]{UNITS}[/]", highlight=False)
    for file in files:
        Console().print(str(file))

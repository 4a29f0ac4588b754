"""Subcommands that explain a run: verify, timeline, report, doctor. Heavy imports happen when one is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from skyrl_thundersync.errors import ConfigError

JSON = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
FAILED = 1


def register(app: typer.Typer) -> None:
    """Add the subcommands to the command line."""
    app.command()(verify)


def verify(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run with thundersync.record=true.")],
    limit: Annotated[int, typer.Option(help="How many recorded batches to replay.", min=1)] = 10,
    plant: Annotated[
        str | None,
        typer.Option(
            help="Plant a fault, to see that it is found: source-twice, dropped-adjoint, wrong-n, stale-version."
        ),
    ] = None,
    as_json: JSON = False,
) -> None:
    """Prove on recorded batches that streaming changed nothing: replay, compare with the textbook.

    Exits 1 and names the kind of fault when something differs beyond rounding. Uses the devices the run used.
    """
    from skyrl_thundersync.quiet import quiet_imports

    with Console(stderr=True).status("loading torch"), quiet_imports():
        from skyrl_thundersync.analysis import equivalence
    result = _readable(lambda: equivalence.report(run, limit, plant))
    if as_json:
        print(json.dumps(result))
    else:
        _print_verify(result)
    raise typer.Exit(FAILED if result["findings"] else 0)


def _print_verify(result: dict) -> None:
    console = Console(soft_wrap=True, highlight=False)
    kind = f"{result['objective']}{', LoRA' if result['lora'] else ''}, {result['ranks']} learner ranks"
    console.print(f"{escape(result['run'])}: {kind}, work in the order in which it became ready")
    table = Table("batch", "N_k", "|g|", "FP64", "FP32", "rounding", "Δ sync", "Δ AdamW", box=None, pad_edge=False)
    for index, row in enumerate(result["batches"]):
        delta = [f"{d:.0e}" for d in result["delta"][index]] if index < len(result["delta"]) else ["-", "-"]
        cells = ["-"] * 4
        if "float32" in row:
            exact, single = row["float64"], row["float32"]
            cells = [f"{exact['norm_textbook']:.4g}"]
            cells += [f"{value:.1e}" for value in (exact["error"], single["error"], single["rounding"])]
        table.add_row(str(row["version"]), str(row["n_scored"]), *cells, *delta)
    console.print(table)
    console.print(
        "[dim]FP64, FP32: relative error of the streamed gradient to the textbook's. rounding: of the FP32 textbook to its "
        "FP64 self.\nΔ: parameters after replayed updates, streamed against sync and against torch AdamW.[/]"
    )
    rows = [row["float32"] for row in result["batches"] if "float32" in row]
    if rows:
        worst = max(rows, key=lambda row: row["error"])
        console.print(
            f"worst parameter: {worst['worst_parameter']}, relative error {worst['worst_error']:.1e}, "
            f"{worst['worst_share']:.0%} of its batch's squared error"
        )
    for finding in result["findings"]:
        console.print(f"[red]batch {finding['version']}: {finding['kind']}[/]: {escape(finding['detail'])}")
    console.print("[red]NOT the same update.[/]" if result["findings"] else "[green]The same update.[/]")


def _readable(action):
    """What `action` returns; what the user can put right, as one line instead of a traceback."""
    try:
        return action()
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(str(error)) from error

"""`skyrl eval …`: pass@k of a model folder on terminal tasks, resumable."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

HELP = """Evaluate a model on terminal tasks: independent attempts, pass@1, pass@3 and pass@5.

    skyrl eval +config=opd/quickstart -o runs/eval \\
        trainer.policy.model.path=runs/quickstart/exports/global_step_30/policy

What `make quickstart` trained, on the tasks that were held out: at temperature 0, as the preset says, and so one attempt at
each. Five of them, sampled:

    skyrl eval +config=opd/quickstart -o runs/eval-sampled --attempts 5 \\
        trainer.policy.model.path=runs/quickstart/exports/global_step_30/policy generator.eval_sampling_params.temperature=1.0

Options are a preset's, as for `skyrl train`: trainer.policy.model.path is the model (or an adapter that names its model),
data.val_data the tasks, generator.eval_sampling_params how it samples, generator.inference_engine.* the replicas,
thundersync.sandbox.* where commands run. An interrupted evaluation goes on when the same command is given again.
"""


def evaluate(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for results, summary, table and plot.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[+config=GROUP/NAME] [key=value]...")] = None,
    attempts: Annotated[
        int | None,
        typer.Option(min=1, help="Independent attempts at each task.", show_default="5, or 1 at temperature 0"),
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="A LoRA adapter to serve over the model.")
    ] = None,
    swe_bench: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Grade with swebench's harness: SWE-bench's data set as JSON."),
    ] = None,
    swe_bench_python: Annotated[str, typer.Option(help="An interpreter that has swebench.")] = sys.executable,
    swe_bench_workers: Annotated[int, typer.Option(min=1, help="Instances that the harness grades at once.")] = 4,
) -> None:
    from skyrl_thundersync.process.quiet import quiet_imports

    console = Console(stderr=True)
    with console.status("loading SkyRL"), quiet_imports():
        from skyrl_thundersync.evaluate import session as eval_run
        from skyrl_thundersync.evaluate import swe_bench as harness
    grade = None
    if swe_bench is not None:
        grade = partial(harness.grade, dataset=swe_bench, python=swe_bench_python, workers=swe_bench_workers)
    summary = eval_run.run(arguments or [], attempts, adapter, output, console, grade)
    show(summary, output)


def show(summary: dict[str, Any], output: Path) -> None:
    """The table on the screen, and where everything is."""
    table = Table("", "first k", "unbiased", box=None, pad_edge=False)
    for k, value in summary["pass_at_k"].items():
        table.add_row(f"pass@{k}", f"{value['first_k']:.2f}", f"{value['unbiased']:.2f}")
    console = Console()
    console.print(table)
    mean = summary["mean"]
    console.print(
        f"{summary['tasks']} tasks x {summary['attempts']} attempts; mean reward {mean['reward']:.3f}, "
        f"{mean['turns']:.1f} turns, {mean['sampled_tokens']:.0f} sampled tokens; "
        f"{summary['accounting']['gpu_hours']:.2f} GPU hours in {summary['accounting']['wall_hours']:.2f} h"
    )
    console.print(str(output / "summary.json"), soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("eval", help=HELP)(evaluate)

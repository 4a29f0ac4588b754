"""`skyrl data …`: from public task sets to files that `skyrl train` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from skyrl_thundersync.errors import ConfigError

app = typer.Typer(
    no_args_is_help=True, help="Prepare tasks: filters, decontamination, execution checks, split, manifest."
)

Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for train.jsonl, dev.jsonl and manifest.json.")]
Turns = Annotated[int, typer.Option(min=1, help="Turns an episode has at most.")]
Enable = Annotated[
    list[str] | None,
    typer.Option(
        help="Take tasks of a kind that is skipped otherwise: build, compose, gpu, internet. May be repeated."
    ),
]
Partial = Annotated[
    bool,
    typer.Option(help="Training reward counts passed tests. Success in evaluation is the official one either way."),
]
Decontaminate = Annotated[
    list[Path] | None,
    typer.Option(
        exists=True,
        help="A benchmark: a folder of Harbor tasks, or .jsonl/.parquet in SWE-bench's schema. May be repeated.",
    ),
]
Check = Annotated[
    bool, typer.Option("--check", help="Keep tasks that the reference solves and doing nothing does not.")
]
Backend = Annotated[str, typer.Option(help="Sandbox for --check: auto, docker or bubblewrap.")]
Workers = Annotated[int, typer.Option(min=1, help="Tasks checked at the same time.")]


@app.command(help="Harbor task folders (Terminal-Bench, one's own). Without --split, dev.jsonl holds all tasks too.")
def harbor(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False)],
    output: Output,
    max_turns: Turns = 300,
    enable: Enable = None,
    partial_credit: Partial = True,
    decontaminate: Decontaminate = None,
    check: Check = False,
    backend: Backend = "auto",
    workers: Workers = 2,
    split: Annotated[bool, typer.Option(help="Set 5 % of the tasks aside.")] = False,
) -> None:
    _harbor("harbor", folder, output, max_turns, enable, partial_credit, decontaminate, check, backend, workers, split)


@app.command(help="SETA-Env: the folder that holds SETA_Synth/ and SETA_Evolve/.")
def seta(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False)],
    output: Output,
    max_turns: Turns = 300,
    enable: Enable = None,
    partial_credit: Partial = True,
    decontaminate: Decontaminate = None,
    check: Check = False,
    backend: Backend = "auto",
    workers: Workers = 2,
) -> None:
    _harbor("seta", folder, output, max_turns, enable, partial_credit, decontaminate, check, backend, workers, True)


@app.command("swe-smith", help="SWE-smith (Python): the data set's .parquet or .jsonl files.")
def swe_smith(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False)],
    output: Output,
    max_turns: Turns = 300,
    partial_credit: Partial = True,
    decontaminate: Decontaminate = None,
) -> None:
    from skyrl_thundersync.data import prepare

    source = _refusing(lambda: prepare.swe_smith_source(files, max_turns, partial_credit))
    _finish(source, output, decontaminate, None, True)


@app.command("swe-bench", help="SWE-bench (Verified) for evaluation: the data set as .json, .jsonl or .parquet.")
def swe_bench(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .jsonl file of tasks to write.")],
    max_turns: Turns = 300,
) -> None:
    from skyrl_thundersync.data.swe_bench import read_instances, terminal_row

    rows = [terminal_row(instance, max_turns) for instance in read_instances(file)]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    Console().print(f"{len(rows)} tasks in {output}")


@app.command(
    help="Build the images of tasks that need one: Harbor task folders, or prepared .jsonl files of SWE-smith."
)
def images(
    sources: Annotated[list[Path], typer.Argument(exists=True, help="Folders of Harbor tasks, or .jsonl files.")],
    network: Annotated[bool, typer.Option(help="Give builds the engine's network.")] = False,
) -> None:
    from skyrl_thundersync.data.harbor import read_tasks
    from skyrl_thundersync.data.images import ImageBuilder
    from skyrl_thundersync.sandbox.base import SandboxError
    from skyrl_thundersync.tasks.rows import read_rows

    made = kept = 0
    failed: list[str] = []
    try:
        with ImageBuilder(network) as builder:
            for source in sources:
                jobs: list[tuple[str, Any]] = []
                if source.is_dir():
                    tasks, _ = _refusing(lambda source=source: read_tasks(source, ["build"]))
                    jobs = [
                        (t.image, lambda t=t: builder.build(t.folder / "environment", t.workdir, t.image))
                        for t in tasks
                        if "build" in t.needs
                    ]
                else:
                    rows = {row["image"]: row for _, row in read_rows(source) if row.get("base_image")}
                    jobs = [
                        (tag, lambda r=row, tag=tag: builder.own(r["base_image"], r["workdir"], tag))
                        for tag, row in sorted(rows.items())
                    ]
                for tag, job in jobs:
                    try:
                        new = job()
                    except SandboxError as error:
                        failed.append(f"{tag}: {error}")
                        continue
                    made, kept = made + new, kept + (not new)
    except SandboxError as error:
        raise ConfigError(str(error)) from error
    Console().print(f"{made} images built, {kept} there already, {len(failed)} failed")
    if failed:
        raise ConfigError("\n".join(failed))


def _harbor(
    name: str,
    folder: Path,
    output: Path,
    max_turns: int,
    enable: list[str] | None,
    partial_credit: bool,
    decontaminate: list[Path] | None,
    check: bool,
    backend: str,
    workers: int,
    split: bool,
) -> None:
    from skyrl_thundersync.data import prepare
    from skyrl_thundersync.data.task_folder import ENABLEABLE

    if unknown := set(enable or ()) - set(ENABLEABLE):
        raise ConfigError(f"--enable {', '.join(sorted(unknown))}: must be one of {', '.join(ENABLEABLE)}")
    source = _refusing(lambda: prepare.harbor_source(name, folder, max_turns, partial_credit, enable or ()))
    _finish(source, output, decontaminate, (backend, workers) if check else None, split)


def _finish(
    source: Any, output: Path, decontaminate: list[Path] | None, check: tuple[str, int] | None, split: bool
) -> None:
    from skyrl_thundersync.data import prepare
    from skyrl_thundersync.data.decontaminate import load_benchmark

    benchmarks = [_refusing(lambda path=path: load_benchmark(path)) for path in decontaminate or ()]
    checking = None if check is None else (lambda tasks: _execution_problems(tasks, *check))
    manifest = prepare.write(prepare.prepare(source, benchmarks, checking, split), output)
    _show(manifest, output)


def _execution_problems(tasks: list[Any], backend: str, workers: int) -> Mapping[str, str | None]:
    from skyrl_thundersync.data.execution import check_all
    from skyrl_thundersync.options.schema import SandboxConfig
    from skyrl_thundersync.sandbox.base import SandboxError
    from skyrl_thundersync.sandbox.pool import SandboxPool

    # One command is the whole reference solution here.
    longest = max((task.agent_timeout_s for task in tasks), default=1.0)
    config = SandboxConfig(backend=backend, command_timeout_s=longest)
    unrunnable = {task.task_id: f"needs {','.join(task.needs)}" for task in tasks if set(task.needs) - {"build"}}
    try:
        with SandboxPool(config, "data-check") as pool:
            runnable = [task for task in tasks if task.task_id not in unrunnable]
            return unrunnable | {check.task_id: check.problem for check in check_all(pool, runnable, workers)}
    except SandboxError as error:
        raise ConfigError(f"--check: {error}") from error


def _refusing(read: Any) -> Any:
    """What a user can put right, said in one line."""
    try:
        return read()
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _show(manifest: Mapping[str, Any], output: Path) -> None:
    counts = manifest["counts"]
    table = Table("", "tasks", box=None, pad_edge=False)
    table.add_row("read", str(counts["read"]))
    for name, count in counts["dropped"].items():
        if count:
            table.add_row(f"  dropped: {name}", str(count))
    for name in ("kept", "train", "dev"):
        table.add_row(name, str(counts[name]))
    for name, pair in (manifest["paper"] or {}).items():
        table.add_row(
            f"paper's count of {name}: {'the same' if pair['paper'] == pair['here'] else 'differs'}", str(pair["paper"])
        )
    console = Console()
    console.print(table)
    console.print(f"{output / 'manifest.json'}", soft_wrap=True)

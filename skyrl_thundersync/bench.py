"""`skyrl-thundersync bench`: one configuration under sync, group and thundersync, on the same seeds, in one process tree.

Each run is `skyrl train` with one schedule; rounds interleave the schedules, so that a machine that drifts hits all of them.
The first update of a run is warm-up and dropped. Speed-up of a schedule is sync's mean step time over its own (PAPER.md,
"Results"), with the range over updates paired by index. A sweep repeats this for every value of one option.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from skyrl_thundersync.analysis.rundata import read_metrics
from skyrl_thundersync.errors import ConfigError

SCHEDULES = ("sync", "group", "thundersync")
FIGURES = {
    "rollout_s": "timing/rollout",
    "tail_s": "timing/tail",
    "suffix_s": "timing/suffix",
    "step_s": "timing/update",
    "busy_share": "thundersync/learner_busy_share",
    "rho": "theory/rho",
    "kappa": "theory/kappa",
    "n_scored": "thundersync/n_scored",
}
"""Means over the counted updates: name here, key in metrics.jsonl."""


@dataclass(frozen=True)
class Row:
    """One schedule at one value of the swept option (None without a sweep); seconds, shares and counts are means.

    speedup: against sync. low, high: least and largest ratio of paired updates.
    """

    value: str | None
    schedule: str
    updates: int
    figures: dict[str, float]
    speedup: float
    low: float
    high: float


def run(schedule: str, arguments: list[str], folder: Path, updates: int) -> list[dict]:
    """One training run of `updates` counted updates in `folder`; its metrics rows without the warm-up.

    Raises:
        ConfigError: the run failed, or took another number of updates; the message ends with what it printed last.
    """
    command = [
        str(Path(sys.executable).with_name("skyrl-thundersync")),
        *("train", "+plugin=thundersync"),
        *arguments,
        f"thundersync.schedule={schedule}",
        f"thundersync.run_dir={folder}",
        f"trainer.max_training_steps={updates + 1}",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise ConfigError(f"{schedule}: `{' '.join(command)}` exited {done.returncode}\n{done.stdout[-3000:]}")
    rows = [row for row in read_metrics(folder) if "timing/update" in row]
    if len(rows) != updates + 1:
        raise ConfigError(
            f"{schedule}: {len(rows)} updates in {folder}/metrics.jsonl, expected {updates + 1}. Is there enough data, "
            f"and are trainer.epochs large enough?"
        )
    return rows[1:]


def summary(rows: dict[str, list[dict]], value: str | None = None) -> list[Row]:
    """Means per schedule and speed-ups against sync, paired by position in `rows`."""
    found = []
    sync_s = statistics.fmean(row["timing/update"] for row in rows["sync"])
    for schedule, own in rows.items():
        paired = [s["timing/update"] / r["timing/update"] for s, r in zip(rows["sync"], own, strict=True)]
        figures = {name: statistics.fmean(row[key] for row in own) for name, key in FIGURES.items()}
        speedup = sync_s / figures["step_s"]
        found.append(Row(value, schedule, len(own), figures, speedup, min(paired), max(paired)))
    return found


def compare(arguments: list[str], folder: Path, updates: int, rounds: int, value: str | None = None) -> list[Row]:
    """Run all schedules `rounds` times with run folders below `folder`."""
    rows: dict[str, list[dict]] = {schedule: [] for schedule in SCHEDULES}
    console = Console(stderr=True)
    for index in range(rounds):
        for schedule in SCHEDULES:
            console.print(f"round {index + 1}/{rounds}: {schedule}")
            rows[schedule] += run(schedule, arguments, folder / f"{schedule}-{index}", updates)
    return summary(rows, value)


def points(rows: list[Row]) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Measured speed-ups against ρ, for `analysis.curves.plot`."""
    by_rho: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        if row.schedule != "sync":
            xs, ys = by_rho.setdefault(f"measured, {row.schedule}", ([], []))
            xs.append(next(r.figures["rho"] for r in rows if r.value == row.value and r.schedule == "sync"))
            ys.append(row.speedup)
    return {"speedup_rho": by_rho}


def swept(sweep: str | None) -> list[tuple[str | None, list[str]]]:
    """(value, overrides) of every point of a sweep `key=value,value,…`; one point without overrides where there is none.

    Raises:
        ConfigError: not of that form.
    """
    if sweep is None:
        return [(None, [])]
    key, _, values = sweep.partition("=")
    if not key or not all(values.split(",")):
        raise ConfigError(f"--sweep {sweep!r}: write key=value,value, for example thundersync.sandbox.latency_s=1,2,4")
    return [(value, [f"{key}={value}"]) for value in values.split(",")]


def show(rows: list[Row], key: str | None = None) -> None:
    """Print the table; `key`: the swept option."""
    columns = ("schedule", "updates", "rollout", "tail", "suffix", "step", "busy", "ρ", "N_k", "speed-up", "range")
    table = Table(*([key] if key else []), *columns, box=None, padding=(0, 1, 0, 0), title_justify="left")
    table.title = "seconds an update, means"
    for row in rows:
        f = row.figures
        table.add_row(
            *([row.value] if key else []),
            row.schedule,
            str(row.updates),
            *(f"{f[name]:.2f}" for name in ("rollout_s", "tail_s", "suffix_s", "step_s")),
            f"{f['busy_share']:.0%}",
            f"{f['rho']:.2f}",
            f"{f['n_scored']:.0f}",
            f"{row.speedup:.2f}x",
            f"{row.low:.2f}-{row.high:.2f}",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def command(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[+config=GROUP/NAME] [key=value]...", help="As for `train`.")
    ] = None,
    updates: Annotated[int, typer.Option(help="Counted updates a run.", min=1)] = 5,
    rounds: Annotated[int, typer.Option(help="Runs of each schedule, interleaved.", min=1)] = 1,
    sweep: Annotated[str | None, typer.Option(help="Repeat for every value of one option: key=value,value.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Keep the run folders here.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write the theory's curves with the measured points into this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time one configuration under sync, group and thundersync on the same seeds.

    Worth a sweep: thundersync.sandbox.latency_s (the ratio of rollout to learner time), trainer.train_batch_size,
    generator.max_turns.
    """
    cases = swept(sweep)
    chosen = [argument for argument in arguments or [] if argument != "+plugin=thundersync"]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        free = f"thundersync.run_dir={temporary}/free"
        _refuse_what_cannot_run([[*chosen, *overrides, free] for _, overrides in cases])
        folder = Path(out or temporary).absolute()
        for index, (value, overrides) in enumerate(cases):
            rows += compare(chosen + overrides, folder / (value and f"sweep-{index}" or ""), updates, rounds, value)
    if plot is not None:
        from skyrl_thundersync.analysis import curves

        curves.plot(plot, points(rows))
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    show(rows, sweep.partition("=")[0] if sweep else None)


def _refuse_what_cannot_run(cases: list[list[str]]) -> None:
    """Read every configuration before the first of many runs starts. Raises ConfigError."""
    with Console(stderr=True).status("reading the configuration"):
        from skyrl_thundersync.validate import checked_config

        for arguments in cases:
            checked_config(*arguments)

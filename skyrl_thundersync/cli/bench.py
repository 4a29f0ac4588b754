"""`skyrl bench`: one configuration under sync, group and thundersync, update by update in one run.

Each round gives the same batch of tasks, from the same weights and seeds, to every schedule in turn
(hosts/skyrl/interleaved.py), so that a machine whose speed drifts hits all of them. The first round is warm-up and dropped.
Speed-up of a schedule is sync's step ÷ its own within a round; the median over rounds, with the range. A sweep repeats this
for every value of one option.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.stream.release import SCHEDULES

FIGURES = {
    "rollout_s": "timing/rollout",
    "tail_s": "timing/tail",
    "suffix_s": "timing/suffix",
    "rho": "theory/rho",
    "learner_s": "timing/learner_busy",
    "append_s": "timing/learner_append",
    "sweep_s": "timing/learner_sweep",
    "prompt_s": "timing/learner_prompt",
    "cpu_s": "timing/learner_cpu",
    "page_faults": "memory/learner_page_faults",
    "n_scored": "thundersync/n_scored",
}
"""Medians over the counted rounds: name here, metric. Beside them step_s, by the bench's own clock, and busy_share."""

PARTS = ("rollout", "tail", "suffix", "step")
KINDS = ("append", "sweep", "prompt")
"""Of learner work: turns' first forwards, sweeps of trajectories, forward and sweep of a group's prompt."""

STDERR = 2  # the descriptor: what the run shows is not the result
DEARER = 1.1
"""Learner time of the same work, against the schedule that needed least, from which on the table warns."""


@dataclass(frozen=True)
class Row:
    """One schedule at one value of the swept option (None without a sweep).

    Attributes:
        rounds: counted ones.
        figures: medians over them: seconds an update, shares, counts.
        ratios: sync's step ÷ this schedule's, round by round.
        speedup: their median; low, high: their range.
        bound: 1 + ρ under sync, which no schedule can exceed.
        dearer: learner seconds for the same work ÷ those under the schedule `than` that needed least; medians of rounds.
        ranks: each learner rank's cores and threads.
    """

    value: str | None
    schedule: str
    rounds: int
    figures: dict[str, float]
    ratios: tuple[float, ...]
    speedup: float
    low: float
    high: float
    bound: float
    dearer: float
    than: str
    ranks: list[dict[str, Any]]


def run(arguments: list[str], folder: Path, rounds: int) -> list[dict[str, Any]]:
    """The run of `bench_arguments`, its progress on stderr; its counted updates.

    Raises:
        ConfigError: it failed, after saying why, or took another number of updates.
    """
    updates = (rounds + 1) * len(SCHEDULES)
    command = [sys.executable, "-m", __spec__.name, *bench_arguments(arguments, folder, rounds)]
    done = subprocess.run(command, stdout=STDERR)
    if done.returncode:
        raise ConfigError(f"the run exited {done.returncode} and said why above: `{' '.join(command)}`")
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines()]
    if len(rows) != updates:
        raise ConfigError(f"{len(rows)} updates in {folder}/rounds.jsonl, expected {updates}")
    return [row for row in rows if row["round"] > 0]


def bench_arguments(arguments: list[str], folder: Path, rounds: int) -> list[str]:
    """Those of a comparison of `rounds` counted rounds in `folder`: its length is fixed, and all it does is updates."""
    return [
        *arguments,
        f"thundersync.run_dir={folder}",
        f"trainer.max_training_steps={(rounds + 1) * len(SCHEDULES)}",
        f"trainer.epochs={rounds + 1}",
        "trainer.resume_mode=none",
        "trainer.ckpt_interval=-1",
        "trainer.hf_save_interval=-1",
        "trainer.eval_interval=-1",
        "trainer.eval_before_train=false",
        "thundersync.record=false",
    ]


def summary(updates: list[dict[str, Any]], value: str | None = None) -> list[Row]:
    """A row a schedule, from the updates of whole rounds (lines of `rounds.jsonl`)."""
    by_schedule = {s: sorted(_of(updates, s), key=lambda row: row["round"]) for s in SCHEDULES}
    figures = {schedule: _figures(rows) for schedule, rows in by_schedule.items()}
    learner = {s: [row["metrics"][FIGURES["learner_s"]] for row in rows] for s, rows in by_schedule.items()}
    least = min(SCHEDULES, key=lambda schedule: figures[schedule]["learner_s"])
    found = []
    for schedule, rows in by_schedule.items():
        ratios = tuple(s["step_s"] / own["step_s"] for s, own in zip(by_schedule["sync"], rows, strict=True))
        dearer = statistics.median(a / b for a, b in zip(learner[schedule], learner[least], strict=True))
        found.append(
            Row(
                value=value,
                schedule=schedule,
                rounds=len(rows),
                figures=figures[schedule],
                ratios=ratios,
                speedup=statistics.median(ratios),
                low=min(ratios),
                high=max(ratios),
                bound=1 + figures["sync"]["rho"],
                dearer=dearer,
                than=least,
                ranks=rows[-1]["ranks"],
            )
        )
    return found


def _of(updates: list[dict[str, Any]], schedule: str) -> list[dict[str, Any]]:
    return [row for row in updates if row["schedule"] == schedule]


def _figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    found = {name: statistics.median(row["metrics"][key] for row in rows) for name, key in FIGURES.items()}
    found["step_s"] = statistics.median(row["step_s"] for row in rows)
    busy = (row["metrics"][FIGURES["learner_s"]] / (row["step_s"] * len(row["ranks"])) for row in rows)
    return found | {"busy_share": statistics.median(busy)}


def warnings(rows: list[Row]) -> list[str]:
    """Where the same work took the learner longer under one schedule than under another, and in which kind of work."""
    found = []
    for row in rows:
        if row.dearer > DEARER:
            than = next(r for r in rows if r.value == row.value and r.schedule == row.than)
            kinds = (f"{kind} {row.figures[f'{kind}_s']:.1f} s ({than.figures[f'{kind}_s']:.1f})" for kind in KINDS)
            cpu = f"CPU time {row.figures['cpu_s']:.1f} s ({than.figures['cpu_s']:.1f})"
            faults = f"{row.figures['page_faults']:.0f} page faults ({than.figures['page_faults']:.0f})"
            found.append(
                f"{row.schedule}{f' at {row.value}' if row.value else ''}: the learner took {row.dearer:.2f} times as long "
                f"as under {row.than} for the same work: {', '.join((*kinds, cpu, faults))}. The steps differ by more "
                "than their schedules"
            )
    return found


def points(rows: list[Row]) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Measured speed-ups against ρ, for `report.curves.plot`."""
    by_rho: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        if row.schedule != "sync":
            xs, ys = by_rho.setdefault(f"measured, {row.schedule}", ([], []))
            xs.append(row.bound - 1)
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
    """Print the table, what bounds it and what is odd about it; `key`: the swept option."""
    columns = ("schedule", *PARTS, *KINDS, "CPU", "faults", "N_k", "busy", "ρ", "speed-up", "range")
    table = Table(*([key] if key else []), *columns, box=None, padding=(0, 1, 0, 0), title_justify="left")
    table.title = f"seconds an update, medians of {rows[0].rounds} rounds"
    for row in rows:
        f = row.figures
        table.add_row(
            *([row.value] if key else []),
            row.schedule,
            *(f"{f[f'{name}_s']:.2f}" for name in (*PARTS, *KINDS, "cpu")),
            f"{f['page_faults']:.0f}",
            f"{f['n_scored']:.0f}",
            f"{f['busy_share']:.0%}",
            f"{f['rho']:.2f}",
            f"{row.speedup:.2f}x",
            f"{row.low:.2f}-{row.high:.2f}",
        )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for row in rows:
        if row.schedule == "sync":
            at = f"{key}={row.value}: " if key else ""
            console.print(f"{at}1 + ρ = {row.bound:.2f} is the most that any schedule can reach", highlight=False)
    for index, rank in enumerate(rows[0].ranks):
        cores = ", ".join(map(str, rank["cores"]))
        console.print(f"learner-{index}: threads {rank['threads']}, cores {cores}", highlight=False)
    for warning in warnings(rows):
        console.print(f"[yellow]warning:[/yellow] {warning}", highlight=False)


def publish(rows: list[Row], key: str | None, plot: Path | None, as_json: bool) -> None:
    """Plot the rows where asked to, and print them as a table or as JSON."""
    if plot is not None:
        from skyrl_thundersync.report import curves

        curves.plot(plot, points(rows))
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
        for warning in warnings(rows):
            print(f"warning: {warning}", file=sys.stderr)
    else:
        show(rows, key)


def command(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[+config=GROUP/NAME] [key=value]...", help="As for `train`.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Counted rounds: an update under each schedule.", min=1)] = 6,
    sweep: Annotated[str | None, typer.Option(help="Repeat for every value of one option: key=value,value.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Keep the run folder here.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write the theory's curves with the measured points into this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time one configuration under sync, group and thundersync on the same tasks, weights and seeds.

    Worth a sweep: thundersync.sandbox.latency_s (the ratio of rollout to learner time), trainer.train_batch_size,
    generator.max_turns. --rounds 3 or 6: each schedule is then first, second and third equally often.
    """
    chosen = [argument for argument in arguments or [] if argument != "+plugin=thundersync"]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        folder = Path(out or temporary).absolute()
        cases = [
            (value, chosen + overrides, folder / f"sweep-{index}" if value else folder)
            for index, (value, overrides) in enumerate(swept(sweep))
        ]
        _refuse_what_cannot_run([bench_arguments(given, place, rounds) for _, given, place in cases])
        for value, given, place in cases:
            rows += summary(run(given, place, rounds), value)
    publish(rows, sweep.partition("=")[0] if sweep else None, plot, as_json)


def _refuse_what_cannot_run(cases: list[list[str]]) -> None:
    """Read every configuration before the first of many runs starts. Raises ConfigError."""
    with Console(stderr=True).status("reading the configuration"):
        from skyrl_thundersync.hosts.skyrl.checks import checked_config

        for arguments in cases:
            checked_config(*arguments)


if __name__ == "__main__":  # the run that `run` starts
    from skyrl_thundersync.hosts.skyrl import entrypoint

    entrypoint.main("skyrl_thundersync.hosts.skyrl.interleaved:InterleavedExperiment")

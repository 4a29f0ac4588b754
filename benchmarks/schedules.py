"""sync, group and thundersync side by side on the same seeds, in one process tree.

    python -m benchmarks.schedules [--updates 5] [--rounds 1] [key=value …]

Each run is `skyrl train` with the preset `opd/bench` and one schedule; rounds interleave the schedules so that a machine
that drifts hits all of them. The student is the quickstart's with a wider MLP whose added units are silent: it acts
like the original at thirty times the arithmetic. The first update of a run is warm-up and dropped. Speed-up of a
schedule is sync's mean step time over its own (PAPER.md, "Results"), with the range over updates paired by index.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

SCHEDULES = ("sync", "group", "thundersync")


WIDTH = 16384  # of the student's MLP; 384 in the original


def widened_student(folder: Path) -> Path:
    """The quickstart's student with an MLP of `WIDTH` units, those added having output weights of zero."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from skyrl_thundersync.data.byte_tokenizer import byte_tokenizer
    from skyrl_thundersync.quickstart.files import load_asset

    torch.manual_seed(0)
    small = load_asset("student")
    wide = Qwen3ForCausalLM(Qwen3Config(**{**small.config.to_dict(), "intermediate_size": WIDTH})).float()
    weights = wide.state_dict()
    for name, weight in small.state_dict().items():
        if name.endswith("down_proj.weight"):
            weights[name].zero_()
        weights[name][tuple(slice(n) for n in weight.shape)] = weight
    wide.load_state_dict(weights)
    wide.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def run(schedule: str, student: Path, folder: Path, updates: int, overrides: list[str]) -> list[dict]:
    """One training run of `updates` counted updates; its metrics rows without the warm-up."""
    command = [
        str(Path(sys.executable).with_name("skyrl-thundersync")),
        *("train", "+plugin=thundersync", "+config=opd/bench"),
        f"thundersync.schedule={schedule}",
        f"trainer.policy.model.path={student}",
        f"thundersync.run_dir={folder}",
        f"trainer.max_training_steps={updates + 1}",
        *overrides,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{schedule}: `{' '.join(command)}` exited {done.returncode}\n{done.stdout[-3000:]}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if "timing/update" in row]
    if len(rows) != updates + 1:
        sys.exit(f"{schedule}: {len(rows)} updates in {folder}/metrics.jsonl, expected {updates + 1}")
    return rows[1:]


def summary(rows: dict[str, list[dict]]) -> list[dict]:
    """Means per schedule and speed-ups against sync, paired by position in `rows`."""
    out = []
    for schedule, own in rows.items():
        paired = [s["timing/update"] / r["timing/update"] for s, r in zip(rows["sync"], own, strict=True)]
        mean = {
            name: statistics.fmean(row[key] for row in own)
            for name, key in (
                ("rollout_s", "timing/rollout"),
                ("tail_s", "timing/tail"),
                ("suffix_s", "timing/suffix"),
                ("step_s", "timing/update"),
                ("busy_share", "thundersync/learner_busy_share"),
                ("n_scored", "thundersync/n_scored"),
            )
        }
        sync_step = statistics.fmean(row["timing/update"] for row in rows["sync"])
        out.append(
            {
                "schedule": schedule,
                "updates": len(own),
                **mean,
                "speedup": sync_step / mean["step_s"],
                "speedup_range": [min(paired), max(paired)],
            }
        )
    return out


def main(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...")] = None,
    updates: Annotated[int, typer.Option(help="Counted updates a run.")] = 5,
    rounds: Annotated[int, typer.Option(help="Runs of each schedule, interleaved.")] = 1,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Run all three schedules and compare."""
    rows: dict[str, list[dict]] = {schedule: [] for schedule in SCHEDULES}
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="schedules-") as folder:
        student = widened_student(Path(folder) / "student")
        for index in range(rounds):
            for schedule in SCHEDULES:
                console.print(f"round {index + 1}/{rounds}: {schedule}")
                rows[schedule] += run(schedule, student, Path(folder) / f"{schedule}-{index}", updates, overrides or [])
    result = summary(rows)
    if as_json:
        print(json.dumps(result))
        return
    columns = ("schedule", "updates", "rollout", "tail", "suffix", "step", "busy", "N_k", "speed-up", "range")
    table = Table(*columns, box=None, padding=(0, 1, 0, 0), title="seconds an update, means", title_justify="left")
    for r in result:
        table.add_row(
            r["schedule"],
            str(r["updates"]),
            *(f"{r[key]:.2f}" for key in ("rollout_s", "tail_s", "suffix_s", "step_s")),
            f"{r['busy_share']:.0%}",
            f"{r['n_scored']:.0f}",
            f"{r['speedup']:.2f}x",
            "{:.2f}-{:.2f}".format(*r["speedup_range"]),
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)

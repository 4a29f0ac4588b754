"""Patches of an evaluation graded by swebench's own harness, which may live in another Python environment.

The harness starts containers of its own from the instances' images, so an agent has no say in its grade. Instances that it
has graded already are not run again, so an interrupted grading goes on.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.evaluate.attempts import Attempt, read_attempts
from skyrl_thundersync.process.durable import replace_text

MODEL = "policy"
HARNESS = "swebench.harness.run_evaluation"


def patch_file(folder: Path, task_id: str, attempt: int) -> Path:
    """Where an evaluation keeps what an attempt changed."""
    return folder / "patches" / str(attempt) / f"{task_id}.diff"


def keep_patch(folder: Path, task_id: str, attempt: int, patch: str) -> None:
    """Write it, whole or not at all."""
    file = patch_file(folder, task_id, attempt)
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(file, patch)


def grade(folder: Path, dataset: Path, python: str, workers: int) -> list[Attempt]:
    """Grade every attempt of the evaluation in `folder` and write its success into results.jsonl.

    dataset: the data set as a JSON file; python: an interpreter that has swebench.

    Raises:
        ConfigError: the harness failed, or says that its machinery and not the patch failed.
    """
    attempts = read_attempts(folder)
    resolved: set[tuple[str, int]] = set()
    for number in sorted({attempt.attempt for attempt in attempts}):
        tasks = [attempt.task_id for attempt in attempts if attempt.attempt == number]
        resolved |= {(task, number) for task in _run(folder, dataset, python, workers, number, tasks)}
    graded = [_graded(attempt, (attempt.task_id, attempt.attempt) in resolved) for attempt in attempts]
    replace_text(folder / "results.jsonl", "".join(json.dumps(asdict(attempt)) + "\n" for attempt in graded))
    return graded


def _graded(attempt: Attempt, solved: bool) -> Attempt:
    return replace(attempt, solved=solved, reward=float(solved))


def _run(folder: Path, dataset: Path, python: str, workers: int, number: int, tasks: Sequence[str]) -> set[str]:
    """The instances that attempt `number` resolved."""
    place = folder / "swebench"
    place.mkdir(exist_ok=True)
    predictions = place / f"predictions-{number}.jsonl"
    with predictions.open("w", encoding="utf-8") as file:
        for task in tasks:
            # An attempt that ended ungraded (context full, sandbox lost) has left none: an empty patch resolves nothing.
            patch = patch_file(folder, task, number)
            text = patch.read_text(encoding="utf-8") if patch.is_file() else ""
            line = {"instance_id": task, "model_name_or_path": MODEL, "model_patch": text}
            file.write(json.dumps(line) + "\n")
    run_id = f"attempt-{number}"
    command = [python, "-m", HARNESS, "-d", str(dataset.absolute()), "-p", str(predictions.absolute()), "-id", run_id]
    command += ["--max_workers", str(workers), "--report_dir", ".", "-i", *tasks]
    done = subprocess.run(
        command, cwd=place, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    said = done.stdout.decode("utf-8", "replace")
    (place / f"{run_id}.log").write_text(said, encoding="utf-8")
    report = place / f"{MODEL}.{run_id}.json"
    if done.returncode or not report.is_file():
        raise ConfigError(
            f"swebench's harness ended with {done.returncode} ({place / run_id}.log): {said.strip()[-600:]}"
        )
    told = json.loads(report.read_text(encoding="utf-8"))
    if broken := told.get("infra_failure_ids"):
        raise ConfigError(
            f"swebench's harness could not grade {len(broken)} instances, {broken[0]} for one; its logs are in {place}. "
            "Give the same command again when its machinery works"
        )
    return set(told["resolved_ids"])

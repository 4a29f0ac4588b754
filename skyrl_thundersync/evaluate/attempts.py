"""The files of an evaluation: one line per finished attempt, one per session, and the summary made of them.

An evaluation that was interrupted goes on where it stopped. The results file is append-only and names, in a file beside it,
what was evaluated: results of another model, task set or sampling are never mixed in. A line that a kill cut short is taken
off and its attempt made again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.evaluate.passk import first_k, unbiased
from skyrl_thundersync.process.durable import replace_text

KS = (1, 3, 5)


@dataclass(frozen=True)
class Attempt:
    """One attempt at one task.

    Attributes:
        solved: the official success. reward: the training reward, partial credit included.
        turns, sampled_tokens, context_tokens: of the trajectory; the last is its whole length.
        stop_reason: of the last turn. seconds: from start to grade; tool_seconds: of these, in the sandbox.
        verifier_failed, sandbox_lost: the attempt counts as failed for that reason.
        session: number of the session that made it; at_s: seconds into it.
    """

    task_id: str
    attempt: int
    solved: bool
    reward: float
    turns: int
    sampled_tokens: int
    context_tokens: int
    stop_reason: str
    seconds: float
    tool_seconds: float
    verifier_failed: bool
    sandbox_lost: bool
    session: int
    at_s: float


class AttemptFiles:
    """An evaluation's folder: subject.json, results.jsonl, sessions.jsonl."""

    def __init__(self, folder: Path, subject: Mapping[str, Any]) -> None:
        """Begin, or go on with, the evaluation of `subject` in `folder`.

        Raises:
            ConfigError: the folder holds another evaluation; the message names what differs.
        """
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "subject.json"
        if file.is_file():
            before = json.loads(file.read_text(encoding="utf-8"))
            if differing := sorted(key for key in {*before, *subject} if before.get(key) != subject.get(key)):
                raise ConfigError(
                    f"{folder} holds the evaluation of something else; these differ: {', '.join(differing)}. Name another "
                    "--output, or remove the folder"
                )
        else:
            replace_text(file, json.dumps(dict(subject), indent=2, sort_keys=True) + "\n")
        self._results, self._sessions = folder / "results.jsonl", folder / "sessions.jsonl"
        _drop_half_line(self._results)
        _drop_half_line(self._sessions)
        self.attempts = read_attempts(folder)
        self.session = 1 + max((json.loads(line)["session"] for line in _lines(self._sessions)), default=-1)
        self._file = self._results.open("a", encoding="utf-8", buffering=1)

    def note(self, record: Mapping[str, Any]) -> None:
        """Note about this session: what it runs on when it starts, `wall_s` when it ends. Later notes add to earlier."""
        with self._sessions.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"session": self.session, **record}, sort_keys=True) + "\n")

    def add(self, attempt: Attempt) -> None:
        """Append a finished attempt; it is on disk when this returns."""
        self._file.write(json.dumps(asdict(attempt)) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.attempts.append(attempt)

    def close(self) -> None:
        self._file.close()


def read_attempts(folder: Path) -> list[Attempt]:
    """Finished attempts in the order they ended. Raises ConfigError on a line that is none, or an attempt given twice."""
    names = {field.name for field in fields(Attempt)}
    attempts, seen = [], set()
    for number, line in enumerate(_lines(folder / "results.jsonl"), 1):
        row = json.loads(line)
        if set(row) != names:
            raise ConfigError(f"{folder / 'results.jsonl'}, line {number}: not an attempt of this version")
        attempt = Attempt(**row)
        if (key := (attempt.task_id, attempt.attempt)) in seen:
            raise ConfigError(f"{folder / 'results.jsonl'}, line {number}: attempt {key[1]} at {key[0]} is there twice")
        seen.add(key)
        attempts.append(attempt)
    return attempts


def outcomes(attempts: Sequence[Attempt], task_ids: Sequence[str], count: int) -> list[list[bool]]:
    """Per task of `task_ids`, whether attempts 0 … count-1 solved it. Raises ValueError when one is missing."""
    solved = {(a.task_id, a.attempt): a.solved for a in attempts}
    missing = [(task, j) for task in task_ids for j in range(count) if (task, j) not in solved]
    if missing:
        raise ValueError(f"{len(missing)} attempts are missing, the first is {missing[0][1]} at {missing[0][0]}")
    return [[solved[task, j] for j in range(count)] for task in task_ids]


def gpu_accounting(folder: Path) -> dict[str, Any]:
    """GPU hours: GPUs held x wall time, summed over sessions, start-up included.

    A session that was killed counts until its last finished attempt.
    """
    last: dict[int, float] = {}
    for attempt in read_attempts(folder):
        last[attempt.session] = max(last.get(attempt.session, 0.0), attempt.at_s)
    sessions: dict[int, dict[str, Any]] = {}
    for line in _lines(folder / "sessions.jsonl"):
        row = json.loads(line)
        sessions[row["session"]] = sessions.get(row["session"], {}) | row
    rows = []
    for number, row in sorted(sessions.items()):
        wall = row.get("wall_s", last.get(number, 0.0))
        rows.append({**row, "wall_s": wall, "ended": "wall_s" in row, "gpu_hours": row["gpus"] * wall / 3600})
    return {
        "gpu_hours": sum(row["gpu_hours"] for row in rows),
        "wall_hours": sum(row["wall_s"] for row in rows) / 3600,
        "sessions": rows,
    }


def summarise(folder: Path, task_ids: Sequence[str], count: int) -> dict[str, Any]:
    """pass@k by both formulas for k of `KS` up to `count`, per-task counts, means, GPU hours."""
    attempts = [a for a in read_attempts(folder) if a.attempt < count]
    table = outcomes(attempts, task_ids, count)
    mean = {
        name: sum(float(getattr(a, name)) for a in attempts) / len(attempts)
        for name in ("reward", "turns", "sampled_tokens", "seconds", "tool_seconds", "verifier_failed", "sandbox_lost")
    }
    return {
        "tasks": len(task_ids),
        "attempts": count,
        "pass_at_k": {
            str(k): {"first_k": float(first_k(table, k)), "unbiased": float(unbiased(table, k))}
            for k in KS
            if k <= count
        },
        "mean": mean,
        "solved": {task: sum(row) for task, row in zip(task_ids, table, strict=True)},
        "accounting": gpu_accounting(folder),
    }


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


def _drop_half_line(file: Path) -> None:
    """Take off what follows the last newline: the writer was killed while it wrote it."""
    if not file.is_file():
        return
    data = file.read_bytes()
    end = data.rfind(b"\n") + 1
    if end != len(data):
        with file.open("r+b") as handle:
            handle.truncate(end)

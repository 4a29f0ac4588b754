"""What the agents did, to be read: the training rollouts of each update as text, and what they earned by task and by source.

In the run folder `rollouts/step-000012.jsonl` has one trajectory a line, and `rollouts/tasks.json` each task's last update.
The files of the oldest updates go when all together take more than `thundersync.rollouts_mib`.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from skyrl_thundersync.process.durable import replace_text
from skyrl_thundersync.rollout.outcomes import outcome_of

ROLLOUTS, TASKS = "rollouts", "tasks.json"
LONGEST = 20_000
"""Characters of a trajectory's part that are kept: head and tail of longer ones."""
SOME = 3
"""Tasks and reasons that a warning names."""


@dataclass(frozen=True)
class Played:
    """One training trajectory. reward: None where it is masked. outcome: None for one that came to its own end
    (rollout/outcomes.py). parts: who wrote ("task", "policy" or "environment") and what, in order."""

    task: str
    source: str
    sample: int
    reward: float | None
    solved: bool
    outcome: str | None
    reason: str
    stop_reason: str
    turns: int
    parts: list[tuple[str, str]]


def played(tokenizer, host_id, env_class: str, extras: dict[str, Any], output, reward: float | None) -> Played:
    """From what SkyRL's agent loop returned; `reward` as it is learned from."""
    scored, metrics = (
        groupby(zip(output.response_ids, output.loss_mask, strict=True), lambda pair: pair[1]),
        output.env_metrics,
    )
    parts = [("task", output.prompt_ids)]
    parts += [("policy" if by else "environment", [token for token, _ in pairs]) for by, pairs in scored]
    return Played(
        task=str(extras.get("task_id") or host_id.instance_id),
        source=str(extras.get("data_source") or env_class),
        sample=host_id.repetition_id,
        reward=reward,
        solved=bool(metrics.get("solved", (reward or 0.0) > 0)),
        outcome=outcome_of(metrics),
        reason=str(metrics.get("reason") or ""),
        stop_reason=output.stop_reason,
        turns=sum(by == "policy" for by, _ in parts),
        parts=[(by, _clipped(tokenizer.decode(ids))) for by, ids in parts],
    )


class RolloutLog:
    """Args: run_dir: the run folder. limit: bytes of all files together; 0 writes none, and still counts and warns."""

    def __init__(self, run_dir: Path, limit: int) -> None:
        self._folder, self._limit = run_dir / ROLLOUTS, limit
        self._of_update: list[Played] = []
        self._told: set[str] = set()
        self._unrewarded = 0

    def add(self, one: Played) -> None:
        self._of_update.append(one)

    def end(self, step: int) -> tuple[dict[str, float], list[str]]:
        """The update is over: write it. Returns metrics, and what a person should be told."""
        batch, self._of_update = self._of_update, []
        if self._limit and batch:
            self._folder.mkdir(exist_ok=True)
            lines = (json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in batch)
            replace_text(self._folder / f"step-{step:06d}.jsonl", "".join(lines))
            self._write_tasks(step, batch)
            self._prune()
        by_source: dict[str, list[bool]] = defaultdict(list)
        groups: dict[str, set[float | None]] = defaultdict(set)
        for one in batch:
            by_source[one.source].append(one.solved)
            groups[one.task].add(one.reward)
        metrics = {f"success/{source}": fmean(solved) for source, solved in by_source.items()}
        metrics["reward/zero_variance_groups"] = sum(len(rewards - {None}) < 2 for rewards in groups.values())
        return metrics, list(self._warnings(batch))

    def _warnings(self, batch: list[Played]) -> Iterator[str]:
        """A task whose verifier failed for all its samples, once; an update without any reward, the first and each tenth in
        a row; one that is masked whole."""
        by_task: dict[str, list[Played]] = defaultdict(list)
        for one in batch:
            by_task[one.task].append(one)
        failed = [
            task
            for task, ones in by_task.items()
            if all(one.outcome == "verifier_failed" for one in ones) and task not in self._told
        ]
        self._told |= set(failed)
        if failed:
            of_them = [one for task in failed for one in by_task[task]]
            yield f"the verifier failed for every sample of {_some(failed)}: {_reasons(of_them)}"
        if batch and all(one.reward is None for one in batch):
            yield f"all {len(batch)} trajectories were masked, so there is no gradient: {_reasons(batch)}"
        self._unrewarded = 0 if any(one.reward for one in batch) else self._unrewarded + 1
        if self._unrewarded % 10 == 1 and batch:
            row = f" ({self._unrewarded} updates in a row)" if self._unrewarded > 1 else ""
            yield f"no trajectory earned a reward{row}, tasks {_some(list(by_task))}: {_reasons(batch)}"

    def _write_tasks(self, step: int, batch: list[Played]) -> None:
        file = self._folder / TASKS
        tasks = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        for task in {one.task for one in batch}:
            ones = [one for one in batch if one.task == task]
            rewards = [one.reward for one in ones if one.reward is not None]
            tasks[task] = {
                "update": step,
                "source": ones[0].source,
                "samples": len(ones),
                "solved": sum(one.solved for one in ones),
                "mean_reward": fmean(rewards) if rewards else None,
            }
        replace_text(file, json.dumps(tasks, ensure_ascii=False, indent=0))

    def _prune(self) -> None:
        files = sorted(self._folder.glob("step-*.jsonl"))
        sizes = [file.stat().st_size for file in files]
        while len(files) > 1 and sum(sizes) > self._limit:
            files.pop(0).unlink()
            sizes.pop(0)


def _clipped(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}\n[{len(text) - LONGEST:,} characters left out]\n{text[-half:]}"


def _some(tasks: list[str]) -> str:
    more = f" and {len(tasks) - SOME} more" if len(tasks) > SOME else ""
    return ", ".join(repr(task) for task in tasks[:SOME]) + more


def _reasons(ones: list[Played]) -> str:
    """The commonest reasons, and how many trajectories each is of."""
    counts = Counter(one.reason or (one.outcome or "graded 0, no reason given").replace("_", " ") for one in ones)
    return "; ".join(f"{count} × {reason}" for reason, count in counts.most_common(SOME))

"""What a run folder says about a run: its configuration, its updates, its evaluations and, where logged, its events."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from skyrl_thundersync.telemetry.timeline import EVENTS, Event, read_events
from skyrl_thundersync.theory import MeasuredLaw, measured_release

PHASES = ("rollout", "tail", "finish", "publish", "host")
"""The parts of a step, `host` for all between the others; metric `timing/NAME`."""


@dataclass(frozen=True)
class RunData:
    """One run.

    Attributes:
        name: of its folder.
        config: as resolved.
        rows: metrics of every update in order, warm-up included.
        warmup: updates at the start that averages leave out.
        evaluations: (updates done, held-out score).
        events: in order of their start; empty for runs without an event log.
    """

    name: str
    config: dict[str, Any]
    rows: list[dict[str, float]]
    warmup: int
    evaluations: list[tuple[int, float]]
    events: list[Event]

    @property
    def schedule(self) -> str:
        return self.config["thundersync"]["schedule"]

    @property
    def counted(self) -> list[dict[str, float]]:
        """Updates that averages are over."""
        return self.rows[self.warmup :]

    def series(self, metric: str) -> list[float]:
        """A metric of every update; NaN where it has none."""
        return [float(row.get(metric, "nan")) for row in self.rows]

    def mean(self, metric: str) -> float | None:
        values = [row[metric] for row in self.counted if metric in row]
        return statistics.fmean(values) if values else None

    @cached_property
    def hours(self) -> list[float]:
        """Hours of work, update steps only, until each update was published."""
        return (np.cumsum([row["timing/update"] for row in self.rows]) / 3600).tolist()

    @cached_property
    def laws(self) -> list[MeasuredLaw]:
        """F⁻ of every counted update: release of its learner work into the queues, over normalised rollout time."""
        versions = {row["thundersync/policy_version"] for row in self.counted}
        found, work = [], []
        rollouts = {e.args["version"]: e for e in self.events if e.track == "update" and e.name == "rollouts"}
        tails = {e.args["version"]: e for e in self.events if e.track == "update" and e.name == "tail"}
        learner = [e for e in self.events if e.track.startswith("learner-")]
        for version in sorted(versions & rollouts.keys()):
            start, end = rollouts[version].start, tails[version].start + tails[version].seconds
            work = [e for e in learner if start <= e.start < end + 1e-3]
            release = [max(0.0, e.start - e.args["waited"] - start) for e in work]
            if sum(e.seconds for e in work) > 0:
                found.append(measured_release(release, [e.seconds for e in work], rollouts[version].seconds))
        return found


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The rows of a run folder's metrics.jsonl by step; an update's has `timing/update`, one of an evaluation alone has not.

    Of two rows of one step and kind the later one counts. A last line that a crash cut is left out. Raises FileNotFoundError.
    """
    rows = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith(("\n", "}")):
            row = json.loads(line)
            rows[int(row["step"]), "timing/update" in row] = row
    return [rows[key] for key in sorted(rows)]


def read_run(folder: Path, warmup: int) -> RunData:
    """Read a run folder.

    Raises:
        FileNotFoundError: it has no configuration or metrics.
        ValueError: it has no update beyond the warm-up.
    """
    folder = Path(folder)
    for name in ("config.yaml", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} holds no {name}: name the folder of a run (thundersync.run_dir)")
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    every = read_metrics(folder)
    rows = [row for row in every if "timing/update" in row]
    if len(rows) <= warmup:
        raise ValueError(f"{folder} has {len(rows)} updates, no more than the {warmup} of warm-up; see --warmup")
    scores = [(int(row["step"]), float(row["eval/all/avg_score"])) for row in every if "eval/all/avg_score" in row]
    events = read_events(folder) if (folder / EVENTS).is_file() else []
    return RunData(folder.resolve().name, config, rows, warmup, scores, events)


@dataclass(frozen=True)
class SpeedUp:
    """Of one run over another, from mean step times; `low`, `high`: over pairs of the same policy version."""

    mean: float
    low: float
    high: float
    pairs: int


def speed_up(baseline: RunData, run: RunData) -> SpeedUp:
    """Mean step time of `baseline` ÷ that of `run` (PAPER.md, "Results").

    Raises:
        ValueError: the two have no update in common.
    """
    ours = {row["thundersync/policy_version"]: row["timing/update"] for row in run.counted}
    pairs = [
        row["timing/update"] / ours[row["thundersync/policy_version"]]
        for row in baseline.counted
        if row["thundersync/policy_version"] in ours
    ]
    if not pairs:
        raise ValueError(f"{baseline.name} and {run.name} have no update of the same policy version in common")
    mean = baseline.mean("timing/update") / run.mean("timing/update")
    return SpeedUp(mean, min(pairs), max(pairs), len(pairs))


def baseline_of(runs: list[RunData]) -> RunData:
    """The first synchronous run, else the first."""
    return next((run for run in runs if run.schedule == "sync"), runs[0])

"""The report's charts of runs: step time by phase, learning curves, release of work, one update's spans, memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from matplotlib.collections import PolyCollection

from skyrl_thundersync import theory
from skyrl_thundersync.charts import SERIES, WIDTH, Chart, colour
from skyrl_thundersync.objectives.contract import NONE
from skyrl_thundersync.objectives.registry import find
from skyrl_thundersync.options.schema import OBJECTIVES
from skyrl_thundersync.telemetry.rundata import PHASES, RunData
from skyrl_thundersync.telemetry.timeline import Event, lanes, tracks

Legend = list[tuple[str, str]]
"""(colour's name, text) pairs."""

WHOLE = 2 * WIDTH + 40
"""Width of a chart that has the page for itself."""
PHASE_COLOURS = {phase: phase for phase in PHASES} | {"host": "muted"}
SPANS: Legend = [
    ("rollout", "rollout"),
    ("muted", "between turns"),
    ("tools", "tools and checkers"),
    ("teacher", "teacher"),
    ("append", "append (forward)"),
    ("sweep", "sweep"),
    ("tail", "tail"),
    ("finish", "finish"),
    ("publish", "publish"),
]
"""What is drawn in which colour in the timeline."""


class Picture(NamedTuple):
    """One chart on the page: its SVG, and text above and below it."""

    svg: str
    heading: str = ""
    note: str = ""


class Box(NamedTuple):
    """A rectangle in data units, and what it says when pointed at."""

    left: float
    right: float
    low: float
    high: float
    colour: str
    tip: str


def phases(runs: list[RunData]) -> list[Picture]:
    """A run's updates as stacked bars; all runs on one scale."""
    top = 1.05 * max(row["timing/update"] for run in runs for row in run.rows)
    made = []
    for run in runs:
        title = f"step time of {run.name} by phase"
        chart = Chart(title, "update", "seconds", width=WIDTH if len(runs) > 1 else WHOLE, counts=True)
        boxes = []
        for index, row in enumerate(run.rows, 1):
            heights = np.cumsum([0.0, *(row[f"timing/{phase}"] for phase in PHASES)]).tolist()
            for phase, (low, high) in zip(PHASES, pairwise(heights), strict=True):
                tip = f"update {index}, {phase}: {high - low:.3g} s of {heights[-1]:.3g} s"
                boxes.append(Box(index - 0.38, index + 0.38, low, high, PHASE_COLOURS[phase], tip))
        chart.axes.set(xlim=(0.5, len(run.rows) + 0.5), ylim=(0, top))
        _draw(chart, boxes)
        made.append(Picture(chart.inline(), run.name))
    return made


def learning(runs: list[RunData]) -> list[Picture]:
    """Reward and reverse KL against updates and against time; entropy and gradient norm against updates."""
    made = []
    for metric, label, both in (
        ("reward/avg_raw_reward", "mean reward", True),
        ("opd/reverse_kl", "reverse KL, nats a token", True),
        ("policy/entropy", "entropy, nats a token", False),
        ("policy/grad_norm", "gradient norm", False),
    ):
        values = [value for run in runs for value in run.series(metric) if math.isfinite(value)]
        if not values:
            continue
        if metric.startswith("reward"):
            values += [score for run in runs for _, score in run.evaluations]
        limits = (min(0.0, *values), max(values) * 1.08 or 1.0)
        for against in ("updates", "time") if both else ("updates",):
            unit, scale = (against, 1.0) if against == "updates" else _unit(max(run.hours[-1] for run in runs))
            chart = Chart(f"{label} against {unit}", unit, label, counts=against == "updates")
            right = 0.0
            for index, run in enumerate(runs):
                xs = [x * scale for x in (run.hours if against == "time" else range(1, len(run.rows) + 1))]
                right = max(right, xs[-1])
                _curve(chart, runs, index, xs, run.series(metric))
                if metric.startswith("reward") and run.evaluations:
                    at = [xs[min(step, len(xs)) - 1] if step else 0.0 for step, _ in run.evaluations]
                    (dots,) = chart.axes.plot(
                        at, [score for _, score in run.evaluations], "o", color=_colour(index), clip_on=False
                    )
                    tips = [f"{run.name}: held-out {score:.1%} after {step} updates" for step, score in run.evaluations]
                    chart.tip(dots, *tips)
            chart.axes.set(xlim=(0, right), ylim=limits)
            made.append(Picture(chart.inline()))
    return made


def release(runs: list[RunData]) -> list[Picture]:
    """F(u) of each run whose work was logged: mean and spread over updates, and the paper's law fitted to it."""
    u = np.linspace(0, 1, 201)
    made = []
    for index, run in enumerate(runs):
        if not run.laws:
            continue
        shares = np.array([law(u) for law in run.laws])
        mean = shares.mean(axis=0)
        chart = Chart(f"release of {run.name}", "normalised rollout time u", "share released F(u)")
        chart.tip(chart.axes.plot([0, 1], [0, 1], color=colour("muted"))[0], "released evenly")
        chart.axes.fill_between(
            u, shares.min(axis=0), shares.max(axis=0), color=_colour(index), alpha=0.16, linewidth=0
        )
        chart.tip(chart.axes.plot(u, mean, color=_colour(index), linewidth=2)[0], "measured")
        note = f"D = {np.mean([theory.lag(law) for law in run.laws]):.2f}"
        if (fitted := _fitted_law(run, u, mean)) is not None:
            law, text = fitted
            chart.tip(chart.axes.plot(u, law, "--", color=colour("ink"), linewidth=2)[0], text)
            note += f"; {text}"
        chart.axes.set(xlim=(0, 1), ylim=(0, 1))
        made.append(Picture(chart.inline(), run.name, note))
    return made


def _fitted_law(run: RunData, u: np.ndarray, mean: np.ndarray) -> tuple[np.ndarray, str] | None:
    """The paper's OPD law with γ and δ fitted; None for schedules that release everything late, and where rewards count."""
    if run.schedule != "thundersync" or not _by_turns(run.config["thundersync"]["objective"]):
        return None
    trajectories = run.config["trainer"]["train_batch_size"] * run.config["generator"]["n_samples_per_prompt"]
    turns = max(1, round(run.mean("thundersync/n_sources") / trajectories))
    grid = [(gamma, delta) for gamma in np.linspace(0, 12, 61) for delta in np.linspace(0, 1, 11)]
    laws = [theory.opd_release(u, gamma, turns, delta) for gamma, delta in grid]
    best = int(np.argmin([np.square(law - mean).mean() for law in laws]))
    (gamma, delta), law = grid[best], laws[best]
    gap = float(np.abs(law - mean).max())
    return law, f"dashed: the paper's OPD law, a = {turns} turns, γ = {gamma:.1f}, δ = {delta:.1f}, off by ≤ {gap:.2f}"


def _by_turns(objective: str) -> bool:
    """Whether its turns are released one by one, as the law has it. Of a user's own class that may not be here: unknown."""
    return objective in OBJECTIVES and find(objective).rewards == NONE


def timeline(run: RunData) -> Picture:
    """The update of median step time, as rows of spans."""
    start, events = _median_update(run)
    names, boxes, height = {}, [], 0.0
    for track, own in tracks(events).items():
        rows = lanes(own)
        tall = max(1.0, min(3.0, (max(rows) + 1) / 8)) if track != "update" else 1.0
        thick = tall / (max(rows) + 1)
        for event, row in zip(own, rows, strict=True):
            left, top = event.start - start, height + row * thick
            what = f"{event.name} {event.args.get('of', event.args.get('task', ''))}".strip()
            tip = f"{track}: {what}, {event.seconds * 1e3:.1f} ms"
            boxes.append(Box(left, left + event.seconds, top, top + thick * 0.9, _span_colour(event), tip))
        names[track] = height + tall / 2
        height += tall + 0.25
    chart = Chart(f"timeline of one update of {run.name}", "seconds", width=WHOLE, height=int(60 + 26 * height))
    chart.axes.set(xlim=(0, max(box.right for box in boxes)), ylim=(height, 0))
    chart.axes.set_yticks(list(names.values()), list(names))
    chart.axes.grid(False)
    _draw(chart, boxes)
    return Picture(chart.inline())


def _median_update(run: RunData) -> tuple[float, list[Event]]:
    """When the update of median step time started, and its events."""
    by_time = sorted(run.counted, key=lambda row: row["timing/update"])
    version = by_time[len(by_time) // 2]["thundersync/policy_version"]
    phases = [e for e in run.events if e.track == "update" and e.args.get("version") in (version, version + 1)]
    rollouts = next(e for e in phases if e.name == "rollouts" and e.args["version"] == version)
    published = [e.start + e.seconds for e in phases if e.name == "publish" and e.start >= rollouts.start]
    end = min(published, default=rollouts.start + rollouts.seconds)
    return rollouts.start, [e for e in run.events if rollouts.start - 1e-6 <= e.start <= end]


def _span_colour(event: Event) -> str:
    if event.track == "update":
        return PHASE_COLOURS["rollout" if event.name == "rollouts" else event.name]
    if event.track.startswith("learner"):
        return "append" if event.name == "append" else "sweep"
    kind = event.track.partition("-")[0]
    return kind if kind in ("rollout", "tools", "teacher") else "muted"


def memory(runs: list[RunData]) -> list[Picture]:
    """Peaks of each update, in GiB; none for what no run has."""
    made = []
    for metric, label in (
        ("memory/learner_host_peak_gib", "learner host, GiB"),
        ("memory/learner_device_peak_gib", "learner device, GiB"),
        ("memory/driver_host_peak_gib", "driver host, GiB"),
    ):
        most = max((value for run in runs for value in run.series(metric) if math.isfinite(value)), default=0.0)
        if most == 0:
            continue
        chart = Chart(f"{label} against updates", "updates", label, counts=True)
        for index, run in enumerate(runs):
            _curve(chart, runs, index, range(1, len(run.rows) + 1), run.series(metric))
        chart.axes.set(xlim=(0, max(len(run.rows) for run in runs)), ylim=(0, most * 1.1))
        made.append(Picture(chart.inline()))
    return made


def names(runs: list[RunData]) -> Legend:
    """Which run has which colour."""
    return [(SERIES[index % len(SERIES)], run.name) for index, run in enumerate(runs)]


def _colour(index: int) -> str:
    return colour(SERIES[index % len(SERIES)])


def _unit(hours: float) -> tuple[str, float]:
    """In what to show a time, and what an hour is in it."""
    return ("hours", 1.0) if hours >= 0.5 else ("minutes", 60.0)


def _curve(chart: Chart, runs: list[RunData], index: int, xs: Sequence[float], ys: Sequence[float]) -> None:
    """One run's line; earlier runs wider, so that those with the same curve still show below later ones."""
    wide = 2.0 + 2.0 * (len(runs) - 1 - index)
    (line,) = chart.axes.plot(
        xs, ys, color=_colour(index), linewidth=wide, marker="o" if len(ys) == 1 else None, clip_on=len(ys) > 1
    )
    chart.tip(line, runs[index].name)


def _draw(chart: Chart, boxes: Sequence[Box]) -> None:
    """Boxes at least 0.4 pixels wide, on axes whose limits are set."""
    low, high = chart.axes.get_xlim()
    least = 0.4 * (high - low) / WHOLE
    corners = [
        [(b.left, b.low), (right := max(b.right, b.left + least), b.low), (right, b.high), (b.left, b.high)]
        for b in boxes
    ]
    drawn = PolyCollection(corners, facecolors=[colour(box.colour) for box in boxes], linewidths=0)
    chart.axes.add_collection(drawn)
    chart.tip(drawn, *(box.tip for box in boxes))

"""`skyrl report RUN…`: one self-contained HTML page about a run, or a comparison of runs. It loads nothing from anywhere."""

from __future__ import annotations

import math
from html import escape
from itertools import pairwise

import numpy as np

from skyrl_thundersync import theory
from skyrl_thundersync.objectives.contract import NONE
from skyrl_thundersync.objectives.registry import find
from skyrl_thundersync.options.schema import OBJECTIVES
from skyrl_thundersync.report.comparable import incomparable, other_means
from skyrl_thundersync.report.page import card, figure, page, table
from skyrl_thundersync.report.svg import Chart, legend, number
from skyrl_thundersync.telemetry.rundata import PHASES, RunData, baseline_of, speed_up
from skyrl_thundersync.telemetry.timeline import lanes, tracks

COLORS = {"rollout": "rollout", "tail": "tail", "finish": "finish", "publish": "publish", "host": "muted"}
SUMMARY = (
    ("step", "timing/update", "s"),
    ("rollouts R", "timing/rollout", "s"),
    ("tail", "timing/tail", "s"),
    ("finish", "timing/finish", "s"),
    ("publish", "timing/publish", "s"),
    ("host, between these", "timing/host", "s"),
    ("learner idle", "thundersync/learner_idle_share", "%"),
    ("ρ = L/R", "theory/rho", ""),
    ("λ = tail/R", "theory/lambda", ""),
    ("κ = P/R", "theory/kappa", ""),
    ("D", "theory/lag", ""),
    ("queue wait, median", "queue_wait/p50", "s"),
    ("queue wait, p99", "queue_wait/p99", "s"),
    ("active MFU", "thundersync/active_mfu", "%"),
    ("model TFLOP/s a rank", "thundersync/train_tflops_per_rank", ""),
    ("N_k", "thundersync/n_scored", ""),
    ("log-prob gap, p99", "logprob_gap/p99", "nats"),
    ("log-prob gap, max", "logprob_gap/max", "nats"),
    ("teacher tokens ratio", "opd/teacher_tokens_ratio", ""),
    ("learner host peak", "memory/learner_host_peak_gib", "GiB"),
    ("learner device peak", "memory/learner_device_peak_gib", "GiB"),
    ("driver host peak", "memory/driver_host_peak_gib", "GiB"),
)


def summary(runs: list[RunData]) -> dict:
    """The figures of the page, for --json: per run its means, and its speed-up over the baseline.

    speedup is None for the baseline, and for runs that are not comparable with it: incomparable then says why.
    """
    baseline = baseline_of(runs)
    return {
        "baseline": baseline.name,
        "runs": [
            {
                "name": run.name,
                "schedule": run.schedule,
                "updates": len(run.counted),
                "warmup": run.warmup,
                "mean": {metric: run.mean(metric) for _, metric, _ in SUMMARY if run.mean(metric) is not None},
                "speedup": None if run is baseline or incomparable(baseline, run) else vars(speed_up(baseline, run)),
                "incomparable": incomparable(baseline, run),
                "differs": other_means(baseline, run),
                "evaluations": run.evaluations,
            }
            for run in runs
        ],
    }


def render(runs: list[RunData]) -> str:
    """The page."""
    baseline = baseline_of(runs)
    parts = [_headline(runs, baseline)]
    parts.append(figure("Step time by phase", legend([(COLORS[p], p) for p in PHASES]) + _phases(runs), _PHASES_NOTE))
    parts.append(figure("Learning", _names(runs) + _learning(runs), _LEARNING_NOTE))
    if any(run.laws for run in runs):
        parts.append(figure("Release of learner work", _release(runs), _RELEASE_NOTE))
    for run in runs:
        if run.events:
            parts.append(figure(f"One update of {run.name}", _SPANS + _thumbnail(run), _TIMELINE_NOTE))
    if any("memory/learner_host_peak_gib" in row for run in runs for row in run.rows):
        parts.append(
            figure("Memory", _names(runs) + _memory(runs), "Peak resident memory so far, of the largest rank.")
        )
    parts.append(figure("Figures", _figures(runs), f"Means over updates, the first {runs[0].warmup} left out."))
    return page(" · ".join(run.name for run in runs), "".join(parts))


_PHASES_NOTE = (
    "One bar an update, as long as its wall clock: rollouts (with the learner work that overlaps them), tail, finish, "
    "publish, and on top the host's own work between them, checkpoints included."
)
_LEARNING_NOTE = "Left against updates, right against time in update steps. Dots: held-out evaluations."
_RELEASE_NOTE = (
    "Share of learner service that had been released by normalised rollout time u; the line is the mean over updates, the "
    "band their spread. Dashed: the paper's law, fitted. D is the largest distance below the diagonal."
)
_TIMELINE_NOTE = "The update of median step time; `skyrl timeline` writes all of them for ui.perfetto.dev."

_SPANS = legend(
    [
        ("rollout", "rollout requests"),
        ("muted", "between turns"),
        ("tools", "tools"),
        ("teacher", "teacher"),
        ("forward", "append (forward)"),
        ("sweep", "sweep"),
    ]
)


def _color(index: int) -> str:
    return f"run{index % 5}"


def _wide(index: int, runs: list[RunData]) -> float:
    """Earlier runs wider, so that those with the same curve still show below later ones."""
    return 2.0 + 2.0 * (len(runs) - 1 - index)


def _names(runs: list[RunData]) -> str:
    return legend([(_color(i), run.name) for i, run in enumerate(runs)])


def _headline(runs: list[RunData], baseline: RunData) -> str:
    cards = []
    for run in runs:
        if run is baseline:
            continue
        if reasons := incomparable(baseline, run):
            cards.append(card("not comparable", f"{run.name} with {baseline.name}", "; ".join(reasons)))
            continue
        gain = speed_up(baseline, run)
        note = f"{gain.low:.2f}–{gain.high:.2f} over {gain.pairs} paired updates"
        if means := other_means(baseline, run):
            note += f"; not of the schedule alone: {'; '.join(means)}"
        cards.append(card(f"{gain.mean:.2f}×", f"{run.name} over {baseline.name}", note))
    for run in runs:
        steps = [row["timing/update"] for row in run.counted]
        spread = f"± {np.std(steps, ddof=1):.2g} s over {len(steps)} updates" if len(steps) > 1 else "one update"
        cards.append(card(f"{np.mean(steps):.2f} s", f"mean step, {run.name}", spread))
    for run in runs:
        if (busy := run.mean("thundersync/learner_busy_share")) is not None:
            cards.append(card(f"{1 - busy:.0%}", f"learner idle, {run.name}", run.schedule))
    for run in runs:
        if len(run.evaluations) > 1:
            (_, before), (at, after) = run.evaluations[0], run.evaluations[-1]
            cards.append(
                card(f"{after:.0%}", f"held-out success, {run.name}", f"{before:.0%} before, after {at} updates")
            )
    return f'<section class="cards">{"".join(cards)}</section>'


def _phases(runs: list[RunData]) -> str:
    top = 1.05 * max(row["timing/update"] for run in runs for row in run.rows)
    charts = []
    for run in runs:
        n = len(run.rows)
        chart = Chart((0.5, n + 0.5), (0, top), "update", "seconds", f"step time of {run.name} by phase", whole=True)
        for index, row in enumerate(run.rows, 1):
            heights = np.cumsum([0.0, *(row[f"timing/{phase}"] for phase in PHASES)]).tolist()
            for phase, (low, high) in zip(PHASES, pairwise(heights), strict=True):
                tip = f"update {index}, {phase}: {high - low:.3g} s of {heights[-1]:.3g} s"
                chart.bar(index - 0.38, index + 0.38, low, high, COLORS[phase], tip)
        charts.append(f"<div><h3>{escape(run.name)}</h3>{chart.render()}</div>")
    return f'<div class="grid2">{"".join(charts)}</div>'


def _learning(runs: list[RunData]) -> str:
    curves = [("reward/avg_raw_reward", "mean reward")]
    if any("opd/reverse_kl" in row for run in runs for row in run.rows):
        curves.append(("opd/reverse_kl", "reverse KL, nats a token"))
    charts = []
    for metric, label in curves:
        values = [v for run in runs for v in run.series(metric) if math.isfinite(v)]
        if metric.startswith("reward"):
            values += [score for run in runs for _, score in run.evaluations]
        if not values:
            continue
        low, high = min(0.0, *values), max(values) * 1.08 or 1.0
        for against in ("updates", "hours"):
            axes = [list(range(1, len(run.rows) + 1)) if against == "updates" else run.hours for run in runs]
            unit, scale = (against, 1.0)
            if against == "hours" and max(x[-1] for x in axes) < 0.5:
                unit, scale = "minutes", 60.0
            axes = [[v * scale for v in x] for x in axes]
            right = max(x[-1] for x in axes)
            chart = Chart((0, right), (low, high), unit, label, f"{label} against {unit}", whole=against == "updates")
            for index, (run, xs) in enumerate(zip(runs, axes, strict=True)):
                chart.line(xs, run.series(metric), _color(index), wide=_wide(index, runs), tip=run.name)
                if metric.startswith("reward"):
                    at = [(xs[min(step, len(xs)) - 1] if step else 0.0, score) for step, score in run.evaluations]
                    tips = [f"{run.name}: held-out {score:.1%} after {step} updates" for step, score in run.evaluations]
                    chart.dots([x for x, _ in at], [y for _, y in at], _color(index), tips)
            charts.append(f"<div>{chart.render()}</div>")
    return f'<div class="grid2">{"".join(charts)}</div>'


def _release(runs: list[RunData]) -> str:
    u = np.linspace(0, 1, 201)
    charts = []
    for index, run in enumerate(runs):
        if not run.laws:
            continue
        shares = np.array([law(u) for law in run.laws])
        mean = shares.mean(axis=0)
        chart = Chart((0, 1), (0, 1), "normalised rollout time u", "share released F(u)", f"release of {run.name}")
        chart.line([0, 1], [0, 1], "muted", dashed=False, tip="released evenly")
        chart.band(u.tolist(), shares.min(axis=0).tolist(), shares.max(axis=0).tolist(), _color(index))
        chart.line(u.tolist(), mean.tolist(), _color(index), tip="measured")
        lags = [theory.lag(law) for law in run.laws]
        note = f"D = {np.mean(lags):.2f}"
        if (fitted := _fitted_law(run, u, mean)) is not None:
            law, text = fitted
            chart.line(u.tolist(), law.tolist(), "ink", dashed=True, tip=text)
            note += f"; {text}"
        charts.append(f"<div><h3>{escape(run.name)}</h3>{chart.render()}<p class=note>{escape(note)}</p></div>")
    return f'<div class="grid2">{"".join(charts)}</div>'


def _fitted_law(run: RunData, u: np.ndarray, mean: np.ndarray) -> tuple[np.ndarray, str] | None:
    """The paper's OPD law with γ and δ fitted; None for schedules that release everything late, and where rewards count."""
    if run.schedule != "thundersync" or not _by_turns(run.config["thundersync"]["objective"]):
        return None
    trajectories = run.config["trainer"]["train_batch_size"] * run.config["generator"]["n_samples_per_prompt"]
    turns = max(1, round(run.mean("thundersync/n_sources") / trajectories))
    grid = [(gamma, delta) for gamma in np.linspace(0, 12, 61) for delta in np.linspace(0, 1, 11)]
    laws = [theory.opd_release(u, gamma, turns, delta) for gamma, delta in grid]
    best = int(np.argmin([np.square(law - mean).mean() for law in laws]))
    gap = float(np.abs(laws[best] - mean).max())
    gamma, delta = grid[best]
    return laws[
        best
    ], f"dashed: the paper's OPD law, a = {turns} turns, γ = {gamma:.1f}, δ = {delta:.1f}, off by ≤ {gap:.2f}"


def _by_turns(objective: str) -> bool:
    """Whether its turns are released one by one, as the law has it. Of a user's own class that may not be here: unknown."""
    return objective in OBJECTIVES and find(objective).rewards == NONE


def _thumbnail(run: RunData) -> str:
    """The update of median step time, as rows of spans."""
    by_time = sorted(run.counted, key=lambda row: row["timing/update"])
    version = by_time[len(by_time) // 2]["thundersync/policy_version"]
    phases = [e for e in run.events if e.track == "update" and e.args.get("version") in (version, version + 1)]
    rollouts = next(e for e in phases if e.name == "rollouts" and e.args["version"] == version)
    after = [e for e in phases if e.start >= rollouts.start and not (e.name == "rollouts" and e is not rollouts)]
    end = min((e.start + e.seconds for e in after if e.name == "publish"), default=rollouts.start + rollouts.seconds)
    own = [e for e in run.events if rollouts.start - 1e-6 <= e.start <= end]
    names, marks, height = [], [], 0
    for track, events in tracks(own).items():
        rows = lanes(events)
        tall = max(1.0, min(3.0, (max(rows) + 1) / 8)) if track != "update" else 1.0
        thick = tall / (max(rows) + 1)
        for event, row in zip(events, rows, strict=True):
            low = height + row * thick
            color = COLORS.get(event.name.rstrip("s"), _track_color(track, event.name))
            tip = f"{track}: {event.name} {event.args.get('of', event.args.get('task', ''))}, {event.seconds * 1e3:.1f} ms"
            marks.append((event.start - rollouts.start, event.seconds, low, low + thick * 0.9, color, tip))
        names.append((height + tall / 2, track))
        height += tall + 0.25
    chart = Chart(
        (0, end - rollouts.start),
        (height, 0),
        "seconds",
        "",
        f"timeline of one update of {run.name}",
        width=1080,
        height=int(60 + 26 * height),
        left=92,
    )
    for start, seconds, low, high, color, tip in marks:
        chart.bar(start, start + seconds, low, high, color, tip)
    chart.name_rows(names)
    return chart.render()


def _track_color(track: str, name: str) -> str:
    if track.startswith("learner"):
        return "forward" if name == "append" else "sweep"
    kind = track.partition("-")[0]
    return {"rollout": "rollout", "tools": "tools", "teacher": "teacher", "environment": "muted"}.get(kind, "muted")


def _memory(runs: list[RunData]) -> str:
    charts = []
    for metric, label in (
        ("memory/learner_host_peak_gib", "learner host, GiB"),
        ("memory/learner_device_peak_gib", "learner device, GiB"),
        ("memory/driver_host_peak_gib", "driver host, GiB"),
    ):
        values = [v for run in runs for v in run.series(metric) if math.isfinite(v)]
        if not values or max(values) == 0:
            continue
        most = max(len(run.rows) for run in runs)
        chart = Chart((1, most), (0, max(values) * 1.1), "updates", label, f"{label} against updates", whole=True)
        for index, run in enumerate(runs):
            xs = list(range(1, len(run.rows) + 1))
            chart.line(xs, run.series(metric), _color(index), wide=_wide(index, runs), tip=run.name)
        charts.append(f"<div>{chart.render()}</div>")
    return f'<div class="grid2">{"".join(charts)}</div>'


def _figures(runs: list[RunData]) -> str:
    rows = []
    for name, metric, unit in SUMMARY:
        means = [run.mean(metric) for run in runs]
        if any(mean is not None for mean in means):
            rows.append([name, *("–" if mean is None else _quantity(mean, unit) for mean in means)])
    return table(["", *(f"{run.name} ({run.schedule})" for run in runs)], rows)


def _quantity(value: float, unit: str) -> str:
    return f"{value:.1%}" if unit == "%" else f"{number(value)} {unit}".strip()

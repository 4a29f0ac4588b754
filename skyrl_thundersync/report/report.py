"""`skyrl report RUN…`: one self-contained HTML page about a run, or a comparison of runs. It loads nothing from anywhere."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from skyrl_thundersync.charts import PALETTE
from skyrl_thundersync.report import pictures
from skyrl_thundersync.report.comparable import incomparable, option_of, other_means
from skyrl_thundersync.report.pictures import Legend, Picture
from skyrl_thundersync.telemetry.rundata import PHASES, RunData, baseline_of, speed_up

SUMMARY = (
    ("step", "timing/update", "s", "wall clock of an update"),
    ("rollouts R", "timing/rollout", "s", "until the last trajectory closed"),
    ("tail", "timing/tail", "s", "learner work after that"),
    ("finish", "timing/finish", "s", "reduction over ranks, division, clipping, the step"),
    ("publish", "timing/publish", "s", "until every replica had proved that it serves the new weights"),
    ("host, between these", "timing/host", "s", "SkyRL's own work; checkpoints and exports"),
    ("learner idle", "thundersync/learner_idle_share", "%", "of the step, over ranks"),
    ("ρ = L/R", "theory/rho", "", "L: mean rank's busy time"),
    ("λ = tail/R", "theory/lambda", "", ""),
    ("κ = P/R", "theory/kappa", "", "P: finish and publish"),
    ("D", "theory/lag", "", "how far release runs behind an even one at most, as a share of the work"),
    ("queue wait, median", "queue_wait/p50", "s", "of released work, before its rank began with it"),
    ("queue wait, p99", "queue_wait/p99", "s", ""),
    ("active MFU", "thundersync/active_mfu", "%", "model FLOPs over the whole step, of the GPU's dense BF16 peak"),
    ("model TFLOP/s a rank", "thundersync/train_tflops_per_rank", "", "by formula, over the whole step"),
    ("N_k", "thundersync/n_scored", "", "scored tokens: what the gradient is divided by"),
    ("log-prob gap, p99", "logprob_gap/p99", "nats", "sampler's and learner's log-prob of a scored token"),
    ("log-prob gap, max", "logprob_gap/max", "nats", ""),
    ("teacher tokens ratio", "opd/teacher_tokens_ratio", "", "tokens computed per trajectory token; 1 is the least"),
    ("learner host peak", "memory/learner_host_peak_gib", "GiB", "of an update; of the largest rank"),
    ("learner device peak", "memory/learner_device_peak_gib", "GiB", ""),
    ("driver host peak", "memory/driver_host_peak_gib", "GiB", ""),
)
"""Name, metric, unit and meaning of the figures that are averaged over updates."""


class Card(NamedTuple):
    """One headline figure."""

    value: str
    what: str
    note: str


class Section(NamedTuple):
    """A titled panel of charts."""

    title: str
    note: str
    charts: list[Picture]
    legend: Legend = []


def summary(runs: list[RunData]) -> dict[str, Any]:
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
                "mean": {metric: run.mean(metric) for _, metric, *_ in SUMMARY if run.mean(metric) is not None},
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
    templates = Environment(
        loader=PackageLoader("skyrl_thundersync.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template("page.html.j2").render(
        title=" · ".join(run.name for run in runs),
        palette=PALETTE,
        about=[_about(run) for run in runs],
        cards=_cards(runs, baseline),
        remarks=_remarks(runs, baseline),
        sections=_sections(runs),
        runs=runs,
        figures=_figures(runs),
    )


def _about(run: RunData) -> dict[str, str]:
    """What the run was; "–" for what its configuration does not say."""

    def said(option: str) -> str:
        value = option_of(run.config, option)
        return "–" if value is None else str(value)

    batch = f"{said('trainer.train_batch_size')} × {said('generator.n_samples_per_prompt')}"
    return {
        "run": run.name,
        "schedule": run.schedule,
        "objective": said("thundersync.objective"),
        "model": PurePath(said("trainer.policy.model.path")).name,
        "prompts × samples": batch,
        "learner ranks": said("thundersync.learner.ranks"),
        "seed": said("trainer.seed"),
        "updates": f"{len(run.rows)}, {run.warmup} of them warm-up",
    }


def _cards(runs: list[RunData], baseline: RunData) -> list[Card]:
    cards = []
    for run in runs:
        if run is not baseline and not incomparable(baseline, run):
            gain = speed_up(baseline, run)
            note = f"{gain.low:.2f}–{gain.high:.2f} over {gain.pairs} paired updates"
            cards.append(Card(f"{gain.mean:.2f}×", f"{run.name} over {baseline.name}", note))
    for run in runs:
        steps = [row["timing/update"] for row in run.counted]
        spread = f"± {np.std(steps, ddof=1):.2g} s over {len(steps)} updates" if len(steps) > 1 else "one update"
        cards.append(Card(f"{np.mean(steps):.2f} s", f"mean step, {run.name}", spread))
    for run in runs:
        if (busy := run.mean("thundersync/learner_busy_share")) is not None:
            cards.append(Card(f"{1 - busy:.0%}", f"learner idle, {run.name}", f"of the step, under {run.schedule}"))
    for run in runs:
        if len(run.evaluations) > 1:
            (_, before), (at, after) = run.evaluations[0], run.evaluations[-1]
            note = f"{before:.0%} before, after {at} updates"
            cards.append(Card(f"{after:.0%}", f"held-out success, {run.name}", note))
    return cards


def _remarks(runs: list[RunData], baseline: RunData) -> list[tuple[str, list[str]]]:
    """What stands in the way of a comparison: a sentence and its particulars, for each run that has any."""
    found = []
    for run in runs:
        if reasons := incomparable(baseline, run):
            found.append((f"{run.name} is not comparable with {baseline.name}", reasons))
        elif means := other_means(baseline, run):
            found.append((f"What {run.name} gains over {baseline.name} is not of the schedule alone", means))
    return found


def _sections(runs: list[RunData]) -> list[Section]:
    names = pictures.names(runs)
    sections = [
        Section(
            "Step time by phase",
            "One bar an update, as long as its wall clock: rollouts (with the learner work that overlaps them), tail, "
            "finish, publish, and on top the host's own work between them, checkpoints included.",
            pictures.phases(runs),
            [(pictures.PHASE_COLOURS[phase], phase) for phase in PHASES],
        ),
        Section(
            "Learning",
            "Time is that of update steps alone. Dots: held-out evaluations.",
            pictures.learning(runs),
            names,
        ),
        Section(
            "Release of learner work",
            "Share of learner service that had been released by normalised rollout time u; the line is the mean over "
            "updates, the band their spread. Dashed: the paper's law, fitted. D is the largest distance below the diagonal.",
            pictures.release(runs),
        ),
    ]
    for run in runs:
        if run.events:
            note = "The update of median step time; skyrl timeline writes all of them for ui.perfetto.dev."
            sections.append(Section(f"One update of {run.name}", note, [pictures.timeline(run)], pictures.SPANS))
    sections.append(
        Section(
            "Memory",
            "Most memory that each process held for the update; of learners, the largest rank.",
            pictures.memory(runs),
            names,
        )
    )
    return [section for section in sections if section.charts]


def _figures(runs: list[RunData]) -> list[tuple[str, list[str], str]]:
    """Name, a text a run, and meaning of all figures that any run has."""
    rows = []
    for name, metric, unit, meaning in SUMMARY:
        means = [run.mean(metric) for run in runs]
        if any(mean is not None for mean in means):
            rows.append((name, ["–" if mean is None else _quantity(mean, unit) for mean in means], meaning))
    return rows


def _quantity(value: float, unit: str) -> str:
    return f"{value:.1%}" if unit == "%" else f"{number(value)} {unit}".strip()


def number(value: float) -> str:
    """Short: three significant digits, no exponent between 0.001 and 100,000."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        text = f"{value:.3g}"
        return text if "e" not in text else f"{value:.0f}"
    return f"{value:.1e}"

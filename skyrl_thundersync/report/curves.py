"""The theory's curves as data and as SVG files.

    skyrl theory --plot FOLDER

`plot` writes one SVG a figure and `theory.json` with every number drawn. Measured points go on top of the curves.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import numpy as np

from skyrl_thundersync import theory
from skyrl_thundersync.charts import SERIES, Chart, colour

WIDTH, HEIGHT = 640, 480
KAPPA = 0.043
"""κ at which uniform durations give the paper's 1.58x (GRPO, balanced, service as long as duration)."""


@dataclass
class Figure:
    """One figure: curves and, where measured, points; each a name and its x and y values.

    x, y: axis titles. limit: a dashed horizontal line, such as 2x.
    """

    name: str
    title: str
    x: str
    y: str
    curves: dict[str, tuple[list[float], list[float]]]
    points: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)
    limit: float | None = None


def figures(group: int = 8, turns: int = 20, deferred: float = 2 / 3, kappa: float = KAPPA) -> list[Figure]:
    """The figures of "Theory": speed-up against ρ, against heterogeneity, and against waves; release laws.

    Args:
        group: m, GRPO's samples a prompt. turns: a, OPD's turns a trajectory. deferred: δ. kappa: κ = P/R.
    """
    u, rho = np.linspace(0, 1, 201), np.linspace(0.05, 3, 60)
    laws: dict[str, theory.Law] = {
        "GRPO, β = 0": lambda u: theory.grpo_release(u, 1, group, 0.0),
        "GRPO, whole groups (β = 1)": lambda u: theory.grpo_release(u, 1, group, 1.0),
        f"OPD, {turns} turns, δ = {deferred:.2f}": lambda u: theory.opd_release(u, 1, turns, deferred),
        f"OPD, {turns} turns, δ = 0": lambda u: theory.opd_release(u, 1, turns, 0.0),
    }
    release = {name: (u.tolist(), law(u).tolist()) for name, law in laws.items()}
    bound = {"bound (κ = 0)": (rho.tolist(), theory.speedup_bound(rho).tolist())}
    by_rho = {n: (rho.tolist(), theory.speedup(rho, kappa, theory.tail(law, rho)).tolist()) for n, law in laws.items()}
    skew = np.geomspace(0.5, 32, 40)
    by_spread: dict[str, tuple[list[float], list[float]]] = {}
    for name, law in (
        ("GRPO, β = 0", lambda u, s: theory.grpo_release(u, 1, group, 0.0, s)),
        ("GRPO, β = 0.25", lambda u, s: theory.grpo_release(u, 1, group, 0.25, s)),
        (f"OPD, δ = {deferred:.2f}", lambda u, s: theory.opd_release(u, 1, turns, deferred, s)),
    ):
        tails = [theory.tail(lambda u, s=s, law=law: law(u, s), 1.0) for s in skew]
        by_spread[name] = (theory.spread(skew).tolist(), theory.speedup(1.0, kappa, np.array(tails)).tolist())
    waves = np.arange(1, 33)
    by_waves = {
        f"{name}, ρ = {r:g}": (
            waves.tolist(),
            theory.waves_speedup(waves, r, kappa, theory.tail(laws[law], r)).tolist(),
        )
        for name, law in (("GRPO", "GRPO, β = 0"), ("OPD", f"OPD, {turns} turns, δ = {deferred:.2f}"))
        for r in (1.0, 0.7)
    }
    return [
        Figure("release", "How work is released", "time / rollout time, u", "share of service released, F(u)", release),
        Figure("speedup_rho", "Speed-up over sync", "learner / rollout time, ρ", "speed-up", bound | by_rho, limit=2.0),
        Figure(
            "speedup_heterogeneity",
            "More heterogeneous trajectories gain more (ρ = 1)",
            "coefficient of variation of durations",
            "speed-up",
            by_spread,
            limit=2.0,
        ),
        Figure("speedup_waves", "More rollout waves gain more", "waves, w", "speed-up", by_waves, limit=2.0),
    ]


def plot(folder: Path, measured: dict[str, dict[str, tuple[list[float], list[float]]]] | None = None) -> list[Path]:
    """Write every figure as SVG, and theory.json with their numbers, into `folder`.

    Args:
        measured: by figure's name, points to draw on its curves: name → (x values, y values).

    Returns:
        The files written.

    Raises:
        ValueError: measured points for a figure that does not exist.
    """
    drawn = figures()
    for name in measured or {}:
        if name not in {figure.name for figure in drawn}:
            raise ValueError(f"no figure is named {name!r}; there are {', '.join(figure.name for figure in drawn)}")
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for figure in drawn:
        figure.points = (measured or {}).get(figure.name, {})
        files.append(folder / f"{figure.name}.svg")
        files[-1].write_text(svg(figure), encoding="utf-8")
    files.append(folder / "theory.json")
    numbers = {c.name: {"x": c.x, "y": c.y, "curves": c.curves, "points": c.points} for c in drawn}
    files[-1].write_text(json.dumps(numbers), encoding="utf-8")
    return files


def svg(figure: Figure) -> str:
    """The figure as one SVG document: axes, a dashed line at its limit, and the names of curves and points below."""
    chart = Chart(figure.title, figure.x, figure.y, width=WIDTH, height=HEIGHT)
    if figure.limit is not None:
        chart.axes.axhline(figure.limit, color=colour("ink"), linestyle="--", linewidth=1)
    for series, (name, (x, y)) in zip(cycle(SERIES), figure.curves.items(), strict=False):
        (line,) = chart.axes.plot(x, y, color=colour(series), linewidth=2, label=name)
        chart.tip(line, name)
    for marker, (name, (x, y)) in zip(cycle("sDo^v"), figure.points.items(), strict=False):
        (dots,) = chart.axes.plot(x, y, marker, color=colour("ink"), label=name)
        chart.tip(dots, *(f"{name}: {value:.2f}" for value in y))
    chart.legend()
    return chart.document()

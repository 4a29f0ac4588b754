"""The theory's curves as data and as plain SVG files: no plotting library is needed.

    skyrl theory --plot FOLDER

`plot` writes one SVG a figure and `theory.json` with every number drawn. Measured points go on top of the curves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import numpy as np

from skyrl_thundersync.analysis import theory

COLOURS = ("#1f5fa8", "#c2571a", "#2d7d46", "#7a4aa0", "#8a6d1b", "#5b5b5b")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 400, 62, 16, 40, 48
KAPPA = 0.043
"""κ at which uniform durations give the paper's 1.58x (GRPO, balanced, service as long as duration)."""


@dataclass
class Chart:
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


def charts(group: int = 8, turns: int = 20, deferred: float = 2 / 3, kappa: float = KAPPA) -> list[Chart]:
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
        Chart("release", "How work is released", "time / rollout time, u", "share of service released, F(u)", release),
        Chart("speedup_rho", "Speed-up over sync", "learner / rollout time, ρ", "speed-up", bound | by_rho, limit=2.0),
        Chart(
            "speedup_heterogeneity",
            "More heterogeneous trajectories gain more (ρ = 1)",
            "coefficient of variation of durations",
            "speed-up",
            by_spread,
            limit=2.0,
        ),
        Chart("speedup_waves", "More rollout waves gain more", "waves, w", "speed-up", by_waves, limit=2.0),
    ]


def plot(folder: Path, measured: dict[str, dict[str, tuple[list[float], list[float]]]] | None = None) -> list[Path]:
    """Write every chart as SVG, and theory.json with their numbers, into `folder`.

    Args:
        measured: by chart name, points to draw on its curves: name → (x values, y values).

    Returns:
        The files written.

    Raises:
        ValueError: measured points for a chart that does not exist.
    """
    drawn = charts()
    for name in measured or {}:
        if name not in {chart.name for chart in drawn}:
            raise ValueError(f"no chart is named {name!r}; there are {', '.join(chart.name for chart in drawn)}")
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for chart in drawn:
        chart.points = (measured or {}).get(chart.name, {})
        files.append(folder / f"{chart.name}.svg")
        files[-1].write_text(svg(chart), encoding="utf-8")
    files.append(folder / "theory.json")
    numbers = {c.name: {"x": c.x, "y": c.y, "curves": c.curves, "points": c.points} for c in drawn}
    files[-1].write_text(json.dumps(numbers), encoding="utf-8")
    return files


def svg(chart: Chart) -> str:
    """The chart as one SVG document."""
    series = [*chart.curves.values(), *chart.points.values()]
    xs, ys = ([value for one in series for value in one[axis]] for axis in (0, 1))
    x_ticks = ticks(min(xs), max(xs))
    y_ticks = ticks(min(ys), max([*ys, chart.limit or -math.inf]))
    low_x, high_x = min(*xs, x_ticks[0]), max(*xs, x_ticks[-1])
    low_y, high_y = y_ticks[0], y_ticks[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - (y - low_y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM)

    names = list(chart.curves) + [name for name in chart.points if name not in chart.curves]
    tall = HEIGHT + 18 * math.ceil(len(names) / 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {tall}" font-family="sans-serif" font-size="12">',
        f"<title>{escape(chart.title)}</title>",
        f'<rect width="{WIDTH}" height="{tall}" fill="white"/>',
        _text(LEFT, 22, chart.title, "start", 15),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, chart.x, "middle"),
        f'<g transform="translate(16 {HEIGHT / 2}) rotate(-90)">{_text(0, 0, chart.y, "middle")}</g>',
    ]
    for tick in y_ticks:
        _, y = at(low_x, tick)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e2e2e2"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{tick:g}", "end"))
    for tick in x_ticks:
        x, _ = at(tick, low_y)
        parts.append(_text(x, HEIGHT - BOTTOM + 18, f"{tick:g}", "middle"))
    if chart.limit is not None:
        _, y = at(low_x, chart.limit)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#333" stroke-dasharray="5 4"/>')
    for name, (x_values, y_values) in chart.curves.items():
        line = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in zip(x_values, y_values, strict=True))
        colour = COLOURS[names.index(name) % len(COLOURS)]
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for name, (x_values, y_values) in chart.points.items():
        colour = COLOURS[names.index(name) % len(COLOURS)]
        for x, y in zip(x_values, y_values, strict=True):
            parts.append('<circle cx="{:.1f}" cy="{:.1f}" r="4" fill="{}"/>'.format(*at(x, y), colour))
    parts += _legend(chart, names)
    return "\n".join([*parts, "</svg>", ""])


def _legend(chart: Chart, names: Sequence[str]) -> list[str]:
    """Below the axis, two names a row, where no curve runs."""
    parts = []
    for index, name in enumerate(names):
        left = LEFT + (index % 2) * (WIDTH - LEFT - RIGHT) / 2
        y, colour = HEIGHT + 10 + 18 * (index // 2), COLOURS[index % len(COLOURS)]
        mark = (
            f'<path d="M{left} {y - 4}h18" stroke="{colour}" stroke-width="3"/>'
            if name in chart.curves
            else f'<circle cx="{left + 9}" cy="{y - 4}" r="4" fill="{colour}"/>'
        )
        parts += [mark, _text(left + 24, y, name, "start")]
    return parts


def ticks(low: float, high: float) -> list[float]:
    """About six round values that hold [low, high] between them."""
    span = (high - low) or 1.0
    step = 10 ** math.floor(math.log10(span / 5))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if span / (m * step) <= 6)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 10) for index in range(first, max(last, first + 1) + 1)]


def _text(x: float, y: float, text: str, anchor: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="#222">{escape(text)}</text>'

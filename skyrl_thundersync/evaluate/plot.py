"""Two pictures of an evaluation in one SVG: pass@k, and how often tasks were solved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from matplotlib.ticker import MaxNLocator

from skyrl_thundersync.charts import Chart, colour, styled

WIDTH, HEIGHT = 720, 320
BAR = 0.38


@styled
def pass_plot(summary: Mapping[str, Any], title: str) -> str:
    """SVG text of `attempts.summarise`'s result."""
    chart = Chart(title, "", "percent of tasks", width=WIDTH, height=HEIGHT, columns=2)
    passed, solved = chart.figure.axes
    pairs = summary["pass_at_k"]
    for kind, label, offset, name in (("first_k", "first k", -0.5, "run0"), ("unbiased", "unbiased", 0.5, "run1")):
        places = [index + offset * BAR for index in range(len(pairs))]
        bars = passed.bar(places, [pair[kind] for pair in pairs.values()], BAR, color=colour(name), label=label)
        passed.bar_label(bars, fmt="{:.1f}", padding=2)
    passed.set_xticks(range(len(pairs)), [f"pass@{k}" for k in pairs])
    passed.set(ylim=(0, 108), xlim=(-0.6, len(pairs) - 0.4), yticks=range(0, 101, 20))
    counts = Counter(summary["solved"].values())
    times = range(summary["attempts"] + 1)
    solved.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    bars = solved.bar(times, [counts[n] for n in times], 2 * BAR, color=colour("run0"))
    solved.bar_label(bars, padding=2)
    solved.set(xlabel="attempts that solved it", ylabel="tasks", xticks=times, ylim=(0, 1.08 * max(counts.values())))
    chart.legend()
    return chart.document()

"""Two pictures of an evaluation in one SVG, written without a plotting library: pass@k, and how often tasks were solved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT, MARGIN = 720, 300, 46
INK, FIRST, UNBIASED = "#333333", "#4c78a8", "#f58518"


def pass_plot(summary: Mapping[str, Any], title: str) -> str:
    """SVG text of `attempts.summarise`'s result."""
    half = WIDTH // 2
    pairs = [
        (f"pass@{k}", [(value["first_k"], FIRST), (value["unbiased"], UNBIASED)])
        for k, value in summary["pass_at_k"].items()
    ]
    counts = Counter(summary["solved"].values())
    tasks = [(str(n), [(counts[n], FIRST)]) for n in range(summary["attempts"] + 1)]
    top = max(counts.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="11" fill="{INK}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="18" font-size="13">{escape(title)}</text>',
        *_bars(0, half, pairs, 100.0, "percent of tasks", "{:.1f}"),
        *_bars(half, half, tasks, float(top), "tasks, by attempts that solved them", "{:.0f}"),
        f'<rect x="{half - 150}" y="26" width="9" height="9" fill="{FIRST}"/><text x="{half - 137}" y="34">first k</text>',
        f'<rect x="{half - 85}" y="26" width="9" height="9" fill="{UNBIASED}"/><text x="{half - 72}" y="34">unbiased</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _bars(
    left: int, width: int, groups: list[tuple[str, list[tuple[float, str]]]], top: float, label: str, form: str
) -> list[str]:
    base, high = HEIGHT - MARGIN, HEIGHT - MARGIN - 62
    x0, room = left + MARGIN, width - MARGIN - 12
    parts = [
        f'<line x1="{x0}" y1="{base}" x2="{x0 + room}" y2="{base}" stroke="{INK}"/>',
        f'<text x="{x0 + room / 2:.0f}" y="{base + 34}" text-anchor="middle">{escape(label)}</text>',
    ]
    step = room / len(groups)
    for index, (name, bars) in enumerate(groups):
        each = step * 0.7 / len(bars)
        start = x0 + index * step + step * 0.15
        parts.append(f'<text x="{start + step * 0.35:.1f}" y="{base + 16}" text-anchor="middle">{escape(name)}</text>')
        for place, (value, colour) in enumerate(bars):
            height = high * value / top
            x = start + place * each
            parts.append(
                f'<rect x="{x:.1f}" y="{base - height:.1f}" width="{each - 2:.1f}" height="{height:.1f}" fill="{colour}"/>'
            )
            text = form.format(value)
            parts.append(f'<text x="{x + each / 2:.1f}" y="{base - height - 4:.1f}" text-anchor="middle">{text}</text>')
    return parts

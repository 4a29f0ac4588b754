"""Charts as inline SVG: axes, lines, stacked bars and rows of spans. No script, no font, no network.

Colours are CSS variables of the page that holds them (report/page.py), so charts follow its light and dark theme;
`document` makes a file of a chart alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 34
"""Margins around the plotting area, in pixels."""
TITLE = 30
"""Height of the title above a chart that is a file of its own."""


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most `most` + 1 round numbers (1, 2 or 5 times a power of ten apart) within [low, high]."""
    if not high > low:
        return [low]
    step = 10 ** math.floor(math.log10((high - low) / most))
    step = next(step * m for m in (1, 2, 5, 10, 20) if (high - low) / (step * m) <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """Short: three significant digits, no exponent between 0.001 and 100,000."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        text = f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
        return text if "e" not in text else f"{value:.0f}"
    return f"{value:.1e}"


@dataclass
class Chart:
    """One set of axes. Add marks, then `render`.

    Args:
        x, y: (low, high) of the data.
        x_label, y_label: with unit.
        title: read by screen readers.
    """

    x: tuple[float, float]
    y: tuple[float, float]
    x_label: str
    y_label: str
    title: str
    width: int = 520
    height: int = 240
    left: int = LEFT
    whole: bool = False  # x counts things
    _marks: list[str] = field(default_factory=list)
    _y_names: list[tuple[float, str]] = field(default_factory=list)

    def px(self, x: float) -> float:
        low, high = self.x
        return self.left + (x - low) / ((high - low) or 1) * (self.width - self.left - RIGHT)

    def py(self, y: float) -> float:
        low, high = self.y
        return self.height - BOTTOM - (y - low) / ((high - low) or 1) * (self.height - TOP - BOTTOM)

    def line(self, xs: Sequence[float], ys: Sequence[float], color: str, *, dashed=False, wide=2.0, tip="") -> None:
        """A polyline, `wide` pixels. Points that are not finite break it."""
        path, pen = [], "M"
        for x, y in zip(xs, ys, strict=True):
            if not (math.isfinite(x) and math.isfinite(y)):
                pen = "M"
                continue
            path.append(f"{pen}{self.px(x):.1f},{self.py(y):.1f}")
            pen = "L"
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._marks.append(
            f'<path d="{"".join(path)}" fill="none" stroke="var(--{color})" stroke-width="{wide:g}"{dash}>'
            f"{_tip(tip)}</path>"
        )

    def dots(self, xs: Sequence[float], ys: Sequence[float], color: str, tips: Sequence[str]) -> None:
        for x, y, tip in zip(xs, ys, tips, strict=True):
            self._marks.append(
                f'<circle cx="{self.px(x):.1f}" cy="{self.py(y):.1f}" r="3.5" fill="var(--{color})">{_tip(tip)}</circle>'
            )

    def band(self, xs: Sequence[float], low: Sequence[float], high: Sequence[float], color: str) -> None:
        points = [f"{self.px(x):.1f},{self.py(y):.1f}" for x, y in zip(xs, high, strict=True)]
        points += [f"{self.px(x):.1f},{self.py(y):.1f}" for x, y in reversed(list(zip(xs, low, strict=True)))]
        self._marks.append(f'<polygon points="{" ".join(points)}" fill="var(--{color})" opacity="0.16"/>')

    def bar(self, x0: float, x1: float, y0: float, y1: float, color: str, tip: str) -> None:
        """A rectangle between two corners in data units."""
        a, b = sorted((self.px(x0), self.px(x1)))
        top, bottom = sorted((self.py(y0), self.py(y1)))
        self._marks.append(
            f'<rect x="{a:.2f}" y="{top:.2f}" width="{max(b - a, 0.4):.2f}" height="{max(bottom - top, 0.4):.2f}" '
            f'fill="var(--{color})">{_tip(tip)}</rect>'
        )

    def text(self, x: float, y: float, text: str, *, anchor: str = "start") -> None:
        self._marks.append(
            f'<text x="{self.px(x):.1f}" y="{self.py(y):.1f}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def name_rows(self, names: Sequence[tuple[float, str]]) -> None:
        """Names at heights y, in place of numbers on the y axis."""
        self._y_names = list(names)

    def render(self) -> str:
        parts = [
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(self.title, quote=True)}">'
        ]
        right, base = self.width - RIGHT, self.height - BOTTOM
        for value in [] if self._y_names else ticks(*self.y, most=5):
            y = self.py(value)
            parts.append(f'<line class="grid" x1="{self.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{self.left - 6}" y="{y + 3.5:.1f}" text-anchor="end">{number(value)}</text>')
        for y, name in self._y_names:
            parts.append(
                f'<text x="{self.left - 6}" y="{self.py(y) + 3.5:.1f}" text-anchor="end">{escape(name)}</text>'
            )
        for value in ticks(*self.x, most=8 if self.width > 400 else 5):
            if self.whole and value != int(value):
                continue
            x = self.px(value)
            parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base + 4}"/>')
            parts.append(f'<text x="{x:.1f}" y="{base + 16}" text-anchor="middle">{number(value)}</text>')
        parts += self._marks
        parts.append(f'<line class="axis" x1="{self.left}" x2="{right}" y1="{base}" y2="{base}"/>')
        parts.append(_label(f'x="{(self.left + right) / 2:.0f}" y="{self.height - 3}"', self.x_label))
        if self.y_label:
            parts.append(_label(f'transform="translate(12,{(TOP + base) / 2:.0f}) rotate(-90)"', self.y_label))
        return "".join(parts) + "</svg>"


def document(chart: Chart, names: Mapping[str, tuple[str, bool]], colours: Sequence[str]) -> str:
    """A chart as a file of its own, with its title above and names below, two a row.

    Args:
        names: name → (colour, whether it is of dots). Colours are "ink" or "c0", "c1", … into `colours`.
    """
    tall = TITLE + chart.height + 18 * math.ceil(len(names) / 2) + 10
    variables = "".join(f"--c{index}:{colour};" for index, colour in enumerate(colours))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {chart.width} {tall}">',
        f"<style>:root{{--ink:#222;{variables}}}text{{font:12px sans-serif;fill:#222}}.title{{font-size:15px}}"
        ".grid{stroke:#e2e2e2}.axis{stroke:#999}</style>",
        f'<rect width="{chart.width}" height="{tall}" fill="white"/>',
        f'<text class="title" x="{chart.left}" y="20">{escape(chart.title)}</text>',
        chart.render().replace("<svg", f'<svg y="{TITLE}" width="{chart.width}" height="{chart.height}"', 1),
    ]
    for index, (name, (colour, dots)) in enumerate(names.items()):
        x = chart.left + (index % 2) * (chart.width - chart.left) / 2
        y = TITLE + chart.height + 18 * (index // 2 + 1)
        mark = (
            f'<circle cx="{x + 9}" cy="{y - 4}" r="4"' if dots else f'<rect x="{x}" y="{y - 6}" width="18" height="3"'
        )
        parts.append(f'{mark} fill="var(--{colour})"/><text x="{x + 24}" y="{y}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _label(where: str, text: str) -> str:
    return f'<text class="label" {where} text-anchor="middle">{escape(text)}</text>'


def legend(items: Sequence[tuple[str, str]]) -> str:
    """(color, text) pairs in a row."""
    return (
        '<div class="legend">'
        + "".join(f'<span><i style="background:var(--{color})"></i>{escape(text)}</span>' for color, text in items)
        + "</div>"
    )


def _tip(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""

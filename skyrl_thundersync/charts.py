"""One look for every chart: matplotlib draws, and its SVG comes out as a page or a file needs it.

    chart = Chart("speed-up over sync")
    chart.axes.plot(rho, gain, color=colour("run0"))
    chart.inline()      # part of an HTML page, in the page's font and its light and dark theme
    chart.document()    # a file of its own, on white, with its title

The same marks give the same bytes: no dates, no random ids.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from xml.etree import ElementTree

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

PALETTE = {
    "ink": ("#1d2329", "#e4e8ec"),
    "soft": ("#5c6670", "#9aa5b0"),
    "line": ("#e3e5e8", "#2d343c"),
    "muted": ("#b0b8c0", "#67727d"),
    "rollout": ("#5b8db8", "#6fa3d0"),
    "tail": ("#dd7a3c", "#e38a50"),
    "finish": ("#57a27c", "#62b48b"),
    "publish": ("#9a78b5", "#b08fcb"),
    "append": ("#8cc9a8", "#a5dcbf"),
    "sweep": ("#2f7d58", "#3f9c70"),
    "tools": ("#c9a227", "#d6b548"),
    "teacher": ("#b5658f", "#cd80a8"),
    "run0": ("#2f6fbb", "#6ba4e8"),
    "run1": ("#d1603d", "#ee8a66"),
    "run2": ("#3a9a74", "#63c39c"),
    "run3": ("#8a63b8", "#b594de"),
    "run4": ("#a58419", "#d3b24a"),
}
"""Colours by name, for light and dark pages. The light ones are all different: they stand for their names in the SVG."""
SERIES = tuple(name for name in PALETTE if name.startswith("run"))
"""Names for lines of a kind: runs, laws."""

WIDTH, HEIGHT = 520, 240
"""Of a chart, in the pixels of a page that shows two side by side."""


def colour(name: str) -> str:
    """The light colour of that name; `Chart.inline` lets the page have the last word."""
    return PALETTE[name][0]


STYLE = {
    "font.size": 11,
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: the layout is the same everywhere
    "axes.titlesize": 11,
    "text.color": colour("soft"),
    "axes.labelcolor": colour("soft"),
    "axes.edgecolor": colour("muted"),
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.xmargin": 0.0,
    "grid.color": colour("line"),
    "xtick.color": colour("muted"),
    "xtick.labelcolor": colour("soft"),
    "ytick.labelcolor": colour("soft"),
    "ytick.major.size": 0,
    "legend.frameon": False,
    "svg.fonttype": "none",
}
styled = matplotlib.rc_context(STYLE)
"""Decorates what makes parts of a figure (bar labels, legends) beside `Chart` itself."""


class Chart:
    """One figure: `axes` of matplotlib to draw on (`figure` for more than one set), tooltips, and its SVG.

    Args:
        title: read by screen readers; seen in a file.
        x, y: axis titles, with unit.
        width, height: pixels. columns: sets of axes side by side.
        counts: x counts things, so there is no tick between two of them.
    """

    @styled
    def __init__(
        self,
        title: str,
        x: str = "",
        y: str = "",
        *,
        width: int = WIDTH,
        height: int = HEIGHT,
        columns: int = 1,
        counts: bool = False,
    ) -> None:
        self.title = title
        self._tips: list[Sequence[str]] = []
        self.figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained", facecolor="none")
        self.figure.subplots(1, columns)
        self.axes.set(xlabel=x, ylabel=y)
        self.axes.yaxis.set_major_locator(MaxNLocator(height // 45, steps=[1, 2, 5, 10]))
        if counts:
            self.axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))

    @property
    def axes(self) -> Axes:
        """The first set."""
        return self.figure.axes[0]

    def tip(self, artist: Artist, *texts: str) -> None:
        """What shows when the pointer rests on `artist`: one text, or one for each of its marks in order."""
        artist.set_gid(f"tip-{len(self._tips)}")
        self._tips.append(texts)

    @styled
    def legend(self) -> None:
        """The names of what is drawn, below the axes, two a row."""
        self.figure.legend(loc="outside lower center", ncols=2)

    def inline(self) -> str:
        """An <svg> element that takes colours (as variables, `--ink`), font and width from the page around it."""
        svg = self._draw()
        del svg.attrib["width"], svg.attrib["height"]
        svg.attrib |= {"role": "img", "aria-label": self.title}
        text = ElementTree.tostring(svg, encoding="unicode")
        for name, (light, _) in PALETTE.items():
            text = text.replace(light, f"var(--{name})")
        return text

    @styled
    def document(self) -> str:
        """The text of an SVG file."""
        self.figure.set_facecolor("white")
        self.figure.suptitle(self.title, fontsize=14, color=colour("ink"))
        svg = self._draw()
        svg.attrib |= {"xmlns": "http://www.w3.org/2000/svg", "font-family": "sans-serif"}
        return ElementTree.tostring(svg, encoding="unicode") + "\n"

    @styled
    def _draw(self) -> ElementTree.Element:
        """matplotlib's SVG without what neither page nor file needs, with tooltips."""
        out = io.StringIO()
        with matplotlib.rc_context({"svg.hashsalt": self.title}):
            self.figure.savefig(out, format="svg", facecolor="auto", metadata={"Date": None, "Creator": None})
        svg = ElementTree.fromstring(out.getvalue())
        for node in svg.iter():
            node.tag = node.tag.rpartition("}")[2]
        svg.remove(svg.find("metadata"))
        svg.remove(svg.find("defs"))  # the style of joins and ends
        svg.attrib |= {"stroke-linejoin": "round", "stroke-linecap": "butt"}
        for size in ("width", "height"):
            svg.set(size, svg.get(size).removesuffix("pt"))
        groups = {group.get("id"): group for group in svg.iter("g")}
        for index, texts in enumerate(self._tips):
            group = groups[f"tip-{index}"]
            for mark, text in zip([group] if len(texts) == 1 else _marks(group), texts, strict=True):
                title = ElementTree.Element("title")
                title.text = text
                mark.insert(0, title)
        used = {name for node in svg.iter() for value in node.attrib.values() for name in _REFERENCE.findall(value)}
        for node in svg.iter():
            node.attrib = {
                name.rpartition("}")[2]: _short(value)
                for name, value in node.attrib.items()
                if name != "id" or value in used
            }
        return svg


_REFERENCE = re.compile(r"#([\w-]+)")
_FAMILY = re.compile(r" font-family: [^;]*;")
_BEYOND = re.compile(r"(\.\d\d)\d+")


def _marks(group: ElementTree.Element) -> list[ElementTree.Element]:
    """What a group shows: its paths and uses, in order, without the definitions they use."""
    defined = {id(node) for definitions in group.iter("defs") for node in definitions.iter()}
    return [node for node in group.iter() if node.tag in ("path", "use") and id(node) not in defined]


def _short(value: str) -> str:
    """An attribute to a hundredth of a pixel, on one line, without a font of its own."""
    return _BEYOND.sub(r"\1", _FAMILY.sub("", " ".join(value.split())))

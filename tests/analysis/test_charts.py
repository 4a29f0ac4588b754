"""Charts as SVG: the same marks the same bytes; part of a page takes its colours, a file brings its own."""

import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from skyrl_thundersync.charts import PALETTE, Chart, colour

SVG = "{http://www.w3.org/2000/svg}"


def drawn(title="a <b> & c"):
    chart = Chart(title, "x", "y")
    (line,) = chart.axes.plot([0, 1, 2, 3], [0.5, float("nan"), 0.5, 0.7], color=colour("run0"))
    (dots,) = chart.axes.plot([0, 1, 2], [0, 1, 2], "o", color=colour("run1"), label="points")
    chart.tip(line, "one & <all>")
    chart.tip(dots, "first", "second", "third")
    return chart


def test_a_file_is_whole_and_has_its_colours_and_title():
    chart = drawn()
    chart.legend()
    root = ElementTree.fromstring(chart.document())
    assert root.tag == f"{SVG}svg" and {"a <b> & c", "points", "x", "y"} <= {t.text for t in root.iter(f"{SVG}text")}
    assert "var(" not in chart.document() and colour("run0") in chart.document()
    assert [title.text for title in root.iter(f"{SVG}title")] == ["one & <all>", "first", "second", "third"]


def test_part_of_a_page_takes_colours_font_and_width_from_there():
    text = drawn().inline()
    root = ElementTree.fromstring(text)
    assert root.get("aria-label") == "a <b> & c" and root.get("role") == "img" and root.get("viewBox") == "0 0 520 240"
    assert "width" not in root.attrib and "height" not in root.attrib
    assert not re.search(r"#[0-9a-f]{6}\b|font-family|https?:", text)
    assert set(re.findall(r"var\(--(\w+)\)", text)) <= set(PALETTE)


def test_a_broken_series_leaves_a_gap():
    root = ElementTree.fromstring(drawn().inline())
    line = next(group for group in root.iter("g") if group.findtext("title") == "one & <all>")
    assert re.fullmatch(r"M [\d.]+ [\d.]+ (M [\d.]+ [\d.]+ )?L [\d.]+ [\d.]+", line.find("path").get("d"))


def test_a_tip_for_every_mark_or_none():
    chart = Chart("t")
    (dots,) = chart.axes.plot([0, 1, 2], [0, 1, 2], "o")
    chart.tip(dots, "only", "two")
    with pytest.raises(ValueError, match="zip"):
        chart.inline()


def test_the_same_marks_are_the_same_bytes_in_any_process():
    script = "from tests.analysis.test_charts import drawn; print(drawn().document(), drawn().inline(), end='')"
    here = drawn().document() + " " + drawn().inline()
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout == here


def test_light_colours_tell_their_names():
    lights = [light for light, _ in PALETTE.values()]
    assert len(set(lights)) == len(lights)
    assert all(re.fullmatch("#[0-9a-f]{6}", one) for pair in PALETTE.values() for one in pair)

"""The report page: right figures, nothing loaded from anywhere, and a real browser draws it without complaint."""

import json
import random
import re
import shutil
import statistics
import subprocess
from html.parser import HTMLParser

import pytest
import yaml
from typer.testing import CliRunner

from skyrl_thundersync.cli.app import app
from skyrl_thundersync.report.svg import Chart, number, ticks
from skyrl_thundersync.telemetry import timeline
from skyrl_thundersync.telemetry.rundata import read_run

UPDATES = 6


def write(folder, schedule, seed, slower):
    """A run folder as a run leaves it, with known figures; its name needs escaping."""
    rng, rows, now = random.Random(seed), [], 100.0
    folder.mkdir()
    config = {
        "thundersync": {"schedule": schedule, "objective": "opd"},
        "trainer": {"train_batch_size": 2},
        "generator": {"n_samples_per_prompt": 2},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    timeline.open_log(folder)
    for version in range(UPDATES):
        parts = {
            "rollout": 2 + rng.random(),
            "tail": slower * rng.random(),
            "finish": 0.1,
            "publish": 0.2,
            "host": 0.05,
        }
        at = now
        for phase, name in (("rollout", "rollouts"), ("tail", "tail"), ("finish", "finish"), ("publish", "publish")):
            timeline.add("update", name, at, at + parts[phase], version=version)
            at += parts[phase]
        for index in range(8):
            start = now + parts["rollout"] * index / 10
            timeline.add("rollout-0", "generate", start, start + 0.3, of="<s>&")
            timeline.add(f"learner-{index % 2}", "sweep", start + 0.4, start + 0.5, of="close", waited=0.1)
        step = sum(parts.values())
        rows.append(
            {
                "step": version + 1,
                "thundersync/policy_version": version,
                "thundersync/n_sources": 12,
                "timing/update": step,
                **{f"timing/{phase}": seconds for phase, seconds in parts.items()},
                "reward/avg_raw_reward": version / UPDATES,
                "opd/reverse_kl": 1 / (1 + version),
                "thundersync/learner_busy_share": 0.4,
                "thundersync/learner_idle_share": 0.6,
                "memory/learner_host_peak_gib": 1 + version / 10,
            }
        )
        now += step
    timeline.close_log()
    rows.insert(0, {"step": 0, "eval/all/avg_score": 0.1})
    rows.append({"step": UPDATES, "eval/all/avg_score": 0.7})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def runs(tmp_path):
    return write(tmp_path / "fast <&> one", "thundersync", 1, 0.3), write(tmp_path / "slow", "sync", 2, 4.0)


def page(runs, out, *options):
    done = CliRunner().invoke(app, ["report", *map(str, runs), "--out", str(out), "--json", *options])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout), out.read_text()


def steps(folder, warmup):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["timing/update"] for row in rows if "timing/update" in row][warmup:]


@pytest.mark.parametrize("warmup", [0, 2])
def test_speed_up_is_the_ratio_of_mean_steps_with_its_range_over_pairs(runs, tmp_path, warmup):
    said, html = page(runs, tmp_path / "r.html", "--warmup", str(warmup))
    fast, slow = (steps(run, warmup) for run in runs)
    assert said["baseline"] == "slow"
    gain = said["runs"][0]["speedup"]
    assert gain["mean"] == pytest.approx(statistics.fmean(slow) / statistics.fmean(fast))
    pairs = [s / f for s, f in zip(slow, fast, strict=True)]
    assert (gain["low"], gain["high"], gain["pairs"]) == pytest.approx((min(pairs), max(pairs), UPDATES - warmup))
    assert f"{gain['mean']:.2f}×" in html
    assert said["runs"][1]["speedup"] is None


def change(folder, **values):
    """Set options of a run folder's configuration, dotted with __."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    for option, value in values.items():
        *blocks, name = option.split("__")
        node = config
        for block in blocks:
            node = node.setdefault(block, {})
        node[name] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.parametrize(
    ("option", "kind"),
    [
        ("thundersync__objective", "objective"),
        ("trainer__policy__model__path", "model"),
        ("thundersync__teacher__model", "teacher"),
        ("data__train_data", "tasks"),
        ("trainer__train_batch_size", "batch"),
        ("generator__sampling_params__max_generate_length", "lengths"),
        ("thundersync__sandbox__latency_s", "tools"),
        ("trainer__policy__optimizer_config__lr", "optimizer"),
        ("trainer__seed", "seed"),
    ],
)
def test_runs_that_do_other_work_have_no_speed_up_and_the_reason_is_said(runs, tmp_path, option, kind):
    fast, slow = runs
    for folder, value in ((fast, 4), (slow, 3)):
        change(folder, **{option: value})
    said, html = page(runs, tmp_path / "r.html")
    dotted = option.replace("__", ".")
    reason = f"{kind}: {dotted} is 3 there, 4 here"
    assert said["runs"][0]["speedup"] is None and said["runs"][0]["incomparable"] == [reason]
    assert "not comparable" in html and "×" not in html
    shown = CliRunner().invoke(app, ["report", *map(str, runs), "--out", str(tmp_path / "r.html")]).output
    assert "is not comparable with slow:" in shown and reason in shown and "x " not in shown.partition("not comp")[0]


def test_what_the_same_work_is_done_with_is_said_beside_the_speed_up(runs, tmp_path):
    fast, slow = runs
    for folder, ranks in ((fast, 4), (slow, 2)):
        change(
            folder,
            thundersync__learner__ranks=ranks,
            thundersync__learner__dtype="float32",
            thundersync__run_dir=str(folder),
        )
    said, html = page(runs, tmp_path / "r.html")
    assert said["runs"][0]["incomparable"] == [] and said["runs"][0]["speedup"]["mean"] > 1
    assert said["runs"][0]["differs"] == ["thundersync.learner.ranks is 2 there, 4 here"]
    assert "not of the schedule alone: thundersync.learner.ranks is 2 there, 4 here" in html


class Page(HTMLParser):
    """Tags that are open, and everything that could load something."""

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.count = [], [], {}

    def handle_starttag(self, tag, attributes):
        self.count[tag] = self.count.get(tag, 0) + 1
        self.loads += [value for name, value in attributes if name in ("src", "href", "xlink:href", "srcset", "data")]
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(runs, tmp_path):
    _, html = page(runs, tmp_path / "r.html")
    parsed = Page()
    parsed.feed(html)
    assert parsed.open == []
    assert parsed.loads == ["data:,"]
    assert "script" not in parsed.count
    assert not re.search(r"@import|url\(|https?://", html)
    assert "fast &lt;&amp;&gt; one" in html
    assert "fast <&> one" not in html
    # Two step charts, four learning curves, two releases, two timelines, one memory.
    assert parsed.count["svg"] == 11


def test_every_phase_of_every_update_is_a_bar_of_its_length(runs, tmp_path):
    _, html = page(runs[:1], tmp_path / "r.html")
    rows = read_run(runs[0], 0).rows
    bars = re.findall(r"<title>update (\d+), (\w+): ([\d.e-]+) s of", html)
    assert len(bars) == UPDATES * 5
    for update, phase, seconds in bars:
        assert float(seconds) == pytest.approx(rows[int(update) - 1][f"timing/{phase}"], rel=0.01)


def test_release_is_counted_from_entering_the_queue(runs):
    """Every item of 0.1 s was released 0.3 s after a tenth of the rollouts: the known staircase."""
    run = read_run(runs[0], 1)
    assert len(run.laws) == UPDATES - 1
    for law, row in zip(run.laws, run.counted, strict=True):
        for index in range(8):
            moment = index / 10 + 0.3 / row["timing/rollout"]
            if moment < 0.99:
                assert float(law(moment + 1e-3)) == pytest.approx((index + 1) / 8)


@pytest.mark.timeout(240)
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium: apt-get install chromium")
def test_a_browser_draws_it(runs, tmp_path):
    _, _ = page(runs, tmp_path / "r.html")
    done = subprocess.run(
        [
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1180,2400"),
            *(f"--screenshot={tmp_path / 'r.png'}", (tmp_path / "r.html").as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert (tmp_path / "r.png").stat().st_size > 30_000, done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr


def test_what_is_no_run_is_said(tmp_path):
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code != 0
    assert "holds no config.yaml" in str(done.exception)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.0031), (2, 1234), (0.3, 0.35), (0, 9)])
def test_axes_have_round_numbers_inside_them(low, high):
    found = ticks(low, high)
    assert 2 <= len(found) <= 7
    assert all(low - 1e-9 <= value <= high + 1e-9 for value in found)
    gaps = {round(b - a, 9) for a, b in zip(found, found[1:], strict=False)}
    assert len(gaps) == 1
    assert number(found[-1])


def test_a_broken_series_leaves_a_gap():
    chart = Chart((0, 3), (0, 1), "x", "y", "t")
    chart.line([0, 1, 2, 3], [0.5, float("nan"), 0.5, 0.7], "run0")
    assert re.search(r'd="M[\d.,]+M[\d.,]+L[\d.,]+"', chart.render())

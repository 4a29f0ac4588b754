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

from skyrl_thundersync.charts import PALETTE
from skyrl_thundersync.cli.app import app
from skyrl_thundersync.report.comparable import incomparable
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
def test_runs_that_do_other_work_are_not_comparable(runs, option, kind):
    fast, slow = runs
    for folder, value in ((fast, 4), (slow, 3)):
        change(folder, **{option: value})
    reason = f"{kind}: {option.replace('__', '.')} is 3 there, 4 here"
    assert incomparable(read_run(slow, 1), read_run(fast, 1)) == [reason]


def test_runs_that_are_not_comparable_have_no_speed_up_and_the_reason_is_said(runs, tmp_path):
    for folder, seed in zip(runs, (4, 3), strict=True):
        change(folder, trainer__seed=seed)
    said, html = page(runs, tmp_path / "r.html")
    reason = "seed: trainer.seed is 3 there, 4 here"
    assert said["runs"][0]["speedup"] is None and said["runs"][0]["incomparable"] == [reason]
    assert "fast &lt;&amp;&gt; one is not comparable with slow:" in html and f"<li>{reason}</li>" in html
    assert not re.search(r"\d×", html)
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
    assert "What fast &lt;&amp;&gt; one gains over slow is not of the schedule alone" in html
    assert "<li>thundersync.learner.ranks is 2 there, 4 here</li>" in html


class Page(HTMLParser):
    """Tags that are open, everything that could load something, and names within the page."""

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.count, self.ids, self.meant = [], [], {}, [], set()

    def handle_starttag(self, tag, attributes):
        self.count[tag] = self.count.get(tag, 0) + 1
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            elif name == "href" and value.startswith("#"):
                self.meant.add(value[1:])
            elif name in ("src", "href", "xlink:href", "srcset", "data"):
                self.loads.append(value)
            self.meant |= set(re.findall(r"url\(#([^)]*)\)", value or ""))
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in ("meta", "link"):
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(runs, tmp_path):
    _, html = page(runs, tmp_path / "r.html")
    parsed = Page()
    parsed.feed(html)
    assert parsed.open == []
    assert parsed.loads == ["data:,"]
    assert "script" not in parsed.count
    assert not re.search(r"@import|url\((?!#)|https?://", html)
    assert len(set(parsed.ids)) == len(parsed.ids) and parsed.meant == set(parsed.ids)
    assert "fast &lt;&amp;&gt; one" in html
    assert "fast <&> one" not in html
    # Two step charts, four learning curves, two releases, two timelines, one memory.
    assert parsed.count["svg"] == 11


def test_every_phase_of_every_update_is_a_bar_of_its_length(runs, tmp_path):
    _, html = page(runs[:1], tmp_path / "r.html")
    rows = read_run(runs[0], 0).rows
    bars = re.findall(r'<path d="([^"]*)"[^>]*><title>update (\d+), (\w+): ([\d.e-]+) s of', html)
    assert len(bars) == UPDATES * 5
    pixels, seconds = [], []
    for path, update, phase, said in bars:
        ys = [float(y) for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", path)]
        pixels.append(max(ys) - min(ys))
        seconds.append(rows[int(update) - 1][f"timing/{phase}"])
        assert float(said) == pytest.approx(seconds[-1], rel=0.01)
    second = sum(pixels) / sum(seconds)
    assert pixels == pytest.approx([second * length for length in seconds], abs=0.05)


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return sum(
        w * (c / 12.92 if c <= 0.04 else ((c + 0.055) / 1.055) ** 2.4)
        for w, c in zip((0.2126, 0.7152, 0.0722), parts, strict=True)
    )


@pytest.mark.parametrize(("theme", "panel"), [(0, "#ffffff"), (1, "#1b2026")])
def test_texts_and_curves_stand_out_in_light_and_dark(runs, tmp_path, theme, panel):
    """WCAG's contrast: 4.5 for text, 3 for graphics. Every colour of a chart is the page's to choose."""
    _, html = page(runs, tmp_path / "r.html")
    themes = re.findall(r":root \{([^}]*)\}", html)
    assert len(themes) == 2 and (panel in themes[theme] or "#fff;" in themes[theme])
    for name, colours in PALETTE.items():
        assert f"--{name}: {colours[theme]};" in themes[theme]
        high, low = sorted((luminance(colours[theme]), luminance(panel)), reverse=True)
        least = 4.5 if name in ("ink", "soft") else 3 if name.startswith("run") else 1
        assert (high + 0.05) / (low + 0.05) >= least, name
    for drawing in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        assert set(re.findall(r"#[0-9a-f]{6}\b", drawing)) == set()


def test_the_same_runs_make_the_same_page(runs, tmp_path):
    assert page(runs, tmp_path / "one.html")[1] == page(runs, tmp_path / "two.html")[1]


def test_a_run_of_one_update_is_drawn(runs, tmp_path):
    folder = runs[0]
    rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(rows[:2]))
    _, html = page([folder], tmp_path / "r.html", "--warmup", "0")
    reward = html.partition('aria-label="mean reward against updates"')[2].partition("</svg>")[0]
    assert re.search(r"<use [^>]*var\(--run0\)", reward)


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

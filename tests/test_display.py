"""What a person sees between an update's start and its line, on a terminal and in a log."""

import io
import os
import pty
import re
import time

from rich.console import Console

from skyrl_thundersync.stream.ledger import Progress
from skyrl_thundersync.telemetry.display import COLUMNS, Display
from skyrl_thundersync.telemetry.live_line import LOG_S, LiveLine, clock, short

METRICS = {
    "reward/avg_raw_reward": 0.5,
    "thundersync/n_scored": 100.0,
    "policy/grad_norm": 1.0,
    "thundersync/stepped": 1.0,
    "timing/rollout": 3000.0,
    "timing/tail": 60.0,
    "timing/suffix": 10.0,
    "timing/update": 3605.0,
    "thundersync/learner_busy_share": 0.5,
    "logprob_gap/max": 1e-6,
}


def read_until(fd, wanted, limit_s=30):
    seen, end = "", time.monotonic() + limit_s
    while wanted not in seen:
        assert time.monotonic() < end, f"no {wanted!r} in {seen!r}"
        seen += os.read(fd, 65536).decode()
    return seen


def test_a_terminal_shows_how_far_the_batch_is_while_it_runs_and_one_line_is_left():
    terminal, stream = pty.openpty()
    display = Display(stream)
    batch = Progress(0, 4, 0, 0)
    display.begin("1/9", lambda: batch)
    read_until(terminal, "0 closed, 4 open")
    batch = Progress(1, 3, 12_345, 7)
    seen = read_until(terminal, "1 closed, 3 open")
    assert "\x1b[2K" in seen  # the old line was erased, not scrolled away
    display.update(1, 9, METRICS)
    read_until(terminal, "1/9")
    display.begin("2/9", lambda: batch)
    assert "of ~1:00:05" in read_until(terminal, "3 open")  # what the first one took
    display.end()
    display.say("the end")
    assert "\x1b[2K" in read_until(terminal, "the end")
    os.close(terminal)
    os.close(stream)


def test_a_log_gets_plain_lines_and_none_of_them_for_a_short_update(tmp_path):
    file = (tmp_path / "screen.txt").open("w")
    display = Display(file.fileno())
    display.begin("1/9", lambda: Progress(0, 4, 0, 0))
    display.update(1, 9, METRICS)
    lines = (tmp_path / "screen.txt").read_text().splitlines()
    assert len(lines) == 2 and lines[0].split() == [name for name, _ in COLUMNS] and lines[1].split()[0] == "1/9"
    assert LOG_S >= 60
    out, texts = io.StringIO(), iter(f"line {k}" for k in range(10**6))
    line = LiveLine(Console(file=out, highlight=False), lambda: next(texts), interval_s=0.001)
    end = time.monotonic() + 30
    while out.getvalue().count("\n") < 3 and time.monotonic() < end:
        time.sleep(0.01)
    line.end()
    said = out.getvalue()
    assert re.match(r"line 0\nline 1\nline 2\n", said)
    time.sleep(0.05)
    assert out.getvalue() == said and "\x1b" not in said


def test_times_and_counts_are_short():
    assert [clock(s) for s in (7, 760, 3723)] == ["0:07", "12:40", "1:02:03"]
    assert [short(n) for n in (950, 12_345, 1_240_000)] == ["950", "12.3k", "1.24M"]

"""The event log of a run: complete, on one clock across processes, and a trace whose rows do not overlap."""

import asyncio
import json
import random
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from skyrl_thundersync.cli.app import app
from skyrl_thundersync.stream.ledger import work_name
from skyrl_thundersync.stream.release import WorkPolicy
from skyrl_thundersync.stream.sources import Source, WorkDone
from skyrl_thundersync.telemetry import timeline
from skyrl_thundersync.trainer import Update


class Rank:
    """A learner that takes a little time over each item, one after the other, and says when it began."""

    def __init__(self):
        self.names = []

    async def run(self, work):
        done = []
        for item in work:
            start = time.perf_counter()
            await asyncio.sleep(0.0005)
            done.append(WorkDone(time.perf_counter() - start, started=start))
            self.names.append(work_name(item))
        return done


async def rollouts(update):
    rng = random.Random(3)

    async def one(trajectory):
        for turn in range(3):
            await asyncio.sleep(rng.random() * 0.002)
            update.on_turn(Source(trajectory, turn, 0, (1,), (2,), (1,), (0.0,), "stop", 5))
        update.on_trajectory_closed(trajectory, 1.0, None)

    await asyncio.gather(*(one(trajectory) for trajectory in update.ledger.trajectories))


@pytest.fixture
def run_dir(tmp_path):
    """A run folder with the events of one update on two ranks."""
    ranks = [Rank(), Rank()]
    timeline.open_log(tmp_path)
    update = Update(5, {"a": 3, "b": 2, "c": 2}, ranks, None, WorkPolicy())
    asyncio.run(update.run(rollouts(update)))
    timeline.add_update(update)
    timeline.close_log()
    return tmp_path, update, ranks


def test_every_work_item_is_there_once_inside_its_update_and_after_its_release(run_dir):
    folder, update, ranks = run_dir
    events = timeline.read_events(folder)
    phases = {e.name: e for e in events if e.track == "update"}
    assert phases["tail"].start == pytest.approx(phases["rollouts"].start + phases["rollouts"].seconds, abs=1e-5)
    begin, end = phases["rollouts"].start, phases["tail"].start + phases["tail"].seconds
    for index, rank in enumerate(ranks):
        own = [e for e in events if e.track == f"learner-{index}"]
        assert sorted(e.args["of"] for e in own) == sorted(rank.names)
        for event in own:
            assert begin - 1e-4 <= event.start - event.args["waited"] <= event.start
            assert event.start + event.seconds <= end + 1e-4
        for before, after in zip(own, own[1:], strict=False):  # a rank does one thing at a time
            assert before.start + before.seconds <= after.start + 1e-5
    assert sum(len(rank.names) for rank in ranks) == len(update.spans) == 7 * 3 + 7 + 3


def test_all_processes_of_a_machine_share_the_clock():
    """What lets learner ranks and sandboxes' threads report moments that the driver puts beside its own."""
    before = time.perf_counter()
    other = subprocess.run(
        [sys.executable, "-c", "import time; print(time.perf_counter(), time.monotonic())"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    after = time.perf_counter()
    for moment in other.stdout.split():
        assert before < float(moment) < after


def test_the_trace_keeps_every_event_and_no_row_overlaps(run_dir):
    folder, _, _ = run_dir
    done = CliRunner().invoke(app, ["timeline", str(folder), "--out", str(folder / "t.json"), "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    trace = json.loads((folder / "t.json").read_text())["traceEvents"]
    spans = [e for e in trace if e["ph"] == "X"]
    assert len(spans) == len(timeline.read_events(folder)) == sum(said["events"].values())
    rows: dict[tuple, float] = {}
    for event in sorted(spans, key=lambda e: e["ts"]):
        row = (event["pid"], event["tid"])
        assert rows.get(row, 0.0) <= event["ts"] + 0.2  # microseconds, rounded
        rows[row] = event["ts"] + event["dur"]
    for pid in {e["pid"] for e in trace if e["ph"] == "C"}:
        waiting = [e["args"]["items"] for e in trace if e["ph"] == "C" and e["pid"] == pid]
        assert min(waiting) >= 0
        assert waiting[-1] == 0
    names = {e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert names == {"update", "learner-0", "learner-1"}


def test_overlapping_requests_get_as_few_rows_as_can_be():
    rng = random.Random(0)
    events = sorted(
        (timeline.Event("rollout-0", "generate", rng.random(), rng.random() * 0.2, {}) for _ in range(200)),
        key=lambda e: e.start,
    )
    rows = timeline.lanes(events)
    for row in set(rows):
        own = [e for e, r in zip(events, rows, strict=True) if r == row]
        assert all(a.start + a.seconds <= b.start for a, b in zip(own, own[1:], strict=False))
    at_once = max(sum(o.start <= e.start < o.start + o.seconds for o in events) for e in events)
    assert max(rows) + 1 == at_once


def test_a_resumed_run_has_its_own_clock_and_a_killed_one_its_last_whole_line(tmp_path):
    (tmp_path / "trace").mkdir()
    path = tmp_path / timeline.EVENTS
    lines = [
        {"clock": 100.0, "unix": 1000.0, "pid": 1},
        {"track": "update", "name": "a", "t": 101.0, "d": 1.0},
        {"clock": 5.0, "unix": 2000.0, "pid": 2},
        {"track": "update", "name": "b", "t": 6.0, "d": 1.0},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"track": "upd')
    assert [(e.name, e.start) for e in timeline.read_events(tmp_path)] == [("a", 1001.0), ("b", 2001.0)]
    path.write_text('{"clock": 1, "unix": 2}\nnonsense\n{"track": "update", "name": "b", "t": 6.0, "d": 1.0}\n')
    with pytest.raises(ValueError, match="line 2"):
        timeline.read_events(tmp_path)


def test_nothing_is_logged_while_no_log_is_open(tmp_path):
    timeline.add("update", "x", 0.0, 1.0)
    done = CliRunner().invoke(app, ["timeline", str(tmp_path)])
    assert done.exit_code != 0
    assert "it is not a run folder" in str(done.exception)

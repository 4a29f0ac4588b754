"""What happened when, in every part of a run: an event log written while it runs, and its Chrome/Perfetto trace.

The driver writes one JSON line an event into `run_dir/trace/events.jsonl`; learner ranks report when each work item started.
All moments are of the machine's monotonic clock, which its processes share; a header line ties it to wall-clock time, one
each time the run was (re)started. An event costs some microseconds (docs/insight.md), so the log is always on.
"""

from __future__ import annotations

import heapq
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from skyrl_thundersync.stream.ledger import work_name
from skyrl_thundersync.stream.sources import Append, CloseTrajectory, Work, WorkDone

if TYPE_CHECKING:
    from skyrl_thundersync.trainer import Update

EVENTS = Path("trace") / "events.jsonl"

_log: TextIO | None = None
_lock = threading.Lock()


class WorkSpan(NamedTuple):
    """One learner work item: when it entered its rank's queue, when the rank started it (both s) and for how long (s)."""

    rank: int
    kind: str
    name: str
    released: float
    started: float
    seconds: float

    @classmethod
    def of(cls, rank: int, work: Work, released: float, done: WorkDone) -> WorkSpan:
        kind = (
            "append" if isinstance(work, Append) else "sweep" if isinstance(work, CloseTrajectory) else "sweep prompt"
        )
        return cls(rank, kind, work_name(work), released, max(released, done.started), done.seconds)

    @property
    def waited(self) -> float:
        """Seconds between release and start."""
        return self.started - self.released


def open_log(run_dir: Path) -> None:
    """Start (or go on with) the event log of this process's run."""
    global _log
    path = run_dir / EVENTS
    path.parent.mkdir(parents=True, exist_ok=True)
    _log = path.open("a", encoding="utf-8")
    _write({"clock": time.perf_counter(), "unix": time.time(), "pid": os.getpid()})
    flush()


def close_log() -> None:
    global _log
    if _log is not None:
        _log.close()
        _log = None


def flush() -> None:
    """Hand what was logged to the system; done once an update."""
    if _log is not None:
        with _lock:
            _log.flush()


def add(track: str, name: str, start: float, end: float, **args: Any) -> None:
    """Log that `track` (a process, replica or kind of work) was at `name` from `start` to `end`. Any thread; off unless open.

    Args:
        start, end: seconds of `time.perf_counter` (or `time.monotonic`, the same clock on Linux) in any process here.
        args: shown with the event; numbers and strings.
    """
    if _log is not None:
        event = {"track": track, "name": name, "t": round(start, 6), "d": round(end - start, 6)}
        _write({**event, "args": args} if args else event)


def add_update(update: Update) -> None:
    """Log an update's phases and its learner work, after `Update.run`."""
    if _log is None:
        return
    clock, version = update.clock, update.ledger.version
    add("update", "rollouts", clock.started, clock.rollouts_ended, version=version)
    add("update", "tail", clock.rollouts_ended, clock.drained, version=version)
    for span in update.spans:
        waited = round(span.waited, 6)
        add(f"learner-{span.rank}", span.kind, span.started, span.started + span.seconds, of=span.name, waited=waited)
    flush()


def _write(event: dict) -> None:
    line = json.dumps(event, separators=(",", ":")) + "\n"
    with _lock:
        _log.write(line)


class Event(NamedTuple):
    """One logged event: `start` in Unix seconds, `seconds` long."""

    track: str
    name: str
    start: float
    seconds: float
    args: dict[str, Any]


def read_events(run_dir: Path) -> list[Event]:
    """All events of a run in order of their start; of every part of it where it was resumed.

    Raises:
        FileNotFoundError: the run left no event log.
        ValueError: a line that cannot be read, by its number; a last line cut off by a killed run is left out.
    """
    path = Path(run_dir) / EVENTS
    if not path.is_file():
        raise FileNotFoundError(
            f"{run_dir} holds no {EVENTS}: it is not a run folder, or its run ended before its start"
        )
    events, offset = [], None
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
            if "clock" in row:
                offset = row["unix"] - row["clock"]
            else:
                events.append(Event(row["track"], row["name"], row["t"] + offset, row["d"], row.get("args", {})))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not an event: {error}") from error
    return sorted(events, key=lambda event: event.start)


def lanes(events: list[Event]) -> list[int]:
    """A row for each event (in order of start), so that events of one row do not overlap; as few rows as can be."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    rows: list[int] = []
    for event in events:
        while busy and busy[0][0] <= event.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        row = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (event.start + event.seconds, row))
        rows.append(row)
    return rows


ORDER = ("update", "rollout", "environment", "tools", "teacher", "learner")


def tracks(events: list[Event]) -> dict[str, list[Event]]:
    """Events by track, tracks in the order of the data flow."""
    found: dict[str, list[Event]] = {}
    for event in events:
        found.setdefault(event.track, []).append(event)

    def place(track: str) -> tuple[int, str]:
        kind = track.partition("-")[0]
        return (ORDER.index(kind) if kind in ORDER else len(ORDER), track)

    return {track: found[track] for track in sorted(found, key=place)}


def chrome_trace(events: list[Event]) -> dict:
    """The trace in Chrome's JSON format, for ui.perfetto.dev: a process a track, a thread a row, queue lengths counted."""
    return {"displayTimeUnit": "ms", "traceEvents": list(_trace_events(events))}


def _trace_events(events: list[Event]) -> Iterator[dict]:
    zero = min((event.start for event in events), default=0.0)
    for pid, (track, own) in enumerate(tracks(events).items(), 1):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": track}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        for event, row in zip(own, lanes(own), strict=True):
            yield {
                "ph": "X",
                "name": event.name,
                "cat": track.partition("-")[0],
                "pid": pid,
                "tid": row,
                "ts": round((event.start - zero) * 1e6, 1),
                "dur": round(event.seconds * 1e6, 1),
                "args": event.args,
            }
        yield from _queue_lengths(own, pid, zero)


def _queue_lengths(events: list[Event], pid: int, zero: float) -> Iterator[dict]:
    """How many released items wait for this rank, over time."""
    changes = []
    for event in events:
        if event.args.get("waited", 0) > 0:
            changes += [(event.start - event.args["waited"], 1), (event.start, -1)]
    waiting = 0
    for moment, change in sorted(changes):
        waiting += change
        yield {
            "ph": "C",
            "name": "work that waits",
            "pid": pid,
            "ts": round((moment - zero) * 1e6, 1),
            "args": {"items": waiting},
        }

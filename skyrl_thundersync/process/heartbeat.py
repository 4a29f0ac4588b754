"""A process that hangs becomes an error that names it, within a deadline, with its stacks in its log.

Waiting for an answer cannot tell a long pass from a dead one. Each actor's process therefore touches a file once a second
from a thread of its own; the driver looks at the files from a thread of *its* own, so that it also sees a hang while it
waits inside a collective step. A process that stopped for longer than the deadline is asked for its stacks and killed: all
that waited for it fails at once, and the hang is reported as the cause.

The file also says what its process is at (`doing`), and keeps saying it when the process is gone.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

INTERVAL_S = 1.0
STACKS = signal.SIGUSR1
STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waiting for the disk or a device"}


STATUS_BYTES = 512
LONGEST_OF = 120
FOLLOWS_S = 60.0
"""An error so soon after a hang was ended follows from it."""


@dataclass(frozen=True)
class Doing:
    """What a process is at. phase: one of a few words of its own. of: what with. update: of a run, where that is known."""

    phase: str
    of: str = ""
    update: int | None = None

    def __str__(self) -> str:
        text = f"{self.phase} {self.of}".rstrip()
        return text if self.update is None else f"update {self.update}: {text}"


@dataclass(frozen=True)
class Status:
    """A process as its file says it. actor: Ray's id of it in hex; None for one that is no actor."""

    pid: int
    host: str
    actor: str | None
    doing: Doing


_file: int | None = None  # descriptor of this process's file
_actor: str | None = None
_at: list[list[Doing]] = [[Doing("starting")]]  # what this process is at, innermost last; lists, to be told apart


class HungActorError(RuntimeError):
    """A process of the run gave no sign of life."""


def announce(path: Path, actor: str | None = None) -> None:
    """From now on `path` says what this process is at (`doing`)."""
    global _file, _actor
    part = path.with_name(f".{path.name}")
    _file, _actor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644), actor
    _write()
    part.replace(path)  # nobody reads a file that says nothing yet


def at(phase: str) -> None:
    """This process is at `phase` whenever it is within no `doing`. Takes some microseconds; announced nowhere, nothing."""
    _at[0] = [Doing(phase)]
    _write()


def now_at() -> Doing:
    """What this process is at."""
    return _at[-1][0]


@contextmanager
def doing(phase: str, of: str = "", update: int | None = None) -> Iterator[None]:
    """This process is at that within, or at what was entered later, also by tasks that run beside it."""
    entry = [Doing(phase, of[:LONGEST_OF], update)]
    _at.append(entry)
    _write()
    try:
        yield
    finally:
        _at[:] = [other for other in _at if other is not entry]
        _write()


def _write() -> None:
    if _file is not None:
        text = json.dumps(asdict(Status(os.getpid(), socket.gethostname(), _actor, now_at()))).encode()
        os.pwrite(_file, text.ljust(STATUS_BYTES - 1) + b"\n", 0)


def status(path: Path) -> Status:
    """What a file says that `announce` keeps: also of a process that is gone, what it was last at."""
    said = json.loads(path.read_text(encoding="utf-8"))
    return Status(**said | {"doing": Doing(**said["doing"])})


def gone(folder: Path) -> list[str]:
    """The processes of this machine that announced themselves in `folder` and are no more, each with where its log is."""
    dead = []
    for path in sorted(folder.glob("*.alive")):
        its = status(path)
        if its.host == socket.gethostname() and process_state(its.pid) in (None, "Z"):
            dead.append(f"{path.stem} (process {its.pid}) died, at: {its.doing}. Its log: {path.with_suffix('.log')}")
    return dead


def named(folder: Path, *, pid: int | None = None, actor: str | None = None) -> str | None:
    """The process of this id that announced itself in `folder`, with where its log is; None where there is none."""
    for path in folder.glob("*.alive"):
        its = status(path)
        if its.pid == pid or (actor is not None and its.actor == actor):
            return f"{path.stem} (process {its.pid}), its log: {path.with_suffix('.log')}"
    return None


def beat(path: Path, actor: str | None = None) -> None:
    """From now on touch `path` once a second, and write all threads' stacks to stderr on SIGUSR1. Returns at once."""
    announce(path, actor)
    faulthandler.register(STACKS, file=2, all_threads=True)

    def run() -> None:
        while path.exists():  # the run's folder may be taken away before the process is
            os.utime(path)
            time.sleep(INTERVAL_S)

    threading.Thread(target=run, name="heartbeat", daemon=True).start()


class Watch:
    """Watches the heartbeats in a folder while the context is open: those of this machine's processes.

    A hang is made a death: where the run can do without the process, it goes on.

    Attributes:
        error: what hung last; None as long as nothing did.
    """

    def __init__(self, folder: Path, deadline_s: float) -> None:
        self._folder, self._deadline_s = folder, deadline_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._seen: dict[Path, tuple[int, float]] = {}
        self.error: HungActorError | None = None
        self._ended = 0.0  # when that was killed

    def __enter__(self) -> Watch:
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in self._folder.glob("*.alive"):
            old.unlink()
        self._thread.start()
        return self

    def __exit__(self, _type, error: BaseException | None, _traceback) -> None:
        """Raises a hang in place of what followed from it, within the same deadline."""
        self._stop.set()
        self._thread.join()
        followed = isinstance(error, Exception) and time.monotonic() - self._ended < max(self._deadline_s, FOLLOWS_S)
        if self.error is not None and followed:
            raise self.error from error

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._stop.wait(min(INTERVAL_S, self._deadline_s / 4)):
            now = time.monotonic()
            if now - looked > self._deadline_s / 2:  # this process, or the whole machine, slept
                self._seen.clear()
            looked = now
            for path in self._folder.glob("*.alive"):
                if self._late(path, now):
                    self._end(path)

    def _late(self, path: Path, now: float) -> bool:
        try:
            stamp = path.stat().st_mtime_ns
            if status(path).host != socket.gethostname():  # watched over there
                return False
        except FileNotFoundError:
            return False
        seen = self._seen.get(path)
        if seen is None or seen[0] != stamp:
            self._seen[path] = (stamp, now)
            return False
        return now - seen[1] > self._deadline_s

    def _end(self, path: Path) -> None:
        """End a hang. A process that is gone is none: whoever waits for it is told so."""
        its, log = status(path), path.with_suffix(".log")
        pid = its.pid
        state = process_state(pid) if its.host == socket.gethostname() else None
        if state in (None, "Z"):
            path.unlink()
            return
        how = STATES.get(state, "there, but its Python threads do not get on")
        self.error = HungActorError(
            f"{path.stem} (process {pid}) gave no sign of life for {self._deadline_s:g} s (thundersync.hang_timeout_s): it "
            f"is {how}, at: {its.doing}. Its log, with the stacks of its threads where it could still write them: {log}"
        )
        with suppress(ProcessLookupError):  # it may end by itself meanwhile
            os.kill(pid, STACKS)
            os.kill(pid, signal.SIGCONT)  # a stopped process writes them when it goes on
            time.sleep(INTERVAL_S)
            os.kill(pid, signal.SIGKILL)
        self._ended = time.monotonic()
        path.unlink()


def process_state(pid: int) -> str | None:
    """The kernel's letter for what a process does; None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or read
        return None
    return stat.rpartition(")")[2].split()[0]

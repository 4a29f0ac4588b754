"""A process that hangs becomes an error that names it, within a deadline, with its stacks in its log.

Waiting for an answer cannot tell a long pass from a dead one. Each actor's process therefore touches a file once a second
from a thread of its own; the driver looks at the files from a thread of *its* own, so that it also sees a hang while it
waits inside a collective step. A process that stopped for longer than the deadline is asked for its stacks and killed: all
that waited for it fails at once, and the hang is reported as the cause.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

INTERVAL_S = 1.0
STACKS = signal.SIGUSR1
STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waiting for the disk or a device"}


class HungActorError(RuntimeError):
    """A process of the run gave no sign of life."""


def beat(path: Path) -> None:
    """From now on touch `path` once a second, and write all threads' stacks to stderr on SIGUSR1. Returns at once."""
    path.write_text(f"{os.getpid()} {socket.gethostname()}", encoding="utf-8")
    faulthandler.register(STACKS, file=2, all_threads=True)

    def run() -> None:
        while path.exists():  # the run's folder may be taken away before the process is
            os.utime(path)
            time.sleep(INTERVAL_S)

    threading.Thread(target=run, name="heartbeat", daemon=True).start()


class Watch:
    """Watches the heartbeats in a folder while the context is open. On this machine only: others' processes are not seen.

    Attributes:
        error: what hung first; None as long as nothing did.
    """

    def __init__(self, folder: Path, deadline_s: float) -> None:
        self._folder, self._deadline_s = folder, deadline_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._seen: dict[Path, tuple[int, float]] = {}
        self.error: HungActorError | None = None

    def __enter__(self) -> Watch:
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in self._folder.glob("*.alive"):
            old.unlink()
        self._thread.start()
        return self

    def __exit__(self, _type, error: BaseException | None, _traceback) -> None:
        """Raises the hang in place of what followed from it."""
        self._stop.set()
        self._thread.join()
        if self.error is not None:
            raise self.error from error

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._stop.wait(min(INTERVAL_S, self._deadline_s / 4)):
            now = time.monotonic()
            if now - looked > self._deadline_s / 2:  # this process, or the whole machine, slept
                self._seen.clear()
            looked = now
            for path in self._folder.glob("*.alive"):
                if self._late(path, now) and self._end(path):
                    return

    def _late(self, path: Path, now: float) -> bool:
        stamp = path.stat().st_mtime_ns
        seen = self._seen.get(path)
        if seen is None or seen[0] != stamp:
            self._seen[path] = (stamp, now)
            return False
        return now - seen[1] > self._deadline_s

    def _end(self, path: Path) -> bool:
        """Whether it was a hang, ended now. A process that is gone is not: whoever waits for it is told so."""
        pid, host = path.read_text(encoding="utf-8").split()
        pid, log = int(pid), path.with_suffix(".log")
        state = _state(pid) if host == socket.gethostname() else None
        if state in (None, "Z"):
            path.unlink()
            return False
        what = STATES.get(state, "there, but its Python threads do not get on")
        self.error = HungActorError(
            f"{path.stem} (process {pid}) gave no sign of life for {self._deadline_s:g} s (thundersync.hang_timeout_s): it "
            f"is {what}. Its log, with the stacks of its threads where it could still write them: {log}"
        )
        with suppress(ProcessLookupError):  # it may end by itself meanwhile
            os.kill(pid, STACKS)
            os.kill(pid, signal.SIGCONT)  # a stopped process writes them when it goes on
            time.sleep(INTERVAL_S)
            os.kill(pid, signal.SIGKILL)
        return True


def _state(pid: int) -> str | None:
    """The kernel's letter for what a process does; None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return stat.rpartition(")")[2].split()[0]

"""Sandboxes started ahead of their trajectories, so that the start of the next ones overlaps with those that run.

One background thread starts what was announced (`expect`), in order; when nothing is announced, the plain kind, for the
trajectories of the next batch. It is bounded by `room`: what is started and not yet taken. Whoever asks for a sandbox that is
not there starts it himself, so nothing ever waits behind this thread but for a start of the right kind that is under way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from skyrl_thundersync.sandbox.base import SandboxError, call_all
from skyrl_thundersync.sandbox.shell import ShellSandbox

logger = logging.getLogger(__name__)

MAX_AGE_S = 3600.0
"""One that waited longer is given up for a new one: containers carry a deadline."""


class Kind(NamedTuple):
    """Sandboxes of one kind can stand for each other."""

    image: str | None
    writable_root: bool


class WarmSandboxes:
    """Thread-safe.

    Args:
        start: makes a sandbox of a kind; called in the background thread.
        plain: the kind to keep when nothing else is announced, from the first time it is asked for.
        room: at most so many are started and not taken. 0: none ever is.
    """

    def __init__(self, start: Callable[[Kind], ShellSandbox], plain: Kind, room: int) -> None:
        self._start, self._plain, self._room = start, plain, room
        self._changed = threading.Condition()
        self._expected: deque[Kind] = deque()
        self._ready: list[tuple[Kind, ShellSandbox, float]] = []  # oldest first; when it was started
        self._starting: Kind | None = None
        self._keep_plain = False
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def ready_count(self) -> int:
        """Sandboxes that are started and wait to be taken."""
        with self._changed:
            return len(self._ready)

    def expect(self, kind: Kind) -> None:
        """One of this kind will be asked for soon."""
        if self._room:
            with self._changed:
                self._expected.append(kind)
                self._wake()

    def take(self, kind: Kind) -> ShellSandbox | None:
        """One that is ready or just being started; None where the caller has to start it."""
        if not self._room:
            return None
        with self._changed:
            surplus = self._pop_old()
            self._keep_plain = self._keep_plain or kind == self._plain
            sandbox = self._pop(kind)
            if sandbox is None and kind in self._expected:
                self._expected.remove(kind)
            elif sandbox is None and self._starting == kind:
                self._changed.wait_for(lambda: self._starting != kind or self._closed)
                sandbox = self._pop(kind)
            if sandbox is None and len(self._ready) >= self._room:
                # Full of what nobody asked for after all: make room.
                surplus.append(self._ready.pop(0)[1])
            self._wake()
        call_all("closing sandboxes that nobody asked for", [left.close for left in surplus])
        return sandbox

    def settle(self) -> None:
        """Wait until nothing is being started, and nothing will be before one is taken or announced."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._starting is None and not self._due()))

    def close(self) -> None:
        """End the thread and every sandbox that was not taken.

        Raises:
            SandboxError, or ExceptionGroup of several: what could not be closed; the others are nevertheless.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        try:
            if self._thread is not None:
                self._thread.join()
        finally:
            ready, self._ready = self._ready, []
            call_all("closing sandboxes that were started ahead", [sandbox.close for _, sandbox, _ in ready])

    def _pop(self, kind: Kind) -> ShellSandbox | None:
        for index, (has, sandbox, _) in enumerate(self._ready):
            if has == kind:
                del self._ready[index]
                return sandbox
        return None

    def _pop_old(self) -> list[ShellSandbox]:
        oldest = time.monotonic() - MAX_AGE_S
        old = [sandbox for _, sandbox, started in self._ready if started < oldest]
        self._ready = [entry for entry in self._ready if entry[2] >= oldest]
        return old

    def _wake(self) -> None:
        if (self._thread is None or not self._thread.is_alive()) and not self._closed:
            self._thread = threading.Thread(target=self._work, name="sandbox-warm", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._due())
                if self._closed:
                    return
                kind = self._starting = self._expected.popleft() if self._expected else self._plain
            sandbox = None
            try:
                sandbox = self._start(kind)
            except SandboxError as error:
                # Whoever asks next starts his own, and gets the error if it lasts.
                logger.warning("starting a sandbox ahead failed: %s", error)
            finally:  # whatever else is raised ends this thread, and nobody waits for it
                with self._changed:
                    self._starting = None
                    if sandbox is None:
                        self._expected.clear()
                        self._keep_plain = False  # until it is asked for again
                    else:
                        self._ready.append((kind, sandbox, time.monotonic()))
                    self._changed.notify_all()

    def _due(self) -> bool:
        return (bool(self._expected) or self._keep_plain) and len(self._ready) < self._room

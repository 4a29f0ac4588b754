"""Signals that end a run: none is lost while it starts, and none reaches the processes that the end still needs.

Ctrl-C ends a run as it is. SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are what schedulers send before they take the machine back,
to the driver or to its whole process group: the last finished update is saved first. A signal that was ignored when the
process started stays ignored, as everywhere: SIGINT in a script's background job, SIGHUP under nohup.

Python throws away what is raised inside a fork hook (`os.register_at_fork`; logging has one) or a finalizer, also a
KeyboardInterrupt. Starting Ray and reading datasets fork, so now and then a Ctrl-C went nowhere and the run went on.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LOOK_AFTER_S = 1.0
PREEMPTING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_apart: list[bool] | None = None  # whether what is forked now is to be `apart`; None: no fork was ever asked to


class Preempted(BaseException):
    """A scheduler's signal ended the run; the message says what was saved. No error: nothing on the way out handles it."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(what)
        self.number = number

    @property
    def status(self) -> int:
        """Exit status: as of a process that the signal ends."""
        return 128 + self.number


class KeptInterrupts:
    """Within it, Ctrl-C raises KeyboardInterrupt and each of `PREEMPTING` Preempted, and neither gets lost: where the main
    thread is not on its way out with it a second later, the signal is sent again.

    Enter it in the main thread. `end` Ctrl-C's part before `asyncio.run`, which has its own way with it. After the first
    of `PREEMPTING` the others change nothing: schedulers repeat themselves, the way out is taken once.

    Attributes:
        heard: those of `PREEMPTING` that were not ignored as it was entered.
        told: the one that came; None before. Whoever takes signals in another way meanwhile sets it.
    """

    def __enter__(self) -> KeptInterrupts:
        self._over = self._left = self._lost = False
        self.told: int | None = None
        listened = [n for n in (signal.SIGINT, *PREEMPTING) if signal.getsignal(n) is not signal.SIG_IGN]
        self.heard = [n for n in listened if n != signal.SIGINT]
        self._before = {number: signal.signal(number, self._interrupt) for number in listened}
        return self

    def __exit__(self, *_error) -> None:
        self.end()
        self._left = True
        for number in self.heard:
            signal.signal(number, self._before[number])

    def again(self) -> None:
        """Take `heard` back from whoever has set handlers of its own since."""
        for number in self.heard:
            signal.signal(number, self._interrupt)

    def end(self) -> None:
        """Ctrl-C is as it was before. May be called twice."""
        if not self._over:
            self._over = True
            if signal.SIGINT in self._before:
                signal.signal(signal.SIGINT, self._before[signal.SIGINT])

    def _interrupt(self, number: int, _frame: FrameType | None) -> None:
        if number in PREEMPTING:
            if self.told is not None and not self._lost:
                return
            self.told, self._lost = number, False
            error: BaseException = Preempted(number, "No update was running")
        else:
            error = KeyboardInterrupt()
        threading.Thread(target=self._look, args=(error, number), name="interrupts", daemon=True).start()
        raise error

    def _look(self, error: BaseException, number: int) -> None:
        time.sleep(LOOK_AFTER_S)
        main = threading.main_thread().ident
        handled = sys._current_exceptions().get(main)
        while handled is not None:  # also an error that came of it on the way out
            if handled is error:
                return
            handled = handled.__context__
        if not (self._over if number == signal.SIGINT else self._left):
            self._lost = True
            signal.pthread_kill(main, number)


@contextmanager
def apart() -> Iterator[None]:
    """Processes that Python forks within are in process groups of their own, and ignore all of `PREEMPTING` that they do not
    handle but SIGTERM, with all that they start: what a scheduler or a terminal sends to the job's group passes them by.

    Ray takes no such option. It starts its processes with a `preexec_fn`, before which Python runs its fork hooks.
    """
    global _apart
    if _apart is None:
        _apart = []
        os.register_at_fork(after_in_child=_set_apart)
    _apart.append(True)
    try:
        yield
    finally:
        _apart.pop()


def _set_apart() -> None:
    if _apart:
        os.setpgid(0, 0)
        for number in PREEMPTING:
            if number != signal.SIGTERM:  # by which Ray ends them
                signal.signal(number, signal.SIG_IGN)

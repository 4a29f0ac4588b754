"""Ctrl-C that does not get lost while a run starts.

Python throws away what is raised inside a fork hook (`os.register_at_fork`; logging has one) or a finalizer, also a
KeyboardInterrupt. Starting Ray and reading datasets fork, so now and then a Ctrl-C went nowhere and the run went on.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import FrameType

LOOK_AFTER_S = 1.0


class KeptInterrupts:
    """Within it, a Ctrl-C whose KeyboardInterrupt the main thread is not on its way out with a second later is sent again.

    Enter it in the main thread. `end` it before `asyncio.run`, which has its own way with Ctrl-C.
    """

    def __enter__(self) -> KeptInterrupts:
        self._over = False
        self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_error) -> None:
        self.end()

    def end(self) -> None:
        """Ctrl-C is as it was before. May be called twice."""
        if not self._over:
            self._over = True
            signal.signal(signal.SIGINT, self._before)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        error = KeyboardInterrupt()
        threading.Thread(target=self._look, args=(error,), name="interrupts", daemon=True).start()
        raise error

    def _look(self, error: KeyboardInterrupt) -> None:
        time.sleep(LOOK_AFTER_S)
        main = threading.main_thread().ident
        handled = sys._current_exceptions().get(main)
        while handled is not None:  # also an error that came of it on the way out
            if handled is error:
                return
            handled = handled.__context__
        if not self._over:
            signal.pthread_kill(main, signal.SIGINT)

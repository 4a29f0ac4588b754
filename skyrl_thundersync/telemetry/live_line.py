"""The line between two lines of the screen: what a run is at, while it is at it.

On a terminal one line that is rewritten every second; elsewhere a plain line a minute, so that a log stays readable. A
thread of its own draws it, since the driver's event loop stands still within a collective step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

TERMINAL_S, LOG_S = 1.0, 60.0


class LiveLine:
    """Shows what `text` returns until `end`. `text` is called from a thread; lines printed meanwhile go above it.

    Args:
        interval_s: seconds between two looks; by default by what `console` writes to.
    """

    def __init__(self, console: Console, text: Callable[[], str], interval_s: float | None = None) -> None:
        terminal = console.is_terminal and not console.is_dumb_terminal
        self._console, self._text = console, text
        self._interval_s = interval_s or (TERMINAL_S if terminal else LOG_S)
        self._live = None
        if terminal:
            self._live = Live(
                self._line(),
                console=console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start(refresh=True)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live line", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Take the line off a terminal; no line comes after it."""
        self._ended.set()
        self._thread.join()
        if self._live is not None:
            self._live.stop()

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            if self._live is not None:
                self._live.update(self._line(), refresh=True)
            else:
                self._console.print(self._line())

    def _line(self) -> Text:
        return Text(self._text(), style="dim", no_wrap=True, overflow="ellipsis")


def clock(seconds: float) -> str:
    """Minutes and seconds, from an hour on with the hours: 0:07, 12:40, 1:02:03."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def short(count: int) -> str:
    """A count in three figures or so: 950, 12.3k, 1.24M."""
    for unit, size in (("M", 1_000_000), ("k", 1000)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)

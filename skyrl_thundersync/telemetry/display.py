"""What appears on the screen: a few lines at the start, one line an update, a live one meanwhile, the evaluations."""

from __future__ import annotations

import errno
import io
import os
import statistics
import time
from collections import deque
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from skyrl_thundersync.process.heartbeat import now_at
from skyrl_thundersync.stream.ledger import Progress
from skyrl_thundersync.telemetry.live_line import LiveLine, clock, short

# Name and width; 79 characters together, so that a line fits the narrowest terminal.
COLUMNS = (
    ("update", 6),
    ("reward", 6),
    ("KL", 6),
    ("N_k", 5),
    ("|g|", 6),
    ("rollout", 7),
    ("tail", 5),
    ("suffix", 6),
    ("step", 5),
    ("busy", 4),
    ("gap", 5),
    ("teacher", 7),
)


class Screen(io.FileIO):
    """A descriptor of a terminal or pipe; once that is gone (hung up, or its reader ended), the process's stdout instead.

    The run goes on, or ends in order, with nobody there to read.
    """

    def write(self, data) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            return os.write(1, data)


class Display:
    """Progress on `stream_fd`, the terminal's own descriptor: the process's stdout goes to a log file meanwhile."""

    def __init__(self, stream_fd: int) -> None:
        self._console = Console(file=_text(Screen(os.dup(stream_fd), "w")), highlight=False, soft_wrap=True)
        self._printed_header = False
        self._live: LiveLine | None = None
        self._took: deque[float] = deque(maxlen=5)  # seconds of the last updates

    def begin(self, name: str, progress: Callable[[], Progress | None] | None = None) -> None:
        """A live line from now to `end`: time so far and, with `progress` (that of an update), how far its batch is.

        `progress` is called from a thread; None as long as there is no batch.
        """
        self.end()
        started, expected = time.monotonic(), None
        if progress is not None and self._took:
            expected = statistics.median(self._took)

        def text() -> str:
            parts = [f"{name}  {clock(time.monotonic() - started)}{f' of ~{clock(expected)}' if expected else ''}"]
            if progress is not None and (batch := progress()) is not None:
                parts += [
                    f"{batch.closed} closed, {batch.open} open",
                    f"{short(batch.tokens)} tokens",
                    f"{batch.waiting} wait for the learner",
                ]
            return " · ".join([*parts, str(now_at())])

        self._live = LiveLine(self._console, text)

    def end(self) -> None:
        """Take the live line away, where there is one."""
        if self._live is not None:
            self._live.end()
            self._live = None

    def say(self, text: str) -> None:
        """One line of prose; rich markup allowed."""
        self._console.print(text)

    def warn(self, text: str) -> None:
        """What a person should look into; plain text."""
        self._console.print(f"warning: {text}", style="yellow", markup=False)

    def update(self, step: int, total: int, m: dict[str, float]) -> None:
        """The progress line of one update, from its metrics, in place of its live one."""
        self.end()
        self._took.append(m["timing/update"])
        if not self._printed_header:
            self._console.print(_row([name for name, _ in COLUMNS]), style="bold")
            self._printed_header = True
        self._console.print(
            _row(
                [
                    f"{step}/{total}",
                    f"{m['reward/avg_raw_reward']:.2f}",
                    f"{m['opd/reverse_kl']:.3f}" if "opd/reverse_kl" in m else "-",
                    f"{m['thundersync/n_scored']:.0f}",
                    f"{m['policy/grad_norm']:.3f}" if m["thundersync/stepped"] else "no step",
                    f"{m['timing/rollout']:.1f}s",
                    f"{m['timing/tail']:.1f}s",
                    f"{m['timing/suffix']:.1f}s",
                    f"{m['timing/update']:.1f}s",
                    f"{m['thundersync/learner_busy_share']:.0%}",
                    f"{m['logprob_gap/max']:.0e}",
                    f"x{m['opd/teacher_tokens_ratio']:.2f}" if "opd/teacher_tokens_ratio" in m else "-",
                ]
            )
        )

    def summary(self, title: str, rows: list[tuple[str, str]]) -> None:
        """A two-column table."""
        table = Table(title=title, show_header=False, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for name, value in rows:
            table.add_row(name, value)
        self._console.print(table)

    def error(self, text: str) -> None:
        self._console.print(text, style="red", markup=False)


def _text(raw: io.FileIO) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", line_buffering=True)


def _row(cells: list[str]) -> str:
    return " ".join(cell.rjust(width) for cell, (_, width) in zip(cells, COLUMNS, strict=True))

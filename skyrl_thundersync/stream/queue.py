"""The ready queues, one a rank: work-conserving, in ready order, behind the rank's admission cap.

Ready order keeps what must stay in order: a trajectory's turns become ready in turn order and its close after them,
and a group's work stays on one rank.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from skyrl_thundersync.stream.admission import Admission
from skyrl_thundersync.stream.sources import Work


class ReadyQueue:
    """Ready work per rank. Not thread-safe.

    Args:
        ranks: learner ranks.
        cap, state_bytes: how many groups may hold state on a rank at once (stream/admission.py); None: any number.
        now: the clock, in seconds.
    """

    def __init__(
        self,
        ranks: int,
        cap: int | None = None,
        state_bytes: int | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._items: list[deque] = [deque() for _ in range(ranks)]
        limited = cap is not None or state_bytes is not None
        self._admission = [Admission(cap, state_bytes, now) for _ in range(ranks)] if limited else None

    def put(self, rank: int, work: Work) -> None:
        if self._admission is None:
            self._items[rank].append(work)
        else:
            self._items[rank].extend(self._admission[rank].offer(work))

    def acknowledged(self, rank: int, work: Work, held_bytes: int = 0) -> None:
        """The rank finished `work` and now holds `held_bytes` of state: there may be room for a group that waits."""
        if self._admission is not None:
            self._items[rank].extend(self._admission[rank].acknowledged(work, held_bytes))

    def take(self, rank: int, most: int) -> list[Work]:
        """What is ready on `rank` now, at most `most` items."""
        items = self._items[rank]
        return [items.popleft() for _ in range(min(most, len(items)))]

    @property
    def admission_waits(self) -> list[float]:
        """Seconds that each group which had to wait for admission waited."""
        return [] if self._admission is None else [s for admission in self._admission for s in admission.waits]

    def waiting(self, rank: int) -> int:
        return len(self._items[rank]) + (self._admission[rank].waiting if self._admission else 0)

"""The ready queues, one a rank: work-conserving, in ready order.

Ready order keeps what must stay in order: a trajectory's turns become ready in turn order and its close after them,
and a group's work stays on one rank.
"""

from __future__ import annotations

import asyncio
from collections import deque


class ReadyQueue:
    """Ready work per rank; `take` waits only while its rank has nothing to do. Single event loop, not thread-safe."""

    def __init__(self, ranks: int) -> None:
        self._items: list[deque] = [deque() for _ in range(ranks)]
        self._wake = [asyncio.Event() for _ in range(ranks)]
        self._closed = False

    def put(self, rank: int, work) -> None:
        if self._closed:
            raise RuntimeError("work was put into a ready queue after the batch had closed")
        self._items[rank].append(work)
        self._wake[rank].set()

    def close(self) -> None:
        """No work can follow; `take` returns empty lists once its queue is drained."""
        self._closed = True
        for event in self._wake:
            event.set()

    async def take(self, rank: int, most: int) -> list:
        """The next ready items of `rank`, at least one and at most `most`; empty when closed and drained."""
        while not self._items[rank] and not self._closed:
            self._wake[rank].clear()
            await self._wake[rank].wait()
        items = self._items[rank]
        return [items.popleft() for _ in range(min(most, len(items)))]

    def waiting(self, rank: int) -> int:
        return len(self._items[rank])

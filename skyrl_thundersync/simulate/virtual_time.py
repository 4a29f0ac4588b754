"""Virtual time: a heap of timers, and an asyncio event loop that jumps to the next one.

Under `VirtualLoop` the trainer's own asyncio code runs unmodified, hours in seconds. `Events` serves the same timers without
asyncio. Both run what is due at one moment in the order in which it was asked for, so a simulation is repeatable to the bit.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
from collections.abc import Callable, Collection
from typing import Any, Protocol


class Timers(Protocol):
    """What simulated machines need of time."""

    def time(self) -> float:
        """Now, in seconds since the simulation began."""

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any) -> Any:
        """Call `callback(*args)` at `when` seconds."""


class Events:
    """Timers without a loop of their own."""

    def __init__(self) -> None:
        self._now, self._count = 0.0, 0
        self._heap: list[tuple[float, int, Callable, tuple]] = []

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when if when > self._now else self._now, self._count, callback, args))

    def next_moment(self) -> list[tuple[Callable, tuple]]:
        """Advance to the next moment with a timer; what is due then, in the order it was asked for. Empty: nothing left."""
        if not self._heap:
            return []
        when = self._heap[0][0]
        self._now = when
        due = []
        while self._heap and self._heap[0][0] == when:
            due.append(heapq.heappop(self._heap)[2:])
        return due

    def run(self, settle: Callable[[], None], unsettled: Collection) -> None:
        """Run until nothing is left; `settle` is called at the end of each moment that left something in `unsettled`."""
        heap, pop = self._heap, heapq.heappop
        while heap:
            when, count, callback, args = pop(heap)
            self._now = when
            if heap and heap[0][0] == when:
                heapq.heappush(heap, (when, count, callback, args))
                for callback, args in self.next_moment():
                    callback(*args)
            else:
                callback(*args)
            if unsettled:
                settle()


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while anything is runnable, and then jumps to the next timer.

    No file descriptors, threads or subprocesses: nothing in virtual time waits for the real one.

    Raises:
        RuntimeError: nothing is runnable and no timer is left, but the loop was asked to go on: what runs in it is stuck.
    """

    def __init__(self) -> None:
        self._events = Events()
        super().__init__(_Jump(self._jump))

    def time(self) -> float:
        return self._events.time()

    def call_at(self, when, callback, *args, context=None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._events.call_at(when, self._due, handle, callback, args, context)
        return handle

    def _due(self, handle: asyncio.TimerHandle, callback, args, context) -> None:
        if not handle.cancelled():
            self.call_soon(callback, *args, context=context)

    def _jump(self) -> None:
        due = self._events.next_moment()
        if not due:
            raise RuntimeError(f"stuck at {self.time():.6g} s of virtual time: everything waits and no timer is left")
        for callback, args in due:
            callback(*args)


class _Jump(selectors.SelectSelector):
    """Asked to wait for the outside world, lets time jump instead."""

    def __init__(self, jump: Callable[[], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list:
        if timeout is None:
            self._jump()
        return []

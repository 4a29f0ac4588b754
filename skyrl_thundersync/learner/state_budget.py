"""Where cut states and adjoints lie: on the device up to a budget, the least recently used beyond it in host memory.

The textbook keeps every open trajectory's on the device. Here what a pass reads is brought back before it, and what has
waited longest leaves. A path in work is on the device whole, whatever the budget. Where states cannot move (on a CPU device
is host memory) the budget only counts: the scheduler then lets new groups wait (stream/admission.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from skyrl_thundersync.learner.states import Adjoint


class Mover(Protocol):
    """Copies tensors between the device and host memory, in the order of the calls."""

    def out(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """To host memory; the caller lets go of the originals."""

    def back(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """To the device; to be read after `join` only."""

    def join(self) -> None:
        """Passes started from now on see all that was brought back."""


class StreamMover:
    """Moves through pinned memory on a CUDA stream of its own, beside the passes. Not run on a GPU yet."""

    def __init__(self, device: torch.device):
        self.device, self.stream = device, torch.cuda.Stream(device)

    def out(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))  # after the pass that wrote them
        moved = []
        for tensor in tensors:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            with torch.cuda.stream(self.stream):
                host.copy_(tensor, non_blocking=True)
            tensor.record_stream(self.stream)  # its memory is not given away before the copy is done
            moved.append(host)
        return moved

    def back(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.cuda.stream(self.stream):  # so after the copy that made them
            moved = [tensor.to(self.device, non_blocking=True) for tensor in tensors]
        for tensor in moved:
            tensor.record_stream(torch.cuda.current_stream(self.device))
        return moved

    def join(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self.stream)


class StateBudget:
    """The states and adjoints of one rank; holds none alive.

    Args:
        limit: bytes that may stay on the device; None: any number. What is in work may exceed it.
        mover: None where nothing can move.

    Attributes:
        moved: bytes moved so far, either way. leaving: called with what is about to leave the device.
    """

    def __init__(self, limit: int | None = None, mover: Mover | None = None):
        self.limit, self.moved = limit, 0
        self.leaving: Callable[[Adjoint], None] = lambda states: None
        self._mover = None if limit is None else mover
        self._known: WeakKeyDictionary[Adjoint, None] = WeakKeyDictionary()  # least recently used first
        self._expected = False

    @property
    def held(self) -> int:
        """Bytes of all states and adjoints, wherever they lie."""
        return sum(states.bytes for states in self._known)

    @property
    def resident(self) -> int:
        """Bytes of those on the device."""
        return sum(states.bytes for states in self._known if not states.on_host)

    def add(self, states: Adjoint) -> None:
        """`states` were made, on the device."""
        self._known[states] = None

    def bring(self, wanted: Iterable[Adjoint]) -> None:
        """Have `wanted` on the device for the passes that start next; what they need room for leaves."""
        if self._mover is None:
            return
        wanted = list(wanted)
        for states in wanted:
            del self._known[states]
            self._known[states] = None
        absent = [states for states in wanted if states.on_host]
        self._leave(self.limit - sum(states.bytes for states in absent), set(wanted))
        self._back(absent)
        if absent or self._expected:
            self._mover.join()
            self._expected = False

    def expect(self, wanted: Iterable[Adjoint]) -> None:
        """Begin to bring back what soon is wanted, beside what runs, as far as there is room."""
        if self._mover is None:
            return
        absent = [states for states in wanted if states.on_host]
        if absent and self.resident + sum(states.bytes for states in absent) <= self.limit:
            self._back(absent)
            self._expected = True

    def trim(self) -> None:
        """Nothing is in work: let what has waited longest leave until the budget holds."""
        if self._mover is not None:
            self._leave(self.limit, set())

    def _back(self, absent: list[Adjoint]) -> None:
        for states in absent:
            states.move(self._mover.back, to_host=False)
            self.moved += states.bytes

    def _leave(self, limit: int, wanted: set[Adjoint]) -> None:
        over = self.resident - limit
        for states in list(self._known):
            if over <= 0:
                return
            if not states.on_host and states not in wanted and states.bytes:
                self.leaving(states)
                states.move(self._mover.out, to_host=True)
                self.moved += states.bytes
                over -= states.bytes

"""Where cut states and their adjoints lie: the states of a path's consecutive segments side by side, in growing chunks.

The textbook's K/V cache is one tensor that is concatenated anew per layer and call. Here a new segment's K and V are
written once behind those of its parent, so a later segment meets its whole past in one kernel call per chunk, and what that
call's backward returns is added in place to one adjoint of the same layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from skyrl_thundersync.learner.fixed_point import to_fixed

SPAN = 4096
"""Tokens of the largest chunk; a chunk holds at least what was there before it, up to this many."""

Sums = list[list[torch.Tensor | None]]
"""Per layer, one tensor for each of the two state tensors, allocated when something is added."""


def empty_sums(layers: int) -> Sums:
    return [[None, None] for _ in range(layers)]


class Adjoint:
    """Some state tensors and the gradient of the objective with respect to them, so far; they lie in one place.

    Args:
        state: per layer two tensors or None; their shapes are those of the sums, FP32 or the state's wider dtype.
        exact: sum in fixed point, so that the order of deposits cannot matter.

    Attributes:
        sums: the gradient. apart: that of a trajectory's reward part alone, where it is summed apart (`beside`; None else).
        covered: how many rows (of dimension -2, tokens for K and V), from the first, they cover.
        bytes: what states and sums take. on_host: they were moved off the device (learner/state_budget.py).
    """

    def __init__(self, state: list[list[torch.Tensor | None]], exact: bool):
        self.state, self.exact = state, exact
        self.sums, self.covered = empty_sums(len(state)), 0
        self.apart: Sums | None = None
        self.bytes = sum(t.nbytes for pair in state for t in pair if t is not None)
        self.on_host = False
        self._all = [state, self.sums]
        self._targets: list[tuple[Sums, float]] = [(self.sums, 1.0)]

    def deposit(self, layer: int, part: int, gradient: torch.Tensor) -> None:
        """Add a descendant's gradient with respect to the first rows of one state tensor."""
        rows = gradient.shape[-2]
        if self.exact:
            gradient = to_fixed(gradient)
        for sums, factor in self._targets:
            if sums is self.sums or sums is self.apart:
                self.covered = max(self.covered, rows)
            total = sums[layer][part]
            if total is None:
                state = self.state[layer][part]
                dtype = torch.int64 if self.exact else torch.promote_types(state.dtype, torch.float32)
                total = sums[layer][part] = torch.zeros(state.shape, dtype=dtype, device=state.device)
                self.bytes += total.nbytes
            total[..., :rows, :].add_(gradient, alpha=1 if self.exact else factor)

    def beside(self) -> Sums:
        """Further sums, for `collecting`, that lie where these do."""
        self._all.append(empty_sums(len(self.state)))
        return self._all[-1]

    def move(self, move: Callable[[list[torch.Tensor]], list[torch.Tensor]], to_host: bool) -> None:
        """Replace every tensor by what `move` makes of it."""
        places = [(pair, part) for sums in self._all for pair in sums for part in (0, 1) if pair[part] is not None]
        for (pair, part), moved in zip(places, move([pair[part] for pair, part in places]), strict=True):
            pair[part] = moved
        self.on_host = to_host

    @contextmanager
    def collecting(self, targets: list[tuple[Sums, float]]) -> Iterator[None]:
        """Within it, deposits are added to each (sums, factor) of `targets`, not to `sums`. Not for exact sums."""
        outer, self._targets = self._targets, targets
        try:
            yield
        finally:
            self._targets = outer


class Chunk:
    """K and V (or what stands for them) of up to `capacity` consecutive tokens of one path, for layers that have them.

    Args:
        like: per layer two tensors [1, ·, n, ·] to take shape, dtype and device from, or None for other layers.
    """

    def __init__(self, like: list[list[torch.Tensor] | None], capacity: int, exact: bool):
        self.capacity, self.used = capacity, 0
        self.buffers = [[None, None] if pair is None else [_longer(t, capacity) for t in pair] for pair in like]
        self.adjoint = Adjoint(self.buffers, exact)

    def append(self, states: list[list[torch.Tensor] | None], n: int) -> slice:
        """Write the states of `n` tokens behind the others; where they lie."""
        rows = slice(self.used, self.used + n)
        self.used += n
        for buffers, pair in zip(self.buffers, states, strict=True):
            for buffer, state in zip(buffers, pair or (), strict=False):
                buffer[..., rows, :].copy_(state)
        return rows


def _longer(like: torch.Tensor, rows: int) -> torch.Tensor:
    return like.new_empty((*like.shape[:-2], rows, like.shape[-1]))

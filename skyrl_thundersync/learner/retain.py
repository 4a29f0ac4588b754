"""Which autograd graphs stay from a segment's arrival to its sweep: a budget in bytes, newest segments first.

A kept graph saves the sweep a second forward. A graph's size is not known before it exists, so it is predicted from two
graphs measured once, at start-up, with saved-tensor hooks: `per_token · n + per_past · past` bytes.
"""

from __future__ import annotations

import torch

from skyrl_thundersync.learner.segments import Graph, Segment, SegmentModel
from skyrl_thundersync.learner.states import Adjoint

PROBE = 64
"""Tokens in each of the two measured graphs: one chunk of the gated-delta rule."""


class GraphBudget:
    """Keeps graphs on their segments within `budget` bytes; the oldest give way to the newest."""

    def __init__(self, model: SegmentModel, budget: int):
        self.budget, self.kept = budget, {}
        self.per_token = self.per_past = 0.0
        if budget > 0:
            self._measure(model)

    def _measure(self, model: SegmentModel) -> None:
        first = model.segment(None, [0] * PROBE, None)
        at_start = graph_bytes(model, first)
        later = graph_bytes(model, model.segment(first, [0] * PROBE, None))
        self.per_token = at_start / PROBE
        self.per_past = max(0.0, (later - at_start) / PROBE)

    def bytes_of(self, segment: Segment) -> int:
        """Predicted bytes of the segment's graph."""
        return int(self.per_token * segment.ids_1n.shape[1] + self.per_past * segment.start)

    def admits(self, segment: Segment) -> bool:
        return 0 < self.bytes_of(segment) <= self.budget

    def piece(self, block: int) -> int:
        """Least tokens of a segment made at a close: a block, or half the budget's worth of graph where that is more."""
        return max(block, int(self.budget / self.per_token) // 2) if block and self.per_token else block

    def keep(self, segment: Segment, graph: Graph) -> None:
        """Keep `graph` on its segment and drop the oldest ones beyond the budget."""
        segment.graph, self.kept[segment] = graph, self.bytes_of(segment)
        while sum(self.kept.values()) > self.budget:
            self.drop(next(iter(self.kept)))

    def drop(self, segment: Segment) -> None:
        segment.graph = None
        self.kept.pop(segment, None)

    def drop_readers(self, states: Adjoint) -> None:
        """Drop the graphs that read `states`: a graph would keep them where they are."""
        for segment in list(self.kept):
            if segment.parent is not None and states in segment.parent.states():
                self.drop(segment)

    def clear(self) -> None:
        for segment in list(self.kept):
            self.drop(segment)


def graph_bytes(model: SegmentModel, segment: Segment) -> int:
    """Bytes that one forward of `segment` keeps for its backward, beside parameters and earlier states."""
    known = {p.untyped_storage().data_ptr() for p in model.body.parameters()}
    earlier = [t for held in segment.states() for pair in held.state for t in pair if t is not None]
    known |= {t.untyped_storage().data_ptr() for t in earlier}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        graph = model.forward(segment, grad=True)
    del graph
    return sum(saved.values())

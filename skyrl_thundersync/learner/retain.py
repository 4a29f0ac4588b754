"""Which autograd graphs stay from a segment's arrival to its sweep: those that find room in a budget of bytes.

A kept graph saves the sweep a second forward. None is given up for another: its forward would have been for nothing.
"""

from __future__ import annotations

from skyrl_thundersync.learner.segments import Graph, Segment, SegmentModel
from skyrl_thundersync.learner.states import Adjoint


class GraphBudget:
    """Keeps graphs on their segments within `budget` bytes."""

    def __init__(self, model: SegmentModel, budget: int):
        self.model, self.budget, self.kept = model, budget, {}
        if budget > 0 or model.graph_limit is not None:
            _ = model.graph_size  # measured now, not within the first pass

    def bytes_of(self, n: int, start: int) -> int:
        """Predicted bytes of the graph of `n` tokens behind `start` others; 0 without a budget."""
        return self.model.graph_bytes(n, start) if self.budget > 0 else 0

    def admits(self, n: int, start: int) -> bool:
        """Whether there is room for the graph of `n` tokens behind `start` others."""
        return 0 < self.bytes_of(n, start) <= self.budget - sum(self.kept.values())

    def piece(self, block: int) -> int:
        """Least tokens of a segment made at a close: a block, or half the budget's worth of graph where that is more."""
        if not block or self.budget <= 0:
            return block
        return max(block, int(self.budget / self.model.graph_size.per_token) // 2)

    def keep(self, segment: Segment, graph: Graph) -> None:
        """Keep `graph` on its segment, where `admits` found room for it."""
        segment.graph, self.kept[segment] = graph, self.bytes_of(segment.length, segment.start)

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

"""The release policy of the paper's text, to measure the fused one against: a turn's backward on arrival, replayed at close.

Forward F and scored share s: F + s·B before close and F + B after it, where fused takes F and F + B. Its tail is never
shorter, its total always longer, so it is no option of the learner (docs/design.md, "What runs when").
"""

from __future__ import annotations

from skyrl_thundersync.learner.segments import Segment
from skyrl_thundersync.learner.sweep import Forest
from skyrl_thundersync.learner.trajectory import Tally, Trajectory
from skyrl_thundersync.objectives.contract import NONE


class EagerForest(Forest):
    """A forest whose segments add their own loss's gradient on arrival; at close each is run again for its adjoints alone.

    Raises ValueError for objectives that know a source's weight only when its group has closed.
    """

    @classmethod
    def of(cls, forest: Forest) -> EagerForest:
        """The same with nothing open."""
        if forest.objective.rewards != NONE:
            raise ValueError("eager release needs an objective whose sources are complete on arrival")
        return cls(forest.model, forest.objective, forest.block, forest.budget, forest.accumulator)

    def run_ahead(self, trajectory: Trajectory, tally: Tally) -> None:
        self._make(trajectory, len(trajectory.tokens) - 1)
        self._run_path(trajectory.leaf.path(), tally)

    def arrive(self, segment: Segment, tally: Tally) -> None:
        graph = self.model.forward(segment, grad=True)
        if segment.scored is not None:
            self.total(self.tokens(segment, graph.hidden, tally), None, 0).backward()
            self.model.deposit_leaves(segment, graph)
            segment.scored = None

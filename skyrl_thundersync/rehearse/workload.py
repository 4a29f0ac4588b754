"""One trajectory of a given length, as an agent with tools makes it: a prompt, then turns of tool output and samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from skyrl_thundersync.objectives.contract import Objective
from skyrl_thundersync.stream.sources import Append, CloseGroup, CloseTrajectory, Source, TrajectoryId, Work

CONTEXT, ACTION = 512, 256
"""Tokens of a turn: what the tool said, and what was sampled (and is scored)."""


@dataclass(frozen=True)
class Workload:
    """tokens: of a trajectory, its prompt included. prompt: shared by a group's samples. rewards: of the two (`works`)."""

    tokens: int
    prompt: int = 2048
    rewards: tuple[float, float] = (1.0, 0.0)

    @property
    def scored(self) -> int:
        """Sampled tokens of a trajectory."""
        return sum(action for _, action in self._turns())

    def _turns(self) -> Iterator[tuple[int, int]]:
        """(context, action) of each turn; the first has the prompt as its context."""
        left = self.tokens - self.prompt
        if left < ACTION:
            raise ValueError(
                f"a trajectory of {self.tokens} tokens leaves no turn of {ACTION} after {self.prompt} of prompt"
            )
        context = self.prompt
        while left > 0:
            action = min(ACTION, left)
            yield context, action
            left -= action
            context = min(CONTEXT, max(0, left - 1))
            left -= context

    def works(self, objective: Objective) -> Iterator[Work]:
        """One trajectory of one group as learner work, its group's close last.

        Under a group objective a second sample without a turn gives the group two different rewards: it has a gradient.
        """
        trajectory, length = TrajectoryId("g", 0), 0
        for turn, (context, action) in enumerate(self._turns()):
            source = Source(
                trajectory, turn, length, (1,) * context, (1,) * action, (1,) * action, (0.0,) * action, "stop", 0
            )
            length += context + action
            yield Append(source, (0.0,) * action if objective.needs_teacher else None)
        yield CloseTrajectory(trajectory, self.rewards[0])
        if objective.needs_group:
            yield CloseTrajectory(TrajectoryId("g", 1), self.rewards[1])
        yield CloseGroup("g")

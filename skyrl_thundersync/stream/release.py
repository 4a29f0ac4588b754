"""When ready work may enter a queue: the three schedules that PAPER.md compares, as one gate.

`thundersync` lets work through as it becomes ready. `group` holds it until its group's last trajectory closed. `sync`
holds it until the last rollout ended, then lets the largest groups go first, which balances ranks best. The gate
changes when work runs, never what it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from skyrl_thundersync.stream.sources import CloseGroup, Work, group_of

SCHEDULES = ("sync", "group", "thundersync")


@dataclass(frozen=True)
class WorkPolicy:
    """When work may run. It changes no update, only its time and memory.

    schedule: of `SCHEDULES`. cap, state_bytes: groups that may hold state on a rank (admission.py); None: any number.
    statistics_cap: for group objectives, groups that a rank may sum before their last reward (rewards.py); None for others.

    Raises:
        ValueError: an unknown schedule.
    """

    schedule: str = "thundersync"
    cap: int | None = None
    statistics_cap: int | None = None
    state_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"unknown schedule {self.schedule!r}; known are {', '.join(SCHEDULES)}")


class ReleaseRule(Protocol):
    """Decides when, never what. Each item it is offered it gives back once, a group's in the order in which they came, and
    the last of them when the rollouts have ended."""

    def offer(self, work: Work) -> list[Work]:
        """`work` became ready; what may enter the queues now, in order."""

    def rollouts_ended(self) -> list[Work]:
        """The last trajectory of the batch closed; likewise."""


@dataclass
class ReleaseGate:
    """Holds ready work back as `schedule` says; every method returns what may enter the queues now, in order."""

    schedule: str
    group_tokens: Callable[[str], int]
    _held: dict[str, list[Work]] = field(default_factory=dict)
    _complete: list[str] = field(default_factory=list)
    _rollouts_ended: bool = False

    def offer(self, work: Work) -> list[Work]:
        """`work` became ready."""
        if self.schedule == "thundersync":
            return [work]
        group = group_of(work)
        self._held.setdefault(group, []).append(work)
        if not isinstance(work, CloseGroup):
            return []
        self._complete.append(group)
        return self._release() if self.schedule == "group" or self._rollouts_ended else []

    def rollouts_ended(self) -> list[Work]:
        """The last trajectory of the batch closed."""
        self._rollouts_ended = True
        return self._release()

    def _release(self) -> list[Work]:
        groups = sorted(self._complete, key=lambda group: (-self.group_tokens(group), group))
        self._complete = []
        return [work for group in groups for work in self._held.pop(group)]

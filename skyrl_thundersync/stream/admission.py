"""How many groups may hold state on a rank at once: the admission cap (PAPER.md, "GRPO, exactly").

A group holds state (cut states, adjoints, statistics) from its first work item to its sweep. Under a cap, a further group's
work waits beside the queue, and groups enter in the order in which they first became ready. No group waits below the cap, and
an admitted group's work never waits here, so what is admitted always finishes: a cap costs time, never progress.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from skyrl_thundersync.stream.sources import CloseGroup, Work, group_of


@dataclass
class Admission:
    """Admission on one rank; both methods return what may enter its queue now, in order.

    Args:
        cap: groups that may hold state at once, at least 1.

    Raises:
        ValueError: a cap below 1.
    """

    cap: int
    _admitted: set[str] = field(init=False, default_factory=set)
    _waiting: dict[str, list[Work]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.cap < 1:
            raise ValueError(f"an admission cap of {self.cap} groups admits no work at all; give at least 1")

    @property
    def waiting(self) -> int:
        """Work items that wait for admission."""
        return sum(map(len, self._waiting.values()))

    def offer(self, work: Work) -> list[Work]:
        """`work` was released to this rank."""
        group = group_of(work)
        if group not in self._admitted:
            if len(self._admitted) >= self.cap:
                self._waiting.setdefault(group, []).append(work)
                return []
            self._admitted.add(group)
        return [work]

    def acknowledged(self, work: Work) -> list[Work]:
        """The rank finished `work`; a swept group makes room for the one that has waited longest."""
        if not isinstance(work, CloseGroup):
            return []
        self._admitted.remove(work.group)
        if not self._waiting:
            return []
        group = next(iter(self._waiting))
        self._admitted.add(group)
        return self._waiting.pop(group)

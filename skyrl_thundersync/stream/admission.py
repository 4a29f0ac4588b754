"""How many groups may hold state on a rank at once: the admission cap (PAPER.md, "GRPO, exactly").

A group holds state (cut states, adjoints, statistics) from its first work item to its sweep. Over the cap, a further group's
work waits beside the queue, and groups enter in the order in which they first became ready. The cap is a number of groups, or
bytes of state: what the rank last said it holds, and the work on its way there at the most bytes a token seen so far. Until a
rank has said anything, one group goes ahead. An admitted group's work never waits here, and a rank without an admitted group
takes the next one, so what is admitted always finishes and everything is admitted: a cap costs time, never progress.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from skyrl_thundersync.stream.sources import Append, CloseGroup, Work, group_of


@dataclass
class Admission:
    """Admission on one rank; `offer` and `acknowledged` return what may enter its queue now, in order.

    Args:
        cap: groups that may hold state at once, at least 1; None: any number.
        state_bytes: no new group while the rank holds at least so many bytes of state; None: no such limit.
        now: the clock, in seconds.

    Attributes:
        waits: seconds that each group which had to wait waited, in the order of admission.

    Raises:
        ValueError: a cap below 1.
    """

    cap: int | None = None
    state_bytes: int | None = None
    now: Callable[[], float] = time.perf_counter
    waits: list[float] = field(init=False, default_factory=list)
    _admitted: dict[str, int] = field(init=False, default_factory=dict)  # tokens acknowledged
    _waiting: dict[str, list[Work]] = field(init=False, default_factory=dict)
    _since: dict[str, float] = field(init=False, default_factory=dict)
    _held: int | None = field(init=False, default=None)
    _on_the_way: int = field(init=False, default=0)  # tokens
    _bytes_per_token: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        if self.cap is not None and self.cap < 1:
            raise ValueError(f"an admission cap of {self.cap} groups admits no work at all; give at least 1")

    @property
    def waiting(self) -> int:
        """Work items that wait for admission."""
        return sum(map(len, self._waiting.values()))

    def offer(self, work: Work) -> list[Work]:
        """`work` was released to this rank."""
        group = group_of(work)
        if group not in self._admitted:
            if self._waiting or not self._room():
                self._waiting.setdefault(group, []).append(work)
                self._since.setdefault(group, self.now())
                return []
            self._admitted[group] = 0
        self._on_the_way += _tokens(work)
        return [work]

    def acknowledged(self, work: Work, held_bytes: int = 0) -> list[Work]:
        """The rank finished `work` and now holds `held_bytes` of state: there may be room for those that waited longest."""
        group, tokens = group_of(work), _tokens(work)
        self._on_the_way -= tokens
        self._admitted[group] += tokens
        self._held = held_bytes
        if seen := sum(self._admitted.values()):
            self._bytes_per_token = max(self._bytes_per_token, held_bytes / seen)
        if isinstance(work, CloseGroup):
            del self._admitted[group]
        admitted: list[Work] = []
        while self._waiting and self._room():
            group = next(iter(self._waiting))
            works = self._waiting.pop(group)
            self._admitted[group] = 0
            self._on_the_way += sum(map(_tokens, works))
            self.waits.append(self.now() - self._since.pop(group))
            admitted += works
        return admitted

    def _room(self) -> bool:
        """Whether a further group may start."""
        if not self._admitted:
            return True
        if self.cap is not None and len(self._admitted) >= self.cap:
            return False
        if self.state_bytes is None:
            return True
        return self._held is not None and self._held + self._on_the_way * self._bytes_per_token < self.state_bytes


def _tokens(work: Work) -> int:
    return len(work.source.context_ids) + len(work.source.action_ids) if isinstance(work, Append) else 0

"""Which learner rank a group's work goes to: the rank that holds its prompt, else the one with the least to do."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from skyrl_thundersync.stream.sources import Append, CloseGroup, Work, group_of


@dataclass
class Placement:
    """Sticky by group. A new group goes to the rank with the least to do.

    What an open group will bring is mostly more than it has brought. So where groups grow while they are placed
    (`growing`), open groups count first, then outstanding tokens; where they come whole, tokens first. docs/design.md has
    what that gains.

    A token is outstanding from the release of its source until its group is swept: that is how long it binds the rank.
    A decision costs O(log ranks) amortised: loads mostly grow, so the heap holds what they were and is corrected when read.
    """

    ranks: int
    growing: bool
    _rank_of: dict[str, int] = field(default_factory=dict)
    _tokens: dict[str, int] = field(default_factory=dict)
    _load: list[tuple[int, int, int]] = field(init=False)
    _entry: list[tuple[int, int, int]] = field(init=False)
    _heap: list[tuple[int, int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self._load = [(0, 0, rank) for rank in range(self.ranks)]  # groups and tokens in the order that counts, rank
        self._entry, self._heap = list(self._load), list(self._load)

    def rank(self, work: Work) -> int:
        """The rank for `work`, which is now outstanding there."""
        group = group_of(work)
        rank = self._rank_of.get(group)
        if rank is None:
            rank = self._rank_of[group] = self._least_loaded()
            self._tokens[group] = 0
            self._add(rank, 0, 1)
        if isinstance(work, Append):
            tokens = len(work.source.context_ids) + len(work.source.action_ids)
            self._tokens[group] += tokens
            self._add(rank, tokens, 0)
        return rank

    def acknowledged(self, work: Work) -> None:
        """The rank is done with `work`; a swept group binds nothing any more."""
        if isinstance(work, CloseGroup):
            rank = self._rank_of.pop(work.group)
            self._add(rank, -self._tokens.pop(work.group), -1)
            self._entry[rank] = self._load[rank]
            heapq.heappush(self._heap, self._load[rank])

    def _add(self, rank: int, tokens: int, groups: int) -> None:
        first, second = (groups, tokens) if self.growing else (tokens, groups)
        had_first, had_second, _ = self._load[rank]
        self._load[rank] = (had_first + first, had_second + second, rank)

    def _least_loaded(self) -> int:
        """Each rank's own entry is at most its load, so the first own entry that equals its load is the least of all."""
        while True:
            first = self._heap[0]
            rank = first[2]
            if first != self._entry[rank]:
                heapq.heappop(self._heap)  # what a rank had before it became lighter
            elif first != self._load[rank]:
                self._entry[rank] = self._load[rank]
                heapq.heapreplace(self._heap, self._load[rank])
            else:
                return rank

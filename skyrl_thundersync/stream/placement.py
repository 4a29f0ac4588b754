"""Which learner rank a group's work goes to: the rank that holds its prompt, else the one with the least to do."""

from __future__ import annotations

from dataclasses import dataclass, field

from skyrl_thundersync.stream.sources import Append, CloseGroup, Work, group_of


@dataclass
class Placement:
    """Sticky by group; a new group goes to the rank with the fewest outstanding tokens, then fewest open groups.

    A token is outstanding from the release of its source until its group is swept: that is how long it binds the rank.
    """

    ranks: int
    _rank_of: dict[str, int] = field(default_factory=dict)
    _tokens: dict[str, int] = field(default_factory=dict)

    def rank(self, work: Work) -> int:
        """The rank for `work`, which is now outstanding there."""
        group = group_of(work)
        if group not in self._rank_of:
            self._rank_of[group] = min(range(self.ranks), key=self._load)
            self._tokens[group] = 0
        if isinstance(work, Append):
            self._tokens[group] += len(work.source.context_ids) + len(work.source.action_ids)
        return self._rank_of[group]

    def acknowledged(self, work: Work) -> None:
        """The rank is done with `work`; a swept group binds nothing any more."""
        if isinstance(work, CloseGroup):
            del self._rank_of[work.group], self._tokens[work.group]

    def _load(self, rank: int) -> tuple[int, int, int]:
        groups = [group for group, at in self._rank_of.items() if at == rank]
        return sum(self._tokens[group] for group in groups), len(groups), rank

"""What a batch registered and what has closed (DESIGN invariants 2, 3 and 8).

The ledger is the only place that decides whether a batch is complete. It holds no queue and no clock: callers report
events, it checks that each may happen and happens once.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from skyrl_thundersync.stream.sources import Append, CloseGroup, CloseTrajectory, Source, TrajectoryId, Work, group_of


class LedgerError(RuntimeError):
    """An event that breaks the batch's bookkeeping: the update must not be taken."""


class Progress(NamedTuple):
    """How far a batch is: trajectories closed and open, their tokens so far, and the work that a learner has still to do:
    items released and not acknowledged."""

    closed: int
    open: int
    tokens: int
    waiting: int


@dataclass(slots=True)
class _Trajectory:
    sources: int = 0
    scored: int = 0
    surprise: float = 0.0
    tokens: int = 0
    prompt: int = 0
    ended: bool = False
    closed: bool = False
    released: bool = False


@dataclass
class Ledger:
    """Bookkeeping of one logical batch B_k.

    Args:
        version: policy version k that must have sampled every token.
        groups: group id to number of trajectories sampled for it.
    """

    version: int
    groups: dict[str, int]
    _trajectories: dict[TrajectoryId, _Trajectory] = field(init=False)
    _outstanding: dict[Hashable, Work] = field(init=False, default_factory=dict)
    _groups_released: set[str] = field(init=False, default_factory=set)
    _groups_done: set[str] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self._trajectories = {TrajectoryId(g, i): _Trajectory() for g, n in self.groups.items() for i in range(n)}

    @property
    def trajectories(self) -> list[TrajectoryId]:
        return list(self._trajectories)

    @property
    def n_scored(self) -> int:
        """Scored tokens registered so far; N_k once every trajectory closed."""
        return sum(t.scored for t in self._trajectories.values())

    @property
    def entropy(self) -> float:
        """Mean of −log π of the scored tokens under the sampler, nats: an estimate of the policy's entropy a token."""
        return sum(t.surprise for t in self._trajectories.values()) / max(1, self.n_scored)

    @property
    def n_tokens(self) -> int:
        """Tokens of all trajectories, each counted once."""
        return sum(t.tokens for t in self._trajectories.values())

    @property
    def progress(self) -> Progress:
        """May be asked from another thread than the one that reports events."""
        closed = sum(t.closed for t in self._trajectories.values())
        return Progress(closed, len(self._trajectories) - closed, self.n_tokens, len(self._outstanding))

    @property
    def shapes(self) -> list[tuple[int, list[int]]]:
        """Per group: tokens of its prompt, and of each of its trajectories, prompt included."""
        return [
            (self._trajectories[own[0]].prompt, [self._trajectories[t].tokens for t in own])
            for own in ([TrajectoryId(g, i) for i in range(n)] for g, n in self.groups.items())
        ]

    @property
    def n_sources(self) -> int:
        return sum(t.sources for t in self._trajectories.values())

    def sampled(self, source: Source) -> None:
        """A turn was sampled.

        Raises:
            LedgerError: unknown or closed trajectory, a turn out of order, or another policy version than the batch's.
        """
        entry = self._trajectories.get(source.trajectory) or self._unknown(source.trajectory, f"source {source.name}")
        if source.policy_version != self.version:
            raise LedgerError(
                f"source {source.name} was sampled by policy version {source.policy_version}, but this batch belongs "
                f"to version {self.version}: its tokens are stale. A replica kept serving old weights after a publish"
            )
        if entry.ended:
            raise LedgerError(f"source {source.name} arrived after the last turn of its trajectory")
        if source.turn != entry.sources:
            raise LedgerError(f"source {source.name} arrived where turn {entry.sources} was expected")
        if source.turn == 0:
            entry.prompt = len(source.context_ids)
        entry.sources += 1
        entry.scored += source.n_scored
        entry.surprise -= sum(p for p, scored in zip(source.sampler_logps, source.mask, strict=True) if scored)
        entry.tokens += len(source.context_ids) + len(source.action_ids)

    def ended(self, trajectory: TrajectoryId) -> bool:
        """No turn can follow. Whether that is news.

        Raises:
            LedgerError: an unknown trajectory.
        """
        entry = self._trajectories.get(trajectory) or self._unknown(trajectory, f"last turn of {trajectory}")
        news, entry.ended = not entry.ended, True
        return news

    def closed(self, trajectory: TrajectoryId, host_scored: int | None = None) -> None:
        """The host is done with it, its reward is known. `host_scored` is its own count of scored tokens, checked when given.

        Raises:
            LedgerError: closed twice, or the host's final loss mask holds another number of scored tokens than was
                streamed (a turn is missing, or scored twice, or a mask changed late).
        """
        entry = self._trajectories.get(trajectory) or self._unknown(trajectory, f"closing of {trajectory}")
        if entry.closed:
            raise LedgerError(f"trajectory {trajectory} closed twice")
        if host_scored is not None and host_scored != entry.scored:
            raise LedgerError(
                f"trajectory {trajectory}: {entry.scored} scored tokens were streamed, the host's loss mask holds "
                f"{host_scored}. A turn is missing, counted twice, or its mask changed after it was released"
            )
        entry.ended = entry.closed = True

    def released(self, work: Work) -> None:
        """A work item entered a ready queue; each may do so once."""
        key = _key(work)
        if key in self._outstanding:
            raise LedgerError(f"work {work_name(work)} was released twice")
        if isinstance(work, CloseTrajectory):
            entry = self._trajectories.get(work.trajectory) or self._unknown(work.trajectory, work_name(work))
            if entry.released or not entry.ended:
                when = "twice" if entry.released else "before the last turn of its trajectory"
                raise LedgerError(f"{work_name(work)} was released {when}")
            entry.released = True
        if isinstance(work, CloseGroup):
            if work.group in self._groups_released or not self.group_swept(work.group):
                raise LedgerError(f"{work_name(work)} was released twice, or before all its trajectories")
            self._groups_released.add(work.group)
        self._outstanding[key] = work

    def acknowledged(self, work: Work) -> None:
        """A learner rank finished a work item."""
        if self._outstanding.pop(_key(work), None) is None:
            raise LedgerError(
                f"a learner acknowledged {work_name(work)}, which it was not given, or acknowledged before"
            )
        if isinstance(work, CloseGroup):
            self._groups_done.add(group_of(work))

    def group_swept(self, group: str) -> bool:
        """Whether every trajectory of `group` has been released for its sweep."""
        return all(self._trajectories[TrajectoryId(group, i)].released for i in range(self.groups[group]))

    def group_tokens(self, group: str) -> int:
        return sum(self._trajectories[TrajectoryId(group, i)].tokens for i in range(self.groups[group]))

    def require_closed(self) -> None:
        """Raise unless every registered trajectory closed."""
        if open_ones := [str(t) for t, entry in self._trajectories.items() if not entry.closed]:
            raise LedgerError(f"{len(open_ones)} trajectories are still open: {_some(open_ones)}")

    def require_complete(self) -> None:
        """Raise unless the batch may be finished: every trajectory and group closed, every work item acknowledged."""
        self.require_closed()
        if missing := [g for g in self.groups if g not in self._groups_done]:
            raise LedgerError(f"{len(missing)} groups have not been swept: {_some(missing)}")
        if names := [work_name(work) for work in self._outstanding.values()]:
            raise LedgerError(f"{len(names)} work items are not acknowledged: {_some(names)}")

    def _unknown(self, trajectory: TrajectoryId, what: str) -> NoReturn:
        raise LedgerError(f"{what}: trajectory {trajectory} is not registered in this batch")


def _key(work: Work) -> Hashable:
    """What makes a work item the same as another: not its scores or rewards."""
    if isinstance(work, Append):
        return work.source.trajectory, work.source.turn
    return work.trajectory if isinstance(work, CloseTrajectory) else work.group


def work_name(work: Work) -> str:
    """A unique, readable name of a work item."""
    if isinstance(work, CloseTrajectory):
        return f"close of trajectory {work.trajectory}"
    if isinstance(work, CloseGroup):
        return f"close of group {work.group}"
    return f"source {work.source.name}"


def _some(names) -> str:
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

"""The schedule of one update as a state machine: events go in, work comes out (PAPER.md, Algorithm 1).

It is synchronous and knows no event loop, no transport and no clock but the one it is given. The trainer drives it with
asyncio, the simulator in virtual time: what is simulated is what trains.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from skyrl_thundersync.stream.ledger import Ledger
from skyrl_thundersync.stream.placement import Placement
from skyrl_thundersync.stream.queue import ReadyQueue
from skyrl_thundersync.stream.release import ReleaseGate, ReleaseRule, WorkPolicy
from skyrl_thundersync.stream.rewards import RewardGate
from skyrl_thundersync.stream.sources import Append, CloseGroup, CloseTrajectory, Scores, Source, TrajectoryId, Work


class Scheduler:
    """Every method but `take` reports an event; what follows from it is put into three lists, which the driver empties.

    Args:
        version: k, the policy version that samples this batch.
        groups: group id to its number of trajectories: the logical batch B_k.
        ranks: how many learner ranks there are.
        policy: when work may run.
        teacher: whether a source is ready only once a teacher has scored it.
        entered: called with (rank, work) as work enters a rank's queue.
        now: the clock, in seconds.
        placement, release: in place of the schedule's own (placement.py, release.py).

    Attributes:
        ledger: what the batch registered and what has closed.
        to_score: sources for the teacher; of a trajectory one at a time, in turn order.
        to_free: trajectories whose teacher cache may go.
        woken: ranks that may have work to `take`.
    """

    def __init__(
        self,
        version: int,
        groups: dict[str, int],
        ranks: int,
        policy: WorkPolicy,
        *,
        teacher: bool,
        entered: Callable[[int, Work], None],
        now: Callable[[], float] = time.perf_counter,
        placement: Placement | None = None,
        release: ReleaseRule | None = None,
    ) -> None:
        self.ledger = Ledger(version, groups)
        self.to_score: deque[Source] = deque()
        self.to_free: deque[TrajectoryId] = deque()
        self.woken: deque[int] = deque()
        self._teacher, self._entered = teacher, entered
        self._release = release or ReleaseGate(policy.schedule, self.ledger.group_tokens)
        self._rewards_gate = None if policy.statistics_cap is None else RewardGate(policy.statistics_cap, groups)
        self._placement = placement or Placement(ranks, growing=policy.schedule == "thundersync")
        self._queue = ReadyQueue(ranks, policy.cap, policy.state_bytes, now)
        # Turns that are not scored yet, the first of them at the teacher; None behind the last.
        self._turns: dict[TrajectoryId, deque[Source | None]] = {t: deque() for t in self.ledger.trajectories}
        self._rewards: dict[TrajectoryId, float | None] = {}

    def turn(self, source: Source) -> None:
        """A turn was sampled. Raises LedgerError as `Ledger.sampled`."""
        self.ledger.sampled(source)
        if not self._teacher:
            self._ready(Append(source, None))
            return
        turns = self._turns[source.trajectory]
        turns.append(source)
        if len(turns) == 1:
            self.to_score.append(source)

    def scored(self, trajectory: TrajectoryId, scores: Scores) -> None:
        """The teacher answered for the trajectory's source in `to_score`."""
        turns = self._turns[trajectory]
        self._ready(Append(turns.popleft(), scores.logps, scores.support))
        if not turns:
            return
        if turns[0] is None:
            self._swept(trajectory)
        else:
            self.to_score.append(turns[0])

    def last_turn(self, trajectory: TrajectoryId) -> None:
        """Its newest turn is its last; the host is not done with it. Where no reward is waited for, it is swept now.

        May come late, or more than once.
        """
        if self._rewards_gate is None and self.ledger.ended(trajectory):
            self._no_more_turns(trajectory)

    def closed(self, trajectory: TrajectoryId, reward: float | None, host_scored: int | None) -> None:
        """The host is done with it. Raises LedgerError as `Ledger.closed`."""
        news = self.ledger.ended(trajectory)
        self.ledger.closed(trajectory, host_scored)
        if self._rewards_gate is not None:
            self._rewards[trajectory] = reward
        if news:
            self._no_more_turns(trajectory)

    def rollouts_ended(self) -> None:
        """The host has no more trajectories. Raises LedgerError when one that was registered is open."""
        self.ledger.require_closed()
        for work in self._release.rollouts_ended():
            self._place(work)

    def take(self, rank: int, most: int) -> list[Work]:
        """What `rank` is to do next, at most `most` items, in order; empty when nothing is ready."""
        return self._queue.take(rank, most)

    def acknowledged(self, rank: int, work: Work, held_bytes: int = 0) -> None:
        """`rank` finished `work` and now holds `held_bytes` of state. Raises LedgerError as `Ledger.acknowledged`."""
        self.ledger.acknowledged(work)
        self._placement.acknowledged(work)
        self._queue.acknowledged(rank, work, held_bytes)
        if self._rewards_gate is not None:
            self._enter(self._rewards_gate.acknowledged(rank, work))

    @property
    def admission_waits(self) -> list[float]:
        """Seconds that each group which had to wait for admission waited."""
        return self._queue.admission_waits

    def _no_more_turns(self, trajectory: TrajectoryId) -> None:
        if turns := self._turns[trajectory]:
            turns.append(None)
        else:
            self._swept(trajectory)

    def _swept(self, trajectory: TrajectoryId) -> None:
        """All its turns are ready: so is its sweep, and with the group's last one the sweep of the shared prompt."""
        self._ready(CloseTrajectory(trajectory, self._rewards.get(trajectory)))
        if self.ledger.group_swept(trajectory.group):
            self._ready(CloseGroup(trajectory.group))
        if self._teacher:
            self.to_free.append(trajectory)

    def _ready(self, work: Work) -> None:
        self.ledger.released(work)
        for released in self._release.offer(work):
            self._place(released)

    def _place(self, work: Work) -> None:
        rank = self._placement.rank(work)
        self._enter(((rank, work),) if self._rewards_gate is None else self._rewards_gate.offer(rank, work))

    def _enter(self, items: Sequence[tuple[int, Work]]) -> None:
        for rank, work in items:
            self._entered(rank, work)
            self._queue.put(rank, work)
            self.woken.append(rank)

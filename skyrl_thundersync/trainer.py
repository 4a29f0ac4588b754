"""One update of ThunderSyncRL, top to bottom (PAPER.md, Algorithm 1; DESIGN.md §2).

    rollouts run ── each sampled turn ─▶ scored by the frozen teacher ─▶ ready ─▶ learner rank: forward, keep cut state
                 └─ last turn known ─▶ sweep its segments ── group so ─▶ sweep the shared prompt
    the last group is swept ─▶ finish: reduce, ÷ N_k, clip, ONE optimizer step ─▶ publish k+1 ─▶ all replicas acknowledge

Every forward and backward of update k uses θ_k, and nothing of update k+1 starts before the acknowledgements: the
update is that of batch-synchronous training. This module knows no host, engine or transport; they come in as small protocols.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from skyrl_thundersync.stream.ledger import Ledger
from skyrl_thundersync.stream.placement import Placement
from skyrl_thundersync.stream.queue import ReadyQueue
from skyrl_thundersync.stream.release import ReleaseGate
from skyrl_thundersync.stream.rewards import RewardGate
from skyrl_thundersync.stream.sources import (
    Append,
    CloseGroup,
    CloseTrajectory,
    Source,
    TrajectoryId,
    Work,
    WorkDone,
)
from skyrl_thundersync.telemetry.timeline import WorkSpan

T = TypeVar("T")

# Work items handed to a rank in one call: enough to hide the call's own cost, few enough to keep ready order lively.
MOST_PER_CALL = 16


class LearnerRank(Protocol):
    """One learner process, as the update sees it."""

    async def run(self, work: list[Work]) -> list[WorkDone]:
        """Do `work` in order; one acknowledgement an item. Raises what the rank raised."""


class Teacher(Protocol):
    """The frozen teacher of OPD."""

    async def score(self, source: Source) -> tuple[float, ...]:
        """log π_T of each action token in its realised context. Called in turn order within a trajectory."""

    async def close(self, trajectory: TrajectoryId) -> None:
        """No turn can follow: the trajectory's cache may go."""


Recorder = Callable[[int, Work], None]
_NO_MORE_TURNS = object()


@dataclass
class Clock:
    """Moments of one update, seconds on one monotonic clock."""

    started: float
    rollouts_ended: float | None = None
    drained: float | None = None

    @property
    def rollout_s(self) -> float:
        """R_k: from the start to the last rollout's end."""
        return self.rollouts_ended - self.started

    @property
    def tail_s(self) -> float:
        """Learner time after the last rollout, c_n - R_k."""
        return self.drained - self.rollouts_ended


class Update:
    """Update k, from its first rollout to the last acknowledged piece of gradient work.

    Args:
        version: k, the policy version that samples this batch.
        groups: group id to its number of trajectories: the logical batch B_k.
        ranks: the learner ranks.
        teacher: None for objectives without one.
        schedule: "thundersync", "group" or "sync" (stream/release.py).
        record: called with (rank, work) in release order, to keep the batch for replay.
        cap, state_bytes: how many groups may hold state on a rank at once (stream/admission.py); None: any number.
        now: the clock, in seconds; the simulator brings a virtual one.
        statistics_cap: for group objectives, how many groups may hold statistics on a rank (stream/rewards.py).
    """

    def __init__(
        self,
        version: int,
        groups: dict[str, int],
        ranks: list[LearnerRank],
        teacher: Teacher | None,
        schedule: str,
        record: Recorder | None = None,
        cap: int | None = None,
        now: Callable[[], float] = time.perf_counter,
        statistics_cap: int | None = None,
        state_bytes: int | None = None,
    ) -> None:
        self.ledger = Ledger(version, groups)
        self._now = now
        self.clock = Clock(now())
        self.acknowledged: list[WorkDone] = []
        self.spans: list[WorkSpan] = []
        self.done_before_rollouts_ended = 0
        self.busy_s = [0.0] * len(ranks)
        self._ranks, self._teacher, self._record = ranks, teacher, record
        self._gate = ReleaseGate(schedule, self.ledger.group_tokens)
        self._reward_gate = None if statistics_cap is None else RewardGate(statistics_cap, groups)
        self._needs_rewards = statistics_cap is not None
        self._placement = Placement(len(ranks), growing=schedule == "thundersync")
        self._queue = ReadyQueue(len(ranks), cap, state_bytes, now)
        self._turns: dict[TrajectoryId, asyncio.Queue] = {t: asyncio.Queue() for t in self.ledger.trajectories}
        self._rewards: dict[TrajectoryId, float | None] = {}
        self._released: dict[int, float] = {}  # by identity: hashing a source costs its tokens

    async def run(self, rollouts: Awaitable[T]) -> T:
        """Run the rollouts and, beside them, all gradient work they release. Returns what the rollouts returned.

        When it returns, every registered trajectory and group is closed and every work item acknowledged: the batch may
        be finished. Any failure, wherever it happens, cancels the rest and is raised here.
        """
        async with asyncio.TaskGroup() as lanes:
            for rank in range(len(self._ranks)):
                lanes.create_task(self._lane(rank))
            async with asyncio.TaskGroup() as followers:
                for trajectory in self.ledger.trajectories:
                    followers.create_task(self._follow(trajectory))
                result = await rollouts
                self.ledger.require_closed()
                self.clock.rollouts_ended = self._now()
                for work in self._gate.rollouts_ended():
                    self._enqueue(work)
            self._queue.close()
        self.clock.drained = self._now()
        self.ledger.require_complete()
        return result

    @property
    def admission_waits(self) -> list[float]:
        """Seconds that each group which had to wait for admission waited."""
        return self._queue.admission_waits

    # Called by the host while the rollouts run, on the same event loop.

    def on_turn(self, source: Source) -> None:
        """A turn was sampled; its tool has not run yet."""
        self.ledger.sampled(source)
        self._turns[source.trajectory].put_nowait(source)

    def on_last_turn(self, trajectory: TrajectoryId) -> None:
        """Its newest turn is its last, though the host is not done with it: a command runs, its grading is to come.

        Where no reward is waited for, the trajectory is swept now; it must still close. May come late, or more than once.
        """
        if not self._needs_rewards and self.ledger.ended(trajectory):
            self._turns[trajectory].put_nowait(_NO_MORE_TURNS)

    def on_trajectory_closed(self, trajectory: TrajectoryId, reward: float | None, host_scored: int | None) -> None:
        """The host is done with it. `host_scored`: its own count of scored tokens, checked against the stream's."""
        if self.ledger.ended(trajectory):
            self._turns[trajectory].put_nowait(_NO_MORE_TURNS)
        self.ledger.closed(trajectory, host_scored)
        if self._needs_rewards:
            self._rewards[trajectory] = reward

    async def _follow(self, trajectory: TrajectoryId) -> None:
        """Make a trajectory's turns ready one after the other, then its close, then its group's; free the teacher's cache."""
        while (source := await self._turns[trajectory].get()) is not _NO_MORE_TURNS:
            scores = await self._teacher.score(source) if self._teacher else None
            self._ready(Append(source, scores))
        self._ready(CloseTrajectory(trajectory, self._rewards.get(trajectory)))
        if self.ledger.group_swept(trajectory.group):
            self._ready(CloseGroup(trajectory.group))
        if self._teacher:  # beside the sweep: a replica may answer only after all that it was asked to score
            await self._teacher.close(trajectory)

    def _ready(self, work: Work) -> None:
        self.ledger.released(work)
        for released in self._gate.offer(work):
            self._enqueue(released)

    def _enqueue(self, work: Work) -> None:
        rank = self._placement.rank(work)
        self._enter(self._reward_gate.offer(rank, work) if self._reward_gate else [(rank, work)])

    def _enter(self, items: list[tuple[int, Work]]) -> None:
        for rank, work in items:
            if self._record:
                self._record(rank, work)
            self._released[id(work)] = self._now()
            self._queue.put(rank, work)

    async def _lane(self, rank: int) -> None:
        """Keep one learner rank busy as long as it has ready work."""
        while items := await self._queue.take(rank, MOST_PER_CALL):
            for work, done in zip(items, await self._ranks[rank].run(items), strict=True):
                self.ledger.acknowledged(work)
                self._placement.acknowledged(work)
                self._queue.acknowledged(rank, work, done.held_bytes)
                if self._reward_gate:
                    self._enter(self._reward_gate.acknowledged(rank, work))
                self.acknowledged.append(done)
                self.spans.append(WorkSpan.of(rank, work, self._released.pop(id(work)), done))
                self.busy_s[rank] += done.seconds
                self.done_before_rollouts_ended += self.clock.rollouts_ended is None

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

from skyrl_thundersync.stream.release import WorkPolicy
from skyrl_thundersync.stream.scheduler import Scheduler
from skyrl_thundersync.stream.sources import Scores, Source, TrajectoryId, Work, WorkDone
from skyrl_thundersync.telemetry.timeline import WorkSpan

T = TypeVar("T")

# Work items handed to a rank in one call: enough to hide the call's own cost, few enough to keep ready order lively.
MOST_PER_CALL = 16


class LearnerHandle(Protocol):
    """One learner process, as the update sees it."""

    async def run(self, work: list[Work]) -> list[WorkDone]:
        """Do `work` in order; one acknowledgement an item. Raises what the rank raised."""


class Teacher(Protocol):
    """The frozen teacher of OPD."""

    async def score(self, source: Source) -> Scores:
        """log π_T of each action token in its realised context. Called in turn order within a trajectory."""

    async def close(self, trajectory: TrajectoryId) -> None:
        """No turn can follow: the trajectory's cache may go."""


Recorder = Callable[[int, Work], None]


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
        policy: when work may run.
        record: called with (rank, work) in release order, to keep the batch for replay.
        now: the clock, in seconds; the simulator brings a virtual one.
    """

    def __init__(
        self,
        version: int,
        groups: dict[str, int],
        ranks: list[LearnerHandle],
        teacher: Teacher | None,
        policy: WorkPolicy,
        record: Recorder | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._now = now
        self.clock = Clock(now())
        self.acknowledged: list[WorkDone] = []
        self.spans: list[WorkSpan] = []
        self.done_before_rollouts_ended = 0
        self.busy_s = [0.0] * len(ranks)
        self._ranks, self._teacher, self._record = ranks, teacher, record
        self._released: dict[int, float] = {}  # by identity: hashing a source costs its tokens
        self._scheduler = Scheduler(
            version,
            groups,
            len(ranks),
            policy,
            teacher=teacher is not None,
            entered=self._entered,
            now=now,
        )
        self.ledger = self._scheduler.ledger
        self._teaching: asyncio.TaskGroup | None = None
        self._bells = [asyncio.Event() for _ in ranks]
        self._no_more_work = False

    async def run(self, rollouts: Awaitable[T]) -> T:
        """Run the rollouts and, beside them, all gradient work they release. Returns what the rollouts returned.

        When it returns, every registered trajectory and group is closed and every work item acknowledged: the batch may
        be finished. Any failure, wherever it happens, cancels the rest and is raised here.
        """
        async with asyncio.TaskGroup() as lanes:
            for rank in range(len(self._ranks)):
                lanes.create_task(self._lane(rank))
            async with asyncio.TaskGroup() as self._teaching:
                result = await rollouts
                self._scheduler.rollouts_ended()
                self.clock.rollouts_ended = self._now()
                self._act()
            self._no_more_work = True
            for bell in self._bells:
                bell.set()
        self.clock.drained = self._now()
        self.ledger.require_complete()
        return result

    @property
    def admission_waits(self) -> list[float]:
        """Seconds that each group which had to wait for admission waited."""
        return self._scheduler.admission_waits

    # Called by the host while the rollouts run, on the same event loop.

    def on_turn(self, source: Source) -> None:
        """A turn was sampled; its tool has not run yet."""
        self._scheduler.turn(source)
        self._act()

    def on_last_turn(self, trajectory: TrajectoryId) -> None:
        """Its newest turn is its last, though the host is not done with it: a command runs, its grading is to come.

        Where no reward is waited for, the trajectory is swept now; it must still close. May come late, or more than once.
        """
        self._scheduler.last_turn(trajectory)
        self._act()

    def on_trajectory_closed(self, trajectory: TrajectoryId, reward: float | None, host_scored: int | None) -> None:
        """The host is done with it. `host_scored`: its own count of scored tokens, checked against the stream's."""
        self._scheduler.closed(trajectory, reward, host_scored)
        self._act()

    def _act(self) -> None:
        """Do what the scheduler says is due."""
        due = self._scheduler
        while due.to_score:
            self._teaching.create_task(self._score(due.to_score.popleft()))
        while due.to_free:  # beside the sweep: a replica may answer only after all that it was asked to score
            self._teaching.create_task(self._teacher.close(due.to_free.popleft()))
        while due.woken:
            self._bells[due.woken.popleft()].set()

    def _entered(self, rank: int, work: Work) -> None:
        if self._record:
            self._record(rank, work)
        self._released[id(work)] = self._now()

    async def _score(self, source: Source) -> None:
        self._scheduler.scored(source.trajectory, await self._teacher.score(source))
        self._act()

    async def _lane(self, rank: int) -> None:
        """Keep one learner rank busy as long as it has ready work."""
        bell = self._bells[rank]
        while True:
            if items := self._scheduler.take(rank, MOST_PER_CALL):
                self._done(rank, items, await self._ranks[rank].run(items))
            elif self._no_more_work:
                return
            else:
                bell.clear()
                await bell.wait()

    def _done(self, rank: int, items: list[Work], answers: list[WorkDone]) -> None:
        for work, done in zip(items, answers, strict=True):
            self._scheduler.acknowledged(rank, work, done.held_bytes)
            self.acknowledged.append(done)
            self.spans.append(WorkSpan.of(rank, work, self._released.pop(id(work)), done))
            self.busy_s[rank] += done.seconds
            self.done_before_rollouts_ended += self.clock.rollouts_ended is None
        self._act()

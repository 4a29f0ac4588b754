"""One update in virtual time, by the scheduler that real ones run, with simulated machines.

Two drivers that agree to the bit: `via_update` runs `trainer.Update`, unmodified, under a clock that jumps; `direct` runs the
same ledger, gate, placement and queues without asyncio, for batches of millions of sources.
"""

from __future__ import annotations

import asyncio
import gc
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from skyrl_thundersync.analysis.machines import Learner, Machine, TeacherReplica
from skyrl_thundersync.analysis.virtual_time import Events, Timers, VirtualLoop
from skyrl_thundersync.analysis.workload import RecordedRollouts, Rollouts, float_zeros
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
from skyrl_thundersync.trainer import MOST_PER_CALL, Update

SCHEDULES = ("sync", "group", "thundersync")


@dataclass(frozen=True)
class Policy:
    """When work may run.

    schedule: stream/release.py. cap: groups that may hold state on a rank (stream/admission.py); None: any number.
    statistics_cap: under GRPO, groups a rank may sum before their last reward (stream/rewards.py); None: not GRPO.
    """

    schedule: str = "thundersync"
    cap: int | None = None
    statistics_cap: int | None = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"unknown schedule {self.schedule!r}; known are {', '.join(SCHEDULES)}")


@dataclass(frozen=True)
class Figures:
    """One simulated update; seconds unless named otherwise. R, L, P, ρ, κ, λ as in theory.py, L a rank's mean.

    Attributes:
        busy_share: share of T_k that the ranks worked.
        early_share: share of their work done before the last rollout ended.
        queue_wait_*: from a work item's release to its start.
        state_tokens_peak: tokens whose cut states a rank held, at most; groups_peak: groups that held state on a rank;
            statistics_peak: groups that held GRPO's statistics on a rank (0 for OPD).
    """

    rollout_s: float
    tail_s: float
    suffix_s: float
    step_s: float
    busy_share: float
    early_share: float
    rho: float
    kappa: float
    tail: float
    queue_wait_mean_s: float
    queue_wait_p50_s: float
    queue_wait_p99_s: float
    queue_wait_max_s: float
    state_tokens_peak: int
    groups_peak: int
    statistics_peak: int
    sources: int
    work_items: int


@dataclass(frozen=True)
class Run:
    """A simulated update: its figures, and by work item in order of completion the rank, release, start and service."""

    figures: Figures
    rank: np.ndarray
    released_s: np.ndarray
    started_s: np.ndarray
    service_s: np.ndarray


class Meter:
    """Simulated ranks with their books: when each work item was released, when it started and how long it took."""

    def __init__(self, timers: Timers, machine: Machine, policy: Policy) -> None:
        self._timers = timers
        self.learners = [Learner(machine, policy.statistics_cap is not None) for _ in range(machine.ranks)]
        self._released_at: dict[int, float] = {}
        self.rank, self.released, self.started, self.service = array("l"), array("d"), array("d"), array("d")

    def released_to(self, rank: int, work: Work) -> None:
        self._released_at[id(work)] = self._timers.time()

    def run(self, rank: int, works: list[Work]) -> list[float]:
        """Start `works` now; busy seconds of each."""
        at, seconds = self._timers.time(), self.learners[rank].run(works)
        for work, service in zip(works, seconds, strict=True):
            self.rank.append(rank)
            self.released.append(self._released_at.pop(id(work)))
            self.started.append(at)
            self.service.append(service)
            at += service
        return seconds

    def close(self, rollout_s: float, tail_s: float, suffix_s: float, sources: int) -> Run:
        rank, released = np.array(self.rank), np.array(self.released)
        started, service = np.array(self.started), np.array(self.service)
        wait, step = started - released, rollout_s + tail_s + suffix_s
        early = np.clip(rollout_s - started, 0.0, service).sum()
        busy, ranks = float(service.sum()), len(self.learners)
        figures = Figures(
            rollout_s=rollout_s,
            tail_s=tail_s,
            suffix_s=suffix_s,
            step_s=step,
            busy_share=busy / (step * ranks),
            early_share=float(early) / busy,
            rho=busy / ranks / rollout_s,
            kappa=suffix_s / rollout_s,
            tail=tail_s / rollout_s,
            queue_wait_mean_s=float(wait.mean()),
            queue_wait_p50_s=float(np.percentile(wait, 50)),
            queue_wait_p99_s=float(np.percentile(wait, 99)),
            queue_wait_max_s=float(wait.max()),
            state_tokens_peak=max(learner.state_tokens_peak for learner in self.learners),
            groups_peak=max(learner.groups_peak for learner in self.learners),
            statistics_peak=max(learner.statistics_peak for learner in self.learners),
            sources=sources,
            work_items=len(service),
        )
        return Run(figures, rank, released, started, service)


class Teachers:
    """Teacher replicas; a trajectory stays with the one that holds its cache."""

    def __init__(self, timers: Timers, machine: Machine) -> None:
        self._replicas = [TeacherReplica(timers, machine) for _ in range(machine.teachers)]
        self._replica_of: dict[TrajectoryId, TeacherReplica] = {}

    def submit(self, source: Source, done: Callable[..., None], *args) -> None:
        replica = self._replica_of.get(source.trajectory)
        if replica is None:
            replica = self._replicas[len(self._replica_of) % len(self._replicas)]
            self._replica_of[source.trajectory] = replica
        replica.score(len(source.context_ids) + len(source.action_ids), done, *args)


def direct(rollouts: Rollouts | RecordedRollouts, machine: Machine, policy: Policy) -> Run:
    """Simulate one update with stream/'s own classes, without asyncio: some ten microseconds a work item."""
    events = Events()
    update = DirectUpdate(events, rollouts, machine.under(policy.schedule), policy)
    rollouts.begin(events, update, update.on_rollouts_ended)
    with _uncollected():
        events.run(update.settle, update.woken)
    return update.close()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's cycle collector, which would walk millions of live objects again and again and find no cycle."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def via_update(rollouts: Rollouts | RecordedRollouts, machine: Machine, policy: Policy) -> Run:
    """Simulate one update with `trainer.Update` itself, unmodified, on an event loop in virtual time."""

    async def main() -> Run:
        loop = asyncio.get_running_loop()
        meter = Meter(loop, machine.under(policy.schedule), policy)
        teacher = _Teacher(Teachers(loop, machine)) if _teaches(rollouts, machine) else None
        update = Update(
            rollouts.version,
            rollouts.groups,
            [_Rank(meter, rank) for rank in range(machine.ranks)],
            teacher,
            policy.schedule,
            record=meter.released_to,
            cap=policy.cap,
            now=loop.time,
            statistics_cap=policy.statistics_cap,
        )

        async def host() -> None:
            ended = loop.create_future()
            rollouts.begin(loop, update, lambda: ended.set_result(None))
            await ended

        await update.run(host())
        return meter.close(update.clock.rollout_s, update.clock.tail_s, machine.suffix_s, update.ledger.n_sources)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())


def _teaches(rollouts: Rollouts | RecordedRollouts, machine: Machine) -> bool:
    """Recorded sources were ready with their scores."""
    return machine.teachers > 0 and not isinstance(rollouts, RecordedRollouts)


class _Rank:
    """A simulated rank as `trainer.LearnerRank`."""

    def __init__(self, meter: Meter, rank: int) -> None:
        self._meter, self._rank = meter, rank

    async def run(self, work: list[Work]) -> list[WorkDone]:
        seconds = self._meter.run(self._rank, work)
        await asyncio.sleep(sum(seconds))
        return [WorkDone(s) for s in seconds]


class _Teacher:
    """Simulated teachers as `trainer.Teacher`."""

    def __init__(self, teachers: Teachers) -> None:
        self._teachers = teachers

    async def score(self, source: Source) -> tuple[float, ...]:
        scored = asyncio.get_running_loop().create_future()
        self._teachers.submit(source, scored.set_result, None)
        await scored
        return float_zeros(len(source.action_ids))

    async def close(self, trajectory: TrajectoryId) -> None: ...


class DirectUpdate:
    """`trainer.Update` without asyncio, step for step: turns are scored one after the other within a trajectory, ready work
    passes the gate to its rank's queue, and an idle rank takes what is ready at the end of a moment.
    """

    def __init__(self, events: Events, rollouts, machine: Machine, policy: Policy) -> None:
        self.ledger = Ledger(rollouts.version, rollouts.groups)
        self._events, self._suffix_s = events, machine.suffix_s
        self._meter = Meter(events, machine, policy)
        self._teachers = Teachers(events, machine) if _teaches(rollouts, machine) else None
        self._gate = ReleaseGate(policy.schedule, self.ledger.group_tokens)
        cap = policy.statistics_cap
        self._reward_gate = None if cap is None else RewardGate(cap, rollouts.groups)
        self._placement = Placement(machine.ranks, growing=policy.schedule == "thundersync")
        self._queue = ReadyQueue(machine.ranks, policy.cap)
        self._turns: dict[TrajectoryId, deque[Source | None]] = {t: deque() for t in self.ledger.trajectories}
        self._rewards: dict[TrajectoryId, float | None] = {}
        self._idle, self.woken = [True] * machine.ranks, deque()
        self._rollouts_ended: float | None = None
        self._last = 0.0

    def on_turn(self, source: Source) -> None:
        self.ledger.sampled(source)
        if self._teachers is None:
            self._ready(Append(source, None))
            return
        turns = self._turns[source.trajectory]
        turns.append(source)
        if len(turns) == 1:
            self._teachers.submit(source, self._scored, turns)

    def on_trajectory_closed(self, trajectory: TrajectoryId, reward: float | None, host_scored: int | None) -> None:
        self.ledger.closed(trajectory, host_scored)
        self._rewards[trajectory] = reward
        turns = self._turns[trajectory]
        if turns:
            turns.append(None)
        else:
            self._swept(trajectory)

    def on_rollouts_ended(self) -> None:
        self.ledger.require_closed()
        self._rollouts_ended = self._events.time()
        for work in self._gate.rollouts_ended():
            self._enqueue(work)

    def settle(self) -> None:
        """End of a moment: ranks that have nothing to do take what is ready."""
        while self.woken:
            rank = self.woken.popleft()
            if self._idle[rank] and (works := self._queue.take_ready(rank, MOST_PER_CALL)):
                self._idle[rank] = False
                end = self._events.time() + sum(self._meter.run(rank, works))
                self._events.call_at(end, self._done, rank, works)

    def close(self) -> Run:
        self.ledger.require_complete()
        tail = max(self._last, self._rollouts_ended) - self._rollouts_ended
        return self._meter.close(self._rollouts_ended, tail, self._suffix_s, self.ledger.n_sources)

    def _scored(self, turns: deque[Source | None]) -> None:
        source = turns.popleft()
        self._ready(Append(source, float_zeros(len(source.action_ids))))
        if not turns:
            return
        if turns[0] is None:
            turns.clear()
            self._swept(source.trajectory)
        else:
            self._teachers.submit(turns[0], self._scored, turns)

    def _swept(self, trajectory: TrajectoryId) -> None:
        self._ready(CloseTrajectory(trajectory, self._rewards[trajectory]))
        if self.ledger.group_swept(trajectory.group):
            self._ready(CloseGroup(trajectory.group))

    def _ready(self, work: Work) -> None:
        self.ledger.released(work)
        for released in self._gate.offer(work):
            self._enqueue(released)

    def _enqueue(self, work: Work) -> None:
        rank = self._placement.rank(work)
        if self._reward_gate is None:
            self._enter(rank, work)
            return
        for item in self._reward_gate.offer(rank, work):
            self._enter(*item)

    def _enter(self, rank: int, work: Work) -> None:
        self._meter.released_to(rank, work)
        self._queue.put(rank, work)
        self.woken.append(rank)

    def _done(self, rank: int, works: list[Work]) -> None:
        for work in works:
            self.ledger.acknowledged(work)
            self._placement.acknowledged(work)
            self._queue.acknowledged(rank, work)
            if self._reward_gate is not None:
                for item in self._reward_gate.acknowledged(rank, work):
                    self._enter(*item)
        self._idle[rank], self._last = True, self._events.time()
        self.woken.append(rank)

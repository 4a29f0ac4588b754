"""One update in virtual time, by the scheduler that real ones run, with simulated machines.

Two drivers that agree to the bit: `via_update` runs `trainer.Update`, unmodified, under a clock that jumps; `direct` runs the
same ledger, gate, placement and queues without asyncio, for batches of millions of sources.
"""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from skyrl_thundersync.simulate.machines import Machine, TeacherReplica
from skyrl_thundersync.simulate.meter import Meter, Policy, Run
from skyrl_thundersync.simulate.virtual_time import Events, Timers, VirtualLoop
from skyrl_thundersync.simulate.workload import RecordedRollouts, Rollouts, float_zeros
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


def direct(
    rollouts: Rollouts | RecordedRollouts, machine: Machine, policy: Policy, placement: Placement | None = None
) -> Run:
    """Simulate one update with stream/'s own classes, without asyncio: some ten microseconds a work item.

    placement: a fresh one to use in place of the schedule's own.
    """
    events = Events()
    update = DirectUpdate(events, rollouts, machine.under(policy.schedule), policy, placement)
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

    def __init__(
        self, events: Events, rollouts, machine: Machine, policy: Policy, placement: Placement | None = None
    ) -> None:
        self.ledger = Ledger(rollouts.version, rollouts.groups)
        self._events, self._suffix_s = events, machine.suffix_s
        self._meter = Meter(events, machine, policy)
        self._teachers = Teachers(events, machine) if _teaches(rollouts, machine) else None
        self._gate = ReleaseGate(policy.schedule, self.ledger.group_tokens)
        cap = policy.statistics_cap
        self._reward_gate = None if cap is None else RewardGate(cap, rollouts.groups)
        self._needs_rewards = cap is not None
        self._placement = placement or Placement(machine.ranks, growing=policy.schedule == "thundersync")
        self._queue = ReadyQueue(machine.ranks, policy.cap)
        self._turns: dict[TrajectoryId, list[Source | None]] = {t: [] for t in self.ledger.trajectories}
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

    def on_last_turn(self, trajectory: TrajectoryId) -> None:
        if not self._needs_rewards and self.ledger.ended(trajectory):
            self._no_more_turns(trajectory)

    def on_trajectory_closed(self, trajectory: TrajectoryId, reward: float | None, host_scored: int | None) -> None:
        if self._needs_rewards:
            self._rewards[trajectory] = reward
        news = self.ledger.ended(trajectory)
        self.ledger.closed(trajectory, host_scored)
        if news:
            self._no_more_turns(trajectory)

    def _no_more_turns(self, trajectory: TrajectoryId) -> None:
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

    def _scored(self, turns: list[Source | None]) -> None:
        source = turns.pop(0)
        self._ready(Append(source, float_zeros(len(source.action_ids))))
        if not turns:
            return
        if turns[0] is None:
            turns.clear()
            self._swept(source.trajectory)
        else:
            self._teachers.submit(turns[0], self._scored, turns)

    def _swept(self, trajectory: TrajectoryId) -> None:
        self._ready(CloseTrajectory(trajectory, self._rewards.get(trajectory)))
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

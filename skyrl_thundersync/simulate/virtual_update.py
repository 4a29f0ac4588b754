"""One update in virtual time, by the scheduler that real ones run, with simulated machines.

Two drivers of one `stream.scheduler.Scheduler`, which agree to the bit: `via_update` is `trainer.Update`, unmodified, under a
clock that jumps; `direct` does without asyncio, for batches of millions of sources.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from skyrl_thundersync.simulate.machines import Machine, SimulatedTeacher
from skyrl_thundersync.simulate.meter import Meter, SimulatedUpdate
from skyrl_thundersync.simulate.virtual_time import Events, Timers, VirtualLoop
from skyrl_thundersync.simulate.workload import RecordedRollouts, Rollouts, float_zeros
from skyrl_thundersync.stream.placement import Placement
from skyrl_thundersync.stream.release import ReleaseRule, WorkPolicy
from skyrl_thundersync.stream.scheduler import Scheduler
from skyrl_thundersync.stream.sources import Scores, Source, TrajectoryId, Work, WorkDone
from skyrl_thundersync.trainer import MOST_PER_CALL, Update


class Teachers:
    """Teacher replicas; a trajectory stays with the one that holds its cache."""

    def __init__(self, timers: Timers, machine: Machine) -> None:
        self._replicas = [SimulatedTeacher(timers, machine) for _ in range(machine.teachers)]
        self._replica_of: dict[TrajectoryId, SimulatedTeacher] = {}

    def submit(self, source: Source, done: Callable[..., None], *args) -> None:
        replica = self._replica_of.get(source.trajectory)
        if replica is None:
            replica = self._replicas[len(self._replica_of) % len(self._replicas)]
            self._replica_of[source.trajectory] = replica
        replica.score(len(source.context_ids) + len(source.action_ids), done, *args)


def direct(
    rollouts: Rollouts | RecordedRollouts,
    machine: Machine,
    policy: WorkPolicy,
    placement: Placement | None = None,
    release: ReleaseRule | None = None,
) -> SimulatedUpdate:
    """Simulate one update without asyncio: some ten microseconds a work item.

    placement, release: fresh ones to use in place of the schedule's own.
    """
    events = Events()
    update = DirectUpdate(events, rollouts, machine.under(policy.schedule), policy, placement, release)
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


def via_update(rollouts: Rollouts | RecordedRollouts, machine: Machine, policy: WorkPolicy) -> SimulatedUpdate:
    """Simulate one update with `trainer.Update` itself, unmodified, on an event loop in virtual time."""

    async def main() -> SimulatedUpdate:
        loop = asyncio.get_running_loop()
        meter = Meter(loop, machine.under(policy.schedule), policy)
        teacher = _Teacher(Teachers(loop, machine)) if _teaches(rollouts, machine) else None
        update = Update(
            rollouts.version,
            rollouts.groups,
            [_Rank(meter, rank) for rank in range(machine.ranks)],
            teacher,
            policy,
            record=meter.released_to,
            now=loop.time,
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
    """A simulated rank as `trainer.LearnerHandle`."""

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

    async def score(self, source: Source) -> Scores:
        scored = asyncio.get_running_loop().create_future()
        self._teachers.submit(source, scored.set_result, None)
        await scored
        return Scores(float_zeros(len(source.action_ids)))

    async def close(self, trajectory: TrajectoryId) -> None: ...


class DirectUpdate:
    """`trainer.Update` without asyncio: an idle rank takes what is ready at the end of a moment.

    Attributes:
        woken: not empty while something is left to `settle`.
    """

    def __init__(
        self,
        events: Events,
        rollouts,
        machine: Machine,
        policy: WorkPolicy,
        placement: Placement | None = None,
        release: ReleaseRule | None = None,
    ) -> None:
        self._events, self._suffix_s = events, machine.suffix_s
        self._meter = Meter(events, machine, policy)
        self._teachers = Teachers(events, machine) if _teaches(rollouts, machine) else None
        self._scheduler = Scheduler(
            rollouts.version,
            rollouts.groups,
            machine.ranks,
            policy,
            teacher=self._teachers is not None,
            entered=self._meter.released_to,
            now=events.time,
            placement=placement,
            release=release,
        )
        self.ledger, self.woken = self._scheduler.ledger, self._scheduler.woken
        self._idle = [True] * machine.ranks
        self._rollouts_ended: float | None = None
        self._last = 0.0

    def on_turn(self, source: Source) -> None:
        self._scheduler.turn(source)
        self._teach()

    def on_last_turn(self, trajectory: TrajectoryId) -> None:
        self._scheduler.last_turn(trajectory)
        self._scheduler.to_free.clear()

    def on_trajectory_closed(self, trajectory: TrajectoryId, reward: float | None, host_scored: int | None) -> None:
        self._scheduler.closed(trajectory, reward, host_scored)
        self._scheduler.to_free.clear()

    def on_rollouts_ended(self) -> None:
        self._rollouts_ended = self._events.time()
        self._scheduler.rollouts_ended()

    def settle(self) -> None:
        """End of a moment: ranks that have nothing to do take what is ready."""
        while self.woken:
            rank = self.woken.popleft()
            if self._idle[rank] and (works := self._scheduler.take(rank, MOST_PER_CALL)):
                self._idle[rank] = False
                end = self._events.time() + sum(self._meter.run(rank, works))
                self._events.call_at(end, self._done, rank, works)

    def close(self) -> SimulatedUpdate:
        self.ledger.require_complete()
        tail = max(self._last, self._rollouts_ended) - self._rollouts_ended
        return self._meter.close(self._rollouts_ended, tail, self._suffix_s, self.ledger.n_sources)

    def _teach(self) -> None:
        """Teachers' caches take no time to free."""
        due = self._scheduler
        due.to_free.clear()
        while due.to_score:
            source = due.to_score.popleft()
            self._teachers.submit(source, self._scored, source)

    def _scored(self, source: Source) -> None:
        self._scheduler.scored(source.trajectory, Scores(float_zeros(len(source.action_ids))))
        self._teach()

    def _done(self, rank: int, works: list[Work]) -> None:
        for work in works:
            self._scheduler.acknowledged(rank, work)
        self._idle[rank], self._last = True, self._events.time()
        self.woken.append(rank)

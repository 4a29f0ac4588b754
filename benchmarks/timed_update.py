"""One update on the wall clock, in this process: `trainer.Update` with a real `LearnerRank`, rollouts on timers.

Tools and sampling are waited for, not run, so that what is measured is the scheduler and the learner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from skyrl_thundersync.learner.rank import LearnerRank, RankSpec
from skyrl_thundersync.learner.zero import free_port
from skyrl_thundersync.options.schema import LearnerConfig, OptimizerSettings
from skyrl_thundersync.simulate.workload import Rollouts, float_zeros
from skyrl_thundersync.stream.release import WorkPolicy
from skyrl_thundersync.stream.sources import Scores, Source, TrajectoryId, Work, WorkDone
from skyrl_thundersync.trainer import Update


class LoopTimers:
    """`Timers` on a running event loop: seconds since it was made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._origin = self._loop.time()

    def time(self) -> float:
        return self._loop.time() - self._origin

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any) -> Any:
        return self._loop.call_at(self._origin + when, callback, *args)


class InThread:
    """A learner rank in this process as `trainer.LearnerHandle`; its one thread leaves the event loop free."""

    def __init__(self, rank: LearnerRank) -> None:
        self._rank, self._thread = rank, ThreadPoolExecutor(1)

    async def run(self, work: list[Work]) -> list[WorkDone]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._rank.run_many, work)

    async def finish(self) -> dict:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._rank.finish)


class NoWait:
    """A teacher that answers at once: what scores cost is none of this benchmark's."""

    async def score(self, source: Source) -> Scores:
        return Scores(float_zeros(len(source.action_ids)))

    async def close(self, trajectory: TrajectoryId) -> None: ...


@dataclass(frozen=True)
class Measured:
    """One update on the wall clock, seconds. busy_s: of the rank. items: work items."""

    rollout_s: float
    step_s: float
    suffix_s: float
    busy_s: float
    items: int


def measure(rank: InThread, rollouts: Rollouts, schedule: str) -> Measured:
    """Run one update, its optimizer step included."""

    async def main() -> Measured:
        update = Update(0, rollouts.groups, [rank], NoWait(), WorkPolicy(schedule))

        async def host() -> None:
            ended = asyncio.get_running_loop().create_future()
            rollouts.begin(LoopTimers(), update, lambda: ended.set_result(None))
            await ended

        await update.run(host())
        clock = update.clock
        await rank.finish()
        suffix = asyncio.get_running_loop().time() - clock.drained
        step = clock.drained - clock.started + suffix
        return Measured(clock.rollout_s, step, suffix, update.busy_s[0], len(update.acknowledged))

    return asyncio.run(main())


def learner(folder: str, block_tokens: int, retain_gib: float) -> InThread:
    settings = LearnerConfig(dtype="float32", block_tokens=block_tokens, retain_gib=retain_gib)
    optimizer = OptimizerSettings(1e-6, (0.9, 0.999), 0.0, 1.0, 0, "constant_with_warmup", 10_000)
    return InThread(LearnerRank(RankSpec(folder, 0, 1, "127.0.0.1", free_port(), settings, optimizer=optimizer)))

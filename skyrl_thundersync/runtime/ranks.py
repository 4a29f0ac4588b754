"""The learner ranks of a run, and what makes them outlive one of theirs.

A rank that dies in the middle of a batch takes with it its shard of the optimizer, its part of the batch's gradient, and the
process group. With `thundersync.learner.max_restarts` each update begins with a copy of every shard on disk, and the work
that a rank has acknowledged is kept beside it until the batch is finished, up to a size. Then all ranks start anew from the
copy, which is θ_k and its moments, and do their acknowledged work again: the same sources, without a rollout. With the
exact accumulator the batch's gradient is the same to the bit.

From the moment that a rank enters the batch's finish, a death ends the run: some ranks may have stepped.
"""

from __future__ import annotations

import asyncio
import pickle
import shutil
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import RayActorError

from skyrl_thundersync.learner.actor import LearnerActor
from skyrl_thundersync.learner.answers import Written
from skyrl_thundersync.learner.rank import WHOLE_TRAJECTORY, RankSpec
from skyrl_thundersync.objectives import registry as objectives
from skyrl_thundersync.options.schema import learner_ranks, lora_settings, optimizer_settings
from skyrl_thundersync.process.durable import NotWrittenError
from skyrl_thundersync.runtime.nodes import Nodes, Place
from skyrl_thundersync.stream.sources import Work, WorkDone

if TYPE_CHECKING:
    from skyrl_thundersync.hosts.skyrl.config import TrainConfig

T = TypeVar("T")


class RankHandle:
    """One learner rank, as `trainer.LearnerHandle`; whichever process it is in."""

    def __init__(self, learners: Learners, rank: int) -> None:
        self._learners, self._rank = learners, rank

    async def run(self, work: list[Work]) -> list[WorkDone]:
        return await self._learners.run(self._rank, work)


class Learners:
    """All ranks of a run, one Ray actor each.

    Args:
        cfg: of the run.
        device: "cpu" or "cuda".
        nodes, places: the run's machines, and where on them each rank goes.
        kept: folder for what a restart needs; emptied as updates finish.
        say: shows a line to the user.

    Attributes:
        actors: handles of the actors that are the ranks now. places: where each is.
    """

    def __init__(
        self, cfg: TrainConfig, device: str, nodes: Nodes, places: list[Place], kept: Path, say: Callable[[str], None]
    ) -> None:
        self._cfg, self._device, self._kept, self._say = cfg, device, kept, say
        self._nodes, self.places = nodes, places
        self._most_restarts = cfg.thundersync.learner.max_restarts
        self._world = learner_ranks(cfg)
        self._generation = self._restarts = 0
        self._lock = asyncio.Lock()
        self._copies: tuple[Path, list] | None = None
        self._journals: list[Journal] = []
        self._most_bytes, self._too_much = int(cfg.thundersync.learner.restart_gib * 2**30), False
        self.actors: list = self._start()
        if self._most_restarts:
            kept.mkdir(parents=True, exist_ok=True)
            self._journals = [Journal(kept / f"work-{rank}") for rank in range(self._world)]

    def ranks(self) -> list[RankHandle]:
        return [RankHandle(self, rank) for rank in range(self._world)]

    async def run(self, rank: int, work: list[Work]) -> list[WorkDone]:
        """Do `work` in order on a rank. Raises what the rank raised, or RayActorError when it died and may not restart."""
        done = await self._ask(rank, lambda actor: actor.run_many.remote(work))
        if offset_s := self.places[rank].node.offset_s:  # one clock, the driver's, for all spans
            done = [replace(item, started=item.started - offset_s) for item in done]
        if self._journals and not self._too_much:
            self._journals[rank].add(work)
            if sum(journal.bytes for journal in self._journals) > self._most_bytes:
                self._forget()
        return done

    async def settle(self) -> None:
        """All ranks are there and hold the whole batch. Call it before the finish, which no restart can repair."""
        await asyncio.gather(*(self._ask(rank, lambda actor: actor.stats.remote()) for rank in range(self._world)))

    async def _ask(self, rank: int, call: Callable[[Any], Awaitable[T]]) -> T:
        """A rank's answer, from a process that still is that rank."""
        while True:
            async with self._lock:  # not while ranks restart
                actor, generation = self.actors[rank], self._generation
            try:
                answer = await call(actor)
            except RayActorError as error:
                await self._restart(generation, rank, error)
                continue
            # An answer that came while a restart had begun is of a process that is gone, and in no journal.
            if generation == self._generation:
                return answer

    def follow_schedule(self) -> None:
        """The configuration's schedule is another one from the next batch on."""
        ray.get([actor.set_block_tokens.remote(block_tokens(self._cfg)) for actor in self.actors])

    def keep(self, version: int) -> None:
        """Every rank copies its shard as that of θ_version, before any work that it is given later; returns at once."""
        if self._most_restarts:
            folder = self._kept / f"version_{version}"
            self._copies = folder, [actor.keep.remote(str(folder)) for actor in self.actors]

    def begin_finish(self) -> None:
        """The batch is about to be finished: what was kept for it is no longer needed.

        Raises OSError when a copy could not be written, or is not there: the next restart would find none.
        """
        if self._copies is not None:
            folder, copies = self._copies
            require_kept(folder, ray.get(copies))
            self._copies = None
            for old in self._kept.glob("version_*"):
                if old != folder:
                    shutil.rmtree(old)
        for journal in self._journals:
            journal.clear()
        self._restarts, self._too_much = 0, False

    def _forget(self) -> None:
        """The batch's work is more than may be kept: it cannot be done again."""
        self._too_much = True
        for journal in self._journals:
            journal.clear()
        self._say(
            f"[yellow]the work of this update is more than thundersync.learner.restart_gib={self._most_bytes / 2**30:g}: "
            "until it is finished a rank's death ends the run[/yellow]"
        )

    async def _restart(self, generation: int, rank: int, error: RayActorError) -> None:
        """Start all ranks anew where the batch is. Whoever waited for the same processes finds it done.

        Raises `error` when there is no copy to start from, too much work to keep, or it happened too often in this update.
        """
        async with self._lock:
            if generation != self._generation:
                return
            if self._copies is None or self._too_much or self._restarts == self._most_restarts:
                raise error
            begin = time.perf_counter()
            folder, copies = self._copies
            try:
                saved = await asyncio.gather(*copies)
            except RayActorError:  # it died before its copy was whole
                raise error from None
            require_kept(folder, saved)
            self._restarts += 1
            self._generation += 1
            self._say(f"[yellow]learner rank {rank} died; all ranks start again where the update is[/yellow]")
            for actor in self.actors:
                ray.kill(actor)
            self.actors = self._start()
            await asyncio.gather(*(actor.load_checkpoint.remote(str(folder), saved[0].shards) for actor in self.actors))
            items = await asyncio.gather(*(self._again(rank) for rank in range(self._world)))
            self._copies = folder, [ray.put(answer) for answer in saved]
            self._say(f"{sum(items)} work items done again; {time.perf_counter() - begin:.0f} s")

    async def _again(self, rank: int) -> int:
        """A rank's acknowledged work of this batch once more; how many items."""
        items = 0
        for work in self._journals[rank]:
            await self.actors[rank].run_many.remote(work)
            items += len(work)
        return items

    def _start(self) -> list:
        ts, policy = self._cfg.thundersync, self._cfg.trainer.policy
        settings = replace(ts.learner, block_tokens=block_tokens(self._cfg))
        address, port = self._nodes.meeting_point(self.places, self._device)
        options = {"num_cpus": 0, "num_gpus": 1 if self._device == "cuda" else 0}
        options["runtime_env"] = {"env_vars": {"OMP_NUM_THREADS": str(settings.threads)}}
        return [
            self._nodes.holds(
                place.node,
                ray.remote(LearnerActor)
                .options(**options, **place.options)
                .remote(
                    RankSpec(
                        model_path=policy.model.path,
                        rank=rank,
                        world_size=self._world,
                        master_address=address,
                        master_port=port,
                        learner=settings,
                        objective=ts.objective,
                        optimizer=optimizer_settings(self._cfg),
                        lora=lora_settings(self._cfg),
                        device=self._device,
                        log_path=str(place.logs / f"learner-{rank}.log"),
                        objective_settings=vars(objectives.of(ts)),
                    )
                ),
            )
            for rank, place in enumerate(self.places)
        ]


def require_kept(folder: Path, saved: list[Written]) -> None:
    """Every rank's copy is in `folder`, as long as the rank (`keep_rank`) says. Raises NotWrittenError."""
    for shard in saved:
        path = folder / shard.file
        size = path.stat().st_size if path.is_file() else None
        if size != shard.bytes:
            there = "is not there" if size is None else f"has {size} bytes, {shard.bytes} were written"
            raise NotWrittenError(f"the copy that a restart needs is not whole: {path} {there}")


def block_tokens(cfg: TrainConfig) -> int:
    """The option, for the schedule that works while trajectories grow; whole trajectories for those that do not."""
    ts = cfg.thundersync
    return ts.learner.block_tokens if ts.schedule == "thundersync" else WHOLE_TRAJECTORY


class Journal:
    """Work that a rank acknowledged, in order, on disk; iterating gives it back, list by list, as it was added.

    Compressed a little: some 5 bytes a token, at about 30 MB/s.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b")

    @property
    def bytes(self) -> int:
        return self._file.tell()

    def add(self, work: list[Work]) -> None:
        if work:
            packed = zlib.compress(pickle.dumps(work, protocol=pickle.HIGHEST_PROTOCOL), level=1)
            pickle.dump(packed, self._file, protocol=pickle.HIGHEST_PROTOCOL)

    def clear(self) -> None:
        self._file.seek(0)
        self._file.truncate()

    def __iter__(self) -> Iterator[list[Work]]:
        end = self._file.tell()
        self._file.seek(0)
        while self._file.tell() < end:
            yield pickle.loads(zlib.decompress(pickle.load(self._file)))

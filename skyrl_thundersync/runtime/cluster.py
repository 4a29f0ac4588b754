"""The processes of a run: learner ranks, rollout replicas, teacher replicas, all Ray actors, started side by side.

Also the update's end, which needs all of them: `finish` (one step on every rank) and `publish` (every replica
acknowledges). Leaving the context takes everything down, whatever happened.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray.exceptions import RayActorError
from rich.markup import escape

from skyrl_thundersync.engines.thread import EngineSpec
from skyrl_thundersync.errors import ConfigError, DeadActorError, MachineFullError, first_cause
from skyrl_thundersync.learner.answers import Content, Finish, RankStats, Shards, Written
from skyrl_thundersync.learner.checkpoint import OPTIMIZER
from skyrl_thundersync.objectives import registry as objectives
from skyrl_thundersync.options.schema import learner_ranks, ray_address, uses_cuda, uses_servers
from skyrl_thundersync.preflight.models import longest_sampled, models
from skyrl_thundersync.process.check import Check, require
from skyrl_thundersync.process.durable import seal_claimed
from skyrl_thundersync.process.heartbeat import gone, named
from skyrl_thundersync.process.interrupts import apart
from skyrl_thundersync.process.limits import available_memory, update_disk, update_memory
from skyrl_thundersync.rollout.publication import Expected, Publishable, probe_ids, publish
from skyrl_thundersync.rollout.replica import engine_spec, start_replica
from skyrl_thundersync.runtime.nodes import Node, Nodes, Place
from skyrl_thundersync.runtime.ranks import Learners, require_kept
from skyrl_thundersync.stream.ledger import Ledger, LedgerError
from skyrl_thundersync.teacher.client import TeacherClient, TeacherCounts, TeacherError, start_teacher
from skyrl_thundersync.teacher.preflight import check_context, check_scores, same_checkpoint
from skyrl_thundersync.teacher.scores import TeacherSpec
from skyrl_thundersync.telemetry.display import Display

if TYPE_CHECKING:
    from skyrl_thundersync.hosts.skyrl.config import TrainConfig
    from skyrl_thundersync.trainer import LearnerHandle


PUBLISHED, CHECKPOINT = "published", "checkpoint"
"""Folders of a machine's folder."""


class Host(Protocol):
    """What the training framework brings to the processes."""

    def environment(self, cfg: TrainConfig) -> dict[str, str]:
        """Environment variables that its own actors need."""

    def client(self, replicas: list[Any], tokenizer: Any, model: str, say: Callable[[str], None]) -> SamplingClient:
        """Its inference client over the rollout replicas that were started here."""

    def devices(self, cfg: TrainConfig) -> int | None:
        """How many devices Ray should believe in, for its own inference servers without GPUs; None: those that there are."""

    def publisher(self, client: Any, lora: bool) -> Publishable:
        """What publishes to the inference servers behind its own client."""


class SamplingClient(Publishable, Protocol):
    """The host's inference client over replicas."""

    async def ready(self) -> list[dict[str, Any]]:
        """What every replica says of itself, once all are up."""


class Cluster:
    """Context manager around everything that runs beside the driver.

    Attributes:
        version: policy version that the replicas serve: the number of optimizer steps taken.
        ranks: the learner ranks.
        saved: folder of the last model written; None before.
    """

    def __init__(self, cfg: TrainConfig, run_dir: Path, display: Display, host: Host) -> None:
        self._cfg, self._run_dir, self._display, self._host = cfg, run_dir, display, host
        self._device = "cuda" if uses_cuda(cfg) else "cpu"
        self._publish_dir, self._kept_dir = run_dir / PUBLISHED, run_dir / "kept"
        self._replicas: SamplingClient | None = None
        self._target: Publishable | None = None
        self._learners: Learners | None = None
        self._nodes: Nodes | None = None
        self._places: dict[str, list[Place]] = {}
        self._teacher: TeacherClient | None = None
        self._served: int | None = None
        self._published_bytes = self._kept_bytes = 0
        self._probe_ids: list[int] = []
        self.version = 0
        self.ranks: list[LearnerHandle] = []
        self.saved: Path | None = None

    def __enter__(self) -> Cluster:
        # Ray lowers its workers' priority, for drivers that people type into; here they are the work.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # Ray keeps a history of calls for its dashboard, which is off: 0.2 MiB more an update.
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
        address = ray_address(self._cfg)
        options: dict[str, Any] = {}
        if address == "local":
            options = dict(
                # Actors ask for devices, not for cores. As many worker processes start at a time as there are "CPUs".
                num_cpus=None if self._device == "cuda" else 8,
                num_gpus=self._host.devices(self._cfg),
                include_dashboard=False,
            )
        with apart():  # they are needed for the end's checkpoint
            try:
                ray.init(
                    address=address,
                    log_to_driver=False,
                    logging_level="warning",
                    runtime_env={"env_vars": self._environment()},
                    **options,
                )
            except ConnectionError as error:
                raise ConfigError(
                    f"no Ray cluster at {address} (thundersync.ray_address, RAY_ADDRESS): {error}. Start one with "
                    "`ray start`, on this machine too, or set thundersync.ray_address=local."
                ) from error
        try:
            self._place(joined=address != "local")
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _place(self, joined: bool) -> None:
        """Reserve a place for every process. Raises ConfigError, before anything loads, where there is none."""
        cfg, engine = self._cfg, self._cfg.generator.inference_engine
        self._nodes = Nodes(self._run_dir, joined, self._device, cfg.thundersync.hang_timeout_s)
        count = learner_ranks(cfg)
        self._places["learner"] = self._nodes.learners(count, cfg.trainer.placement.policy_num_nodes if joined else 1)
        if not uses_servers(cfg):
            each = engine.tensor_parallel_size if self._device == "cuda" else 1
            self._places["rollout"] = self._nodes.replicas("rollout", engine.num_engines, each)
        elif joined and len([node for node in ray.nodes() if node["Alive"]]) > 1:
            raise ConfigError(
                "thundersync.rollout=servers: SkyRL's servers read published weights from the driver's disk, so they run on "
                "one machine only. Set thundersync.rollout=replicas."
            )
        if objectives.of(cfg.thundersync).needs_teacher:
            teacher = cfg.thundersync.teacher
            each = teacher.tensor_parallel_size if self._device == "cuda" else 1
            self._places["teacher"] = self._nodes.replicas("teacher", teacher.replicas, each)
        far = {place.node.id for places in self._places.values() for place in places} - {self._nodes.here.id}
        if far and cfg.thundersync.learner.max_restarts:
            raise ConfigError(
                "thundersync.learner.max_restarts: ranks start again from files of one machine. Set it to 0 for "
                "several machines."
            )
        self._nodes.require_fit([path for path in models(cfg).values() if path])

    @property
    def _writer(self) -> Node:
        """The machine of the rank that writes weights."""
        return self._places["learner"][0].node

    def __exit__(self, _type, error: BaseException | None, _traceback) -> None:
        """Raises DeadActorError, naming the processes that are gone, in place of what Ray says of one."""
        died = isinstance(error, Exception) and isinstance(_root(error), RayActorError)
        dead = (gone(self._run_dir / "logs") or self._broke_off(_root(error))) if died else []
        lost = None
        if self._nodes is not None:
            lost = self._nodes.why_lost() if died else self._nodes.lost
            self._nodes.close()
        ray.shutdown()
        for folder in (self._publish_dir, self._kept_dir):
            shutil.rmtree(folder, ignore_errors=True)
        if lost and isinstance(error, Exception):
            raise DeadActorError(lost) from error
        if dead:
            raise DeadActorError("; ".join(dead)) from error

    def _broke_off(self, error: RayActorError) -> list[str]:
        """The process that Ray's error is about, where it lives on: only its connection is gone."""
        name = error.actor_id and named(self._run_dir / "logs", actor=error.actor_id)
        return [f"no connection any more to {name}"] if name else []

    def start(self, tokenizer) -> None:
        """Start every actor at once and wait until all are ready.

        Raises what an actor's constructor raised: a missing model, an unsupported layer, a vocabulary that does not fit.
        """
        begin = time.perf_counter()
        self._learners = Learners(
            self._cfg, self._device, self._nodes, self._places["learner"], self._kept_dir, self._display.say
        )
        count = self._cfg.generator.inference_engine.num_engines
        if not uses_servers(self._cfg):
            replicas = [self._start_replica(*item) for item in enumerate(self._places["rollout"])]
            model = self._cfg.trainer.policy.model.path
            self._target = self._replicas = self._host.client(replicas, tokenizer, model, self._display.say)
        self.ranks = self._learners.ranks()
        if objectives.of(self._cfg.thundersync).needs_teacher:
            self._teacher = self._start_teacher()
        self._probe_ids = probe_ids(tokenizer, self._cfg.thundersync.publish.probe_tokens)
        asyncio.run(self._ready())
        if self._cfg.thundersync.learner.max_restarts:
            self._kept_bytes = self.checkpoint_bytes()  # a little more than the shards alone
        parts = [f"{len(self.ranks)} learner ranks"]
        if self._replicas is not None:
            parts.append(f"{count} rollout replica{'s' * (count > 1)}")
        if self._teacher:
            count = self._cfg.thundersync.teacher.replicas
            parts.append(f"{count} teacher replica{'s' * (count > 1)}")
        self._display.say(f"{', '.join(parts)} up in {time.perf_counter() - begin:.0f} s on {self._device}")
        rank = self.learner_stats()[0]
        self._display.say(
            f"[dim]attention over cut states: {escape(rank.kernel)}; log-probs through them are within {rank.cut_gap:.1g} of "
            "stock attention's[/dim]"
        )

    async def _ready(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            if self._replicas is not None:
                tasks.create_task(self._replicas.ready())
            for actor in self._learners.actors:
                tasks.create_task(_await(actor.stats.remote()))
            if self._teacher:
                tasks.create_task(self._check_teacher())

    async def _check_teacher(self) -> None:
        """DESIGN.md §8: the context fits, repeated requests agree, and teacher = student gives no divergence."""
        check_context(await self._teacher.ready(), self._longest)
        student, teacher = self._cfg.trainer.policy.model.path, self._cfg.thundersync.teacher.model
        own = None
        if same_checkpoint(student, teacher):
            own = await self._learners.actors[0].logps.remote(self._probe_ids)
        tolerance = 1e-3 if self._cfg.thundersync.teacher.dtype == "float32" else 0.2
        await check_scores(self._teacher.replicas, self._probe_ids, tolerance, own)

    def rollout_client(self, host_client: Callable[[], Any]) -> Any:
        """The client that samples: over the replicas started here, or `host_client`'s, over the host's servers."""
        if self._replicas is not None:
            return self._replicas
        client = host_client()
        self._target = self._host.publisher(client, lora=self._cfg.trainer.policy.model.lora.rank > 0)
        return client

    async def served_version(self) -> int:
        """The policy version that the host's inference servers say they serve."""
        return await self._target.served_version()

    def _environment(self) -> dict[str, str]:
        """Environment variables of every actor."""
        own = {"TOKENIZERS_PARALLELISM": "false"}
        return {**self._host.environment(self._cfg), **own} if uses_servers(self._cfg) else own

    @property
    def teacher(self) -> TeacherClient | None:
        """None for objectives without one."""
        return self._teacher

    def teacher_counts(self) -> TeacherCounts | None:
        """What the teacher did for the update that just ran."""
        return self._teacher.take_counts() if self._teacher else None

    @property
    def _longest(self) -> int:
        """Tokens of the longest possible trajectory of training."""
        generator = self._cfg.generator
        return generator.max_input_length + generator.sampling_params.max_generate_length

    def finish(self, ledger: Ledger) -> Finish:
        """One step on every rank.

        Raises:
            LedgerError: the learners scored another number of tokens than the ledger registered.
        """
        self._learners.begin_finish()
        steps = ray.get([actor.finish.remote() for actor in self._learners.actors])
        step = steps[0]
        if step.n_scored != ledger.n_scored:
            raise LedgerError(
                f"the learners counted N_k = {step.n_scored} scored tokens, the ledger {ledger.n_scored}: a source was "
                "lost or learned twice"
            )
        self.version += step.stepped
        return Finish(step, max(s.host_peak_bytes for s in steps), max(s.device_peak_bytes for s in steps))

    def require_room(self) -> None:
        """Before an update: whether the machine has room for it. Raises MachineFullError saying what is short."""
        require([self._disk(), update_memory(available_memory())], MachineFullError)

    def _disk(self) -> Check:
        return update_disk(self._run_dir, self._published_bytes + self._kept_bytes)

    async def rest(self) -> None:
        """The teacher has done all it was asked, the freeing of closed trajectories included."""
        if self._teacher:
            await self._teacher.stats()

    async def settle(self) -> None:
        """Every rank is there and holds its part of the batch; one that died since its last work is started again."""
        await self._learners.settle()

    async def publish(self) -> None:
        """Make every replica serve θ of `version` and prove it, unless they do; the ranks keep what a restart needs.

        Raises MachineFullError before anything is written.
        """
        require([self._disk()], MachineFullError)
        if self._served != self.version:
            await self._publish()
        self._learners.keep(self.version)

    async def _publish(self) -> None:
        name = f"{PUBLISHED}/version_{self.version}"
        folder, learner = self._run_dir / name, self._learners.actors[0]
        readers = {place.node.id: place.node for place in self._places.get("rollout", ())}

        async def write() -> None:
            await learner.save_weights.remote(str(self._writer.folder / name))
            await self._nodes.spread(name, self._writer, list(readers.values()))

        _, bits, logps = await asyncio.gather(
            write(),
            _await(learner.weight_bits.remote()),
            _await(learner.logps.remote(self._probe_ids)),
        )
        expected = Expected(bits, self._probe_ids, logps, self._cfg.thundersync.publish.tolerance)
        await publish(str(folder), self.version, self._target, expected)
        self._served = self.version
        if folder.is_dir():
            self._published_bytes = sum(file.stat().st_size for file in folder.iterdir())
        held = readers | {self._writer.id: self._writer}
        await asyncio.to_thread(self._nodes.clear, name, list(held.values()))

    def save_model(self, folder: Path) -> None:
        """The student (or, with LoRA, the adapter) in Hugging Face format. Raises NotWrittenError when it is not there."""
        there = folder if self._writer == self._nodes.here else self._writer.folder / "export"
        claimed = ray.get(self._learners.actors[0].export.remote(str(there)))
        if there != folder:
            self._nodes.fetch("export", self._writer, folder)
        seal_claimed(folder, claimed)
        self.saved = folder

    def checkpoint_bytes(self) -> int:
        """What a checkpoint of the learners takes on disk, about."""
        return ray.get(self._learners.actors[0].checkpoint_bytes.remote())

    def learner_content(self) -> Content:
        """What a checkpoint must fit."""
        return ray.get(self._learners.actors[0].content.remote())

    def save_learners(self, folder: Path) -> list[Written]:
        """Every rank writes its part of a checkpoint; what each says of it, in rank order."""
        where = [folder if p.node == self._nodes.here else p.node.folder / CHECKPOINT for p in self._learners.places]
        ranks = zip(self._learners.actors, where, strict=True)
        written = ray.get([actor.save_checkpoint.remote(str(place)) for actor, place in ranks])
        for node in self._far("learner"):
            self._nodes.fetch(CHECKPOINT, node, folder)
        return written

    def _far(self, what: str) -> list[Node]:
        """The machines other than the driver's that hold processes of a kind."""
        nodes = {place.node.id: place.node for place in self._places[what]}
        return [node for node in nodes.values() if node != self._nodes.here]

    def keep_learners(self, folder: Path) -> Shards:
        """As `save_learners`, for this process's own use: not flushed. Returns what `load_learners` takes as `saved`."""
        parts = ray.get([actor.keep.remote(str(folder)) for actor in self._learners.actors])
        require_kept(folder, parts)
        return parts[0].shards

    def learner_stats(self) -> list[RankStats]:
        """What every rank says of itself, in rank order."""
        return ray.get([actor.stats.remote() for actor in self._learners.actors])

    def use_schedule(self, schedule: str) -> None:
        """Follow another schedule from the next update on. Call it between updates."""
        self._cfg.thundersync.schedule = schedule
        self._learners.follow_schedule()

    def load_learners(self, folder: Path, saved: Shards, version: int) -> None:
        """Every rank takes its part of a checkpoint. No replica serves these parameters until the next `publish`."""
        far = self._far("learner")
        self._nodes.send(folder, OPTIMIZER, far)
        where = [folder if place.node == self._nodes.here else place.node.folder for place in self._learners.places]
        ranks = zip(self._learners.actors, where, strict=True)
        ray.get([actor.load_checkpoint.remote(str(place), saved) for actor, place in ranks])
        self._nodes.clear(OPTIMIZER, far)
        self.version, self._served = version, None

    def _start_replica(self, index: int, place: Place) -> Any:
        spec = replace(self._replica_spec(), published=str(place.node.folder / PUBLISHED))
        return self._nodes.holds(place.node, start_replica(spec, index, place.logs, place.options))

    def _start_teacher(self) -> TeacherClient:
        teacher, spec = self._cfg.thundersync.teacher, self._teacher_spec()
        replicas = [
            self._nodes.holds(place.node, start_teacher(spec, index, place.logs, place.options))
            for index, place in enumerate(self._places["teacher"])
        ]
        return TeacherClient(replicas, teacher.request_timeout_s, teacher.max_retries, say=self._display.say)

    def _replica_spec(self) -> EngineSpec:
        """Evaluation samples from the same replicas, with its own limit of a turn."""
        return engine_spec(
            self._cfg, longest_sampled(self._cfg), self._cfg.trainer.policy.model.lora.rank, self._device
        )

    def _teacher_spec(self) -> TeacherSpec:
        teacher = self._cfg.thundersync.teacher
        return TeacherSpec(
            model=teacher.model,
            backend=teacher.backend,
            dtype=teacher.dtype,
            max_model_len=self._longest,
            prefix_cache=teacher.prefix_cache,
            max_num_batched_tokens=teacher.max_num_batched_tokens,
            tensor_parallel_size=teacher.tensor_parallel_size,
            engine_options=teacher.engine_init_kwargs,
            support=objectives.of(self._cfg.thundersync).support_size,
            device=self._device,
        )


def _root(error: BaseException) -> BaseException:
    error = first_cause(error)
    return error.__cause__ if isinstance(error, TeacherError) and error.__cause__ else error


async def _await(reference):
    return await reference

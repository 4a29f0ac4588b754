"""Recorded batches through the learner's own ranks again: what `verify` compares with the textbook.

Gradients need no optimizer, so one rank in this process plays every rank of the run in turn. Updates need the process
group of all ranks: they run in one process each, which holds a streamed and a synchronous learner side by side.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch
from omegaconf import OmegaConf
from transformers.utils.logging import disable_progress_bar

from skyrl_thundersync.learner.answers import Step
from skyrl_thundersync.learner.rank import LearnerRank, RankSpec
from skyrl_thundersync.learner.zero import free_port
from skyrl_thundersync.objectives import registry as objectives
from skyrl_thundersync.objectives.contract import Objective
from skyrl_thundersync.options.schema import (
    LearnerConfig,
    LoraSettings,
    OptimizerSettings,
    learner_ranks,
    lora_settings,
    optimizer_settings,
    uses_cuda,
)
from skyrl_thundersync.stream.sources import CloseTrajectory, TrajectoryId, Work, group_of
from skyrl_thundersync.telemetry.record import Batch
from skyrl_thundersync.verify.planted import Plant
from skyrl_thundersync.verify.reference import Gradient, fill_adapter

STREAMED, SYNC = "streamed", "sync"


@dataclass(frozen=True)
class RecordedRun:
    """What of a run's configuration a replay needs.

    Attributes:
        model: folder of θ_0.
        world: learner ranks.
        learner: as the run had them.
        gap_tolerance: largest log-prob gap the run allowed between a replica and the learner (nats).
    """

    model: str
    world: int
    learner: LearnerConfig
    adam: OptimizerSettings
    objective_name: str
    objective: Objective
    lora: LoraSettings | None
    device: str
    gap_tolerance: float


def read_run(folder: Path) -> RecordedRun:
    """From the configuration that a run left in its folder.

    Raises:
        FileNotFoundError: there is none, or its model is no longer where it was.
    """
    file = Path(folder) / "config.yaml"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no config.yaml: name the folder of a run (thundersync.run_dir)")
    cfg = OmegaConf.load(file)
    ts, model = cfg.thundersync, cfg.trainer.policy.model.path
    if not Path(model, "config.json").is_file():
        raise FileNotFoundError(f"{file} names the model folder {model}, which is not there any more")
    options = objectives.settings(ts.objective, ts.get("grpo", {}), ts.get("objective_options", {}))
    known = LearnerConfig.__dataclass_fields__
    return RecordedRun(
        model=model,
        world=learner_ranks(cfg),
        learner=LearnerConfig(**{name: value for name, value in ts.learner.items() if name in known}),
        adam=optimizer_settings(cfg),
        objective_name=ts.objective,
        objective=objectives.build(ts.objective, options),
        lora=lora_settings(cfg),
        device="cuda" if uses_cuda(cfg) else "cpu",
        gap_tolerance=ts.publish.tolerance,
    )


@dataclass(frozen=True)
class Replayed:
    """A batch's gradient from the learner: unnormalised, summed over ranks, on the host; and the N_k it would divide by."""

    gradient: Gradient
    n_scored: int


class ReplayRank:
    """One accumulating rank in this process that plays all ranks of a run, one after the other."""

    def __init__(self, run: RecordedRun, dtype: str) -> None:
        self._world = run.world
        self._rank = _rank(run, replace(run.learner, dtype=dtype), 0, 1, 0, None)
        if run.lora:
            fill_adapter(self._rank.model)

    def adapter(self) -> Gradient:
        """The trained weights, by name."""
        return {name: p.detach() for name, p in self._rank.model.named_parameters() if p.requires_grad}

    def replay(self, batch: Batch, plant: Plant | None = None) -> Replayed:
        """Raises what the rank raises when it refuses the batch."""
        total: Gradient = {}
        n_scored = 0
        for index in range(self._world):
            for work in _of_rank(batch, index):
                with plant.during(work) if plant else nullcontext():
                    self._rank.run(work)
            if plant and index == self._world - 1:
                plant.finish(self._rank)
            for name, part in self._rank.gradient().items():
                total[name] = total[name] + part if name in total else part
            n_scored += self._rank.n_scored
            self._rank.abort_batch()
        return Replayed(total, n_scored)


@dataclass(frozen=True)
class Updated:
    """After one replayed update: rank 0's trained parameters (flat, FP64), its `finish`, and log-prob gaps (nats)."""

    parameters: torch.Tensor
    finish: Step
    gaps: dict[TrajectoryId, float]


class Updaters:
    """All ranks of a run, each with a streamed and a synchronous learner; in this process when there is one rank."""

    def __init__(self, run: RecordedRun, sides: dict[str, LearnerConfig]) -> None:
        port = free_port()
        self._pools = (
            [ProcessPoolExecutor(1, mp_context=get_context("spawn")) for _ in range(run.world)] if run.world > 1 else []
        )
        self._all(_build, [(run, sides, index, port) for index in range(run.world)])

    def update(self, side: str, batch: Batch) -> Updated:
        """Take the batch's optimizer step on one side."""
        answers = self._all(_update, [(side, batch)] * max(1, len(self._pools)))
        gaps = {trajectory: gap for answer in answers for trajectory, gap in answer.gaps.items()}
        return replace(answers[0], gaps=gaps)

    def _all(self, function, arguments: list[tuple]) -> list:
        if not self._pools:
            return [function(*arguments[0])]
        calls = zip(self._pools, arguments, strict=True)
        return [f.result() for f in [pool.submit(function, *args) for pool, args in calls]]

    def __enter__(self) -> Updaters:
        return self

    def __exit__(self, *_error) -> None:
        for pool in self._pools:
            pool.shutdown()
        _sides.clear()  # the process group stays: DeepSpeed keeps references to it, and joining it again is free


_sides: dict[str, LearnerRank] = {}  # the learners of this process


def _build(run: RecordedRun, sides: dict[str, LearnerConfig], index: int, port: int) -> None:
    # A process of its own writes to the same screen.
    disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    _sides.clear()
    _sides.update({side: _rank(run, s, index, run.world, port, run.adam) for side, s in sides.items()})


def _update(side: str, batch: Batch) -> Updated:
    rank = _sides[side]
    gaps: dict[TrajectoryId, float] = {}
    for work in _of_rank(batch, rank.spec.rank):
        done = rank.run(work)
        if isinstance(work, CloseTrajectory) and done.n_scored:
            gaps[work.trajectory] = done.sum_logp_gap / done.n_scored
    finish = rank.finish()
    parameters = flat_parameters(rank.model) if rank.spec.rank == 0 else torch.empty(0)
    return Updated(parameters, finish, gaps)


def _rank(
    run: RecordedRun, settings: LearnerConfig, index: int, world: int, port: int, optimizer: OptimizerSettings | None
) -> LearnerRank:
    return LearnerRank(
        RankSpec(
            model_path=run.model,
            rank=index,
            world_size=world,
            master_address="127.0.0.1",
            master_port=port,
            learner=settings,
            objective=run.objective_name,
            optimizer=optimizer,
            lora=run.lora,
            device=run.device,
            objective_settings=vars(run.objective),
        )
    )


def _of_rank(batch: Batch, index: int) -> Iterator[Work]:
    return (work for work, rank in zip(batch.work, batch.ranks, strict=True) if rank == index)


def flat_parameters(model: torch.nn.Module) -> torch.Tensor:
    """All trained parameters, one after another, as FP64 on the host."""
    return torch.cat([p.detach().double().flatten().cpu() for p in model.parameters() if p.requires_grad])


def synchronous(batch: Batch) -> Batch:
    """The same logical batch as batch-synchronous training works on it: group after group, in the groups' own order."""
    order = {group: i for i, group in enumerate(batch.groups)}
    items = sorted(zip(batch.work, batch.ranks, batch.seconds, strict=True), key=lambda item: order[group_of(item[0])])
    work, ranks, seconds = zip(*items, strict=True)
    return replace(batch, work=work, ranks=ranks, seconds=seconds)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch's CPU threads within."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""One learner rank: a replicated student, its open segment trees, and its share of the sharded optimizer.

Plain Python, no Ray. A rank takes any number of work items, none included; no collective runs before `finish`, which all
ranks must call once a batch (DESIGN: one synchronous step per update, PAPER.md "Zero-staleness barrier").
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig

from skyrl_thundersync.engines.weight_bits import Bits
from skyrl_thundersync.learner.accumulate import Accumulator, contiguous_layout, trainable
from skyrl_thundersync.learner.answers import RankStats, Step
from skyrl_thundersync.learner.cut_state import layer_kinds
from skyrl_thundersync.learner.fixed_point import MOST_RANKS
from skyrl_thundersync.learner.retain import GraphBudget
from skyrl_thundersync.learner.segments import SegmentModel
from skyrl_thundersync.learner.state_budget import StateBudget, StreamMover
from skyrl_thundersync.learner.student import (
    checksum,
    cut_gap,
    load_student,
    published_bits,
    save_student,
    stock_logps,
    student_folder,
)
from skyrl_thundersync.learner.sweep import Forest
from skyrl_thundersync.learner.zero import ZeroOptimizer, connect, route
from skyrl_thundersync.objectives import registry
from skyrl_thundersync.objectives.check import problems
from skyrl_thundersync.options.schema import LearnerConfig, LoraSettings, OptimizerSettings
from skyrl_thundersync.process.memory import forget_peak, peak_bytes
from skyrl_thundersync.stream.sources import Append, CloseGroup, CloseTrajectory, Work, WorkDone

WHOLE_TRAJECTORY = 2**31
"""As `block_tokens` larger than any trajectory: each is forwarded once, whole, at its close."""


@dataclass(frozen=True)
class RankSpec:
    """Everything one rank is built from.

    model_path: a folder in Hugging Face format, or a name on the hub. learner: the `thundersync.learner` options.
    objective: its name (objectives/registry.py); objective_settings: values of its fields. optimizer: None for a rank that
    only accumulates (no process group, `finish` refused). device: "cpu" or "cuda".
    """

    model_path: str
    rank: int
    world_size: int
    master_address: str
    master_port: int
    learner: LearnerConfig
    objective: str = "opd"
    optimizer: OptimizerSettings | None = None
    lora: LoraSettings | None = None
    device: str = "cpu"
    log_path: str | None = None
    objective_settings: Mapping[str, Any] = field(default_factory=dict)


class LearnerRank:
    """See the module docstring. Raises before the model loads for options or models that have no exact route."""

    def __init__(self, spec: RankSpec):
        self.spec, learner = spec, spec.learner
        objective = registry.build(spec.objective, spec.objective_settings)
        if broken := problems(objective):
            raise ValueError(broken[0])
        if learner.accumulator not in ("fp32", "exact"):
            raise ValueError(f"thundersync.learner.accumulator={learner.accumulator!r}; known are fp32, exact")
        if learner.accumulator == "exact" and spec.world_size > MOST_RANKS:
            raise ValueError(
                f"thundersync.learner.accumulator=exact sums over at most {MOST_RANKS} ranks, got {spec.world_size}"
            )
        if spec.optimizer is not None:
            route(learner.zero_stage, learner.offload_optimizer, learner.dtype)
        spec = self.spec = replace(spec, model_path=str(student_folder(spec.model_path)))
        layer_kinds(AutoConfig.from_pretrained(spec.model_path))
        if spec.device == "cpu":
            torch.set_num_threads(learner.threads)
        self.model, self.kernel = load_student(spec)
        exact = learner.accumulator == "exact"
        self.optimizer = None
        if spec.optimizer is not None:
            connect(spec.rank, spec.world_size, spec.master_address, spec.master_port, spec.device)
            self.optimizer = ZeroOptimizer(
                trainable(self.model), learner.zero_stage, learner.offload_optimizer, learner.dtype, spec.optimizer
            )
        layout = self.optimizer.layout if self.optimizer else contiguous_layout(trainable(self.model))
        graph_limit = None if learner.graph_gib is None else int(learner.graph_gib * 2**30)
        self.segments = SegmentModel(self._causal_lm, _states(learner.state_gib, spec.device), graph_limit)
        budget = GraphBudget(self.segments, int(learner.retain_gib * 2**30))
        self.accumulator = Accumulator(layout, exact)
        self.forest = Forest(self.segments, objective, learner.block_tokens, budget, self.accumulator)
        self.cut_gap = cut_gap(self.segments, self._causal_lm, spec)
        self._begin_batch()
        self._published = checksum(self.model)
        self.busy_seconds = 0.0

    @property
    def _causal_lm(self) -> torch.nn.Module:
        return self.model.get_base_model() if self.spec.lora else self.model

    def run(self, work: Work) -> WorkDone:
        """Do one work item. Raises naming the source, trajectory or group at fault; the parameters stay as they were."""
        return self.run_many([work])[0]

    def run_many(self, works: list[Work]) -> list[WorkDone]:
        """Do work items in order. Turns of trajectories that close within the list wait for their sweep's own forward."""
        closing = {work.trajectory for work in works if isinstance(work, CloseTrajectory)}
        if self.forest.exact:
            closing = set()  # the same segments whatever comes together
        done = []
        for work, following in zip(works, [*works[1:], None], strict=True):
            if following is not None:
                self.forest.expect(following)
            done.append(self._run(work, closing))
        return done

    def _run(self, work: Work, closing: set) -> WorkDone:
        start, cpu, faults, states = time.perf_counter(), time.process_time(), page_faults(), self.segments.states
        name, moved = _name(work), states.moved
        try:
            if isinstance(work, Append):
                self._check_version(work)
                tally = self.forest.append(work, work.source.trajectory in closing)
            elif isinstance(work, CloseTrajectory):
                tally = self.forest.close_trajectory(work)
            else:
                tally = self.forest.close_group(work)
        except OverflowError as error:
            raise OverflowError(f"{name}: {error}") from error
        self.accumulator.check(name)
        states.trim()
        self.n_scored += tally.n_scored
        seconds = time.perf_counter() - start
        self.busy_seconds += seconds
        return WorkDone(
            seconds,
            tally.n_scored,
            tally.sum_kl,
            tally.sum_logp_gap,
            tally.max_logp_gap,
            tuple(tally.gap_counts.items()),
            start,
            states.held,
            states.moved - moved,
            tally.prompt_seconds,
            page_faults() - faults,
            time.process_time() - cpu,
        )

    def _check_version(self, work: Append) -> None:
        version = work.source.policy_version
        if self._version is None:
            self._version = version
        elif version != self._version:
            raise ValueError(
                f"source {work.source.name}: sampled under policy version {version}, but this batch is of version "
                f"{self._version}; one update takes sources of one version only"
            )

    def finish(self) -> Step:
        """Close the batch: reduce over ranks, ÷ N_k, clip, one step. Collective: every rank calls it once a batch.

        With no scored token anywhere no step is taken.

        Raises RuntimeError naming open trajectories and groups, or when parameters changed since the last publication.
        """
        if self.optimizer is None:
            raise RuntimeError("this rank was built without an optimizer: it accumulates, but cannot finish a batch")
        still_open = self.forest.open_names()
        if still_open:
            raise RuntimeError(
                f"learner rank {self.spec.rank}: the batch cannot finish with {', '.join(still_open)} open"
            )
        self.require_frozen()
        n_scored = torch.tensor(self.n_scored, dtype=torch.int64, device=self.segments.device)
        dist.all_reduce(n_scored)
        n_scored = int(n_scored)
        step = Step(0.0, False, self.optimizer.lr, 0.0, 0.0, stepped=False)
        if n_scored:
            divisor = n_scored if self.forest.objective.divides_by_tokens else 1
            step = self.optimizer.step(self.accumulator, divisor)
            self._published = checksum(self.model)
        cuda = self.segments.device.type == "cuda"
        step = replace(
            step,
            n_scored=n_scored,
            host_peak_bytes=peak_bytes(),
            device_peak_bytes=torch.cuda.max_memory_allocated() if cuda else 0,
        )
        self._begin_batch()
        return step

    def abort_batch(self) -> None:
        """Drop everything of the running batch; parameters and optimizer state stay."""
        self.forest.clear()
        self._begin_batch()

    def set_block_tokens(self, block_tokens: int) -> None:
        """From now on; between batches. Raises RuntimeError when groups are open."""
        if self.forest.groups:
            raise RuntimeError(f"block_tokens cannot change with {', '.join(self.forest.open_names())} open")
        self.forest.block = block_tokens

    def _begin_batch(self) -> None:
        forget_peak()
        if self.segments.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.accumulator.clear()
        self.n_scored, self._version = 0, None

    def logps(self, ids: list[int]) -> list[float]:
        """log π_θ of ids[1:], each given all before it; by one plain forward with stock attention, not the cut path."""
        return stock_logps(self._causal_lm, self.segments.precision, ids)

    def save_weights(self, folder: str) -> None:
        """Write the student (or, with LoRA, the PEFT adapter) as safetensors with the tokenizer's files; atomic.

        No collective: one rank writes. Whatever `folder` held before is replaced.
        """
        save_student(self.model, self.spec, Path(folder))

    def weight_bits(self) -> Bits:
        """The bits of the weights (with LoRA, of the adapter) that `save_weights` writes; see engines/weight_bits.py."""
        return published_bits(self.model, self.spec)

    def gradient(self) -> dict[str, torch.Tensor]:
        """This rank's accumulated, unnormalised gradient by parameter name, as copies on the host."""
        return self.accumulator.gradient()

    def stats(self) -> RankStats:
        return RankStats(
            busy_seconds=self.busy_seconds,
            cut_gap=self.cut_gap,
            kernel=f"{self.kernel.name} ({self.kernel.why})",
            cores=sorted(os.sched_getaffinity(0)),
            threads=torch.get_num_threads(),
            parameters=self._published,
        )

    def require_frozen(self) -> None:
        """Raises RuntimeError when parameters changed since the last step: they are constant between publications."""
        if checksum(self.model) != self._published:
            raise RuntimeError(f"learner rank {self.spec.rank}: parameters changed between two publications")

    def parameters_replaced(self) -> None:
        """All of them were set from a checkpoint: what comes next is a publication of these."""
        self._published = checksum(self.model)


def page_faults() -> int:
    """Minor page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _name(work: Work) -> str:
    if isinstance(work, Append):
        return f"source {work.source.name}"
    if isinstance(work, CloseTrajectory):
        return f"trajectory {work.trajectory}"
    if isinstance(work, CloseGroup):
        return f"group {work.group}"
    raise TypeError(f"not a work item: {work!r}")


def _states(gib: float | None, device: str) -> StateBudget:
    if gib is None:
        return StateBudget()
    mover = StreamMover(torch.device(device, torch.cuda.current_device())) if device == "cuda" else None
    return StateBudget(int(gib * 2**30), mover)

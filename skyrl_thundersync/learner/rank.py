"""One learner rank: a replicated student, its open segment trees, and its share of the sharded optimizer.

Plain Python, no Ray. A rank takes any number of work items, none included; no collective runs before `finish`, which all
ranks must call once a batch (DESIGN: one synchronous step per update, PAPER.md "Zero-staleness barrier").
"""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_thundersync.learner import attention
from skyrl_thundersync.learner.accumulate import Accumulator, contiguous_layout, trainable
from skyrl_thundersync.learner.cut_state import layer_kinds
from skyrl_thundersync.learner.fixed_point import MOST_RANKS
from skyrl_thundersync.learner.retain import GraphBudget
from skyrl_thundersync.learner.segments import SegmentModel
from skyrl_thundersync.learner.sweep import Forest, Tally
from skyrl_thundersync.learner.zero import OptimizerSettings, ZeroOptimizer, connect, route
from skyrl_thundersync.objectives import OBJECTIVES
from skyrl_thundersync.stream.sources import Append, CloseGroup, CloseTrajectory, Work, WorkDone

STOCK_ATTENTION = "sdpa"


class LearnerSettings(Protocol):
    """What a rank reads of the `thundersync.learner` options; see `config.LearnerConfig` for their meaning."""

    dtype: str
    zero_stage: int
    offload_optimizer: bool
    block_tokens: int
    retain_gib: float
    accumulator: str
    threads: int


@dataclass(frozen=True)
class LoraSettings:
    """A PEFT adapter without dropout; `target_modules`: "all-linear" or module names."""

    rank: int
    alpha: int
    target_modules: str | list[str] = "all-linear"


@dataclass(frozen=True)
class RankSpec:
    """Everything one rank is built from.

    model_path: a local folder in Hugging Face format. learner: the `thundersync.learner` options. objective: "opd" or
    "grpo"; objective_settings: its constructor's arguments. optimizer: None for a rank that only accumulates (no process
    group, `finish` refused). device: "cpu" or "cuda".
    """

    model_path: str
    rank: int
    world_size: int
    master_address: str
    master_port: int
    learner: LearnerSettings
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
        if spec.objective not in OBJECTIVES:
            raise ValueError(f"unknown objective {spec.objective!r}; known are {', '.join(OBJECTIVES)}")
        if learner.accumulator not in ("fp32", "exact"):
            raise ValueError(f"thundersync.learner.accumulator={learner.accumulator!r}; known are fp32, exact")
        if learner.accumulator == "exact" and spec.world_size > MOST_RANKS:
            raise ValueError(
                f"thundersync.learner.accumulator=exact sums over at most {MOST_RANKS} ranks, got {spec.world_size}"
            )
        if spec.optimizer is not None:
            route(learner.zero_stage, learner.offload_optimizer, learner.dtype)
        if not Path(spec.model_path, "config.json").is_file():
            raise FileNotFoundError(f"student model folder {spec.model_path} has no config.json")
        layer_kinds(AutoConfig.from_pretrained(spec.model_path))
        if spec.device == "cpu":
            torch.set_num_threads(learner.threads)
        self.model = load_student(spec)
        exact = learner.accumulator == "exact"
        self.optimizer = None
        if spec.optimizer is not None:
            connect(spec.rank, spec.world_size, spec.master_address, spec.master_port, spec.device)
            self.optimizer = ZeroOptimizer(
                trainable(self.model), learner.zero_stage, learner.offload_optimizer, learner.dtype, spec.optimizer
            )
        layout = self.optimizer.layout if self.optimizer else contiguous_layout(trainable(self.model))
        self.segments = SegmentModel(self._causal_lm)
        budget = GraphBudget(self.segments, int(learner.retain_gib * 2**30))
        self.accumulator = Accumulator(layout, exact)
        objective = OBJECTIVES[spec.objective](**spec.objective_settings)
        self.forest = Forest(self.segments, objective, learner.block_tokens, budget, self.accumulator)
        self.cut_gap = self._probe()
        self._begin_batch()
        self._published = self._checksum()
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
        return [self._run(work, closing) for work in works]

    def _run(self, work: Work, closing: set) -> WorkDone:
        start = time.perf_counter()
        name = _name(work)
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
        self.n_scored += tally.n_scored
        seconds = time.perf_counter() - start
        self.busy_seconds += seconds
        return _done(start, seconds, tally)

    def _check_version(self, work: Append) -> None:
        version = work.source.policy_version
        if self._version is None:
            self._version = version
        elif version != self._version:
            raise ValueError(
                f"source {work.source.name}: sampled under policy version {version}, but this batch is of version "
                f"{self._version}; one update takes sources of one version only"
            )

    def finish(self) -> dict:
        """Close the batch: reduce over ranks, ÷ N_k, clip, one step. Collective: every rank calls it once a batch.

        Returns n_scored (over all ranks), grad_norm (of the normalised gradient, before clipping), clipped, lr,
        reduce_seconds, step_seconds, stepped. With no scored token anywhere no step is taken: stepped False, norm 0.

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
        result = {
            "grad_norm": 0.0,
            "clipped": False,
            "lr": self.optimizer.lr,
            "reduce_seconds": 0.0,
            "step_seconds": 0.0,
        }
        if n_scored:
            divisor = n_scored if self.forest.objective.divides_by_tokens else 1
            result = self.optimizer.step(self.accumulator, divisor)
            self._published = self._checksum()
        self._begin_batch()
        return {"n_scored": n_scored, "stepped": n_scored > 0, **result}

    def abort_batch(self) -> None:
        """Drop everything of the running batch; parameters and optimizer state stay."""
        self.forest.clear()
        self._begin_batch()

    def _begin_batch(self) -> None:
        self.accumulator.clear()
        self.n_scored, self._version = 0, None

    def logps(self, ids: list[int]) -> list[float]:
        """log π_θ of ids[1:], each given all before it; by one plain forward with stock attention, not the cut path."""
        with torch.no_grad(), _stock_attention(self._causal_lm), self.segments.precision():
            ids_1n = torch.tensor([ids], device=self.segments.device)
            logits_nV = self._causal_lm(input_ids=ids_1n, use_cache=False).logits[0, :-1]
        logits_nV = logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32))
        return torch.log_softmax(logits_nV, -1).gather(-1, ids_1n[0, 1:, None])[:, 0].tolist()

    def save_weights(self, folder: str) -> None:
        """Write the student (or, with LoRA, the PEFT adapter) as safetensors with the tokenizer's files; atomic.

        No collective: one rank writes. Whatever `folder` held before is replaced.
        """
        target = Path(folder)
        part, old = target.with_name(target.name + ".part"), target.with_name(target.name + ".old")
        for leftover in (part, old):
            shutil.rmtree(leftover, ignore_errors=True)
        part.mkdir(parents=True)
        self.model.save_pretrained(part)
        for file in sorted(Path(self.spec.model_path).iterdir()):
            weights = file.suffix in (".safetensors", ".bin", ".gguf") or file.name.endswith(".index.json")
            if file.is_file() and not weights and not (part / file.name).exists() and not self.spec.lora:
                shutil.copy2(file, part / file.name)
        if target.exists():
            target.rename(old)
        part.rename(target)
        shutil.rmtree(old, ignore_errors=True)

    def gradient(self) -> dict[str, torch.Tensor]:
        """This rank's accumulated, unnormalised gradient by parameter name, as copies on the host."""
        return self.accumulator.gradient()

    def stats(self) -> dict:
        """busy_seconds (since the start), host_peak_bytes, device_peak_bytes (0 on CPU), cut_gap (see `_probe`)."""
        cuda = self.segments.device.type == "cuda"
        return {
            "busy_seconds": self.busy_seconds,
            "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "device_peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
            "cut_gap": self.cut_gap,
        }

    def require_frozen(self) -> None:
        """Raises RuntimeError when parameters changed since the last step: they are constant between publications."""
        if self._checksum() != self._published:
            raise RuntimeError(f"learner rank {self.spec.rank}: parameters changed between two publications")

    def parameters_replaced(self) -> None:
        """All of them were set from a checkpoint: what comes next is a publication of these."""
        self._published = self._checksum()

    def _checksum(self) -> tuple[int, ...]:
        """One integer per trainable parameter, of its bits: any single changed element changes it."""
        words = {8: torch.int64, 4: torch.int32, 2: torch.int16}
        sums = [p.detach().view(words[p.element_size()]).sum(dtype=torch.int64) for _, p in trainable(self.model)]
        return tuple(torch.stack(sums).tolist())

    def _probe(self) -> float:
        """Largest log-prob difference between the cut path and stock attention on fixed tokens.

        Raises NotImplementedError when it is beyond rounding: this model does something in between that the cut misses.
        """
        n, rows = 48, self.segments.rows
        ids = [(7 + 31 * i * i) % rows for i in range(n)]
        parent, cut = None, []
        for a, b in ((0, 17), (17, 18), (18, n - 1)):
            segment = self.segments.segment(parent, ids[a:b], None)
            hidden = self.segments.forward(segment, grad=False).hidden
            with torch.no_grad():
                logits = self._causal_lm.get_output_embeddings()(hidden[0]).double()
            cut += (
                torch.log_softmax(logits, -1)
                .gather(-1, torch.tensor(ids[a + 1 : b + 1])[:, None].to(logits.device))[:, 0]
                .tolist()
            )
            parent = segment
        gap = max(abs(a - b) for a, b in zip(cut, self.logps(ids), strict=True))
        limit = {"float64": 1e-9, "float32": 1e-2}.get(self.spec.learner.dtype, 1.0)
        if not gap <= limit:
            raise NotImplementedError(
                f"student {self.spec.model_path}: log-probs through cut states differ from the model's own by {gap:.3g} "
                f"(limit {limit}); this model cannot be cut into segments exactly"
            )
        return gap


def load_student(spec: RankSpec) -> torch.nn.Module:
    """The student in eval mode with cut attention; with LoRA the adapter alone is trainable."""
    dtype = getattr(torch, spec.learner.dtype, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float64):
        raise ValueError(
            f"thundersync.learner.dtype={spec.learner.dtype!r}; known are bfloat16, float32 (float64 in tests)"
        )
    # grouped expert kernels take no FP64
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    model = AutoModelForCausalLM.from_pretrained(
        spec.model_path, dtype=dtype, attn_implementation=attention.NAME, local_files_only=True, **experts
    )
    model = model.to(spec.device).eval()
    if spec.lora is None:
        return model.requires_grad_(True)
    from peft import LoraConfig, get_peft_model  # slow to import, and only adapters need it

    torch.manual_seed(0)  # every rank starts from the same adapter
    config = LoraConfig(
        r=spec.lora.rank,
        lora_alpha=spec.lora.alpha,
        lora_dropout=0.0,
        target_modules=spec.lora.target_modules,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config, autocast_adapter_dtype=False).eval()


class _stock_attention:
    """Within it the model attends as Transformers ships it."""

    def __init__(self, causal_lm: torch.nn.Module):
        self.causal_lm = causal_lm

    def __enter__(self):
        self.causal_lm.set_attn_implementation(STOCK_ATTENTION)

    def __exit__(self, *_):
        self.causal_lm.set_attn_implementation(attention.NAME)


def _name(work: Work) -> str:
    if isinstance(work, Append):
        return f"source {work.source.name}"
    if isinstance(work, CloseTrajectory):
        return f"trajectory {work.trajectory}"
    if isinstance(work, CloseGroup):
        return f"group {work.group}"
    raise TypeError(f"not a work item: {work!r}")


def _done(started: float, seconds: float, tally: Tally) -> WorkDone:
    counts = tuple(tally.gap_counts.items())
    return WorkDone(seconds, tally.n_scored, tally.sum_kl, tally.sum_logp_gap, tally.max_logp_gap, counts, started)

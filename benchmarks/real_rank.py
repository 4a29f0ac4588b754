"""What a real learner rank on a CPU takes for a workload: memory by PyTorch's profiler, FLOPs by its counter."""

from __future__ import annotations

import gc
import multiprocessing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from skyrl_thundersync.learner.rank import LearnerRank, RankSpec
from skyrl_thundersync.learner.zero import free_port
from skyrl_thundersync.options.schema import LearnerConfig, OptimizerSettings
from skyrl_thundersync.rehearse.learner import FINISH, phase_of
from skyrl_thundersync.rehearse.workload import Workload

aten = torch.ops.aten


@dataclass(frozen=True)
class Measured:
    """One phase: the most bytes that tensors took at a time, and FLOPs."""

    peak: int
    flops: float


def measure(folder: Path, learner: LearnerConfig, objective: str, workload: Workload) -> dict[str, Measured]:
    """Phases as `rehearse_rank` names them, of one rank in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (str(folder), learner, objective, workload))


def _measure(folder: str, learner: LearnerConfig, objective: str, workload: Workload) -> dict[str, Measured]:
    spec = RankSpec(folder, 0, 1, "127.0.0.1", free_port(), learner, objective, OptimizerSettings())
    rank = LearnerRank(spec)
    rank.optimizer.step(rank.accumulator, 1)  # Adam's moments exist from the first step on
    found: dict[str, Measured] = {}
    static = _tensors()
    live = 0
    for work in [*workload.works(rank.forest.objective), None]:
        name = FINISH if work is None else phase_of(work)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            if work is None:
                rank.optimizer.step(rank.accumulator, 1)
            else:
                rank.run(work)
        peak = live
        events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
        for event in sorted(events, key=lambda event: event.start_ns()):
            live += event.nbytes()
            peak = max(peak, live)
        old = found.get(name, Measured(0, 0.0))
        found[name] = Measured(max(old.peak, static + peak), old.flops)
    for work in workload.works(rank.forest.objective):
        with _counter() as counter:
            rank.run(work)
        name = phase_of(work)
        found[name] = Measured(found[name].peak, found[name].flops + counter.get_total_flops())
    return found


def _tensors() -> int:
    """Bytes of all tensors that live, each storage once."""
    gc.collect()
    sizes = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _counter() -> FlopCounterMode:
    """PyTorch's, that knows the CPU's flash attention too; of causal attention it counts the half that is computed."""

    def forward(q, k, v, dropout=0.0, is_causal=False, *args, **kwargs):
        return sdpa_flop_count(q, k, v) / (2 if is_causal else 1)

    def backward(grad, q, k, v, out, lse, dropout, is_causal, *args, **kwargs):
        return sdpa_backward_flop_count(grad, q, k, v) / (2 if is_causal else 1)

    own = {
        aten._scaled_dot_product_flash_attention_for_cpu: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    return FlopCounterMode(display=False, custom_mapping={op: _shapes(count) for op, count in own.items()})


def _shapes(count):
    def shaped(*args, out_val=None, **kwargs):
        return count(*(x.shape if isinstance(x, torch.Tensor) else x for x in args), **kwargs)

    shaped._get_raw = True
    return shaped

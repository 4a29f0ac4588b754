"""One learner rank without data: the real Forest, sweeps, accumulator and finish, over trajectories of a given length.

A model of equal layers is run at two small depths; every figure is linear in the layers between, so the whole follows.
What is not the learner's own code: the model comes from its configuration instead of a checkpoint, cut states move without
streams, and DeepSpeed's part of the step is its arithmetic (`finish.py`).
"""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass, replace
from weakref import WeakSet

import torch

from skyrl_thundersync.learner import attention
from skyrl_thundersync.learner.accumulate import Accumulator
from skyrl_thundersync.learner.rank import LearnerSettings, LoraSettings
from skyrl_thundersync.learner.retain import GraphBudget
from skyrl_thundersync.learner.segments import Graph, Scored, Segment, SegmentModel
from skyrl_thundersync.learner.state_budget import StateBudget
from skyrl_thundersync.learner.states import Adjoint
from skyrl_thundersync.learner.student import prepared
from skyrl_thundersync.learner.sweep import Forest
from skyrl_thundersync.objectives import OBJECTIVES
from skyrl_thundersync.rehearse.accounting import DEVICE, HOST, Accounting, Phase, rehearsing
from skyrl_thundersync.rehearse.devices import Gpu
from skyrl_thundersync.rehearse.finish import finish, optimizer_of
from skyrl_thundersync.rehearse.models import Architecture, depths, transformers_config
from skyrl_thundersync.rehearse.workload import Workload
from skyrl_thundersync.stream.sources import Append, CloseTrajectory, Work

PROMPT, APPEND, SWEEP, GROUP, FINISH = "prompt", "turns", "sweep", "sweep prompt", "finish"
PHASES = (PROMPT, APPEND, SWEEP, GROUP, FINISH)
"""Per group, per trajectory, per trajectory, per group, per update."""


@dataclass(frozen=True)
class Rank:
    """What a rank is built from. `gpu`: None for a rank on the CPU. ranks: how many share the optimizer's state."""

    known: Architecture
    learner: LearnerSettings
    objective: str
    ranks: int
    gpu: Gpu | None
    lora: LoraSettings | None = None


class _Watched(SegmentModel):
    """The learner's own, that says what its memory is for."""

    def __init__(self, model, states: _Budget, accounting: Accounting):
        super().__init__(model, states)
        self._accounting = accounting

    def forward(self, segment: Segment, grad: bool) -> Graph:
        with self._accounting.tagged("graph"):
            graph = super().forward(segment, grad)
        self.states.tell(self._accounting)
        return graph

    def logp(self, hidden: torch.Tensor, scored: Scored) -> torch.Tensor:
        with self._accounting.tagged("head"):
            return super().logp(hidden, scored)

    def deposit_leaves(self, segment: Segment, graph: Graph) -> None:
        super().deposit_leaves(segment, graph)
        self.states.tell(self._accounting)


class _Budget(StateBudget):
    """The learner's own, that knows whose memory is state."""

    def __init__(self, limit: int | None, mover: _Mover | None):
        super().__init__(limit, mover)
        self._all: WeakSet[Adjoint] = WeakSet()

    def add(self, states: Adjoint) -> None:
        super().add(states)
        self._all.add(states)

    def tell(self, accounting: Accounting) -> None:
        for states in self._all:
            for sums in (states.state, states.sums):
                accounting.retag((t for pair in sums for t in pair if t is not None), "states")


class _Mover:
    """To host memory and back, in order."""

    def __init__(self, accounting: Accounting):
        self._accounting = accounting

    def out(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        with self._accounting.tagged("states"):
            return [tensor.to("cpu") for tensor in tensors]

    def back(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        with self._accounting.tagged("states"):
            return [tensor.to("meta") for tensor in tensors]

    def join(self) -> None:
        """Nothing runs beside anything here."""


def phase_of(work: Work) -> str:
    """The phase that a work item belongs to."""
    if isinstance(work, Append):
        return PROMPT if work.source.turn == 0 else APPEND
    return SWEEP if isinstance(work, CloseTrajectory) else GROUP


def rehearse_rank(rank: Rank, workload: Workload) -> dict[str, Phase]:
    """The phases of `PHASES` of one trajectory, one group's prompt and one finish, at the model's whole depth.

    Raises what the learner raises for a model or options that it refuses.
    """
    found = depths(transformers_config(rank.known))
    if found is None:
        return _run(rank, workload, None)
    first, second, times = found
    one, two = _run(rank, workload, first), _run(rank, workload, second)
    return {name: _extrapolated(one[name], two[name], times) for name in one}


def _run(rank: Rank, workload: Workload, layers: int | None) -> dict[str, Phase]:
    device = "cpu" if rank.gpu is None else "meta"
    learner, phases = rank.learner, {}
    with rehearsing(rank.gpu) as accounting:
        with accounting.tagged("weights"):
            model = _student(rank, layers, device)
        mover = None if rank.gpu is None else _Mover(accounting)
        limit = None if learner.state_gib is None else int(learner.state_gib * 2**30)
        optimizer = optimizer_of(accounting, model, learner, rank.ranks)
        with accounting.tagged("sums"):
            accumulator = Accumulator(optimizer.layout, learner.accumulator == "exact")
        base = model.get_base_model() if rank.lora else model
        segments = _Watched(base, _Budget(limit, mover), accounting)
        objective = OBJECTIVES[rank.objective]()
        budget = GraphBudget(segments, int(learner.retain_gib * 2**30))
        forest = Forest(segments, objective, learner.block_tokens, budget, accumulator)
        accounting.tag = "staging"
        for work in workload.works(rank.objective):
            name = phase_of(work)
            with accounting.counting(name) as phase:
                if isinstance(work, Append):
                    forest.append(work, False)
                elif isinstance(work, CloseTrajectory):
                    forest.close_trajectory(work)
                else:
                    forest.close_group(work)
                accumulator.check(name)
                segments.states.trim()
            segments.states.tell(accounting)
            phases[name] = _joined(phases[name], phase) if name in phases else phase
        gc.collect()
        with accounting.counting(FINISH) as phases[FINISH]:
            finish(optimizer, accumulator, rank.ranks)
    return phases


def _student(rank: Rank, layers: int | None, device: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    config = transformers_config(rank.known, layers)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, rank.learner.dtype), attn_implementation=attention.NAME
        )
        return prepared(model, rank.lora)


def _joined(a: Phase, b: Phase) -> Phase:
    """Two runs of a phase, one after the other."""
    c = replace(b, peak=dict(b.peak), peak_by=dict(b.peak_by))
    for place in (DEVICE, HOST):
        if a.peak[place] > b.peak[place]:
            c.peak[place], c.peak_by[place] = a.peak[place], a.peak_by[place]
    for name in ("flops", "launches", "to_host", "to_device", "host_traffic", "network"):
        setattr(c, name, getattr(a, name) + getattr(b, name))
    c.bound_s = a.bound_s + b.bound_s
    return c


def _extrapolated(one: Phase, two: Phase, times: int) -> Phase:
    """What a phase takes with `times` more of the layers that `two` has beyond `one`."""

    def along(a: float, b: float) -> float:
        return a + times * (b - a)

    def table(a: dict, b: dict) -> dict:
        return {key: along(a.get(key, 0), b.get(key, 0)) for key in a | b}

    phase = Phase(one.name)
    for place in (DEVICE, HOST):
        phase.peak_by[place] = table(one.peak_by[place], two.peak_by[place])
        phase.peak[place] = along(one.peak[place], two.peak[place])
        phase.kept[place] = table(one.kept[place], two.kept[place])
    for name in ("flops", "launches", "to_host", "to_device", "host_traffic", "network"):
        setattr(phase, name, along(getattr(one, name), getattr(two, name)))
    phase.bound_s = Counter(table(one.bound_s, two.bound_s))
    return phase

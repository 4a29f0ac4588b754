"""One learner rank without data: the real Forest, sweeps, accumulator and finish, over trajectories of a given length.

A model of equal layers is run at two small depths; every figure is linear in the layers between, so the whole follows.
What is not the learner's own code: the model comes from its configuration instead of a checkpoint, cut states move without
streams, and DeepSpeed's part of the step is its arithmetic (`finish.py`).
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from dataclasses import dataclass, replace
from weakref import WeakSet

import torch

from skyrl_thundersync.learner.accumulate import Accumulator
from skyrl_thundersync.learner.attention import implementation
from skyrl_thundersync.learner.graph_size import GraphSize
from skyrl_thundersync.learner.kernel_choice import choose
from skyrl_thundersync.learner.retain import GraphBudget
from skyrl_thundersync.learner.segments import Graph, Scored, Segment, SegmentModel
from skyrl_thundersync.learner.state_budget import StateBudget
from skyrl_thundersync.learner.states import SPAN, Adjoint
from skyrl_thundersync.learner.student import prepared
from skyrl_thundersync.learner.sweep import Forest
from skyrl_thundersync.objectives import registry
from skyrl_thundersync.options.schema import LearnerConfig, LoraSettings
from skyrl_thundersync.rehearse.accounting import DEVICE, HOST, Accounting, Phase, rehearsing
from skyrl_thundersync.rehearse.devices import Gpu
from skyrl_thundersync.rehearse.finish import optimizer_of
from skyrl_thundersync.rehearse.models import Architecture, depths, transformers_config
from skyrl_thundersync.rehearse.workload import ACTION, CONTEXT, Workload
from skyrl_thundersync.stream.sources import Append, CloseTrajectory, Work

PROMPT, APPEND, SWEEP, GROUP, FINISH = "prompt", "turns", "sweep", "sweep prompt", "finish"
PHASES = (PROMPT, APPEND, SWEEP, GROUP, FINISH)
"""Per group, per trajectory, per trajectory, per group, per update."""


@dataclass(frozen=True)
class Rank:
    """What a rank is built from. `gpu`: None for a rank on the CPU. ranks: how many share the optimizer's state."""

    known: Architecture
    learner: LearnerConfig
    objective: str
    ranks: int
    gpu: Gpu | None
    lora: LoraSettings | None = None


class _Watched(SegmentModel):
    """The learner's own, that says what its memory is for."""

    def __init__(self, model, states: _Budget, graph_limit: int | None, accounting: Accounting):
        super().__init__(model, states, graph_limit)
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
    """The phases of `PHASES` of one trajectory, one group's prompt and one finish, at the model's whole depth and length.

    Raises what the learner raises for a model or options that it refuses.
    """
    layers = transformers_config(rank.known).num_hidden_layers
    first, second, times = depths(transformers_config(rank.known)) or (layers, layers, 0)
    size = {depth: _graph_size(rank, depth) for depth in {first, second}}
    whole = _whole_size(size[first], size[second], times)
    settled = _settled(rank.learner, whole, workload.tokens)

    def at(depth: int) -> dict[str, Phase]:
        # so that the same graphs are kept and the same layers run again as at the whole depth
        share = size[depth].per_token / whole.per_token
        learner = replace(
            rank.learner,
            retain_gib=rank.learner.retain_gib * share,
            graph_gib=None if rank.learner.graph_gib is None else rank.learner.graph_gib * share,
            state_gib=None if rank.learner.state_gib is None else rank.learner.state_gib * depth / layers,
        )
        return _at_length(replace(rank, learner=learner), workload, depth, settled)

    one = at(first)
    if not times:
        return one
    two = at(second)
    return {name: _extrapolated(one[name], two[name], times) for name in one}


def _at_length(rank: Rank, workload: Workload, layers: int, settled: int) -> dict[str, Phase]:
    """Phases over a trajectory of any number of blocks.

    From `settled` blocks on, and with states in chunks of full size, a further chunk adds to memory what the last one
    added, and to work a little more than that by its longer past: three lengths give all the others.
    """
    turn = CONTEXT + ACTION
    block = -(-max(rank.learner.block_tokens, 1) // turn) * turn  # turns are whole, so blocks are too
    settled, chunk = max(settled, 2 * SPAN // block), max(1, SPAN // block)
    chunks = ((workload.tokens - workload.prompt) / block - settled) / chunk
    if chunks <= 2:
        return _run(rank, workload, layers)
    lengths = [workload.prompt + (settled + more * chunk) * block for more in range(3)]
    runs = [_run(rank, replace(workload, tokens=length), layers) for length in lengths]
    return {name: _lengthened(*(run[name] for run in runs), chunks) for name in runs[0]}


def _settled(learner: LearnerConfig, size: GraphSize, tokens: int) -> int:
    """Blocks after which nothing is decided otherwise any more: how many graphs stay, and whether layers run again."""
    block = max(1, learner.block_tokens)
    limit = tokens * size.per_token if learner.graph_gib is None else learner.graph_gib * 2**30
    room = limit - size.whole(block, 0)
    changes = math.ceil(room / size.per_past / block) if size.per_past > 0 and 0 <= room < size.per_past * tokens else 0
    graph = size.run_again(block) if room < 0 or changes else size.whole(block, 0)
    return max(int(learner.retain_gib * 2**30 / graph), changes) + 1


def _graph_size(rank: Rank, layers: int) -> GraphSize:
    """As the learner itself measures it."""
    with rehearsing(rank.gpu):
        model = _student(rank, layers)
        return SegmentModel(model.get_base_model() if rank.lora else model).graph_size


def _whole_size(one: GraphSize, two: GraphSize, times: int) -> GraphSize:
    fields = {name: getattr(one, name) + times * (getattr(two, name) - getattr(one, name)) for name in vars(one)}
    return GraphSize(**fields)


def _run(rank: Rank, workload: Workload, layers: int) -> dict[str, Phase]:
    learner, phases, objective = rank.learner, {}, registry.build(rank.objective)
    if objective.needs_group:
        law = objective.affine(workload.rewards, workload.rewards[0])  # of values, which there are none of within
        objective.affine = lambda rewards, origin: law
    with rehearsing(rank.gpu) as accounting:
        with accounting.tagged("weights"):
            model = _student(rank, layers)
        mover = None if rank.gpu is None else _Mover(accounting)
        limit = None if learner.state_gib is None else int(learner.state_gib * 2**30)
        optimizer = optimizer_of(accounting, model, learner, rank.ranks)
        with accounting.tagged("sums"):
            accumulator = Accumulator(optimizer.layout, learner.accumulator == "exact")
        base = model.get_base_model() if rank.lora else model
        graph_limit = None if learner.graph_gib is None else int(learner.graph_gib * 2**30)
        segments = _Watched(base, _Budget(limit, mover), graph_limit, accounting)
        budget = GraphBudget(segments, int(learner.retain_gib * 2**30))
        forest = Forest(segments, objective, learner.block_tokens, budget, accumulator)
        accounting.tag = "staging"
        for work in workload.works(objective):
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
            optimizer.step(accumulator, 1)
    return phases


def _student(rank: Rank, layers: int) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    device = "cpu" if rank.gpu is None else "meta"
    config, dtype = transformers_config(rank.known, layers), getattr(torch, rank.learner.dtype)
    kernel = choose(config, device, dtype)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=implementation(kernel.name))
        return prepared(model, rank.lora)


def _joined(a: Phase, b: Phase) -> Phase:
    """Two runs of a phase, one after the other."""
    c = replace(b, peak=dict(b.peak), peak_by=dict(b.peak_by))
    for place in (DEVICE, HOST):
        if a.peak[place] > b.peak[place]:
            c.peak[place], c.peak_by[place] = a.peak[place], a.peak_by[place]
    for name in FIGURES:
        setattr(c, name, getattr(a, name) + getattr(b, name))
    c.kernels = a.kernels + b.kernels
    return c


FIGURES = ("flops", "launches", "to_host", "to_device", "host_traffic", "network")


def _extrapolated(one: Phase, two: Phase, times: float) -> Phase:
    """What a phase takes with `times` more of what `two` has beyond `one`."""
    return _combined((one, two), (1 - times, times), (1 - times, times))


def _lengthened(one: Phase, two: Phase, three: Phase, x: float) -> Phase:
    """What a phase takes `x` chunks beyond `one`, one and two beyond which the others are: work quadratic; memory linear, of
    whole chunks."""
    work, whole = ((x - 1) * (x - 2) / 2, -x * (x - 2), x * (x - 1) / 2), math.ceil(x)
    return _combined((one, two, three), (0.0, 2 - whole, whole - 1), work)


def _combined(phases: tuple[Phase, ...], memory: tuple[float, ...], work: tuple[float, ...]) -> Phase:
    def total(values, weights) -> float:
        return sum(weight * value for weight, value in zip(weights, values, strict=True))

    def table(tables, weights) -> dict:
        return {key: total([t.get(key, 0) for t in tables], weights) for key in set().union(*tables)}

    phase = Phase(phases[0].name)
    for place in (DEVICE, HOST):
        phase.peak_by[place] = table([p.peak_by[place] for p in phases], memory)
        phase.peak[place] = total([p.peak[place] for p in phases], memory)
        phase.kept[place] = table([p.kept.get(place, {}) for p in phases], memory)
    for name in FIGURES:
        setattr(phase, name, total([getattr(p, name) for p in phases], work))
    phase.kernels = Counter(table([p.kernels for p in phases], work))
    return phase

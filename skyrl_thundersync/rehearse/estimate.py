"""From a rank's phases to a whole update of a configuration: what fits, what time it takes at least, what bounds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from skyrl_thundersync.objectives.registry import of
from skyrl_thundersync.rehearse.accounting import DEVICE, HOST, Phase
from skyrl_thundersync.rehearse.devices import DISK, GIB, GPUS_A_NODE, HOST_MEMORY, HOST_THREAD, NETWORK, SPARE, Gpu
from skyrl_thundersync.rehearse.learner import APPEND, FINISH, GROUP, PHASES, PROMPT, SWEEP, Rank, rehearse_rank
from skyrl_thundersync.rehearse.models import Architecture, architecture, parameters
from skyrl_thundersync.rehearse.workload import Workload
from skyrl_thundersync.telemetry import flops as mfu

if TYPE_CHECKING:
    from skyrl_thundersync.hosts.skyrl.config import TrainConfig

PROCESS = GIB
"""Host memory of a process that holds nothing yet."""


@dataclass(frozen=True)
class Row:
    """One phase, `times` of them an update and rank. Bytes and seconds of each; `host_s`: of the rank's own threads."""

    name: str
    times: int
    device_peak: float
    device_by: dict[str, float]
    host_peak: float
    tflop: float
    device_s: float
    bound: str
    copied: float
    copy_s: float
    host_s: float
    network: float
    network_s: float

    @property
    def seconds(self) -> float:
        """One after the other, as the learner does them."""
        return self.device_s + self.copy_s + self.host_s + self.network_s


@dataclass(frozen=True)
class Replica:
    """A rollout or teacher replica on its GPUs: bytes of weights, and what is left for K/V, in bytes and tokens."""

    name: str
    gpus: int
    weights: float
    room: float
    kv_token: float
    state: float
    tokens: float
    origin: str


@dataclass(frozen=True)
class Estimate:
    """A rehearsed update. Bytes, seconds; `problems`: what does not fit, each with the option to change. host_states: what of
    host_node is states of open trajectories, moved there."""

    gpu: str
    trajectories: int
    tokens: int
    rows: list[Row]
    graph_token: float
    state_trajectory: float
    device_peak: float
    device_room: float
    host_node: float
    host_states: float
    published: float
    publish_s: float
    learner_s: float
    suffix_s: float
    accumulation: float
    mfu: float | None
    replicas: list[Replica]
    problems: list[str]

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        for row, entry in zip(self.rows, found["rows"], strict=True):
            entry["seconds"] = row.seconds
        return found


def rehearsed(cfg: TrainConfig, gpu: Gpu, tokens: int) -> dict[str, Phase]:
    """The phases of a learner rank of `cfg` with trajectories of `tokens` tokens: the same on every GPU.

    Raises:
        ConfigError: a model whose config.json cannot be had.
    """
    from skyrl_thundersync.options.schema import learner_ranks, lora_settings

    ts = cfg.thundersync
    student = architecture("trainer.policy.model.path", cfg.trainer.policy.model.path)
    rank = Rank(student, ts.learner, ts.objective, learner_ranks(cfg), gpu, lora_settings(cfg))
    return rehearse_rank(rank, _workload(tokens))


def _workload(tokens: int) -> Workload:
    return Workload(tokens, min(2048, tokens // 4))


def estimate(cfg: TrainConfig, gpu: Gpu, nodes: int, tokens: int, phases: dict[str, Phase] | None = None) -> Estimate:
    """An update of `cfg` with trajectories of `tokens` tokens on `nodes` nodes of `gpu`. phases: as `rehearsed` has them.

    Raises:
        ConfigError: a model whose config.json cannot be had.
    """
    from skyrl_thundersync.options.schema import learner_ranks, lora_settings
    from skyrl_thundersync.preflight.memory import gpus_per_engine

    ts = cfg.thundersync
    student = architecture("trainer.policy.model.path", cfg.trainer.policy.model.path)
    ranks = learner_ranks(cfg)
    adapter = lora_settings(cfg)
    workload = _workload(tokens)
    phases = phases or rehearsed(cfg, gpu, tokens)
    groups = -(-cfg.trainer.train_batch_size // ranks)
    own = groups * cfg.generator.n_samples_per_prompt
    times = {PROMPT: groups, APPEND: own, SWEEP: own, GROUP: groups, FINISH: 1}
    a_node = min(ranks, GPUS_A_NODE)
    rows = [_row(phases[name], times[name], gpu, ts.learner.threads, a_node, nodes) for name in PHASES]
    state = phases[APPEND].kept[DEVICE].get("states", 0.0) + phases[APPEND].kept[HOST].get("states", 0.0)
    elsewhere = (own - 1) * state
    limit = None if ts.learner.state_gib is None else ts.learner.state_gib * GIB
    peak = max(row.device_peak for row in rows) + (elsewhere if limit is None else min(elsewhere, limit))
    host_states = 0.0 if limit is None else max(0.0, elsewhere - limit)
    host = a_node * (max(row.host_peak for row in rows) + host_states + PROCESS)
    trained = phases[APPEND].kept[HOST].get("sums", 0.0) / (2 if ts.learner.accumulator == "exact" else 1)
    weights = phases[FINISH].kept[DEVICE]["weights"]
    published = trained / 2 if adapter else weights
    engines = cfg.generator.inference_engine
    replicas = [_replica("rollout", student, engines.gpu_memory_utilization, gpus_per_engine(cfg), gpu, 2.0)]
    if of(ts).needs_teacher:
        teacher = architecture("thundersync.teacher.model", ts.teacher.model)
        share = ts.teacher.engine_init_kwargs.get("gpu_memory_utilization", 0.9)
        replicas.append(
            _replica("teacher", teacher, share, ts.teacher.tensor_parallel_size, gpu, 1.0 if teacher.quantised else 2.0)
        )
    learner_s = sum(row.times * row.seconds for row in rows if row.name != FINISH)
    compute_s = sum(row.times * row.device_s for row in rows if row.name != FINISH)
    publish_s = published / gpu.pcie + 2 * published / DISK
    suffix_s = rows[-1].seconds + publish_s
    graph = phases[SWEEP].peak_by[DEVICE].get("graph", 0.0)
    found = Estimate(
        gpu.name, own, tokens, rows, graph / _block(ts.learner.block_tokens, tokens), state, peak, gpu.memory * (1 - SPARE),
        host, a_node * host_states, published, publish_s, learner_s, suffix_s, (learner_s - compute_s) / compute_s,
        _mfu(student, adapter, workload, groups, own // groups, learner_s, gpu), replicas, [],
    )  # fmt: skip
    found.problems.extend(_problems(found, cfg, elsewhere, tokens))
    return found


def _block(block: int, tokens: int) -> int:
    return min(max(block, 1), tokens)


def _row(phase: Phase, times: int, gpu: Gpu, threads: int, ranks: int, nodes: int) -> Row:
    bounds = phase.bound_s(gpu)
    device_s = sum(bounds.values())
    copied = phase.to_host + phase.to_device
    return Row(
        phase.name, times, phase.peak[DEVICE], phase.peak_by[DEVICE], phase.peak[HOST], phase.flops / 1e12, device_s,
        max(bounds, key=bounds.__getitem__, default="nothing"), copied, copied / gpu.pcie,
        phase.host_traffic / min(threads * HOST_THREAD, HOST_MEMORY / ranks), phase.network,
        phase.network / (gpu.nvlink if nodes == 1 else NETWORK),
    )  # fmt: skip


def _replica(name: str, known: Architecture, share: float, gpus: int, gpu: Gpu, width: float) -> Replica:
    """`width`: bytes of a weight; embeddings and head stay in two."""
    from skyrl_thundersync.rehearse.models import cache_bytes

    body, ends = parameters(known)
    weights = body * width + ends * 2.0
    room = gpus * gpu.memory * share - weights
    kv_token, state = cache_bytes(known)
    return Replica(name, gpus, weights, room, kv_token, state, max(0.0, room) / kv_token, known.origin)


def _mfu(student, adapter, workload: Workload, groups: int, samples: int, seconds: float, gpu: Gpu) -> float | None:
    """Most that the learner's MFU can be while it works: model FLOPs over these seconds at peak."""
    from skyrl_thundersync.rehearse.models import transformers_config

    config: Mapping[str, Any] = transformers_config(student).to_dict()
    try:
        cost = mfu.cost(config, adapter.rank if adapter else 0, adapter.target_modules if adapter else "all-linear")
    except NotImplementedError:
        return None
    shapes = [(workload.prompt, [workload.tokens] * samples)] * groups
    return cost.train_flops(shapes, workload.scored * samples * groups) / (seconds * gpu.bf16)


def _problems(found: Estimate, cfg: TrainConfig, elsewhere: float, tokens: int) -> list[str]:
    problems, learner = [], cfg.thundersync.learner
    worst = max(found.rows, key=lambda row: row.device_peak)
    if found.device_peak > found.device_room:
        largest = max(
            {**worst.device_by, "states of other open trajectories": found.device_peak - worst.device_peak}.items(),
            key=lambda part: part[1],
        )
        advice = {
            "graph": f"lower thundersync.learner.block_tokens (now {learner.block_tokens}) and retain_gib "
            f"(now {learner.retain_gib:g}): {found.graph_token / 1e6:.1f} MB of graph a token",
            "optimizer": "set thundersync.learner.offload_optimizer=true",
            "head": "lower thundersync.learner.block_tokens: the logits of a block's scored tokens are there at once",
            "weights": "use LoRA or a smaller model",
        }.get(
            largest[0],
            f"set thundersync.learner.state_gib: all open trajectories hold {elsewhere / GIB:.0f} GiB of state",
        )
        problems.append(
            f"a learner rank needs {found.device_peak / GIB:.0f} GiB in {worst.name!r}, {found.device_room / GIB:.0f} are "
            f"there with {SPARE:.0%} to spare; most of it is {largest[0]} ({largest[1] / GIB:.0f} GiB): {advice}"
        )
    for replica in found.replicas:
        option = (
            "generator.inference_engine.tensor_parallel_size"
            if replica.name == "rollout"
            else "thundersync.teacher.tensor_parallel_size"
        )
        if replica.tokens < tokens:
            problems.append(
                f"a {replica.name} replica has {replica.weights / GIB:.0f} GiB of weights and "
                f"{max(0, replica.room) / GIB:.0f} GiB left for K/V on {replica.gpus} GPU: {replica.tokens:.0f} tokens, less "
                f"than one trajectory. Give it more GPUs ({option})"
            )
    return problems

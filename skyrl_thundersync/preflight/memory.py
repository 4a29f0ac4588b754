"""How a run is split over devices and hosts, and the memory that the split takes: an estimate, before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyrl_thundersync.engines.thread import kv_cache_gib
from skyrl_thundersync.objectives.registry import of
from skyrl_thundersync.options.schema import learner_ranks, uses_cuda
from skyrl_thundersync.preflight.models import model_config, model_parameters, served_bytes
from skyrl_thundersync.process.check import Check
from skyrl_thundersync.process.limits import GIB, available_memory

if TYPE_CHECKING:
    from skyrl_thundersync.hosts.skyrl.config import TrainConfig

PROCESS = GIB
"""Host memory of a process of ours that holds nothing yet: libraries, mostly."""


def gpus_per_engine(cfg: TrainConfig) -> int:
    """GPUs that one rollout replica spans."""
    engine = cfg.generator.inference_engine
    return engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size


def memory(cfg: TrainConfig) -> Check:
    """An estimate per part of the split, against what the machine has now. Activations come on top, on GPUs K/V too.

    A learner rank: weights; on the host an FP32 gradient of what is trained (twice for the exact accumulator, and two more a
    group with statistics); masters and moments, 12 bytes a trained parameter, shared among ranks, on the device
    unless offloaded, which takes the shard's gradient too: 16. Replicas: weights.
    Without GPUs all of it is host memory, with the K/V caches; each process takes `PROCESS` beside.
    """
    from skyrl_thundersync.teacher.scores import TeacherSpec

    sizes = split_memory(cfg, learner_ranks(cfg))
    if sizes is None:
        return Check("memory of the split", (), "not known: a model is not on this machine yet")
    learner_device, learner_host, rollout, teacher = sizes
    engines = cfg.generator.inference_engine.num_engines
    teachers = cfg.thundersync.teacher.replicas if of(cfg.thundersync).needs_teacher else 0
    ranks = learner_ranks(cfg)
    text = f"learner {_gib(learner_device)} + {_gib(learner_host)} host a rank, rollout {_gib(rollout)} a replica"
    text += f", teacher {_gib(teacher)} a replica" if teachers else ""
    host = ranks * learner_host + (1 + ranks + engines + teachers) * PROCESS
    problems = []
    if uses_cuda(cfg):
        import torch

        room = min(
            (torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())), default=0
        )
        parts = [("a learner rank", learner_device), ("a rollout replica", rollout / gpus_per_engine(cfg))]
        parts += [("a teacher replica", teacher / cfg.thundersync.teacher.tensor_parallel_size)] if teachers else []
        problems += [
            f"{what} needs {_gib(size)} on its device before activations and K/V, a device has {_gib(room)}. "
            "Use LoRA, thundersync.learner.offload_optimizer=true, or more GPUs a replica."
            for what, size in parts
            if size > room
        ]
    else:
        host += ranks * learner_device
        host += engines * (rollout + kv_cache_gib(cfg) * GIB) + teachers * (teacher + TeacherSpec.cache_gib * GIB)
    if host > (available := available_memory()):
        problems.append(
            f"the processes need {_gib(host)} of host memory together, {_gib(available)} are available. Use fewer ranks or "
            "replicas, a smaller model or LoRA; with GRPO lower thundersync.grpo.admission_cap."
        )
    return Check("memory of the split", tuple(problems), f"{text}; host {_gib(host)} of {_gib(available)}")


def split_memory(cfg: TrainConfig, ranks: int) -> tuple[float, float, float, float] | None:
    """Bytes of (learner rank on its device, learner rank on the host, rollout replica, teacher replica); None if unknown."""
    ts = cfg.thundersync
    parameters = model_parameters(cfg.trainer.policy.model.path)
    width = {"bfloat16": 2, "float16": 2, "float32": 4}
    teacher = served_bytes(ts.teacher.model, width[ts.teacher.dtype]) if of(ts).needs_teacher else 0
    if parameters is None or teacher is None:
        return None
    lora = cfg.trainer.policy.model.lora.rank
    trained = parameters
    if lora:
        from skyrl_thundersync.telemetry.flops import cost

        # An adapter's forward FLOPs a token are twice its parameters.
        trained = cost(model_config(cfg.trainer.policy.model.path), lora).adapter / 2
    state = 12 * trained / ranks
    sums = 2 if ts.learner.accumulator == "exact" else 1
    if of(ts).needs_group:
        sums += 2 * ts.grpo.admission_cap
    device = parameters * width[ts.learner.dtype] + (0 if ts.learner.offload_optimizer else state)
    # beside masters and moments DeepSpeed keeps the shard's gradient on the host
    host = 4 * trained * sums + (state + 4 * trained / ranks if ts.learner.offload_optimizer else 0)
    rollout = parameters * width[cfg.generator.inference_engine.model_dtype]
    return device, host, rollout, teacher


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.0f} MiB"

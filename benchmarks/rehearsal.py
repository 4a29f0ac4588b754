"""Every preset for GPUs, rehearsed at full size on 8 x H200 and 8 x B200; and the rehearsal against what a real rank takes.

    python -m benchmarks.rehearsal [--json]      half an hour on two busy cores; no GPU and no weights are needed

32 prompts x 4 trajectories (GRPO: x 8), every one of them as long as the context, 131,072 tokens: the most memory that a
batch can take. Per preset and device: whether all fits with 8% to spare, the largest device and host memory, copies and sums
as a share of what the learner computes, and roofline times, which no machine is faster than. The second table holds what a
rehearsal foretells of ranks on a CPU, for models of 1 to 150 M parameters, against PyTorch's profiler and FLOP counter there.

Gated-delta layers are counted as Transformers' own code computes them: fused kernels (requirements/gpu.in) are faster.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from skyrl_thundersync.options.schema import LearnerConfig
from skyrl_thundersync.rehearse.devices import GIB, GPUS
from skyrl_thundersync.rehearse.models import Architecture
from skyrl_thundersync.rehearse.workload import Workload

PRESETS = (
    "opd/qwen3.8-27b",
    "opd/qwen3.8-27b-lora",
    "opd/glm-4.7-flash",
    "grpo/qwen3.8-27b",
    "grpo/qwen3.8-27b-lora",
    "grpo/glm-4.7-flash",
)
DEVICES = ("h200", "b200")
TOKENS = 131072
MEMORY, FLOPS = 0.10, 0.02
"""Most that a rehearsal may be off on a CPU, of what is measured."""

SMALL = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
HYBRID = SMALL | {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "hidden_size": 96,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
LARGE = SMALL | {
    "vocab_size": 32768,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_hidden_layers": 12,
}
LEARNER = LearnerConfig(dtype="float32", block_tokens=256, retain_gib=0.001)


@dataclass(frozen=True)
class Case:
    """A rank on a CPU: a model and how it is trained."""

    name: str
    fields: dict[str, Any]
    learner: LearnerConfig = field(default_factory=lambda: LEARNER)
    objective: str = "opd"
    workload: Workload = Workload(900, 200)


CASES = (
    Case("dense", SMALL),
    Case("dense, GRPO, graphs kept", SMALL, replace(LEARNER, retain_gib=1.0), "grpo"),
    Case("dense, layers run again", SMALL, replace(LEARNER, retain_gib=0.0, graph_gib=0.0001)),
    Case("gated delta and attention", HYBRID),
)
LARGEST = Case("dense, 12 layers", LARGE)


@dataclass(frozen=True)
class Compared:
    """One phase of a case: bytes and FLOPs foretold and measured."""

    case: str
    parameters: int
    phase: str
    memory: float
    measured_memory: float
    flops: float
    measured_flops: float

    @property
    def memory_error(self) -> float:
        return self.memory / self.measured_memory - 1

    @property
    def flops_error(self) -> float:
        return self.flops / self.measured_flops - 1 if self.measured_flops else self.flops

    @property
    def holds(self) -> bool:
        return abs(self.memory_error) <= MEMORY and abs(self.flops_error) <= FLOPS


def compare(case: Case) -> list[Compared]:
    """Rehearse a case and run it, in a process of its own."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.real_rank import measure
    from skyrl_thundersync.rehearse.accounting import DEVICE
    from skyrl_thundersync.rehearse.learner import Rank, rehearse_rank
    from skyrl_thundersync.rehearse.models import transformers_config

    known = Architecture(case.fields, case.name)
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(transformers_config(known)).float()
        parameters = sum(p.numel() for p in model.parameters())
        model.save_pretrained(folder)
        del model
        real = measure(Path(folder), case.learner, case.objective, case.workload)
    phases = rehearse_rank(Rank(known, case.learner, case.objective, 1, None), case.workload)
    return [
        Compared(
            case.name,
            parameters,
            name,
            phase.peak[DEVICE],
            real[name].peak,
            float(phase.flops),
            float(real[name].flops),
        )
        for name, phase in phases.items()
    ]


def rehearse(preset: str) -> list[dict[str, Any]]:
    """One preset on each of DEVICES."""
    from skyrl_thundersync.hosts.skyrl.compose import build_config
    from skyrl_thundersync.process.quiet import quiet_imports
    from skyrl_thundersync.rehearse.estimate import estimate, rehearsed

    with quiet_imports():
        cfg = build_config([f"+config={preset}", "thundersync.device=cuda"])
        phases = rehearsed(cfg, GPUS[DEVICES[0]], TOKENS)
        found = [estimate(cfg, GPUS[device], 1, TOKENS, phases) for device in DEVICES]
    return [{"preset": preset, "fits": not each.problems, **each.as_dict()} for each in found]


def presets_table(rows: list[dict[str, Any]]) -> Table:
    names = (
        "preset",
        "8 x",
        "fits",
        "device GiB",
        "of",
        "host GB",
        "with states",
        "copies, sums",
        "learner s",
        "suffix s",
        "MFU bound",
    )
    view = Table(*names, box=None)
    for r in rows:
        view.add_row(
            r["preset"],
            r["gpu"],
            "yes" if r["fits"] else "no",
            f"{r['device_peak'] / GIB:.0f}",
            f"{r['device_room'] / GIB:.0f}",
            f"{(r['host_node'] - r['host_states']) / 1e9:.0f}",
            f"{r['host_node'] / 1e9:.0f}",
            f"{r['accumulation']:.0%}",
            f"{r['learner_s']:.0f}",
            f"{r['suffix_s']:.0f}",
            "" if r["mfu"] is None else f"{r['mfu']:.1%}",
        )
    return view


def compared_table(rows: list[Compared]) -> Table:
    view = Table("model", "parameters", "phase", "memory MB", "measured", "off", "GFLOP", "measured", "off", box=None)
    for r in rows:
        memory = (f"{r.memory / 1e6:.1f}", f"{r.measured_memory / 1e6:.1f}", f"{r.memory_error:+.1%}")
        flops = (f"{r.flops / 1e9:.2f}", f"{r.measured_flops / 1e9:.2f}", f"{r.flops_error:+.1%}")
        view.add_row(r.case, f"{r.parameters / 1e6:.1f} M", r.phase, *memory, *flops)
    return view


def main(
    preset: Annotated[list[str] | None, typer.Option(help="One of them alone; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Print both tables; exit 1 when a preset does not fit or a rehearsal is further off than it may be."""
    console = Console(stderr=as_json, soft_wrap=True)
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        rows = [row for found in pool.map(rehearse, preset or PRESETS) for row in found]
    compared = [row for case in (*CASES, LARGEST) for row in compare(case)]
    console.print(presets_table(rows))
    for row in rows:
        for problem in row["problems"]:
            console.print(f"{row['preset']} on {row['gpu']}: {problem}", markup=False)
    console.print(compared_table(compared))
    if as_json:
        against = [vars(r) | {"memory_error": r.memory_error, "flops_error": r.flops_error} for r in compared]
        print(json.dumps({"tokens": TOKENS, "presets": rows, "cpu": against}))
    if any(row["problems"] for row in rows) or not all(row.holds for row in compared):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)

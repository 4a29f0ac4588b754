"""The day a GPU is there: does what runs on CUDA alone agree with what was proven without, and how fast is it.

    make gpu-check                      on one CUDA device, 8 minutes at most; exits 2, in words, where there is none
    python -m benchmarks.gpu_check --device cpu       the same code at a tiny size, to see that it works

Every figure is one line of JSON on standard output, {"name", "value", "unit", "bound", "holds"}; a bound of null is none.
Exits 1 when one is broken. Attention kernels against explicit matmuls in the head shapes of the presets, forward and
backward; moves of states through pinned memory on a stream of their own; one OPD update of a student of 0.5 B parameters
(random weights), its memory and time against the rehearsal's; the bits of what it publishes; tokens a second against Hugging
Face with activation checkpointing, and as a share of the matmul ceiling. The gradients of all families against the textbook's
are `python -m benchmarks.gpu_learner`'s.
It has not been run on a GPU yet.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks import plain_pass
from benchmarks.gpu_learner import attended, ceilings, synchronise
from benchmarks.rehearsal import SMALL
from skyrl_thundersync.engines.weight_bits import weight_bits
from skyrl_thundersync.learner.kernel_choice import BOUND, HALF, probe
from skyrl_thundersync.learner.kernels import KERNELS
from skyrl_thundersync.learner.rank import LearnerRank, RankSpec
from skyrl_thundersync.learner.state_budget import StreamMover
from skyrl_thundersync.learner.zero import free_port
from skyrl_thundersync.options.schema import LearnerConfig, OptimizerSettings
from skyrl_thundersync.rehearse.accounting import DEVICE
from skyrl_thundersync.rehearse.devices import GPUS, Gpu
from skyrl_thundersync.rehearse.learner import FINISH, Rank, rehearse_rank
from skyrl_thundersync.rehearse.models import Architecture, transformers_config
from skyrl_thundersync.rehearse.workload import Workload
from skyrl_thundersync.stream.sources import Append

HALF_BILLION = SMALL | {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 24,
    "tie_word_embeddings": True,
}
SHAPES = {"0.5 B": (14, 2, 64), "qwen3.8-27b": (24, 4, 256), "glm-4.7-flash": (20, 20, 256)}
"""(query heads, K/V heads, width) that attention meets."""
MEMORY = 0.10


@dataclass(frozen=True)
class Figure:
    """What was measured. holds: its bound, named in words, is kept; a bound of None is none."""

    name: str
    value: float
    unit: str
    bound: str | None = None
    holds: bool = True


@dataclass(frozen=True)
class Size:
    """How large the check is on a device: the student, its learner, one trajectory."""

    fields: dict
    learner: LearnerConfig
    workload: Workload

    @staticmethod
    def on(device: str) -> Size:
        if device == "cuda":
            learner = LearnerConfig(dtype="bfloat16", block_tokens=4096, retain_gib=4.0, graph_gib=4.0)
            return Size(HALF_BILLION, learner, Workload(16384))
        return Size(SMALL, LearnerConfig(dtype="float32", block_tokens=256, retain_gib=0.001), Workload(900, 200))


def kernels(device: str, dtype: torch.dtype) -> Iterator[Figure]:
    """Distance of the device's kernel from explicit matmuls, output and all gradients, over two segments."""
    name = "cuda_fused" if device == "cuda" else "cpu_fused"
    limit = BOUND if dtype in HALF else 1e-5
    for shape, sizes in SHAPES.items():
        far = probe(KERNELS[name], device, dtype, *sizes)
        yield Figure(f"{name} against explicit, {shape}", far, "relative", f"at most {limit}", far <= limit)


def moves() -> Iterator[Figure]:
    """States to pinned memory and back beside matmuls: the same bits, and bytes a second there and back."""
    device = torch.device("cuda", torch.cuda.current_device())
    mover, state = StreamMover(device), torch.randn(2**27, device=device)
    busy = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    kept = state.clone()
    synchronise("cuda")
    start = time.perf_counter()
    out = mover.out([state])
    for _ in range(50):
        busy = busy @ busy / 64
    back = mover.back(out)
    mover.join()
    synchronise("cuda")
    seconds = time.perf_counter() - start
    same = bool(torch.equal(back[0], kept)) and out[0].is_pinned()
    yield Figure("states after a move there and back", float(same), "same bits", "1", same)
    yield Figure("moves beside matmuls", 2 * state.nbytes / seconds, "bytes/s")


def update(folder: Path, size: Size, device: str, gpu: Gpu | None, matmul: float) -> Iterator[Figure]:
    """One trajectory's OPD update, twice: the first warms up. Its memory, time and publication."""
    spec = RankSpec(
        str(folder), 0, 1, "127.0.0.1", free_port(), size.learner, "opd", OptimizerSettings(lr=1e-4), device=device
    )
    rank = LearnerRank(spec)
    works = list(size.workload.works(rank.forest.objective))
    for again in range(2):
        if again and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        synchronise(device)
        start = time.perf_counter()
        for work in works:
            rank.run(work)
        synchronise(device)
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
        before = rank.stats().parameters
        step = rank.finish()
    moved = step.stepped and rank.stats().parameters != before
    yield Figure("OPD update took a step", float(moved), "parameters changed", "1", moved)
    scored = size.workload.scored
    yield Figure("scored tokens", step.n_scored, "tokens", f"{scored}", step.n_scored == scored)
    tokens = size.workload.tokens
    yield Figure("learner", tokens / seconds, "tokens/s")
    share = attended(rank.model, tokens) / seconds / matmul
    yield Figure("learner, of the matmul ceiling", share, "share", "at most 1", share <= 1)
    yield from publication(rank, folder.with_name("published"))
    if gpu is not None:
        phases = rehearse_rank(Rank(Architecture(size.fields, "here"), size.learner, "opd", 1, gpu), size.workload)
        most = max(phase.peak[DEVICE] for name, phase in phases.items() if name != FINISH)
        off = most / peak - 1
        yield Figure("rehearsed device memory", off, "of measured", f"within {MEMORY}", abs(off) <= MEMORY)
        least = sum(sum(p.bound_s(gpu).values()) for name, p in phases.items() if name != FINISH)
        yield Figure("rehearsed roofline time", least / seconds, "of measured", "at most 1", least <= seconds)
    rate = plain(folder, works, device, size.learner.dtype, tokens)
    yield Figure("Hugging Face with activation checkpointing", rate, "tokens/s")
    yield Figure("learner against it", tokens / seconds / rate, "times as fast")


def publication(rank: LearnerRank, folder: Path) -> Iterator[Figure]:
    """What lies in the published files, by its bits, against what the learner holds."""
    from safetensors.torch import load_file

    start = time.perf_counter()
    rank.save_weights(str(folder))
    seconds = time.perf_counter() - start
    written = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    dtype = getattr(torch, rank.spec.learner.dtype)
    # a tied head is one tensor in the files
    held = {name: t for name, t in rank.model.state_dict().items() if name in written}
    same = weight_bits(written.items(), dtype) == weight_bits(held.items(), dtype)
    yield Figure("published bits", float(same), "equal", "1", same)
    yield Figure("publication", sum(t.nbytes for t in written.values()) / seconds, "bytes/s")


def plain(folder: Path, works: list, device: str, dtype: str, tokens: int) -> float:
    """Tokens a second of the whole trajectory in one pass of Hugging Face's model, its layers checkpointed."""
    model = plain_pass.baseline_model(str(folder), "checkpointed", device, getattr(torch, dtype))
    turns = [work for work in works if isinstance(work, Append)]
    for _ in range(2):
        synchronise(device)
        start = time.perf_counter()
        plain_pass.monolithic(model, turns)
        synchronise(device)
        seconds = time.perf_counter() - start
    return tokens / seconds


def figures(device: str) -> Iterator[Figure]:
    """All of them, as they are measured."""
    from transformers import AutoModelForCausalLM

    size = Size.on(device)
    dtype = getattr(torch, size.learner.dtype)
    matmul, copied = ceilings(device, quick=device != "cuda")
    yield Figure("BF16 matmul", matmul, "FLOP/s")
    yield Figure("copy", copied, "bytes/s")
    yield from kernels(device, dtype)
    gpu = None
    if device == "cuda":
        yield from moves()
        name = torch.cuda.get_device_name()
        gpu = next((gpu for gpu in GPUS.values() if gpu.name in name), replace(GPUS["h200"], name=name))
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        torch.manual_seed(0)
        student = Path(folder, "student")
        model = AutoModelForCausalLM.from_config(transformers_config(Architecture(size.fields, "here")))
        model.to(dtype).save_pretrained(student)
        del model
        yield from update(student, size, device, gpu, matmul)


def main(device: Annotated[str, typer.Option(help='"cuda", or "cpu" for a tiny size.')] = "cuda") -> None:
    """Print a line a figure; exit 1 when a bound is broken, 2 without the device."""
    if device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: torch sees no CUDA device here; --device cpu runs the same code, tiny", file=sys.stderr)
        sys.exit(2)
    held, screen = True, sys.stdout
    with redirect_stdout(sys.stderr):  # libraries write there, too
        for figure in figures(device):
            print(json.dumps(asdict(figure)), file=screen, flush=True)
            held = held and figure.holds
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    typer.run(main)

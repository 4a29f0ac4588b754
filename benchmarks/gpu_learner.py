"""The learner on one CUDA device: exactness, then cost, in units of what the same run's matmuls and copies reach.

    python -m benchmarks.gpu_learner [--json]          about 8 minutes at most; exits 2 where there is no CUDA device
    python -m benchmarks.gpu_learner --device cpu --quick     the same script, small, to see that it works

Needs torch, transformers, peft and this package only. First the device's ceilings: a large BF16 matmul and a large copy.
Then benchmarks/exactness.py's table and dropped adjoint, with LoRA's adapter beside it. Then, on a Qwen3 shape, what each
release policy takes: seconds, tokens a second, share of the matmul ceiling (6 FLOPs a parameter and token, attention added),
peak device memory. A policy that would start too late for the time limit is left out and named. Exits 1 on a broken bound.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import learner, plain_pass
from benchmarks.exactness import MODELS, POLICIES, Row, bound, severed, show, table
from benchmarks.monolithic import batch, distance, gradient, save_model, settings, stock_model
from skyrl_thundersync.learner.rank import LearnerRank, RankSpec
from skyrl_thundersync.options.schema import LoraSettings
from skyrl_thundersync.stream.sources import CloseGroup, CloseTrajectory, TrajectoryId

LIMIT_S = 480.0
SHAPE = {
    **plain_pass.SHAPE,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 65536,
}
COSTS = {
    "trajectory": {"block_tokens": learner.WHOLE_TRAJECTORY, "retain_gib": 0.0},
    "fused": {"block_tokens": 2048, "retain_gib": 0.0},
    "retain": {"block_tokens": 2048, "retain_gib": 64.0},
}


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def best(run, device: str, repeats: int = 5) -> float:
    """Seconds of the fastest of `repeats` runs after one warm-up."""
    seconds = []
    for _ in range(repeats + 1):
        synchronise(device)
        start = time.perf_counter()
        run()
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def ceilings(device: str, quick: bool) -> tuple[float, float]:
    """(FLOP/s of a square BF16 matmul, bytes/s read and written by a copy) that this device reaches here."""
    n = 512 if quick else 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    flops = 2 * n**3 / best(lambda: a @ b, device)
    source = torch.empty(2 ** (22 if quick else 30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return flops, 2 * source.numel() / best(lambda: target.copy_(source), device)


def lora_row(folder: str, works: list, dtype: str, device: str) -> Row:
    """The adapter's gradient with rank 32 and alpha 64 on all linear layers, against PEFT on the stock model."""
    from peft import LoraConfig, get_peft_model

    adapter = LoraSettings(32, 64)
    spec = RankSpec(folder, 0, 1, "127.0.0.1", 0, settings(dtype=dtype, block_tokens=8), lora=adapter, device=device)
    rank = LearnerRank(spec)
    noise = torch.Generator().manual_seed(0)
    values = {
        n: torch.randn(p.shape, generator=noise) * 0.1 for n, p in rank.model.named_parameters() if p.requires_grad
    }

    def fill(model: torch.nn.Module) -> torch.nn.Module:
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in values:
                    p.copy_(values[name].to(rank.segments.body.dtype))
        return model

    def plain(held: str):
        config = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(stock_model(folder, dtype, held, device), config, autocast_adapter_dtype=False).eval()
        found = gradient(fill(model), works, "opd")
        return {name: g for name, g in found.items() if name in values}

    fill(rank.model)
    for work in works:
        rank.run(work)
    true = plain("float64")
    own = distance(plain(dtype), true)
    return Row("qwen3, LoRA", dtype, "fused", "opd", 1, distance(rank.gradient(), true), own, bound(dtype, own))


def attended(model: torch.nn.Module, tokens: int) -> float:
    """FLOPs of one forward and backward of `tokens` tokens: 6 a parameter and token, and causal attention's own."""
    config, parameters = model.config, sum(p.numel() for p in model.parameters())
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim * tokens**2 * 6
    return 6.0 * parameters * tokens + attention


def costs(device: str, quick: bool, until: float, console: Console) -> list[dict]:
    """Medians per policy of before close, tail and peak memory, on one trajectory."""
    turns, repeats = (4, 1) if quick else (96, 3)
    works, rows = plain_pass.trajectory(turns), []
    tokens = sum(len(w.source.context_ids) + len(w.source.action_ids) for w in works)
    with tempfile.TemporaryDirectory(prefix="gpu-learner-") as folder:
        torch.manual_seed(0)
        shape = plain_pass.SHAPE if quick else SHAPE
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **shape)).to(torch.bfloat16)
        flops = attended(made, tokens)
        made.save_pretrained(folder)
        del made
        for name in (*plain_pass.BASELINES, *COSTS):
            if time.perf_counter() > until:
                console.print(f"{name}: left out, the time limit is near")
                continue
            once = _once(folder, name, works, device)
            once()
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            runs = [once() for _ in range(repeats)]
            rows.append(
                {
                    "policy": name,
                    "total_s": statistics.median(sum(run) for run in runs),
                    "before_close_s": statistics.median(run[0] for run in runs),
                    "tail_s": statistics.median(run[1] for run in runs),
                    "tokens": tokens,
                    "flops": flops,
                    "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
                }
            )
            del once
            if device == "cuda":
                torch.cuda.empty_cache()
    return rows


def _once(folder: str, name: str, works: list, device: str):
    """A function that runs the trajectory once and returns (before close, tail) in seconds."""

    def clock() -> float:
        synchronise(device)
        return time.perf_counter()

    if name in plain_pass.BASELINES:
        model = plain_pass.baseline_model(folder, name, device, torch.bfloat16)

        def baseline() -> tuple[float, float]:
            start = clock()
            plain_pass.monolithic(model, works)
            seconds = clock() - start
            model.zero_grad()
            return 0.0, seconds

        return baseline
    options = learner.Options(**COSTS[name], dtype="bfloat16")
    rank = LearnerRank(RankSpec(folder, 0, 1, "127.0.0.1", 0, options, "opd", device=device))

    def streamed() -> tuple[float, float]:
        start = clock()
        for work in works:
            rank.run(work)
        closed = clock()
        rank.run(CloseTrajectory(TrajectoryId("g", 0), 1.0))
        rank.run(CloseGroup("g"))
        done = clock()
        rank.accumulator.clear()
        return closed - start, done - closed

    return streamed


def show_costs(rows: list[dict], flops_per_s: float, console: Console) -> None:
    unit = next(row["total_s"] for row in rows if row["policy"] == "monolithic")
    names = ("policy", "total", "before close", "tail", "s", "tokens/s", "of the matmul ceiling", "peak GiB")
    view = Table(*names, box=None)
    for r in rows:
        ratios = (f"{r[key] / unit:.2f}" for key in ("total_s", "before_close_s", "tail_s"))
        share = r["flops"] / r["total_s"] / flops_per_s
        speed = f"{r['tokens'] / r['total_s']:.0f}"
        view.add_row(
            r["policy"], *ratios, f"{r['total_s']:.3f}", speed, f"{share:.1%}", f"{r['peak_bytes'] / 2**30:.2f}"
        )
    console.print(view)


def main(
    device: Annotated[str, typer.Option(help='"cuda" or, to see that the script works, "cpu".')] = "cuda",
    quick: Annotated[bool, typer.Option(help="One model, a small shape.")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Print both tables; exit 1 when a bound of the first is broken, 2 without the device."""
    console, begin = Console(stderr=as_json), time.perf_counter()
    if device == "cuda" and not torch.cuda.is_available():
        print(
            "no CUDA device is visible to torch here; `--device cpu --quick` runs the script without one",
            file=sys.stderr,
        )
        sys.exit(2)
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    flops, copied = ceilings(device, quick)
    console.print(
        f"{where}: BF16 matmul {flops / 1e12:.2f} TFLOP/s, copy {copied / 1e12:.3f} TB/s, torch {torch.__version__}"
    )
    works = batch(seed=21, groups=2 if quick else 3, samples=2 if quick else 3)
    models = ("qwen3",) if quick else tuple(MODELS)
    policies = {"fused": POLICIES["fused"]} if quick else dict(POLICIES)
    policies["states moved"] = {**POLICIES["fused"], "state_gib": 0.0}  # all of them, to host memory and back
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="gpu-exactness-") as name:
        for row in table(models, policies, ("float64", "float32", "bfloat16"), (), device, Path(name), works):
            rows.append(row)
            if time.perf_counter() - begin > 0.6 * LIMIT_S:
                console.print(f"exactness stops after {row.model}, {row.dtype}, {row.policy}: the time limit")
                break
        folder = save_model(Path(name, "lora"), "qwen3")
        rows += [lora_row(folder, works, dtype, device) for dtype in ("float64", "float32")]
        show(rows, console)
        lost = severed(folder, works, device, 3 if quick else 10)
    console.print(f"one adjoint dropped: error at least {lost:.1e}" + ("" if lost > 1e-9 else ", NOT SEEN"))
    exact_s = time.perf_counter() - begin
    cost = costs(device, quick, begin + 0.85 * LIMIT_S, console)
    show_costs(cost, flops, console)
    broken = [row for row in rows if not row.holds]
    console.print(
        f"{len(rows)} rows, {len(broken)} broken; {exact_s:.0f} s and {time.perf_counter() - begin - exact_s:.0f} s"
    )
    if as_json:
        found = {"device": where, "matmul_flops": flops, "copy_bytes_per_s": copied, "severed": lost}
        print(json.dumps({**found, "rows": [asdict(row) for row in rows], "costs": cost}))
    if broken or lost <= 1e-9:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)

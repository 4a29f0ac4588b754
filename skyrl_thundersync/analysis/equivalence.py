"""Is the update the same? Recorded batches, replayed under the streamed and the synchronous schedule and by the textbook.

    python -m skyrl_thundersync.analysis.equivalence RUN_FOLDER

Prints, for every recorded batch, the relative error of the streamed whole-batch gradient (its ranks, its ready order as it
happened) against `reference.opd_gradient` in FP64 and FP32, then Δ_k of PAPER.md over the replayed updates:
Δ_k = ‖θ_k(streamed) − θ_k(sync)‖ / ‖θ_k(sync) − θ_0‖, and the same against plain torch AdamW. Exits 1 above a tolerance.
"""

from __future__ import annotations

import json
import socket
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from skyrl_thundersync.analysis.record import Batch, load_batches
from skyrl_thundersync.analysis.reference import opd_gradient, relative_error
from skyrl_thundersync.learner.precision import all_double
from skyrl_thundersync.stream.sources import CloseGroup, group_of

TOLERANCE = {"float64": 1e-12, "float32": 1e-6}
DELTA_TOLERANCE = 1e-4
WHOLE_TRAJECTORY = 2**31

_rank = None  # the learner rank of a worker process


@dataclass(frozen=True)
class Settings:
    """A rank's `thundersync.learner` options for a replay."""

    dtype: str
    zero_stage: int = 1
    offload_optimizer: bool = False
    block_tokens: int = 640
    retain_gib: float = 1.0
    accumulator: str = "fp32"
    threads: int = 1


@dataclass(frozen=True)
class Adam:
    """The optimizer of a replay."""

    lr: float
    adam_betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float


class Ranks:
    """Learner ranks in processes of their own, without Ray."""

    def __init__(self, model: str, world: int, settings: Settings, adam: Adam | None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._pools = [ProcessPoolExecutor(1, mp_context=get_context("spawn")) for _ in range(world)]
        for build in [p.submit(_build, model, i, world, port, settings, adam) for i, p in enumerate(self._pools)]:
            build.result()

    def gradient(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The batch's gradient ÷ N_k, summed over ranks; the ranks drop it afterwards."""
        parts = self._all(_gradient, batch)
        return {name: sum(part[name] for part in parts) / batch.n_scored for name in parts[0]}

    def update(self, batch: Batch) -> tuple[torch.Tensor, dict]:
        """Take the batch's optimizer step. Returns rank 0's parameters afterwards, flat FP64, and what finish reported."""
        return self._all(_update, batch)[0]

    def _all(self, function, batch: Batch) -> list:
        return [f.result() for f in [pool.submit(function, batch) for pool in self._pools]]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_error) -> None:
        for pool in self._pools:
            pool.shutdown()


def _build(model: str, rank: int, world: int, port: int, settings: Settings, adam: Adam | None) -> None:
    global _rank
    from skyrl_thundersync.learner.rank import LearnerRank, RankSpec
    from skyrl_thundersync.learner.zero import OptimizerSettings

    optimizer = OptimizerSettings(**vars(adam)) if adam else None
    _rank = LearnerRank(RankSpec(model, rank, world, "127.0.0.1", port, settings, "opd", optimizer))


def _run(batch: Batch) -> None:
    mine = [work for work, rank in zip(batch.work, batch.ranks, strict=True) if rank == _rank.spec.rank]
    for work in mine:
        _rank.run(work)


def _gradient(batch: Batch) -> dict[str, torch.Tensor]:
    _run(batch)
    gradient = _rank.gradient()
    _rank.abort_batch()
    return gradient


def _update(batch: Batch) -> tuple[torch.Tensor, dict]:
    _run(batch)
    finish = _rank.finish()
    return flat_parameters(_rank.model), finish


def flat_parameters(model: torch.nn.Module) -> torch.Tensor:
    """All parameters, one after another, as FP64 on the host."""
    return torch.cat([p.detach().double().flatten().cpu() for p in model.parameters()])


def synchronous(batch: Batch) -> Batch:
    """The same logical batch as batch-synchronous training works on it: group after group, in the groups' own order."""
    order = {group: i for i, group in enumerate(batch.groups)}
    items = sorted(zip(batch.work, batch.ranks, batch.seconds, strict=True), key=lambda item: order[group_of(item[0])])
    work, ranks, seconds = zip(*items, strict=True)
    return replace(batch, work=work, ranks=ranks, seconds=seconds)


def gradient_errors(model: str, batches: list[Batch], world: int) -> dict[str, list[float]]:
    """By dtype, the relative error of each batch's streamed gradient at θ_0 against the textbook's in the same dtype."""
    errors: dict[str, list[float]] = {}
    for dtype in TOLERANCE:
        reference = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        # Transformers runs norms and rotary angles in FP32 even for FP64 models; a check at 1e-12 must not.
        precision = all_double() if dtype == "float64" else nullcontext()
        with Ranks(model, world, Settings(dtype), None) as ranks, precision:
            errors[dtype] = [
                relative_error(ranks.gradient(batch), opd_gradient(reference, batch)[0]) for batch in batches
            ]
    return errors


def parameter_gaps(model: str, batches: list[Batch], world: int, adam: Adam) -> list[tuple[float, float]]:
    """Δ_k after each replayed update: streamed against sync, and streamed against textbook gradient + torch AdamW, FP32."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    start = flat_parameters(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=adam.lr, betas=adam.adam_betas, weight_decay=adam.weight_decay)
    streamed_settings = Settings("float32")
    sync_settings = replace(streamed_settings, block_tokens=WHOLE_TRAJECTORY)
    gaps = []
    with Ranks(model, world, streamed_settings, adam) as streamed, Ranks(model, world, sync_settings, adam) as sync:
        for batch in batches:
            ours, _ = streamed.update(batch)
            theirs, _ = sync.update(synchronous(batch))
            gradient, _, _ = opd_gradient(plain, batch)
            for name, parameter in plain.named_parameters():
                parameter.grad = gradient[name]
            torch.nn.utils.clip_grad_norm_(plain.parameters(), adam.max_grad_norm)
            optimizer.step()
            book = flat_parameters(plain)
            gaps.append(
                (
                    float((ours - theirs).norm() / (theirs - start).norm()),
                    float((ours - book).norm() / (book - start).norm()),
                )
            )
    return gaps


def report(run: Path, limit: int) -> dict:
    """Both checks over the first `limit` recorded batches of run folder `run`."""
    import yaml

    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    optimizer = config["trainer"]["policy"]["optimizer_config"]
    adam = Adam(optimizer["lr"], tuple(optimizer["adam_betas"]), optimizer["weight_decay"], optimizer["max_grad_norm"])
    model, world = config["trainer"]["policy"]["model"]["path"], config["thundersync"]["learner"]["ranks"]
    batches = [batch for batch in load_batches(run / "record") if batch.n_scored][:limit]
    return {
        "batches": [
            {"version": b.version, "n_scored": b.n_scored, "groups": sum(isinstance(w, CloseGroup) for w in b.work)}
            for b in batches
        ],
        "ranks": world,
        "relative_error": gradient_errors(model, batches, world),
        "delta": parameter_gaps(model, batches, world, adam),
    }


def main(
    run: Annotated[Path, typer.Argument(help="Run folder of a run with thundersync.record=true.")],
    limit: Annotated[int, typer.Option(help="How many recorded batches to replay.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Replay recorded batches and compare; exits 1 when an error is above its tolerance."""
    result = report(run, limit)
    if as_json:
        print(json.dumps(result))
    else:
        table = Table("batch", "N_k", "FP64 error", "FP32 error", "Δ_k to sync", "Δ_k to torch AdamW", box=None)
        for i, batch in enumerate(result["batches"]):
            errors = [f"{result['relative_error'][dtype][i]:.1e}" for dtype in TOLERANCE]
            table.add_row(
                str(batch["version"]), str(batch["n_scored"]), *errors, *(f"{d:.1e}" for d in result["delta"][i])
            )
        Console().print(table)
        print(f"gradient at θ_0, {result['ranks']} learner ranks, work in the order in which it became ready")
    bad = [d for d, errors in result["relative_error"].items() if max(errors) > TOLERANCE[d]]
    if bad or max(max(pair) for pair in result["delta"]) > DELTA_TOLERANCE:
        print(f"NOT the same update: over tolerance in {', '.join(bad) or 'Δ_k'}", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

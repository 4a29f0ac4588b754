"""Is the update the same? `skyrl verify RUN`: recorded batches, streamed, synchronous and by the textbook.

For every recorded batch: the rules of release; the streamed gradient (its ranks, its ready order as it happened) against
`reference.gradient` in FP64 and FP32; N_k and the gradient norm against what the run itself reported. Then, over the
replayed updates, Δ_k = ‖θ_k(streamed) − θ_k(sync)‖ / ‖θ_k(sync) − θ_0‖, the same against plain AdamW in FP64, both held to
what rounding alone can do, and the gap between the sampler's log-probs and θ_k's, which a stale replica cannot hide.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import torch

from skyrl_thundersync.learner.precision import all_double
from skyrl_thundersync.learner.rank import WHOLE_TRAJECTORY
from skyrl_thundersync.objectives.contract import Objective
from skyrl_thundersync.options.schema import OptimizerSettings
from skyrl_thundersync.stream.sources import CloseGroup
from skyrl_thundersync.telemetry.record import Batch, load_batches
from skyrl_thundersync.telemetry.rundata import read_metrics
from skyrl_thundersync.verify import planted as faults
from skyrl_thundersync.verify.diagnose import Finding, check_release, diagnose
from skyrl_thundersync.verify.reference import (
    Gradient,
    difference,
    dot,
    gradient,
    load_model,
    relative_error,
)
from skyrl_thundersync.verify.rerun import (
    STREAMED,
    SYNC,
    RecordedRun,
    Replayed,
    ReplayRank,
    Updaters,
    read_run,
    synchronous,
    threads,
)

TOLERANCE = {"float64": 1e-12, "float32": 1e-6}
ROUNDING = 4.0
"""In FP32 an error of so many times the textbook's own distance from its FP64 self is rounding, where that is more: both are
sums of many roundings, and another order of summing was seen to give twice as much."""
DELTA_TOLERANCE = 1e-4
"""Δ_k allowed at least: more is right where rounding alone gives more (`_pushed`)."""
PUSH = 4.0
"""An element's gradient is pushed towards zero, and through it, by so many times its FP32 textbook's error."""
NORM_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Relative gap allowed, at θ_0, between the run's own gradient norm and the textbook's, by the run's dtype."""


def report(run_folder: Path, limit: int = 10, kind: str | None = None) -> dict:
    """All checks over the first `limit` recorded batches of a run folder; what `skyrl verify --json` prints.

    Args:
        kind: plant this fault (faults.PLANTS) into the first batch's replay, and replay that one only.

    Raises:
        FileNotFoundError: no recorded batch, no configuration or no model.
        ValueError: a plant that the batch has no room for.
    """
    run = read_run(run_folder)
    batches = [batch for batch in load_batches(Path(run_folder) / "record") if batch.n_scored]
    batches = batches[: 1 if kind else limit]
    if not batches:
        raise FileNotFoundError(f"{run_folder}/record holds no batch with a scored token")
    plant = faults.plant(kind, batches[0], run.objective) if kind else None
    seen = [plant.record(batch) if plant else batch for batch in batches]
    findings = [finding for batch in seen for finding in check_release(batch)]
    result = {
        "run": str(run_folder),
        "objective": run.objective_name,
        "lora": run.lora is not None,
        "ranks": run.world,
        "plant": kind,
        "batches": [_describe(batch) for batch in batches],
        "relative_error": {},
        "delta": [],
    }
    if not findings:
        with threads(run.learner.threads):
            findings = _gradients(run, batches, seen, plant, result)
            if not findings and not plant:
                findings = _updates(run, batches, result)
                findings = _own_report(run, Path(run_folder), result) + findings
    result["findings"] = [asdict(finding) for finding in findings]
    return result


def _describe(batch: Batch) -> dict:
    groups = sum(isinstance(work, CloseGroup) for work in batch.work)
    return {"version": batch.version, "n_scored": batch.n_scored, "groups": groups}


def _gradients(run: RecordedRun, batches: list[Batch], seen: list[Batch], plant, result: dict) -> list[Finding]:
    """Streamed against textbook at θ_0 (with an adapter: at random adapter weights), FP64 and FP32."""
    findings: list[Finding] = []
    books, learners = {}, {}
    for dtype in TOLERANCE:
        books[dtype] = load_model(run.model, getattr(torch, dtype), run.lora, run.device)
        learners[dtype] = ReplayRank(run, dtype)
        if run.lora:
            books[dtype].load_state_dict(learners[dtype].adapter(), strict=False)
        result["relative_error"][dtype] = []
    for batch, replayed, row in zip(batches, seen, result["batches"], strict=True):
        found, exact, rounding = None, None, 0.0
        for dtype, tolerance in TOLERANCE.items():
            # Transformers runs norms and rotary angles in FP32 even for FP64 models; a check at 1e-12 must not.
            precision = all_double() if dtype == "float64" else nullcontext()
            ours = learners[dtype].replay(replayed, plant)
            with precision:
                theirs, n_scored = gradient(books[dtype], batch, run.objective)
            if exact is None:
                exact = theirs
            else:
                rounding = relative_error(theirs, exact)
            row[dtype] = _compare(ours, theirs, n_scored, run.objective.divides_by_tokens)
            row[dtype]["rounding"] = rounding
            result["relative_error"][dtype].append(row[dtype]["error"])
            right = row[dtype]["error"] <= max(tolerance, ROUNDING * rounding) and ours.n_scored == n_scored
            if not right and found is None:
                with precision:
                    found = diagnose(books[dtype], batch, run.objective, theirs, n_scored, ours)
        findings += [found] if found else []
    return findings


def _compare(ours: Replayed, theirs: Gradient, n_scored: int, divides: bool) -> dict:
    """Norms, relative error, and the parameter that is furthest off, of two normalised gradients."""
    over, by = (max(1, ours.n_scored), n_scored) if divides else (1, 1)
    book = {n: g.double().cpu() / by for n, g in theirs.items()}
    gap = difference({n: g.double().cpu() / over for n, g in ours.gradient.items()}, book)
    norm, size = dot(book, book) ** 0.5, dot(gap, gap)
    worst = max(gap, key=lambda name: float(gap[name].norm()))
    return {
        "error": size**0.5 / (norm or 1.0),
        "norm_streamed": dot(ours.gradient, ours.gradient) ** 0.5 / over,
        "norm_textbook": norm,
        "worst_parameter": worst,
        "worst_error": float(gap[worst].norm()) / (float(book[worst].norm()) or 1.0),
        "worst_share": float(gap[worst].norm()) ** 2 / (size or 1.0),
    }


def _own_report(run: RecordedRun, folder: Path, result: dict) -> list[Finding]:
    """N_k of every batch, and the norm at θ_0, against metrics.jsonl: the run did what its record says."""
    rows = read_metrics(folder)
    own = {row["thundersync/policy_version"]: row for row in rows if "thundersync/policy_version" in row}
    findings = []
    for row in result["batches"]:
        metrics = own.get(row["version"])
        if metrics is None:
            continue
        if metrics["thundersync/n_scored"] != row["n_scored"]:
            detail = (
                f"the run divided by {metrics['thundersync/n_scored']:.0f}, its record holds {row['n_scored']} tokens"
            )
            findings.append(Finding("wrong-n", row["version"], detail))
        if row["version"] == 0:
            norm, row["run_norm"] = row["textbook_norm"], metrics["policy/grad_norm"]
            if abs(row["run_norm"] - norm) > NORM_TOLERANCE[run.learner.dtype] * norm:
                detail = f"the run's gradient norm was {row['run_norm']:.6g}, the textbook's is {norm:.6g}"
                findings.append(Finding("unknown", 0, detail))
    return findings


class Plain:
    """torch's AdamW over some parameters, fed with normalised gradients. `trained`: by name."""

    def __init__(self, trained: dict[str, torch.nn.Parameter], adam: OptimizerSettings) -> None:
        self.trained, self._limit = trained, adam.max_grad_norm or float("inf")
        self._optimizer = torch.optim.AdamW(
            list(trained.values()), lr=adam.lr, betas=adam.adam_betas, weight_decay=adam.weight_decay
        )

    def step(self, gradient: Gradient, lr: float) -> float:
        """Clip and step; the norm before clipping."""
        for name, p in self.trained.items():
            p.grad = gradient[name]
        norm = float(torch.nn.utils.clip_grad_norm_(list(self.trained.values()), self._limit))
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()
        return norm

    def flat(self) -> torch.Tensor:
        """All parameters, one after another, as FP64 on the host."""
        return torch.cat([p.detach().double().flatten().cpu() for p in self.trained.values()])


def _pushed(exact: Gradient, single: Gradient) -> Gradient:
    """The FP64 gradient with each element moved towards zero, and through it, by PUSH times what FP32 does to it.

    That is its own error in the FP32 textbook's gradient `single`, or the root mean square of its tensor's if that is more.
    Adam's early steps are ±lr whatever an element's size: where the element is no larger than its rounding, rounding decides.
    An element that is exactly 0 (an unused row of the embedding, a fresh adapter's first matrix) stays so.
    """
    found = {}
    for name, g in exact.items():
        error = (single[name].double() - g).abs()
        level = error.square().sum() / max(1, int((g != 0).sum()))
        found[name] = g - g.sign() * PUSH * error.clamp(min=float(level.sqrt()))
    return found


def _updates(run: RecordedRun, batches: list[Batch], result: dict) -> list[Finding]:
    """Δ_k after each replayed update (FP32): streamed against sync, and against textbook gradients and AdamW in FP64.

    The limit is what rounding can do: the distance between AdamW on those gradients and AdamW on `_pushed` ones.
    """
    findings: list[Finding] = []
    book, exact = (load_model(run.model, dtype, run.lora, run.device) for dtype in (torch.float32, torch.float64))
    single, double = (Plain(_trained(model), run.adam) for model in (book, exact))
    with torch.no_grad():
        for name, p in double.trained.items():
            p.copy_(single.trained[name])
    start = double.flat()
    pushed = Plain({name: torch.nn.Parameter(p.detach().clone()) for name, p in double.trained.items()}, run.adam)
    settings = replace(run.learner, dtype="float32")
    sides = {STREAMED: settings, SYNC: replace(settings, block_tokens=WHOLE_TRAJECTORY)}
    with Updaters(run, sides) as updaters:
        for batch, row in zip(batches, result["batches"], strict=True):
            streamed = updaters.update(STREAMED, batch)
            sync = updaters.update(SYNC, synchronous(batch))
            lr, rounded = streamed.finish.lr, _normalised(book, batch, run.objective)
            with all_double():
                true = _normalised(exact, batch, run.objective)
            pushed.step(_pushed(true, rounded), lr)
            row["textbook_norm"] = single.step(rounded, lr)
            double.step(true, lr)
            moved = double.flat() - start
            to_sync = _ratio(streamed.parameters - sync.parameters, sync.parameters - start)
            to_book = _ratio(streamed.parameters - double.flat(), moved)
            result["delta"].append((to_sync, to_book))
            row["replayed_norm"] = streamed.finish.grad_norm
            row["delta_single"] = _ratio(single.flat() - double.flat(), moved)
            row["delta_limit"] = max(DELTA_TOLERANCE, _ratio(pushed.flat() - double.flat(), moved))
            if max(to_sync, to_book) > row["delta_limit"]:
                explained = f"rounding explains at most {row['delta_limit']:.1e}"
                detail = f"Δ_k {to_sync:.1e} to sync, {to_book:.1e} to AdamW; {explained}"
                findings.append(Finding("unknown", batch.version, detail))
            # Only a replay from version 0 on is at the run's own θ_k.
            if batches[0].version == 0:
                row["sampler_gap"] = max(streamed.gaps.values(), default=0.0)
                findings += check_gaps(batch.version, streamed.gaps, run.gap_tolerance)
    return findings


def _trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _normalised(model: torch.nn.Module, batch: Batch, objective: Objective) -> Gradient:
    found, n_scored = gradient(model, batch, objective)
    return {name: g / (n_scored if objective.divides_by_tokens else 1) for name, g in found.items()}


def check_gaps(version: int, gaps: dict, tolerance: float) -> list[Finding]:
    """Trajectories whose sampler log-probs are not those of the weights: mean |gap| (nats) over `tolerance`."""
    far = {trajectory: gap for trajectory, gap in gaps.items() if not gap <= tolerance}
    if not far:
        return []
    worst = max(far, key=far.__getitem__)
    return [
        Finding(
            "stale-version",
            version,
            f"{len(far)} of {len(gaps)} trajectories were sampled by other weights than this version's; the log-probs of "
            f"{worst} differ by {far[worst]:.2g} nats on average (allowed {tolerance:g})",
        )
    ]


def _ratio(gap: torch.Tensor, moved: torch.Tensor) -> float:
    return float(gap.norm() / moved.norm()) if float(moved.norm()) else float(gap.norm())

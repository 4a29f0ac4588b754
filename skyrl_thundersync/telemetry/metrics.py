"""The figures of one update, by the names that reach the tracker, metrics.jsonl and the progress line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from skyrl_thundersync.process.memory import peak_bytes
from skyrl_thundersync.telemetry.flops import Cost, active_mfu
from skyrl_thundersync.theory import lag, measured_release

if TYPE_CHECKING:
    from skyrl_thundersync.learner.answers import Finish
    from skyrl_thundersync.teacher.client import TeacherCounts
    from skyrl_thundersync.trainer import Update

GIB = 2**30


def update_metrics(
    update: Update, finish: Finish, finish_s: float, teacher: TeacherCounts | None, cost: Cost | None = None
) -> dict[str, float]:
    """Metrics of a finished update; seconds unless the name says otherwise.

    Args:
        update: after `Update.run`.
        finish: the step that it took.
        finish_s: wall time of the finish: reduction, clip, step and all-gather.
        teacher: what the teacher did for this update; None without one.
        cost: FLOPs of the student; None where no formula is known.
    """
    done, step = update.acknowledged, finish.step
    n = max(1, step.n_scored)
    metrics = {
        "thundersync/policy_version": update.ledger.version,
        "thundersync/n_scored": step.n_scored,
        "thundersync/n_tokens": update.ledger.n_tokens,
        "thundersync/n_sources": update.ledger.n_sources,
        "thundersync/work_items": len(done),
        "thundersync/work_before_rollouts_ended": update.done_before_rollouts_ended,
        "thundersync/stepped": float(step.stepped),
        "policy/entropy": update.ledger.entropy,
        "policy/grad_norm": step.grad_norm,
        "policy/clipped": float(step.clipped),
        "policy/lr": step.lr,
        "logprob_gap/mean": sum(d.sum_logp_gap for d in done) / n,
        "logprob_gap/max": max((d.max_logp_gap for d in done), default=0.0),
        "timing/rollout": update.clock.rollout_s,
        "timing/tail": update.clock.tail_s,
        "timing/finish": finish_s,
        "timing/learner_busy": sum(update.busy_s),
        "timing/learner_cpu": sum(d.cpu_seconds for d in done),
        "memory/learner_host_peak_gib": finish.host_peak_bytes / GIB,
        "memory/learner_device_peak_gib": finish.device_peak_bytes / GIB,
        "memory/driver_host_peak_gib": peak_bytes() / GIB,
        "memory/learner_state_peak_gib": max((d.held_bytes for d in done), default=0) / GIB,
        "thundersync/state_moved_gib": sum(d.moved_bytes for d in done) / GIB,
        "thundersync/groups_waited": len(update.admission_waits),
        "timing/admission_wait": sum(update.admission_waits),
        "memory/learner_page_faults": sum(d.page_faults for d in done),
        **_by_kind(update),
        **_release(update),
    }
    counts = sum((Counter(dict(d.gap_counts)) for d in done), Counter())
    if counts:
        metrics["logprob_gap/p99"] = gap_percentile(counts, 0.99)
    if cost is not None:
        metrics["thundersync/train_flops"] = cost.train_flops(update.ledger.shapes, step.n_scored)
    if teacher is not None:
        metrics["opd/reverse_kl"] = sum(d.sum_kl for d in done) / n
        metrics["opd/teacher_wait"] = teacher.wait_s
        metrics["opd/teacher_retries"] = teacher.retries
        metrics["opd/teacher_tokens_ratio"] = teacher.tokens_ratio
    return metrics


def _by_kind(update: Update) -> dict[str, float]:
    """Learner seconds by kind of work, over ranks; they add up to `timing/learner_busy`."""
    seconds = dict.fromkeys(("timing/learner_append", "timing/learner_sweep", "timing/learner_prompt"), 0.0)
    for span, done in zip(update.spans, update.acknowledged, strict=True):
        own = "timing/learner_append" if span.kind == "append" else "timing/learner_sweep"
        seconds[own] += done.seconds - done.prompt_seconds
        seconds["timing/learner_prompt"] += done.prompt_seconds
    return seconds


def _release(update: Update) -> dict[str, float]:
    """λ, ρ and D of PAPER.md ("Theory") as measured, L being the mean rank's busy time; and how long ready work waited."""
    rollout = update.clock.rollout_s
    found = {
        "theory/lambda": update.clock.tail_s / rollout,
        "theory/rho": sum(update.busy_s) / len(update.busy_s) / rollout,
    }
    service = [span.seconds for span in update.spans]
    if sum(service) > 0:
        released = [max(0.0, span.released - update.clock.started) for span in update.spans]
        found["theory/lag"] = lag(measured_release(released, service, rollout))
        p50, p90, p99, most = np.percentile([span.waited for span in update.spans], (50, 90, 99, 100)).tolist()
        found |= {"queue_wait/p50": p50, "queue_wait/p90": p90, "queue_wait/p99": p99, "queue_wait/max": most}
    return found


def gap_percentile(counts: Counter[int], share: float) -> float:
    """Upper edge (nats) of the bin of `WorkDone.gap_counts` where the sorted gaps reach `share` of all: at most 9% above."""
    left = share * counts.total()
    for bin_, count in sorted(counts.items()):
        left -= count
        if left <= 0:
            return 2 ** ((bin_ + 1) / 8)
    raise ValueError("no gap was counted")


def step_metrics(
    metrics: dict[str, float], publish_s: float, step: float, ranks: int, peak_flops: float | None = None
) -> dict[str, float]:
    """What is only known after the publish: suffix P_k, κ, the whole step T_k and what the learners made of it.

    `timing/host` is what of T_k lies in no phase: the batch prepared and put away, checkpoints and models written.

    Args:
        metrics: the update's, from `update_metrics`.
        step: T_k, wall clock from the host's start of the step to the publication's last acknowledgement, seconds.
        ranks: learner ranks.
        peak_flops: dense BF16 peak of a learner's device; None without GPUs or for unknown ones: then there is no MFU.
    """
    suffix = metrics["timing/finish"] + publish_s
    busy = metrics["timing/learner_busy"] / (step * ranks)
    found = {
        "timing/publish": publish_s,
        "timing/suffix": suffix,
        "timing/update": step,
        "timing/host": step - metrics["timing/rollout"] - metrics["timing/tail"] - suffix,
        "theory/kappa": suffix / metrics["timing/rollout"],
        "thundersync/learner_busy_share": busy,
        "thundersync/learner_idle_share": 1 - busy,
    }
    if "thundersync/train_flops" in metrics:
        found["thundersync/train_tflops_per_rank"] = metrics["thundersync/train_flops"] / (step * ranks) / 1e12
        if peak_flops is not None:
            found["thundersync/active_mfu"] = active_mfu(metrics["thundersync/train_flops"], step, [peak_flops] * ranks)
    return found


class MetricsFile:
    """One JSON object a line, flushed as it is written, so that a killed run keeps what it had."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, step: int, metrics: dict) -> None:
        self._file.write(json.dumps({"step": step, **metrics}, default=float) + "\n")

    def close(self) -> None:
        self._file.close()

"""The figures of one update, by the names that reach the tracker, metrics.jsonl and the progress line."""

from __future__ import annotations

import json
from pathlib import Path

from skyrl_thundersync.teacher.client import TeacherCounts
from skyrl_thundersync.trainer import Update


def update_metrics(update: Update, finish: dict, finish_s: float, teacher: TeacherCounts | None) -> dict[str, float]:
    """Metrics of a finished update; seconds unless the name says otherwise.

    Args:
        update: after `Update.run`.
        finish: what the learner's finish reported (n_scored, grad_norm, clipped, lr, stepped).
        finish_s: wall time of the finish: reduction, clip, step and all-gather.
        teacher: what the teacher did for this update; None without one.
    """
    done = update.acknowledged
    n = max(1, finish["n_scored"])
    metrics = {
        "thundersync/policy_version": update.ledger.version,
        "thundersync/n_scored": finish["n_scored"],
        "thundersync/n_tokens": update.ledger.n_tokens,
        "thundersync/n_sources": update.ledger.n_sources,
        "thundersync/work_items": len(done),
        "thundersync/work_before_rollouts_ended": update.done_before_rollouts_ended,
        "thundersync/stepped": float(finish["stepped"]),
        "policy/grad_norm": finish["grad_norm"],
        "policy/clipped": float(finish["clipped"]),
        "policy/lr": finish["lr"],
        "logprob_gap/mean": sum(d.sum_logp_gap for d in done) / n,
        "logprob_gap/max": max((d.max_logp_gap for d in done), default=0.0),
        "timing/rollout": update.clock.rollout_s,
        "timing/tail": update.clock.tail_s,
        "timing/finish": finish_s,
        "timing/learner_busy": sum(update.busy_s),
    }
    if teacher is not None:
        metrics["opd/reverse_kl"] = sum(d.sum_kl for d in done) / n
        metrics["opd/teacher_wait"] = teacher.wait_s
        metrics["opd/teacher_retries"] = teacher.retries
        metrics["opd/teacher_tokens_ratio"] = teacher.tokens_ratio
    return metrics


def step_metrics(metrics: dict[str, float], publish_s: float, ranks: int) -> dict[str, float]:
    """What is only known after the publish: suffix P_k, the whole step T_k and the share of it the learners worked."""
    suffix = metrics["timing/finish"] + publish_s
    step = metrics["timing/rollout"] + metrics["timing/tail"] + suffix
    return {
        "timing/publish": publish_s,
        "timing/suffix": suffix,
        "timing/update": step,
        "thundersync/learner_busy_share": metrics["timing/learner_busy"] / (step * ranks),
    }


class MetricsFile:
    """One JSON object a line, flushed as it is written, so that a killed run keeps what it had."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, step: int, metrics: dict) -> None:
        self._file.write(json.dumps({"step": step, **metrics}, default=float) + "\n")

    def close(self) -> None:
        self._file.close()

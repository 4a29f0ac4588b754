"""Whether the step times of two runs may be divided: only where both do the same updates, each in its own way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_thundersync.telemetry.rundata import RunData

SAME_WORK = {
    "objective": (
        "thundersync.objective",
        "thundersync.objective_options",
        "thundersync.grpo.law",
        "thundersync.grpo.epsilon",
    ),
    "model": (
        "trainer.policy.model.path",
        "trainer.policy.model.lora",
        "thundersync.learner.dtype",
        "generator.inference_engine.model_dtype",
    ),
    "teacher": ("thundersync.teacher.model", "thundersync.teacher.dtype"),
    "tasks": ("data.train_data", "environment.env_class"),
    "batch": ("trainer.train_batch_size", "generator.n_samples_per_prompt"),
    "lengths": (
        "trainer.max_prompt_length",
        "generator.max_turns",
        "generator.max_input_length",
        "generator.sampling_params",
    ),
    "tools": (
        "thundersync.sandbox.latency_s",
        "thundersync.sandbox.command_timeout_s",
        "thundersync.sandbox.output_limit_bytes",
    ),
    "outcomes": ("thundersync.outcomes",),
    "optimizer": ("trainer.policy.optimizer_config",),
    "seed": ("trainer.seed",),
}
"""What decides what an update computes. Where it differs, a ratio of step times says nothing about the schedule."""

OTHER_MEANS = (
    "thundersync.device",
    "thundersync.learner",
    "thundersync.teacher",
    "thundersync.sandbox",
    "trainer.placement",
    "generator.inference_engine",
)
"""What the same work is done with: a ratio is then of this too, not of the schedule alone."""


def incomparable(baseline: RunData, run: RunData) -> list[str]:
    """Why a speed-up of `run` over `baseline` means nothing, one reason each; empty where it means something."""
    reasons = [
        f"{kind}: {found}"
        for kind, options in SAME_WORK.items()
        for option in options
        for found in _differences(option, option_of(baseline.config, option), option_of(run.config, option))
    ]
    versions = {row["thundersync/policy_version"] for row in baseline.counted}
    if not versions & {row["thundersync/policy_version"] for row in run.counted}:
        reasons.append("updates: they have none of the same policy version in common")
    return reasons


def other_means(baseline: RunData, run: RunData) -> list[str]:
    """What beside the schedule differs between two runs that do the same work."""
    work = [option for options in SAME_WORK.values() for option in options]
    return [
        found
        for option in OTHER_MEANS
        for found in _differences(option, option_of(baseline.config, option), option_of(run.config, option))
        if not found.startswith(tuple(f"{one} " for one in work))
    ]


def option_of(config: Mapping[str, Any], option: str) -> Any:
    """The value of a dotted option; None where the configuration has none."""
    node: Any = config
    for name in option.split("."):
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _differences(option: str, one: Any, other: Any) -> list[str]:
    if one == other:
        return []
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        names = [*one, *(name for name in other if name not in one)]
        return [found for name in names for found in _differences(f"{option}.{name}", one.get(name), other.get(name))]
    return [f"{option} is {one!r} there, {other!r} here"]

"""Configurations that cannot run, refused at start-up: rules.py by option, inputs.py by what they name on disk.

Every problem of a configuration is reported at once, before any model loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.host_defaults import apply_host_defaults
from skyrl_thundersync.options import CHOICES
from skyrl_thundersync.plugins import nearest
from skyrl_thundersync.presets import build_config
from skyrl_thundersync.rules import RULES, get

if TYPE_CHECKING:
    from skyrl_thundersync.config import TrainConfig


def option_problems(cfg: TrainConfig) -> list[str]:
    """One message per option that cannot be honoured; empty when there is none. Reads no file and loads no model."""
    found = []
    for option, allowed in CHOICES.items():
        value = get(cfg, option)
        if value is not None and value not in allowed:
            found.append(
                f"{option}={value!r}: must be one of {', '.join(allowed)}. {nearest(str(value), list(allowed))}"
            )
    for rule in RULES:
        value = get(cfg, rule.option)
        if not rule.holds(value, cfg):
            found.append(f"{rule.option}={value!r} is refused: {rule.why}. {rule.advice}.")
    return found


def checked_config(args: Sequence[str]) -> TrainConfig:
    """The complete configuration of a run from its arguments (as `presets.build_config`'s), with every rule checked.

    Raises:
        ConfigError: what the user has to put right.
    """
    cfg = build_config(args)
    apply_host_defaults(cfg)
    validate(cfg)
    return cfg


def validate(cfg: TrainConfig) -> None:
    """Refuse a configuration that cannot run: its options, then the models, tasks and limits that it names.

    Raises:
        ConfigError: with every problem found, one a line.
    """
    from skyrl_thundersync.hosts.checkpoint import resume_problems
    from skyrl_thundersync.inputs import input_problems

    problems = option_problems(cfg) or input_problems(cfg) or resume_problems(cfg)
    if problems:
        raise ConfigError("\n".join(problems))
    skyrl_agrees(cfg)


def skyrl_agrees(cfg: TrainConfig) -> None:
    """Ask SkyRL's own validation too, as its entry points do. It imports torch and Ray."""
    from skyrl.train.utils import validate_cfg

    try:
        validate_cfg(cfg)
    except (AssertionError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"SkyRL's own validation refuses this configuration: {error or type(error).__name__}"
        ) from error

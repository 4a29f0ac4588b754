"""The options of a run against the plugin's rules (rules.py) and SkyRL's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.hosts.skyrl.rules import RULES, get
from skyrl_thundersync.objectives.registry import of
from skyrl_thundersync.options.choices import CHOICES
from skyrl_thundersync.options.registry import nearest
from skyrl_thundersync.options.types import not_a_choice

if TYPE_CHECKING:
    from skyrl_thundersync.hosts.skyrl.config import TrainConfig


def option_problems(cfg: TrainConfig) -> list[str]:
    """One message per option that cannot be honoured; empty when there is none. Reads no file and loads no model."""
    found = []
    for option, allowed in CHOICES.items():
        if (wrong := not_a_choice(value := get(cfg, option), allowed)) is not None:
            found.append(f"{option}={value!r}: must be one of {', '.join(allowed)}. {nearest(wrong, list(allowed))}")
    try:
        of(cfg.thundersync)
    except ConfigError as error:  # what depends on it cannot be said
        return [*found, str(error)]
    for rule in RULES:
        value = get(cfg, rule.option)
        if not rule.holds(value, cfg):
            found.append(f"{rule.option}={value!r} is refused: {rule.why}. {rule.advice}.")
    return found


def skyrl_problems(cfg: TrainConfig) -> list[str]:
    """What SkyRL's own validation refuses, which its entry points ask too. It imports torch and Ray."""
    from skyrl.train.utils import validate_cfg

    loggers, cfg.trainer.logger = cfg.trainer.logger, "console"  # it asks wandb's key of runs that need none
    try:
        validate_cfg(cfg)
    except (AssertionError, ValueError, NotImplementedError) as error:
        return [f"SkyRL's own validation refuses this configuration: {error or type(error).__name__}"]
    finally:
        cfg.trainer.logger = loggers
    return []

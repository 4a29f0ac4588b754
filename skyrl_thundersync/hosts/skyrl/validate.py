"""A run's configuration from its arguments: read, completed for this machine, and refused where it cannot run.

What is checked is one list, in checks.py; the options' part of it, rules.py and SkyRL's own, is asked here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from skyrl_thundersync.hosts.skyrl.defaults import apply_host_defaults
from skyrl_thundersync.hosts.skyrl.rules import RULES, get
from skyrl_thundersync.options.choices import CHOICES
from skyrl_thundersync.options.presets import build_config
from skyrl_thundersync.options.registry import nearest
from skyrl_thundersync.options.types import not_a_choice
from skyrl_thundersync.process.quiet import quiet_imports

if TYPE_CHECKING:
    from skyrl_thundersync.hosts.skyrl.config import TrainConfig


def option_problems(cfg: TrainConfig) -> list[str]:
    """One message per option that cannot be honoured; empty when there is none. Reads no file and loads no model."""
    found = []
    for option, allowed in CHOICES.items():
        if (wrong := not_a_choice(value := get(cfg, option), allowed)) is not None:
            found.append(f"{option}={value!r}: must be one of {', '.join(allowed)}. {nearest(wrong, list(allowed))}")
    for rule in RULES:
        value = get(cfg, rule.option)
        if not rule.holds(value, cfg):
            found.append(f"{rule.option}={value!r} is refused: {rule.why}. {rule.advice}.")
    return found


@lru_cache(maxsize=1)
def checked_config(*arguments: str) -> TrainConfig:
    """The complete configuration of a run from its arguments (as `presets.build_config`'s), with everything checked.

    The same arguments are checked once in a process: the command refuses before it loads SkyRL, and the entry point, which
    SkyRL calls, asks again.

    Raises:
        ConfigError: what the user has to put right.
    """
    from skyrl_thundersync.hosts.skyrl.checks import require_fit

    with quiet_imports():
        cfg = build_config(arguments)
        apply_host_defaults(cfg)
        require_fit(cfg)
    return cfg


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

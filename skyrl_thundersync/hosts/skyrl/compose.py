"""A run's typed configuration from a plugin's defaults, a preset and the command line, as SkyRL builds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.hosts.skyrl.defaults import HOST_DEFAULTS
from skyrl_thundersync.hosts.skyrl.paths import placed
from skyrl_thundersync.objectives import registry as objectives
from skyrl_thundersync.options.choices import CHOICES
from skyrl_thundersync.options.presets import Override, own_presets, resolve, split_arguments
from skyrl_thundersync.options.schema import ThunderSyncConfig

if TYPE_CHECKING:
    from skyrl_thundersync.hosts.skyrl.config import TrainConfig


def build_config(args: Sequence[str]) -> TrainConfig:
    """The typed configuration of a run of this plugin.

    Args:
        args: `[+config=GROUP/NAME] key=value …`, as after `trainer.override_entrypoint` was taken out.

    Returns:
        A `TrainConfig` with presets merged, quickstart placeholders replaced by prepared files and `~` expanded. Still to
        do: `defaults.apply_host_defaults` and `checks.require_fit`.

    Raises:
        ConfigError: an unknown or ill-typed option, with its origin; a rule of SkyRL's own configuration classes.
    """
    from skyrl_thundersync.hosts.skyrl.config import TrainConfig

    selectors, _ = split_arguments(args)
    if selectors.get("plugin", "thundersync") != "thundersync":
        raise ConfigError(f"+plugin={selectors['plugin']}: this is the entry point of the plugin thundersync")
    merged = resolve(args, TrainConfig, own_presets(), HOST_DEFAULTS, CHOICES)
    _check_objective(merged)
    values = placed(merged)
    # One optimizer step per logical batch: SkyRL's mini batch is the whole batch unless somebody says otherwise.
    values.setdefault("trainer.policy_mini_batch_size", values.get("trainer.train_batch_size", 1024))
    values.setdefault("trainer.critic_mini_batch_size", values["trainer.policy_mini_batch_size"])
    try:
        cfg = TrainConfig.from_cli_overrides(values)
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(f"SkyRL refuses this configuration: {error}") from error
    if "environment.skyrl_gym.max_env_workers" not in values:
        cfg.environment.skyrl_gym.max_env_workers = _tool_threads(cfg)
    return cfg


def _tool_threads(cfg: TrainConfig) -> int:
    """A thread for each environment that is open at once, so that no tool call waits for another: they mostly wait."""
    training = cfg.trainer.train_batch_size * cfg.generator.n_samples_per_prompt
    evaluation = cfg.trainer.eval_batch_size * cfg.generator.eval_n_samples_per_prompt
    return max(training, evaluation if cfg.trainer.eval_interval > 0 else 0)


def _check_objective(merged: Mapping[str, Override]) -> None:
    """Its class is there, and has the options that it is given. Raises ConfigError."""
    named = merged.get("thundersync.objective")
    given = merged.get(objectives.OPTIONS)
    name = ThunderSyncConfig.objective if named is None else named.value
    objectives.check_options(name, given.value if given else {}, given.origin if given else "")

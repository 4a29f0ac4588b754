"""Environments by the name that rows and `environment.env_class` give: one that SkyRL-Gym knows, or `module:Class`."""

from __future__ import annotations

import skyrl_gym
from skyrl_gym.envs.registration import registry

from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.options.registry import MODULE_CLASS, load_class, nearest

TERMINAL = "terminal"


def require(name: str) -> None:
    """Make sure that SkyRL-Gym can make the environment: a class of one's own is registered under the name that names it.

    Raises:
        ConfigError: there is none of that name, or the class cannot be had or is no environment.
    """
    if name in registry or name == TERMINAL:  # which is registered with its sandboxes
        return
    if ":" not in name:
        raise ConfigError(
            f"{name!r} is not registered with skyrl_gym, nor a {MODULE_CLASS}. {nearest(name, sorted({*registry, TERMINAL}))}"
        )
    found = load_class(name, repr(name))
    if not (isinstance(found, type) and issubclass(found, skyrl_gym.Env)):
        raise ConfigError(
            f"{name!r}: {found!r} is no environment. Derive it from skyrl_gym.envs.base_text_env.BaseTextEnv."
        )
    skyrl_gym.register(id=name, entry_point=name)  # SkyRL asks the class that a text names for its metrics

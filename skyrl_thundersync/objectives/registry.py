"""Objectives by name: our own, those that installed packages offer, and `module:Class` of a user's.

A package offers one in its metadata:

    [options.entry_points]
    skyrl_thundersync.objectives =
        mine = my_package.mine:Mine
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.objectives.contract import Objective
from skyrl_thundersync.options.presets import flatten
from skyrl_thundersync.options.registry import MODULE_CLASS, load_class, nearest, offered
from skyrl_thundersync.options.schema import OBJECTIVE_POINTS, OBJECTIVES
from skyrl_thundersync.options.types import fields

if TYPE_CHECKING:
    from skyrl_thundersync.options.schema import ThunderSyncConfig

OPTIONS = "thundersync.objective_options"
OF_THE_GROUP = ("law", "epsilon")
"""Fields that `thundersync.grpo` sets, whatever the objective."""


def find(name: str) -> type[Objective]:
    """The class of an objective.

    Raises:
        ConfigError: there is none of that name, it cannot be imported, or it is no objective.
    """
    points = offered(OBJECTIVE_POINTS)
    if ":" not in name and name not in OBJECTIVES and name not in points:
        known = (*OBJECTIVES, *points)
        raise ConfigError(
            f"unknown objective {name!r}; known are {', '.join(known)}, and any {MODULE_CLASS}. {nearest(name, list(known))}"
        )
    found = load_class(OBJECTIVES.get(name) or points.get(name) or name, f"thundersync.objective={name}")
    if not (isinstance(found, type) and issubclass(found, Objective) and dataclasses.is_dataclass(found)):
        raise ConfigError(
            f"thundersync.objective={name}: {found!r} is no objective. Derive a dataclass from "
            f"{Objective.__module__}.{Objective.__name__}."
        )
    return found


def build(name: str, settings: Mapping[str, Any] | None = None) -> Objective:
    """An objective with the values of its fields. Raises ConfigError as `find`, and for values that it refuses."""
    try:
        return find(name)(**(settings or {}))
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"thundersync.objective={name} refuses its options: {error}") from error


def settings(name: str, grpo: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Values of an objective's fields, from the blocks `thundersync.grpo` and `thundersync.objective_options`."""
    has = fields(find(name))
    return {key: grpo[key] for key in OF_THE_GROUP if key in has and key in grpo} | dict(own)


def of(ts: ThunderSyncConfig) -> Objective:
    """The objective of a run's `thundersync` block."""
    return build(ts.objective, settings(ts.objective, vars(ts.grpo), ts.objective_options))


def check_options(name: str, own: Mapping[str, Any], origin: str) -> None:
    """Refuse options that the objective does not have, or of another type, with the nearest right name.

    Raises:
        ConfigError: what is wrong, and where it came from.
    """
    cls = find(name)
    if wrong := [key for key in OF_THE_GROUP if key in own and key in fields(cls)]:
        raise ConfigError(
            f"{OPTIONS}.{wrong[0]} ({origin}) is the group's. Did you mean 'thundersync.grpo.{wrong[0]}'?"
        )
    flatten(own, cls, origin, {}, f"{OPTIONS}.")
    build(name, own)

"""Does a value fit the type of an option? Said in words that a person can act on."""

from __future__ import annotations

import dataclasses
import json
import shlex
import types
import typing
from collections.abc import Mapping
from typing import Any

MODULE_CLASS = "module:Class"
"""How a class of one's own is named."""
_LISTS_TYPED_AS_STR = (".lora.target_modules", ".lora.exclude_modules", "trainer.logger")
"""Where SkyRL's type says text: lists that SkyRL takes, and the loggers, of which this plugin takes several."""


def fields(cls: type) -> dict[str, Any]:
    """The types of a configuration dataclass's fields, by name."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def members(kind: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the type itself."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return typing.get_args(kind)
    return (kind,)


def dataclass_in(kind: Any) -> type | None:
    """The block of options that a field of this type holds, if it does."""
    return next((member for member in members(kind) if dataclasses.is_dataclass(member)), None)


def optional_blocks(kind: Any) -> tuple[Any, ...]:
    """The alternatives of a type that may also be null; none for others."""
    return members(kind) if type(None) in members(kind) else ()


def type_problem(key: str, kind: Any, value: Any) -> str | None:
    """Why `value` does not fit a field's type, or None when it does."""
    if key.endswith(_LISTS_TYPED_AS_STR) and isinstance(value, list):
        return None
    if any(_fits(member, value) for member in members(kind)):
        return None
    hint = ""
    if any(typing.get_origin(member) is list for member in members(kind)) and isinstance(value, str):
        hint = f" Write a list: {key}=[{value}]"
    elif str in members(kind) and not isinstance(value, list | Mapping):
        hint = f" Quote it to make it text: {key}={shlex.quote(json.dumps(str(value)))}"
    return f"expected {_describe(kind)}, got {type(value).__name__}.{hint}"


def _fits(kind: Any, value: Any) -> bool:
    origin = typing.get_origin(kind)
    if kind is Any:
        return True
    if kind is type(None):
        return value is None
    if kind is bool:
        return isinstance(value, bool)
    if kind in (int, float):
        return isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool)
    if kind is str:
        return isinstance(value, str)
    if origin is typing.Literal:
        return value in typing.get_args(kind)
    if kind is list or origin is list:
        inner = typing.get_args(kind)
        return isinstance(value, list) and all(_fits(inner[0], item) for item in value if inner)
    if kind is dict or origin is dict:
        return isinstance(value, Mapping)
    return False  # a dataclass: mappings were handled by the caller, anything else is wrong


def _describe(kind: Any) -> str:
    names = []
    for member in members(kind):
        if member is type(None):
            names.append("null")
        elif typing.get_origin(member) is typing.Literal:
            names.extend(repr(choice) for choice in typing.get_args(member))
        elif dataclasses.is_dataclass(member):
            some = list(fields(member))
            names.append(f"a block of options ({', '.join(some[:6])}{', …' if len(some) > 6 else ''})")
        else:
            names.append(getattr(member, "__name__", str(member)) if not typing.get_args(member) else str(member))
    return " or ".join(names).replace("typing.", "")


def not_a_choice(value: object, allowed: tuple[str, ...]) -> str | None:
    """What of an option's value, or of its list, is none of `allowed`; None when everything is.

    Where `MODULE_CLASS` is allowed, anything with a colon is: whether there is such a class is for its importer to say.
    """
    if value is None or (MODULE_CLASS in allowed and ":" in str(value)):
        return None
    given = value if isinstance(value, list) else [value]
    return next((str(one) for one in given if one not in allowed), None if given else "[]")

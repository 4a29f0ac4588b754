"""Reading a dataset row of the terminal environment: every field that is missing or wrong is named with its task."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from skyrl_thundersync.sandbox.base import checked_path


class TaskError(ValueError):
    """A task (dataset row) cannot be run; says which task and which field."""

    def __init__(self, task_id: object, field: str, problem: str) -> None:
        super().__init__(f"task {task_id!r}, field {field!r}: {problem}")
        self.task_id = task_id
        self.field = field


def field(extras: Mapping[str, Any], name: str, kind: type) -> Any:
    value = extras.get(name)
    if isinstance(value, kind) and not isinstance(value, bool) and value != "":
        return value
    problem = "is missing" if value is None or value == "" else f"must be {kind.__name__}, got {value!r}"
    raise TaskError(extras.get("task_id", "?"), name, problem)


def seconds(extras: Mapping[str, Any], name: str, default: float) -> float:
    value = extras.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise TaskError(extras.get("task_id", "?"), name, f"must be a positive number of seconds, got {value!r}")
    return float(value)


def task_files(task_id: str, extras: Mapping[str, Any]) -> dict[str, str]:
    if extras.get("files") is None:
        raise TaskError(task_id, "files", "is missing (a task without files has {})")
    return mapping(task_id, extras, "files")


def mapping(task_id: str, extras: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A field that is a mapping or its JSON; {} where it is missing."""
    value = extras.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise TaskError(task_id, name, f"is no valid JSON: {error}") from error
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TaskError(task_id, name, f"must map paths to texts, got {type(value).__name__}")
    # A table of rows gives every row the union of all paths, with None where a row has no such file.
    return {path: text for path, text in value.items() if text is not None}


def task_tests(task_id: str, extras: Mapping[str, Any]) -> dict[str, bytes] | None:
    """Contents of a Harbor verifier's files; None where the row has none, so that its checker gives the reward."""
    if extras.get("tests") is None:
        return None
    tests = {}
    for path, content in mapping(task_id, extras, "tests").items():
        try:
            name = checked_path(path)
            tests[name] = (
                content.encode() if isinstance(content, str) else base64.b64decode(content["base64"], validate=True)
            )
        except (ValueError, TypeError, KeyError, binascii.Error) as error:
            raise TaskError(task_id, "tests", f'{path!r}: neither text nor {{"base64": …}}: {error}') from error
    return tests

"""What a task (a dataset row) of the terminal environment holds: the one schema, for files, checks and the environment.

A row is a mapping as JSON or a table gives it. A field that is None counts as absent: a table gives every row the union of
all columns. `TaskRow.of` reads one, `problems` says everything that is wrong with it.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_thundersync.options.registry import nearest
from skyrl_thundersync.sandbox.base import WORKSPACE, Limits, checked_files, checked_path

HOST_FIELDS = ("prompt", "env_class", "data_source", "extra_info")
"""Fields of a row that are SkyRL's: the conversation, the environment, the set that evaluation reports by, and whatever else
a data set says of a task."""
CHECKER_TIMEOUT_S = 60.0
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


class TaskError(ValueError):
    """A task cannot be run; says which task and which field."""

    def __init__(self, task_id: object, field: str, problem: str) -> None:
        super().__init__(f"task {task_id!r}, field {field!r}: {problem}")
        self.task_id = task_id
        self.field = field


def text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"must be text, got {_short(value)}")


def flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(f"must be true or false, got {_short(value)}")


def turns(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ValueError(f"must be a whole number, at least 1, got {_short(value)}")


def seconds(value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise ValueError(f"must be a positive number of seconds, got {_short(value)}")


def workdir(value: Any) -> str:
    if text(value).startswith("/") and "\0" not in value:
        return value
    raise ValueError(f"must be an absolute path, got {_short(value)}")


def needs(value: Any) -> str:
    """What must be there for the task; only "build" (of its image, beforehand) can be."""
    if text(value) in ("", "build"):
        return value
    raise ValueError(f"{value}: run it through Harbor, not in this environment")


def mapping(value: Any, what: str) -> dict[str, Any]:
    """A mapping or its JSON, without what is None."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"is no valid JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise ValueError(f"must map {what}, got {_short(value)}")
    return {key: held for key, held in value.items() if held is not None}


def files(value: Any) -> dict[str, str]:
    return checked_files(mapping(value, "paths to texts"), Limits())


def variables(value: Any) -> dict[str, str]:
    named = mapping(value, "names to texts")
    for name, held in named.items():
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a variable")
        if not isinstance(held, str):
            raise ValueError(f"{name} must be text, got {_short(held)}")
    return named


def tests(value: Any) -> dict[str, bytes]:
    read = {}
    for path, content in mapping(value, "paths to contents").items():
        try:
            read[checked_path(path)] = (
                content.encode() if isinstance(content, str) else base64.b64decode(content["base64"], validate=True)
            )
        except (ValueError, TypeError, KeyError, binascii.Error) as error:
            raise ValueError(f'{path!r}: neither text nor {{"base64": …}}: {error}') from error
    return read


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}…"


def _field(read: Callable[[Any], Any], default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"read": read})


@dataclass(frozen=True, kw_only=True)
class TaskRow:
    """A task as read. Each field's reader takes the row's value and raises ValueError with what is wrong with it.

    Attributes:
        task_id: unique among the tasks of a run.
        files: relative path -> text, put into the working folder before the first turn.
        checker: bash, run in the working folder after the agent finished.
        max_turns: turns of this task; None: as many as `generator.max_turns`, which bounds it too.
        image: Docker image; image_optional: bubblewrap, which has none, will do; base_image: what `data images` makes it of.
        workdir: where commands start and the checker runs; the root file system can be written to where it is not /workspace.
        env: variables of the agent's shell.
        setup: bash, run once in the agent's shell before the first turn.
        tests: relative path -> content, in /tests at grading: the checker is a Harbor verifier. None: it is not one.
        verifier_env: variables of the verifier beside `env`.
        partial_credit: the verifier's training reward counts tests passed.
        collect: what the checker prints is kept, and graded elsewhere: evaluation only.
        agent_timeout_s: seconds from the start of the sandbox on until the episode ends and is graded.
        verifier_timeout_s: seconds that grading may take.
        needs: "build" where the image must be built beforehand; any other need is refused.
    """

    task_id: str = _field(text)
    files: dict[str, str] = _field(files)
    checker: str = _field(text)
    max_turns: int | None = _field(turns, None)
    image: str | None = _field(text, None)
    image_optional: bool = _field(flag, False)
    base_image: str | None = _field(text, None)
    workdir: str = _field(workdir, WORKSPACE)
    env: dict[str, str] = dataclasses.field(default_factory=dict, metadata={"read": variables})
    setup: str = _field(text, "")
    tests: dict[str, bytes] | None = _field(tests, None)
    verifier_env: dict[str, str] = dataclasses.field(default_factory=dict, metadata={"read": variables})
    partial_credit: bool = _field(flag, True)
    collect: bool = _field(flag, False)
    agent_timeout_s: float = _field(seconds, math.inf)
    verifier_timeout_s: float = _field(seconds, CHECKER_TIMEOUT_S)
    needs: str = _field(needs, "")

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> TaskRow:
        """Read a row.

        Raises:
            TaskError: names the first field that is missing, wrong or unknown.
        """
        values: dict[str, Any] = {}
        for field, problem in _read(row, values):
            raise TaskError(row.get("task_id", "?"), field, problem)
        return cls(**values)

    @property
    def needs_image(self) -> bool:
        """Whether only a backend with images will do."""
        return bool(self.image and not self.image_optional) or self.workdir != WORKSPACE


_READERS: dict[str, Callable[[Any], Any]] = {f.name: f.metadata["read"] for f in dataclasses.fields(TaskRow)}
REQUIRED = ("task_id", "files", "checker")


def problems(row: Mapping[str, Any]) -> tuple[TaskRow | None, list[tuple[str, str]]]:
    """The row as read, None where something is wrong; and (field, what is wrong with it) of each."""
    values: dict[str, Any] = {}
    found = list(_read(row, values))
    return (None if found else TaskRow(**values)), found


def _read(row: Mapping[str, Any], into: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name in REQUIRED:
        if row.get(name) in (None, ""):
            yield name, "is missing" + _WHY_NEEDED[name]
    for name, value in row.items():
        if value is None or name in HOST_FIELDS or (value == "" and name in REQUIRED):
            continue
        if name not in _READERS:
            advice = nearest(name, [*_READERS, *HOST_FIELDS])
            yield name, f"is no field of a task. {advice} What only describes a task goes into `extra_info`"
            continue
        try:
            into[name] = _READERS[name](value)
        except ValueError as error:
            yield name, str(error)


_WHY_NEEDED = {
    "task_id": "",
    "files": " (a task without files has {})",
    "checker": ": a task without a checker has no reward",
}

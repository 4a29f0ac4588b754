"""Every row of a run's task files, checked before anything starts: read, right in each field, unique, its scripts whole.

Rows of SkyRL-Gym's own environments and of others are checked for what SkyRL needs of any row, and for what theirs need.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.options.registry import nearest
from skyrl_thundersync.tasks import environments, schema
from skyrl_thundersync.tasks.environments import TERMINAL
from skyrl_thundersync.tasks.rows import SUFFIXES, is_hub_name, read_rows
from skyrl_thundersync.tasks.scripts import unparsable

ROLES = ("system", "developer", "user", "assistant", "tool")
GYM_NEEDS = {
    "aime": ("reward_model.ground_truth",),
    "gsm8k": ("reward_spec.ground_truth",),
    "gsm8k_multi_turn": ("reward_spec.ground_truth",),
    "lcb": ("reward_spec.ground_truth",),
    "search": ("reward_spec.ground_truth",),
    "searchcode": ("reward_spec.ground_truth",),
    "text2sql": ("db_id", "data", "reward_spec.ground_truth"),
}
"""Fields that SkyRL-Gym 0.4's environments ask for when they are made."""
NAMED = 3
"""Bad rows of a file that are named; the others are counted."""
BATCH = 512
"""Scripts that are parsed together."""
MANY = 10
"""Scripts that do not parse, after which the others of a file are not asked about: each one costs some processes."""


@dataclass
class Places:
    """Rows that have something in common: how many, and the first few."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, where: str) -> None:
        self.count += 1
        if len(self.first) < NAMED:
            self.first.append(where)

    def join(self, other: Places) -> None:
        self.count += other.count
        self.first = [*self.first, *other.first][:NAMED]

    def __str__(self) -> str:
        more = self.count - len(self.first)
        return "; ".join(self.first) + (f"; and {more} more" if more else "")


@dataclass
class Survey:
    """What was found in one source of tasks.

    Attributes:
        rows: how many there are; None for a data set of the hub, which is read when the run starts.
        problems: one a bad row, the first `NAMED` of them, and how many more there are.
        images: image -> rows that only a backend with images can run; None: those that need no image of their own, but a root
            file system that can be written to.
        optional_images: image -> rows that run without it where the backend has none.
    """

    rows: int | None = None
    problems: list[str] = field(default_factory=list)
    images: dict[str | None, Places] = field(default_factory=dict)
    optional_images: dict[str, Places] = field(default_factory=dict)


class Surveyor:
    """Reads sources of tasks one after the other; task ids are unique over all of an option's."""

    def __init__(self, env_class: str) -> None:
        """`env_class`: of rows that name none (`environment.env_class`)."""
        self._rows = RowChecks(env_class)
        self._seen: dict[tuple[str, str], str] = {}

    def survey(self, option: str, source: str) -> Survey:
        """One file of `option` ("data.train_data", "data.val_data")."""
        if is_hub_name(source):
            return Survey()
        file = Path(source).expanduser()
        if file.suffix not in SUFFIXES:
            wrong = f"{option}: {source!r} is neither a {', '.join(SUFFIXES)} file nor a hub dataset. Correct the path."
            return Survey(problems=[wrong])
        if not file.is_file():
            return Survey(problems=[f"{option}: there is no file {file.absolute()}. Correct the path."])
        found = _Found(option, file)
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            scripts = _Scripts(threads)
            try:
                for where, row in read_rows(file):
                    found.survey.rows = (found.survey.rows or 0) + 1
                    self._row(option, where, row, found, scripts)
            except (ValueError, OSError) as error:
                found.survey.problems.append(f"{option}: {error}.")
            for where, task_id, name, problem in islice(scripts.problems(), MANY):
                found.bad(where, task_id, [(name, f"does not parse as bash: {problem}")])
            threads.shutdown(cancel_futures=True)
        return found.done()

    def _row(self, option: str, where: str, row: dict[str, Any], found: _Found, scripts: _Scripts) -> None:
        task, problems = self._rows.check(row, trained=option == "data.train_data")
        if task is not None:
            before = self._seen.setdefault((option, task.task_id), where)
            if before != where:
                problems.append(("task_id", f"is that of {before}, too"))
            scripts.add(where, task)
            found.image(where, task)
        if problems:
            found.bad(where, row.get("task_id"), problems)


class RowChecks:
    """What any row must hold for SkyRL, and for its environment."""

    def __init__(self, env_class: str) -> None:
        self._default = env_class
        self._problems: dict[str, str | None] = {}

    def check(self, row: Mapping[str, Any], trained: bool) -> tuple[schema.TaskRow | None, list[tuple[str, str]]]:
        """The task, where it is a whole one of the terminal environment; and (field, what is wrong)."""
        problems = list(prompt_problems(row.get("prompt")))
        name = row.get("env_class")
        name = self._default if name is None else name
        if problem := self._unknown(str(name)):
            problems.append(("env_class", problem))
            return None, problems
        if name != TERMINAL:
            return None, problems + list(_gym_problems(row, GYM_NEEDS.get(name, ())))
        task, wrong = schema.problems(row)
        if task is not None and trained and task.collect:
            wrong.append(("collect", "is for evaluation: what is graded elsewhere has no reward here"))
        return task, problems + wrong

    def _unknown(self, name: str) -> str | None:
        if name not in self._problems:
            try:
                self._problems[name] = environments.require(name)
            except ConfigError as error:
                self._problems[name] = str(error).removesuffix(".")
        return self._problems[name]


def prompt_problems(prompt: Any) -> Iterator[tuple[str, str]]:
    """What is wrong with a conversation as chat templates take it."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str) or not prompt:
        yield "prompt", "must be a list of chat messages with `role` and `content`, at least one"
        return
    for number, message in enumerate(prompt, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            yield "prompt", f"message {number} must have `role` and `content`, both text"
        elif (role := message.get("role")) not in ROLES:
            yield "prompt", f"message {number} has the role {role!r}. {nearest(str(role), list(ROLES))}"


def _gym_problems(row: Mapping[str, Any], needed: Sequence[str]) -> Iterator[tuple[str, str]]:
    for path in needed:
        value: Any = row
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is None:
            yield path, "is missing, which this environment needs"
    if row.get("max_turns") is not None:
        try:
            schema.turns(row["max_turns"])
        except ValueError as error:
            yield "max_turns", str(error)


class _Found:
    """A survey in the making."""

    def __init__(self, option: str, file: Path) -> None:
        self.survey = Survey(rows=0)
        self._option, self._file, self._bad = option, file, 0

    def bad(self, where: str, task_id: object, problems: Sequence[tuple[str, str]]) -> None:
        self._bad += 1
        if self._bad <= NAMED:
            task = f" (task {task_id})" if task_id not in (None, "") else ""
            said = "; ".join(f"`{name}` {problem}" for name, problem in problems)
            self.survey.problems.append(f"{self._option}: {where}{task}: {said}.")

    def image(self, where: str, task: schema.TaskRow) -> None:
        if task.needs_image:
            self.survey.images.setdefault(task.image, Places()).add(where)
        elif task.image:
            self.survey.optional_images.setdefault(task.image, Places()).add(where)

    def done(self) -> Survey:
        if self.survey.rows == 0 and not self.survey.problems:
            self.survey.problems.append(
                f"{self._option}: {self._file} holds no tasks. Generate it again, or name another file."
            )
        if self._bad > NAMED:
            self.survey.problems.append(
                f"{self._option}: {self._file}: {self._bad - NAMED} more of {self.survey.rows} rows are wrong in the same "
                "way or another."
            )
        return self.survey


class _Scripts:
    """Checkers and set-ups, parsed beside the reading, each text once."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._places: dict[str, tuple[str, str, str]] = {}
        self._waiting: list[str] = []
        self._batches: list[tuple[list[str], Future[dict[int, str]]]] = []

    def add(self, where: str, task: schema.TaskRow) -> None:
        for name, script in (("checker", task.checker), ("setup", task.setup)):
            if script and script not in self._places:
                self._places[script] = (where, task.task_id, name)
                self._waiting.append(script)
        if len(self._waiting) >= BATCH:
            self._send()

    def _send(self) -> None:
        batch, self._waiting = self._waiting, []
        self._batches.append((batch, self._threads.submit(unparsable, batch, MANY)))

    def problems(self) -> Iterator[tuple[str, str, str, str]]:
        """(where, task id, field, what bash says) of each text that does not parse, of the first row that holds it."""
        if self._waiting:
            self._send()
        for batch, found in self._batches:
            for index, problem in found.result().items():
                yield *self._places[batch[index]], problem

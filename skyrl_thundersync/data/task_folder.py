"""A Harbor task's folder as files: what is read of it, and that nothing outside it is.

Task folders come from strangers, and whatever is read of one travels to an agent or a verifier: a link to a file of the
host must not be followed, in whatever part of the folder it is.
"""

from __future__ import annotations

import re
from pathlib import Path

ENABLEABLE = ("compose", "gpu", "internet", "build")
"""Reasons that a caller may lift. "build" tasks run once their image is built; the other three need Harbor's own runner, and
the terminal environment refuses their rows by name."""
REASONS = (*ENABLEABLE, "invalid", "incomplete", "unsupported", "binary")
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)


class Unsupported(ValueError):
    """A task that is not taken: `reason` is one of `REASONS`, `detail` says what it was."""

    def __init__(self, task_id: str, reason: str, detail: str) -> None:
        super().__init__(f"task {task_id!r}: {reason}: {detail}")
        self.task_id, self.reason, self.detail = task_id, reason, detail


def task_folders(root: Path) -> list[Path]:
    """Folders below `root` (or `root` itself) that hold a task.toml, in order of path."""
    return sorted(file.parent for file in root.rglob("task.toml"))


def refuse_links_out(folder: Path) -> None:
    """Raises Unsupported when anything in the task's folder is a link that leads out of it."""
    home = folder.resolve()
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(home):
            raise Unsupported(folder.name, "invalid", f"{path.relative_to(folder)} is a link out of the task")


def folder_files(folder: Path, part: str) -> dict[str, bytes]:
    """Relative path -> content of every file in a part of the task.

    Raises:
        Unsupported: a link leads out of the task's folder.
    """
    refuse_links_out(folder)
    root, files = folder / part, {}
    for path in sorted(root.rglob("*")):
        if path.is_file():
            files[path.relative_to(root).as_posix()] = path.read_bytes()
    return files


def required(folder: Path, name: str) -> Path:
    """A file of the task that must be there. Raises Unsupported where it is not."""
    file = folder / name
    if not file.is_file():
        raise Unsupported(folder.name, "incomplete", f"no {name}")
    return file


def instruction_of(folder: Path) -> str:
    """instruction.md without the leading canary lines by which benchmarks mark their texts; "" where there is none."""
    file = folder / "instruction.md"
    lines = file.read_text(encoding="utf-8").split("\n") if file.is_file() else []
    while lines and (_CANARY.fullmatch(lines[0].strip()) or not lines[0].strip()):
        lines.pop(0)
    return "\n".join(lines).strip()

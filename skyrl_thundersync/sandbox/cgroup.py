"""Resource control groups for sandboxes without a container engine: memory, processes and CPU of all of one's processes.

Version 1 and version 2 hierarchies, where this process may make groups there (usually root only). Elsewhere the caller
falls back to per-process limits, and says so in its docstring.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from skyrl_thundersync.sandbox.base import Limits, Owner, SandboxError, call_all, process_start

ROOT = Path("/sys/fs/cgroup")
PREFIX = "thundersync-"
V1_CONTROLLERS = ("memory", "pids", "cpu")
OPTIONAL = ("memory.swap.max", "memory.swappiness")
"""Missing where the kernel counts no swap."""
REMOVE_TIMEOUT_S = 5.0
CPU_PERIOD_US = 100_000


@dataclass(frozen=True)
class ControlGroup:
    """One sandbox's folders in the hierarchies: three under version 1, one under version 2."""

    folders: tuple[Path, ...]

    @property
    def process_files(self) -> tuple[Path, ...]:
        """A process joins by writing its pid into each of these."""
        return tuple(folder / "cgroup.procs" for folder in self.folders)

    def remove(self) -> None:
        """Raises SandboxError when the kernel still counts members after some seconds."""
        call_all("removing control groups", [partial(_remove, folder) for folder in self.folders])


def available() -> bool:
    """Whether a group with all controllers can be made here; found out by making one."""
    group = create(Owner.current(), "probe", Limits())
    if group is None:
        return False
    group.remove()
    return True


def create(owner: Owner, label: str, limits: Limits) -> ControlGroup | None:
    """A new group, or None where this process may not make one."""
    name = f"{PREFIX}{owner.pid}-{owner.started}-{label}"
    made: list[Path] = []
    try:
        for parent, values in _settings(limits):
            folder = parent / name
            folder.mkdir()
            made.append(folder)
            for file, value in values.items():
                if (folder / file).exists() or file not in OPTIONAL:
                    (folder / file).write_text(value)
    except BaseException as error:
        call_all("removing control groups", [partial(_remove, folder) for folder in made])
        if isinstance(error, OSError):
            return None
        raise
    return ControlGroup(tuple(made)) if made else None


def sweep() -> int:
    """Remove the groups of owners that no longer run; how many folders that were."""
    removed = 0
    for parent in [ROOT, *(ROOT / controller for controller in V1_CONTROLLERS)]:
        for folder in parent.glob(f"{PREFIX}*"):
            pid, started = folder.name.removeprefix(PREFIX).split("-")[:2]
            if process_start(int(pid)) != int(started) and not (folder / "cgroup.procs").read_text():
                _remove(folder)
                removed += 1
    return removed


def _settings(limits: Limits) -> list[tuple[Path, dict[str, str]]]:
    quota = str(int(limits.cpus * CPU_PERIOD_US))
    if (ROOT / "cgroup.controllers").exists():
        return [
            (
                ROOT,
                {
                    "memory.max": str(limits.memory_bytes),
                    "memory.swap.max": "0",
                    "pids.max": str(limits.processes),
                    "cpu.max": f"{quota} {CPU_PERIOD_US}",
                },
            )
        ]
    values = {
        "memory": {"memory.limit_in_bytes": str(limits.memory_bytes), "memory.swappiness": "0"},
        "pids": {"pids.max": str(limits.processes)},
        "cpu": {"cpu.cfs_period_us": str(CPU_PERIOD_US), "cpu.cfs_quota_us": quota},
    }
    return [(ROOT / controller, values[controller]) for controller in V1_CONTROLLERS]


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + REMOVE_TIMEOUT_S
    while True:
        try:
            os.rmdir(folder)
            return
        except FileNotFoundError:
            return
        except OSError as error:  # members that have just been killed are counted for a moment
            if time.monotonic() > deadline:
                raise SandboxError(f"control group {folder} cannot be removed: {error}") from error
        time.sleep(0.005)

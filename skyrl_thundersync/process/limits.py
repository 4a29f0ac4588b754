"""What a machine, or the container around a run, allows: shared memory, open files, processes, disk, memory.

Each check takes milliseconds and imports nothing heavy, so `skyrl train` runs them before it starts anything.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from skyrl_thundersync.process.check import Check

GIB = 2**30
LEAST_FILES = 4096
MOST = 2**16
LEAST_SHM = GIB
LEAST_PROCESSES = 1024
"""Threads and processes. The quickstart's run has 300 on two cores; Ray, vLLM and torch start more on more."""
LEAST_MEMORY = GIB // 2
"""Of the host, at an update's begin: with less the kernel is about to kill a process."""
RECORDS = 64 * 2**20
"""Room on disk for what an update writes beside weights: its record, metrics, logs."""
FULL = 0.95
"""Share of a disk in use at which Ray refuses to work in it."""
CGROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
PIDS = ("pids", ("pids.max", "pids.current"), ("pids.max", "pids.current"))
MEMORY = ("memory", ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""A controller, and its files with limit and use: in hierarchies of version 2, and of version 1."""


def cheap_checks() -> Iterator[Check]:
    """All that need no configuration."""
    yield shared_memory(Path("/dev/shm"))
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    rooms = (room_in_group(*PIDS), room_for_user(resource.getrlimit(resource.RLIMIT_NPROC)[1]))
    yield processes(min((room for room in rooms if room is not None), default=None))
    yield session_disk(Path(os.environ.get("RAY_TMPDIR", "/tmp")))


def shared_memory(folder: Path, least: int = LEAST_SHM) -> Check:
    """Room for Ray's object store."""
    if not folder.is_dir():
        return Check("shared memory", (f"{folder} does not exist. Mount a tmpfs there.",))
    size = shutil.disk_usage(folder)
    problems = ()
    if size.free < least:
        problems = (
            f"{folder} has {size.free / GIB:.2f} GiB free of {size.total / GIB:.2f}; processes hand each other batches "
            f"through it and want {least / GIB:.0f} GiB. Empty it, or start the container with --shm-size=8g.",
        )
    return Check("shared memory", problems, f"{size.free / GIB:.1f} GiB free")


def raise_own_limits() -> None:
    """Let this process, and what it starts, have the open files, processes and threads that its hard limits allow.

    Not more than `MOST`: there are programs that go through all files that they could have open.
    """
    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC):
        soft, hard = resource.getrlimit(limit)
        wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(limit, (wanted, hard))


def open_files(limit: int) -> Check:
    """Ray opens many sockets a process. `limit`: hard limit of open files, to which a run raises its own; -1: none."""
    problems = ()
    if 0 <= limit < LEAST_FILES:
        problems = (
            f"at most {limit} open files can be had (`ulimit -Hn`), Ray wants {LEAST_FILES}. Raise the hard limit: in "
            f"/etc/security/limits.conf, or start the container with --ulimit nofile={LEAST_FILES}.",
        )
    return Check("open files", problems, "unlimited" if limit < 0 else f"{limit} allowed")


def processes(room: int | None) -> Check:
    """`room`: threads and processes that may still be started; None: no limit."""
    problems = ()
    if room is not None and room < LEAST_PROCESSES:
        problems = (
            f"{room} more threads and processes are allowed, a run wants {LEAST_PROCESSES}. Raise the hard limit (`ulimit "
            "-Hu`) or the control group's pids.max, or start the container with --pids-limit=-1.",
        )
    return Check("processes", problems, "unlimited" if room is None else f"{room} more allowed")


def room_for_user(limit: int) -> int | None:
    """Threads and processes that this user may still start, of `limit` (hard; -1: none). None: no limit, as for root."""
    if limit < 0 or os.geteuid() == 0:
        return None
    return max(0, limit - sum(_threads(folder) for folder in Path("/proc").glob("[0-9]*")))


def _threads(process: Path) -> int:
    """Of a process of this user; 0 of others', and of one that has ended meanwhile."""
    try:
        return len(os.listdir(process / "task")) if process.stat().st_uid == os.getuid() else 0
    except (FileNotFoundError, ProcessLookupError):
        return 0


def session_disk(folder: Path) -> Check:
    """Ray stops working in a folder whose disk is 95% full."""
    size = shutil.disk_usage(folder)
    used = 1 - size.free / size.total
    problems = ()
    if used >= FULL:
        problems = (
            f"the disk of {folder} is {used:.0%} full and Ray stops at {FULL:.0%}. Free some, or set RAY_TMPDIR.",
        )
    return Check("disk of Ray's session", problems, f"{folder}, {used:.0%} full")


def writable(option: str, path: str) -> Check:
    """Whether a folder can be made at `path` and written to."""
    there = Path(path).absolute()
    while not os.path.lexists(there):
        there = there.parent
    problems = ()
    if not there.is_dir():
        problems = (f"{option}={path}: {there} is no folder, so nothing can be written below it. Name another place.",)
    elif not os.access(there, os.W_OK | os.X_OK):
        problems = (f"{option}={path}: this user may not write to {there}. Change its owner, or name another place.",)
    return Check(f"folder {option}", problems, path)


def update_disk(folder: Path, weights: int) -> Check:
    """Room in the run folder for an update that writes `weights` bytes of them."""
    free, needed, problems = shutil.disk_usage(folder).free, weights + RECORDS, ()
    if free < needed:
        problems = (
            f"{folder} has {free / 2**20:.0f} MiB free and the next update may write {needed / 2**20:.0f} MiB there. "
            "Free some space.",
        )
    return Check("disk of the run folder", problems)


def update_memory(available: int) -> Check:
    """What is left of the host's memory at an update's begin."""
    problems = ()
    if available < LEAST_MEMORY:
        problems = (
            f"{available / 2**20:.0f} MiB of host memory are left, an update begins with {LEAST_MEMORY / 2**20:.0f} or more. "
            "End what else takes memory, or raise the container's limit.",
        )
    return Check("host memory", problems)


def available_memory() -> int:
    """Bytes that new processes can have: MemAvailable, or less where a control group limits it."""
    rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(rows["MemAvailable"].split()[0]) * 1024
    room = room_in_group(*MEMORY)
    return free if room is None else min(free, room)


def room_in_group(controller: str, names: tuple[str, str], names_v1: tuple[str, str]) -> int | None:
    """What this process's control group and those above it leave of a resource (`PIDS`, `MEMORY`); None: no limit."""
    found = []
    for line in OWN_GROUPS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            limit, used = names_v1 if controllers else names
            for folder in _folders(CGROUPS / controllers, path):
                # In a container the groups above its own are out of sight; the root has no limit.
                if (folder / limit).is_file() and (text := (folder / limit).read_text().strip()) != "max":
                    found.append(max(0, int(text) - int((folder / used).read_text()) + _reclaimable(folder)))
    return min(found, default=None)


def _reclaimable(folder: Path) -> int:
    """Bytes of the files' cache that a memory group's use counts, and that the kernel gives up when asked; 0 for others."""
    if not (folder / "memory.stat").is_file():
        return 0
    rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    v1 = "total_" if "total_inactive_file" in rows else ""
    return int(rows[f"{v1}inactive_file"]) + int(rows[f"{v1}active_file"])


def _folders(root: Path, path: str) -> Iterator[Path]:
    """A group's folder and those above it."""
    folder = root / path.lstrip("/")
    while folder != root:
        yield folder
        folder = folder.parent
    yield root

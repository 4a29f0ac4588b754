"""What goes wrong, for real: signals, connections that are shut, filesystems that fill up, numbers that are none."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PIDFD_OPEN, PIDFD_GETFD = 434, 438
GROUPS = {
    "few processes": ("pids", {"pids.max": 200}, {"pids.max": 200}),
    "little memory": ("memory", {"memory.max": 2**31}, {"memory.limit_in_bytes": 2**31}),
    "some memory": ("memory", {"memory.max": 2**33}, {"memory.limit_in_bytes": 2**33}),
}
"""What a control group allows: controller, its files in version 2 and version 1."""


def shut_connections(pid: int) -> int:
    """Shut every established stream connection of a process, as a broken network would; how many there were. Needs root."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = libc.syscall(PIDFD_OPEN, pid, 0)
    if handle < 0:
        raise OSError(ctypes.get_errno(), f"pidfd_open({pid})")
    shut = 0
    for entry in list(Path(f"/proc/{pid}/fd").iterdir()):
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(entry.stat().st_mode):
                continue
        own = libc.syscall(PIDFD_GETFD, handle, int(entry.name), 0)
        if own >= 0:
            with socket.socket(fileno=own) as connection, suppress(OSError):
                if connection.type == socket.SOCK_STREAM:
                    connection.shutdown(socket.SHUT_RDWR)
                    shut += 1
    os.close(handle)
    return shut


@contextmanager
def small_filesystem(folder: Path, mib: int) -> Iterator[Path]:
    """A filesystem of its own at `folder`. Needs root."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "faults", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@contextmanager
def control_group(limit: str) -> Iterator[tuple[str, ...]]:
    """A control group with one of the limits in `GROUPS`; gives a command that runs another one in it. Needs root."""
    controller, files, files_v1 = GROUPS[limit]
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    group = Path("/sys/fs/cgroup", *([] if unified else [controller]), f"faults-{os.getpid()}")
    group.mkdir()
    try:
        for name, value in (files if unified else files_v1).items():
            (group / name).write_text(str(value))
        yield "sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"
    finally:
        group.rmdir()


def fill(folder: Path) -> None:
    """Leave no page free in the filesystem of `folder`, while others write there."""
    with (folder / "ballast").open("wb") as file:
        size = 0
        for step in (1 << 24, 1 << 20, 1 << 12):
            with suppress(OSError):  # full, to within a step
                while True:
                    os.posix_fallocate(file.fileno(), size, step)
                    size += step


@contextmanager
def memory_taken(within: tuple[str, ...], leave: int = 300 * 2**20) -> Iterator[None]:
    """A process that holds all but `leave` bytes of what the control group of `within` allows."""
    script = (
        "import time\n"
        "from skyrl_thundersync.process.limits import available_memory\n"
        f"held = []\nwhile available_memory() > {leave} + 2**24:\n    held.append(b'x' * 2**24)\n"
        "print(len(held), flush=True)\ntime.sleep(600)\n"
    )
    process = subprocess.Popen([*within, sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.communicate()


def poisoned_model(source: Path, target: Path, row: int | None = None) -> Path:
    """A copy of a model folder that gives NaN: whatever it reads or, with `row`, once it has read that token."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, dirs_exist_ok=True)
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"][slice(None) if row is None else row] = torch.nan
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def poisoned_tasks(source: Path, target: Path) -> Path:
    """The same tasks, whose checker's reward is no number."""
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(json.dumps({**row, "checker": "echo reward=nan\n"}) + "\n" for row in rows))
    return target

"""What a sandbox is: a closed place with a working folder where an agent's commands run, whatever they do.

The parts that do not depend on the backend: the `Sandbox` protocol, resource limits, results, errors, the check on file
names of a task, the owner's identity, and the head-and-tail buffer that keeps host memory constant under any output.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

WORKSPACE = "/workspace"
"""The working folder inside every sandbox: where task files land, commands start and the checker runs."""

HARBOR_FOLDERS = ("/tests", "/logs", "/solution")
"""Writable, empty folders where Harbor's conventions put a verifier's files, its results and a reference solution. The
agent may write there; a grader empties them first."""

TIMEOUT_EXIT_CODE = 124
"""`CommandResult.exit_code` of a command that ran into its time limit (the code of coreutils' `timeout`)."""


class SandboxError(RuntimeError):
    """The machinery failed (engine gone, namespace refused, folder not writable): not the agent's doing."""


class SandboxLost(SandboxError):
    """This one sandbox had to be given up, files included; others are not affected."""


class StartError(SandboxError):
    """A trajectory's sandbox did not come up, or its files did not get there: before anything was sampled."""


@dataclass(frozen=True)
class Limits:
    """What one sandbox may use, the same for every backend."""

    memory_bytes: int = 512 << 20
    """RAM of all its processes and files together (without a cgroup: address space of each process)."""
    disk_bytes: int = 256 << 20
    """Size of everything it can write. Files live in memory and count towards `memory_bytes` where a cgroup counts."""
    processes: int = 128
    """Processes and threads alive at the same time."""
    cpus: float = 1.0
    """CPU share, in cores (cgroup only)."""
    open_files: int = 1024
    """Open files of one process."""


@dataclass(frozen=True)
class CommandResult:
    """What one command did.

    Attributes:
        output: stdout and stderr in the order written, UTF-8 decoded with replacement, head and tail when too long.
        exit_code: of the last command; 124 after the time limit; the shell's own when the command ended the shell.
        timed_out: the command ran into its time limit and was killed with everything else that ran in the sandbox.
        truncated: bytes were cut out of the middle of `output`.
        seconds: wall time, killing included.
        shell_ended: the shell is gone (`exit`, `exec`, killed, timed out): the next command starts in a fresh one, in
            the working folder, with the files kept and variables, functions and working directory lost.
    """

    output: str
    exit_code: int
    timed_out: bool
    truncated: bool
    seconds: float
    shell_ended: bool = False


@runtime_checkable
class Sandbox(Protocol):
    """One trajectory's closed place. Calls on one sandbox come one at a time; `close` may come from any thread."""

    name: str
    started_ahead: bool

    def write_files(self, files: Mapping[str, str]) -> None:
        """Put text files (UTF-8) at relative paths below the working folder, folders made as needed.

        Raises:
            ValueError: a path is absolute, leaves the folder, or is no path; nothing was written.
            SandboxError: they do not fit, or the sandbox is gone.
        """
        ...

    def run(self, command: str, timeout_s: float) -> CommandResult:
        """Run `command` in the trajectory's shell: working directory and variables carry over from earlier commands.

        Standard input is empty. A child left in the background neither delays the return nor ends with the command.
        """
        ...

    def check(self, script: str, timeout_s: float) -> CommandResult:
        """Grade: end every process of the agent, then run `script` in a fresh shell over the files it left."""
        ...

    def close(self) -> None:
        """End every process and give everything back. May be called again, and while another thread is in `run`."""
        ...


def call_all(doing: str, calls: Iterable[Callable[[], object]]) -> None:
    """Make every call, whatever the ones before it raised: for giving things back.

    Raises:
        the error met, where there was one; an interrupt before all others;
        ExceptionGroup: of several errors, with `doing` as its message.
    """
    errors: list[BaseException] = []
    for call in calls:
        try:
            call()
        except BaseException as error:
            errors.append(error)
    interrupts = [error for error in errors if not isinstance(error, Exception)]
    if interrupts or len(errors) == 1:
        raise (interrupts or errors)[0]
    if errors:
        raise ExceptionGroup(doing, errors)


class HeadTailBuffer:
    """Keeps the first and the last half of at most `limit` bytes of a stream of any length."""

    def __init__(self, limit: int) -> None:
        if limit < 2:
            raise ValueError(f"output limit must be at least 2 bytes, got {limit}")
        self._head_room = limit - limit // 2
        self._tail_room = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def add(self, data: bytes) -> None:
        self._total += len(data)
        room = self._head_room - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > self._tail_room:
            del self._tail[: len(self._tail) - self._tail_room]

    @property
    def truncated(self) -> bool:
        return self._total > len(self._head) + len(self._tail)

    def text(self) -> str:
        """Decoded; where bytes were cut, a line says how many, and no character is shown half."""
        if not self.truncated:
            return bytes(self._head + self._tail).decode("utf-8", "replace")
        head, tail = _drop_half_character_at_end(bytes(self._head)), _drop_half_character_at_start(bytes(self._tail))
        cut = self._total - len(head) - len(tail)
        return f"{head.decode('utf-8', 'replace')}\n[{cut} bytes cut]\n{tail.decode('utf-8', 'replace')}"


def _drop_half_character_at_end(data: bytes) -> bytes:
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:
            width = 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[:-back] if width > back else data
    return data


def _drop_half_character_at_start(data: bytes) -> bytes:
    start = 0
    while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:]


def checked_path(path: str) -> str:
    """A task file's path, normalised.

    Raises:
        ValueError: it is empty, absolute, names the folder itself, holds a NUL, or has a `..` part.
    """
    if not isinstance(path, str) or not path or "\0" in path:
        raise ValueError(f"file path {path!r} must be a non-empty string without NUL")
    parts = [part for part in path.split("/") if part not in ("", ".")]  # a PurePosixPath takes ten times as long
    if path.startswith("/") or ".." in parts:
        raise ValueError(f"file path {path!r} must be relative and stay below the working folder")
    if not parts:
        raise ValueError(f"file path {path!r} names no file")
    return "/".join(parts)


def checked_files(files: Mapping[str, str], limits: Limits) -> dict[str, str]:
    """A task's files under normalised paths.

    Raises:
        ValueError: a path is refused by `checked_path`, two are the same, one is a folder of another, or the contents
            take more than half of the sandbox's disk.
    """
    contents: dict[str, str] = {}
    for path, text in files.items():
        name = checked_path(path)
        if not isinstance(text, str):
            raise ValueError(f"file {path!r} must hold text, got {type(text).__name__}")
        if name in contents:
            raise ValueError(f"file path {path!r} is given twice")
        contents[name] = text
    for name in contents:
        parent = name
        while parent := parent.rpartition("/")[0]:
            if parent in contents:
                raise ValueError(f"file path {parent!r} is also the folder of {name!r}")
    size = sum(len(text.encode("utf-8", "replace")) for text in contents.values())
    if size > limits.disk_bytes // 2:
        raise ValueError(f"the files take {size} bytes; a sandbox of {limits.disk_bytes} bytes takes half of that")
    return contents


@dataclass(frozen=True)
class Owner:
    """Which process owns a sandbox, exact across pid reuse and reboots on one host.

    Attributes:
        host: host name, boot: the kernel's boot id, pid_namespace: inode of the namespace in which `pid` is meant.
        pid, started: the process and its start time in clock ticks since boot.
    """

    host: str
    boot: str
    pid_namespace: str
    pid: int
    started: int

    @classmethod
    def current(cls) -> Owner:
        started = process_start(os.getpid())
        if started is None:
            raise SandboxError("/proc/self/stat cannot be read: mount /proc")
        return cls(socket.gethostname(), _boot_id(), _pid_namespace(), os.getpid(), started)

    def is_dead(self) -> bool:
        """True only where this process can know it; an owner on another host or in another pid namespace may live."""
        if self.host != socket.gethostname():
            return False
        if self.boot != _boot_id():
            return True
        return self.pid_namespace == _pid_namespace() and process_start(self.pid) != self.started


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid").strip("pid:[]")


def process_start(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None where there is no such process or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])

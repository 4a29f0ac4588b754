"""One persistent bash per trajectory, spoken to over a pair of byte streams: the part all backends share.

Differs from the usual `exec` per command in four ways. Commands run in one living shell, so that a command costs a write
and a read (well under a millisecond) and `cd` and variables carry over. The end of a command is a frame with a random
nonce made for that command alone, not end-of-file: a child in the background that holds stdout open delays nothing, and
nothing printed can pass for the frame. Output is bounded while it streams. Every way of losing the shell has an outcome:
`exit`, `exec`, `kill -9 $$`, `set -u` errors and time limits end in a result that says so, and the next command gets a
fresh shell over the same files.

What the frame is not: proof against an agent that reads its own shell's memory. It could then end its own observation
early and gains nothing; grading runs in a shell that starts after the agent's last process has ended.
"""

from __future__ import annotations

import re
import secrets
import shlex
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from skyrl_thundersync.sandbox.archive import tar
from skyrl_thundersync.sandbox.base import (
    TIMEOUT_EXIT_CODE,
    WORKSPACE,
    CommandResult,
    HeadTailBuffer,
    Limits,
    SandboxError,
    SandboxLost,
    call_all,
    checked_files,
)

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
AGENT_ENV = {"PATH": PATH, "HOME": WORKSPACE, "LANG": "C.UTF-8", "TERM": "dumb", "PAGER": "cat", "USER": "agent"}
# Nothing the agent may leave in the working folder is picked up by accident: no start-up files from HOME, and Python
# puts neither the working folder nor a user site folder on its path.
GRADING_ENV = AGENT_ENV | {"HOME": "/nonexistent", "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1"}

SHELL = ("bash", "--norc", "--noprofile")
START_TIMEOUT_S = 60.0
SETUP_OUTPUT_BYTES = 4096
CHECK_OUTPUT_BYTES = 1 << 16
FRAME_END = re.compile(rb"(\d+)\x1e")
"""What follows a frame's mark. The mark differs from command to command: no pattern, which Python would keep each of."""


class Channel(Protocol):
    """A running shell's standard input and output (stderr joined to it)."""

    def send(self, data: bytes, deadline: float) -> bool:
        """Write all of `data`; False when the shell is gone. TimeoutError past `deadline` (time.monotonic)."""
        ...

    def receive(self, deadline: float) -> bytes | None:
        """Some bytes as soon as there are any, b"" at end-of-file, None when `deadline` passed first."""
        ...

    def exit_code(self) -> int:
        """Of the shell, after end-of-file."""
        ...

    def close(self) -> None: ...


class PersistentShell:
    """Frames commands over a channel. Not thread-safe: `ShellSandbox` holds the lock."""

    def __init__(self, channel: Channel, setup: str) -> None:
        """Start talking; `setup` runs first.

        Raises:
            SandboxError: bash did not come up, or `setup` failed; the message holds what was printed.
        """
        self._channel = channel
        self._pending = b""  # printed by background children between two commands
        # Descriptor 9 is the way out that a command's own redirections (`exec >file`) cannot move; stderr of the shell
        # itself goes nowhere, so that `set -x` does not print the frame's nonce.
        result = self._frame(f"{setup} 9>&1 && exec 9>&1 >/dev/null 2>&1", "", START_TIMEOUT_S, SETUP_OUTPUT_BYTES)
        if result.timed_out or result.shell_ended or result.exit_code != 0:
            raise SandboxError(
                f"the sandbox shell did not start (exit code {result.exit_code}): {result.output.strip()}"
            )

    def run(self, command: str, timeout_s: float, limit_bytes: int, stdin: bytes | None = None) -> CommandResult:
        """Run one command. `stdin`: bytes for its standard input, which it must read in full; None for /dev/null."""
        # bash drops NUL bytes with a warning; say nothing and do the same.
        quoted = shlex.quote(command.replace("\0", ""))
        source = "" if stdin is not None else "</dev/null "
        return self._frame(f"{{ eval {quoted}; }} {source}", ">&9 2>&9 9>&-", timeout_s, limit_bytes, stdin)

    def _frame(
        self, command: str, redirections: str, timeout_s: float, limit_bytes: int, stdin: bytes | None = None
    ) -> CommandResult:
        started = time.monotonic()
        deadline = started + timeout_s
        nonce = secrets.token_hex(16)
        # `&& … || …` rather than `;`: a `set -e` of the agent's then ends nothing.
        report = f"builtin printf '\\036{nonce} %d\\036'"
        # bash 5.2 gives up at the next quotation mark after an eval that ended inside an open one; a line without resets it.
        line = f':\n{command}{redirections} && {report} 0 >&9 || {report} "$?" >&9\n'
        buffer = HeadTailBuffer(limit_bytes)
        mark = f"\x1e{nonce} ".encode()
        frame_bytes = len(nonce) + 8
        held = self._pending
        self._pending = b""
        timed_out = ended = False
        exit_code = TIMEOUT_EXIT_CODE
        try:
            alive = self._channel.send(line.encode("utf-8", "replace") + (stdin or b""), deadline)
            # A shell that is gone may still have left output, so read to end-of-file in any case.
            while True:
                data = self._channel.receive(deadline)
                if data is None or time.monotonic() > deadline:  # a flood has always something to read
                    raise TimeoutError
                if not data:
                    ended = True
                    exit_code = self._channel.exit_code()
                    break
                held += data
                if alive and (at := held.find(mark)) >= 0 and (code := FRAME_END.match(held, at + len(mark))):
                    buffer.add(held[:at])
                    held, self._pending = b"", held[code.end() :]
                    exit_code = int(code[1])
                    break
                # All but what may be the start of a frame is output.
                buffer.add(held[:-frame_bytes])
                held = held[-frame_bytes:]
        except TimeoutError:
            timed_out = ended = True
        buffer.add(held)
        return CommandResult(
            output=buffer.text(),
            exit_code=exit_code,
            timed_out=timed_out,
            truncated=buffer.truncated,
            seconds=time.monotonic() - started,
            shell_ended=ended,
        )

    def close(self) -> None:
        self._channel.close()


class ShellSandbox(ABC):
    """A sandbox made of three backend primitives: open a shell, end all processes, give everything back."""

    def __init__(self, name: str, limits: Limits, output_limit_bytes: int) -> None:
        self.name = name
        self.limits = limits
        self.output_limit_bytes = output_limit_bytes
        self._lock = threading.Lock()
        self._shell: PersistentShell | None = None
        self._closing = threading.Lock()
        self._closed = threading.Event()
        self._lost: str | None = None
        self._used = False
        self.on_close: Callable[[], None] = lambda: None
        self.started_ahead = False
        """It was up before its trajectory asked for it."""

    @abstractmethod
    def _open_channel(self, env: Mapping[str, str], grading: bool) -> Channel:
        """Start `SHELL` in the sandbox with exactly `env`. Raises SandboxError when it cannot."""

    @abstractmethod
    def _limits_command(self) -> str:
        """What a new shell runs first: limits that the backend leaves to it."""

    @abstractmethod
    def _kill_processes(self) -> None:
        """End every process of the agent; returns when none is left. Raises SandboxLost when that failed."""

    @abstractmethod
    def _destroy(self) -> None:
        """End everything and free it; called once, from any thread, also while a command runs."""

    def run(self, command: str, timeout_s: float) -> CommandResult:
        with self._lock:
            if self._shell is None:
                self._shell = self._new_shell(AGENT_ENV, grading=False)
            self._used = True
            with self._losing():
                result = self._shell.run(command, timeout_s, self.output_limit_bytes)
            return self._finish(result)

    def check(self, script: str, timeout_s: float) -> CommandResult:
        with self._lock:
            self._end_shell()
            self._shell = self._new_shell(GRADING_ENV, grading=True)
            # In a subshell of its own, `exit` in the script ends the script, not the report of its exit code.
            quoted = shlex.quote(script.replace("\0", ""))
            with self._losing():
                result = self._shell.run(f"( eval {quoted} )", timeout_s, CHECK_OUTPUT_BYTES)
            if not result.shell_ended:
                self._end_shell()
            return self._finish(result)

    def write_files(self, files: Mapping[str, str]) -> None:
        contents = checked_files(files, self.limits)
        data = {path: text.encode("utf-8", "replace") for path, text in contents.items()}
        archive = tar(data, int(time.time()))
        # `cat` takes what tar leaves of the padding, so that the shell does not read it as commands.
        untar = f"tar -x -f - --no-same-owner -C {WORKSPACE}; s=$?; cat >/dev/null; exit $s"
        unpack = f"( head -c {len(archive)} | {{ {untar}; }} )"
        with self._lock:
            if self._shell is None:
                self._shell = self._new_shell(AGENT_ENV, grading=False)
            result = self._finish(self._shell.run(unpack, START_TIMEOUT_S, SETUP_OUTPUT_BYTES, archive))
        if result.exit_code != 0:
            raise SandboxError(
                f"sandbox {self.name}: unpacking {len(files)} files ({len(archive)} bytes) failed with exit code "
                f"{result.exit_code}: {result.output.strip()}"
            )

    def close(self) -> None:
        with self._closing:
            if self._closed.is_set():
                return
            self._closed.set()
        # _destroy ends a command that runs in another thread, which then lets go of the lock.
        call_all(
            f"closing sandbox {self.name}",
            (self.on_close, self._close_idle_shell, self._destroy, self._close_last_shell),
        )

    def _close_idle_shell(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                self._close_shell()
            finally:
                self._lock.release()

    def _close_last_shell(self) -> None:
        with self._lock:
            self._close_shell()

    def _new_shell(self, env: Mapping[str, str], grading: bool) -> PersistentShell:
        self._refuse_if_gone()
        # The agent owns the working folder and may have shut itself out of it.
        setup = f"{self._limits_command()} && chmod u+rwx {WORKSPACE} && cd {WORKSPACE}"
        try:
            channel = self._open_channel(env, grading)
            try:
                return PersistentShell(channel, setup)
            except BaseException:
                channel.close()
                raise
        except SandboxError as error:
            self._refuse_if_gone()
            if not self._used:
                raise
            # A sandbox that once worked and does not any more is what its agent made of it.
            self._lost = f"sandbox {self.name}: no shell starts any more: {error}"
            raise SandboxLost(self._lost) from error

    def _end_shell(self) -> None:
        """Forget the shell and end the agent's processes."""
        # First: a container engine reports no process's end while the output of another waits to be read.
        self._close_shell()
        self._refuse_if_gone()
        with self._losing():
            self._kill_processes()

    def _close_shell(self) -> None:
        shell, self._shell = self._shell, None
        if shell is not None:
            shell.close()

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """Remember that the sandbox was lost; where it was closed meanwhile, that is the reason to give."""
        try:
            yield
        except SandboxLost as error:
            self._refuse_if_gone()
            self._lost = f"sandbox {self.name}: {error}"
            raise SandboxLost(self._lost) from error

    def _finish(self, result: CommandResult) -> CommandResult:
        if not result.shell_ended:
            return result
        started = time.monotonic()
        self._end_shell()
        return replace(result, seconds=result.seconds + time.monotonic() - started)

    def _refuse_if_gone(self) -> None:
        if self._closed.is_set():
            raise SandboxLost(f"sandbox {self.name} is closed")
        if self._lost is not None:
            raise SandboxLost(self._lost)

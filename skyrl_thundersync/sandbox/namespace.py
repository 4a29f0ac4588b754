"""Processes of bubblewrap sandboxes: the holder of a sandbox's namespaces and files, and a shell as a channel."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from skyrl_thundersync.sandbox.base import HARBOR_FOLDERS, WORKSPACE, Limits, SandboxError, SandboxLost

HOST_USER = 65534
"""User and group on the host when root starts a sandbox. Never 0: files in /proc and /sys check for that number."""
SANDBOX_USER = 1000
READ_BYTES = 1 << 16
START_TIMEOUT_S = 30.0
KILL_TIMEOUT_S = 10.0
END_TIMEOUT_S = 1.0
"""Between the end of a shell's output and its own."""

# A parent-death signal is tied to the thread that started the process, not to its program: one thread starts them all
# and lives as long as this program.
_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sandbox-starter")


class Holder:
    """Keeps a user and a mount namespace alive, with the sandbox's tmpfs over /tmp in it."""

    _SCRIPT = """
        mkdir -p /tmp/workspace /tmp/etc /tmp/{{agent,grading}}/{{{folders}}} &&
        printf 'root:x:0:0:root:/:/bin/bash\\nagent:x:{user}:{user}:agent:{home}:/bin/bash\\n' >/tmp/etc/passwd &&
        printf 'root:x:0:\\nagent:x:{user}:\\n' >/tmp/etc/group && echo "ready $$" && exec cat
    """

    def __init__(self, limits: Limits) -> None:
        folders = ",".join(["tmp", "shm", *(folder.removeprefix("/") for folder in HARBOR_FOLDERS)])
        # fmt: off
        command = [
            *as_host_user(),
            "bwrap", "--unshare-user", "--die-with-parent", "--new-session", "--uid", "0", "--gid", "0",
            "--dev-bind", "/", "/", "--perms", "0755", "--size", str(limits.disk_bytes), "--tmpfs", "/tmp", "--",
            "bash", "--norc", "--noprofile", "-c", self._SCRIPT.format(user=SANDBOX_USER, home=WORKSPACE, folders=folders),
        ]
        # fmt: on
        self._process = _start(command)
        self.pid = 0

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Sets `pid`, that of a process inside the namespaces. Raises SandboxError with what was printed."""
        said = b""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not said.endswith(b"\n") or b"ready " not in said:
            data = _read(self._process.stdout.fileno(), deadline)
            if not data:
                raise SandboxError(
                    f"bubblewrap did not start: {said.decode('utf-8', 'replace').strip() or 'no answer'}"
                )
            said += data
        self.pid = int(said.split()[-1])

    def close(self) -> None:
        """Raises SandboxLost when the kernel does not end it in time."""
        self._process.kill()  # its child has a parent-death signal
        try:
            self._process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise SandboxLost(f"the holder {self._process.pid} of a sandbox does not end") from error
        finally:
            self._process.stdin.close()
            self._process.stdout.close()


class NamespaceChannel:
    """A `bwrap` of ours: standard input and output, and a handle on the first process of its process namespace."""

    def __init__(self, command: list[str]) -> None:
        self._first_process = -1
        self._lock = threading.Lock()
        info_read, info_write = os.pipe()
        try:
            words = [str(info_write) if word == "INFO_FD" else word for word in command]
            self._process = _start(words, info_write)
        finally:
            os.close(info_write)
        try:
            info, deadline = b"", time.monotonic() + START_TIMEOUT_S
            while not info.rstrip().endswith(b"}"):
                data = _read(info_read, deadline)
                if not data:
                    said = _read(self._process.stdout.fileno(), time.monotonic() + 1.0) or b""
                    raise SandboxError(f"bubblewrap did not start: {said.decode('utf-8', 'replace').strip()}")
                info += data
            # It may have ended already; end-of-file follows.
            with contextlib.suppress(ProcessLookupError):
                self._first_process = os.pidfd_open(json.loads(info)["child-pid"])
            os.set_blocking(self._process.stdin.fileno(), False)
        except BaseException:
            self._process.kill()
            self._process.wait(KILL_TIMEOUT_S)
            self._close_pipes()
            raise
        finally:
            os.close(info_read)

    def send(self, data: bytes, deadline: float) -> bool:
        target = self._process.stdin.fileno()
        poll = select.poll()
        poll.register(target, select.POLLOUT)
        view = memoryview(data)
        while view:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            try:
                view = view[os.write(target, view) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                return False
        return True

    def receive(self, deadline: float) -> bytes | None:
        return _read(self._process.stdout.fileno(), deadline)

    def exit_code(self) -> int:
        try:
            code = self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # it closed its output, and lives
            self.kill()
            return 128 + signal.SIGKILL
        return code if code >= 0 else 128 - code

    def kill(self) -> None:
        """End the process namespace; returns when its last process is gone. May be called from any thread, again too.

        Raises:
            SandboxLost: the kernel did not end it in time.
        """
        with self._lock:
            if self._process.returncode is None and self._first_process >= 0:
                # The first process goes last: it is reaped, and `bwrap` outside returns, when all others are gone.
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._first_process, signal.SIGKILL)
            elif self._process.returncode is None:
                self._process.kill()
            try:
                self._process.wait(KILL_TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                raise SandboxLost(f"processes of sandbox shell {self._process.pid} do not end") from error
            if self._first_process >= 0:
                os.close(self._first_process)
                self._first_process = -1

    def close(self) -> None:
        self.kill()
        self._close_pipes()

    def _close_pipes(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()


def as_host_user() -> list[str]:
    if os.geteuid() != 0:
        return []
    user = str(HOST_USER)
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs", "--inh-caps=-all"]


def _start(command: list[str], inherited: int | None = None) -> subprocess.Popen[bytes]:
    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            cwd="/",
            start_new_session=True,  # a Ctrl-C meant for the owner does not reach it
            # Readable inside as /proc/1/environ: nothing of the owner's environment may be there.
            env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
            pass_fds=() if inherited is None else (inherited,),
        )

    try:
        starting = _starter.submit(start)
    except RuntimeError as error:
        raise SandboxError(f"no sandbox starts any more: {error}") from error
    try:
        return starting.result()
    except OSError as error:  # no process, no memory
        raise SandboxError(f"bubblewrap did not start: {error}") from error


def _read(source: int, deadline: float) -> bytes | None:
    """Some bytes, b"" at end-of-file, None past the deadline."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        return None
    return os.read(source, READ_BYTES)

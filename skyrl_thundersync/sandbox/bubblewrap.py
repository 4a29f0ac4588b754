"""Sandboxes from Linux namespaces alone, through bubblewrap: no daemon, no image, about 20 ms to start.

Differs from the usual single `bwrap bash`. A *holder* process owns a private mount namespace whose one tmpfs is all that
the sandbox can write, with one size limit; each shell is its own `bwrap`, with its own process namespace, over that tmpfs.
So a shell can be ended with all its descendants by ending the namespace's first process, and the next one, or the
grader's, finds the same files and no process of the agent. Nothing is ever written to the host's disk: when the owner
dies, however, the kernel ends the holder and the shells (parent-death signal) and the files are gone with them.

The agent sees the host's /usr read-only, a small /etc, its working folder, /tmp and /dev/shm; no network interface but a
loopback that is down, no host process, no host file, no device but null, zero, full, random and a terminal; all
capabilities dropped, no new privileges, no further user namespaces. Started by root, it runs as `nobody` on the host.

Weaker than Docker: programs are the host's (/usr), there is no image; no system call filter; where no control group can
be made (started without root) memory is limited for each process and not for their sum, CPU share is not limited, and
the process count is the user's in this sandbox (kernels before 5.14: of all sandboxes together).

Needs bubblewrap 0.8, util-linux, and user namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from skyrl_thundersync.sandbox import cgroup
from skyrl_thundersync.sandbox.base import HARBOR_FOLDERS, WORKSPACE, Limits, Owner, SandboxError, SandboxLost
from skyrl_thundersync.sandbox.shell import AGENT_ENV, SHELL, Channel, ShellSandbox

HOST_USER = 65534
"""User and group on the host when root starts a sandbox. Never 0: files in /proc and /sys check for that number."""
SANDBOX_USER = 1000
READ_BYTES = 1 << 16
START_TIMEOUT_S = 30.0
KILL_TIMEOUT_S = 10.0
ETC_FILES = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types")

# A parent-death signal is tied to the thread that started the process, not to its program: one thread starts them all
# and lives as long as this program.
_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sandbox-starter")
_sequence_lock = threading.Lock()
_sequence = 0


def reason_unavailable() -> str | None:
    """None where sandboxes can be made here, else what is missing and how to get it. Starts one to find out."""
    missing = [tool for tool in ("bwrap", "nsenter", "bash", "tar", "cat", "mkdir") if shutil.which(tool) is None]
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        missing.append("setpriv")
    if missing:
        return f"{', '.join(missing)} not found: install bubblewrap (apt-get install bubblewrap) and util-linux"
    helptext = subprocess.run(["bwrap", "--help"], capture_output=True, text=True, check=False, timeout=30).stdout
    if "--disable-userns" not in helptext:
        return "bubblewrap is older than 0.8: install a newer one"
    try:
        sandbox = BubblewrapSandbox("probe", Limits(), 1024)
    except SandboxError as error:
        return f"user namespaces do not work here ({error}): allow them, or run as root"
    sandbox.close()
    return None


class BubblewrapSandbox(ShellSandbox):
    """See the module."""

    def __init__(self, name: str, limits: Limits, output_limit_bytes: int) -> None:
        """Start the holder and the first shell.

        Raises:
            SandboxError: the kernel or bubblewrap refused; the message holds what they said.
        """
        super().__init__(name, limits, output_limit_bytes)
        self._processes: list[_NamespaceChannel] = []
        self._processes_lock = threading.Lock()
        self._group = cgroup.create(Owner.current(), _next_label(), limits)
        self._holder = _Holder(limits)
        try:
            self._holder.wait_ready()
            self._shell = self._new_shell(AGENT_ENV, grading=False)
        except SandboxError:
            self.close()
            raise

    def _open_channel(self, env: Mapping[str, str], grading: bool) -> Channel:
        if not self._holder.alive:
            raise SandboxError(f"sandbox {self.name}: its holder process was killed from outside (out of memory?)")
        channel = _NamespaceChannel(self._shell_command(env, grading))
        with self._processes_lock:
            self._processes.append(channel)
            closed = self._closed.is_set()
        if closed:
            channel.kill()
            raise SandboxLost(f"sandbox {self.name} is closed")
        return channel

    def _shell_command(self, env: Mapping[str, str], grading: bool) -> list[str]:
        store = "/tmp/grading" if grading else "/tmp/agent"
        # fmt: off
        command = [
            *_as_host_user(),
            "nsenter", "--preserve-credentials", "--user", "--mount", f"--target={self._holder.pid}", "--",
            "bwrap", "--unshare-user", "--unshare-all", "--disable-userns", "--die-with-parent", "--new-session",
            "--uid", str(SANDBOX_USER), "--gid", str(SANDBOX_USER), "--hostname", "sandbox", "--cap-drop", "ALL",
            "--ro-bind", "/usr", "/usr",
        ]
        for folder in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
            if os.path.islink(folder):
                command += ["--symlink", os.readlink(folder), folder]
            elif os.path.isdir(folder):
                command += ["--ro-bind", folder, folder]
        command += ["--dir", "/etc"]
        for name in ETC_FILES:
            command += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        command += [
            "--ro-bind", "/tmp/etc/passwd", "/etc/passwd", "--ro-bind", "/tmp/etc/group", "/etc/group",
            "--proc", "/proc", "--dev", "/dev", "--bind", f"{store}/shm", "/dev/shm", "--remount-ro", "/dev",
            "--bind", f"{store}/tmp", "/tmp", "--bind", "/tmp/workspace", WORKSPACE,
        ]
        for folder in HARBOR_FOLDERS:
            command += ["--bind", f"{store}{folder}", folder]
        command += ["--remount-ro", "/", "--chdir", "/", "--clearenv"]
        # fmt: on
        for key, value in env.items():
            command += ["--setenv", key, value]
        return _joining(self._group, [*command, "--info-fd", "INFO_FD", "--", *SHELL])

    def _limits_command(self) -> str:
        limits = self.limits
        per_process = "" if self._group else f" -v {limits.memory_bytes >> 10}"
        return f"ulimit -c 0 -u {limits.processes} -n {limits.open_files}{per_process}"

    def _kill_processes(self) -> None:
        with self._processes_lock:
            channels, self._processes = self._processes, []
        for channel in channels:
            channel.kill()

    def _destroy(self) -> None:
        self._kill_processes()
        self._holder.close()
        if self._group is not None:
            self._group.remove()


class _Holder:
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
            *_as_host_user(),
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
        self._process.kill()  # its child has a parent-death signal
        self._process.wait(KILL_TIMEOUT_S)
        self._process.stdin.close()
        self._process.stdout.close()


class _NamespaceChannel:
    """A `bwrap` of ours: standard input and output, and a handle on the first process of its process namespace."""

    def __init__(self, command: list[str]) -> None:
        info_read, info_write = os.pipe()
        self._first_process = -1
        self._lock = threading.Lock()
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
                    self._process.kill()
                    self._process.wait(KILL_TIMEOUT_S)
                    self._close_pipes()
                    raise SandboxError(f"bubblewrap did not start: {said.decode('utf-8', 'replace').strip()}")
                info += data
            try:
                self._first_process = os.pidfd_open(json.loads(info)["child-pid"])
            except ProcessLookupError:  # it has ended already; end-of-file follows
                self._first_process = -1
        finally:
            os.close(info_read)
        os.set_blocking(self._process.stdin.fileno(), False)

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
        code = self._process.wait(KILL_TIMEOUT_S)
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


def _as_host_user() -> list[str]:
    if os.geteuid() != 0:
        return []
    user = str(HOST_USER)
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs", "--inh-caps=-all"]


def _joining(group: cgroup.ControlGroup | None, command: list[str]) -> list[str]:
    """`command`, started by a process that first joins `group`: no child can be born outside."""
    if group is None:
        return command
    files = [str(file) for file in group.process_files]
    script = 'for f in "${@:2:$1}"; do echo $$ >"$f" || exit; done; shift $(($1 + 1)); exec "$@"'
    return ["bash", "--norc", "--noprofile", "-c", script, "join", str(len(files)), *files, *command]


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
    return starting.result()


def _read(source: int, deadline: float) -> bytes | None:
    """Some bytes, b"" at end-of-file, None past the deadline."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        return None
    return os.read(source, READ_BYTES)


def _next_label() -> str:
    global _sequence
    with _sequence_lock:
        _sequence += 1
        return str(_sequence)


def sweep() -> int:
    """What dead owners left: only empty control groups can be; processes and files end with their owner."""
    return cgroup.sweep() if Path("/sys/fs/cgroup").is_dir() else 0

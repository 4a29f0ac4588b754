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

import os
import shutil
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path

from skyrl_thundersync.sandbox import cgroup
from skyrl_thundersync.sandbox.base import (
    HARBOR_FOLDERS,
    WORKSPACE,
    Limits,
    Owner,
    SandboxError,
    SandboxLost,
    call_all,
)
from skyrl_thundersync.sandbox.namespace import SANDBOX_USER, Holder, NamespaceChannel, as_host_user
from skyrl_thundersync.sandbox.shell import AGENT_ENV, SHELL, Channel, ShellSandbox

ETC_FILES = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types")

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
        self._processes: list[NamespaceChannel] = []
        self._processes_lock = threading.Lock()
        self._group: cgroup.ControlGroup | None = None
        self._holder: Holder | None = None
        try:
            self._group = cgroup.create(Owner.current(), _next_label(), limits)
            self._holder = Holder(limits)
            self._holder.wait_ready()
            self._shell = self._new_shell(AGENT_ENV, grading=False)
        except BaseException:
            self.close()
            raise

    def _open_channel(self, env: Mapping[str, str], grading: bool) -> Channel:
        if self._holder is None or not self._holder.alive:
            raise SandboxError(f"sandbox {self.name}: its holder process was killed from outside (out of memory?)")
        channel = NamespaceChannel(self._shell_command(env, grading))
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
            *as_host_user(),
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
        call_all(f"ending the processes of sandbox {self.name}", [channel.kill for channel in channels])

    def _destroy(self) -> None:
        calls = [self._kill_processes]
        if self._holder is not None:
            calls.append(self._holder.close)
        if self._group is not None:
            calls.append(self._group.remove)
        call_all(f"giving sandbox {self.name} back", calls)


def _joining(group: cgroup.ControlGroup | None, command: list[str]) -> list[str]:
    """`command`, started by a process that first joins `group`: no child can be born outside."""
    if group is None:
        return command
    files = [str(file) for file in group.process_files]
    script = 'for f in "${@:2:$1}"; do echo $$ >"$f" || exit; done; shift $(($1 + 1)); exec "$@"'
    return ["bash", "--norc", "--noprofile", "-c", script, "join", str(len(files)), *files, *command]


def _next_label() -> str:
    global _sequence
    with _sequence_lock:
        _sequence += 1
        return str(_sequence)


def sweep() -> int:
    """What dead owners left: only empty control groups can be; processes and files end with their owner."""
    return cgroup.sweep() if Path("/sys/fs/cgroup").is_dir() else 0

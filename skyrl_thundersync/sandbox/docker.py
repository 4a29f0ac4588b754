"""Sandboxes in Docker containers (also rootless Docker, and Podman's socket) through the Docker SDK.

Differs from the usual `exec_run` per command. The container's first process is an init that only reaps: it belongs to
root, without any capability, so that the agent, user 1000, can neither end nor trace it. The agent's bash is one
long-lived exec over a hijacked socket. A time limit ends every process of user 1000 (`kill -9 -1`, one system call that
no fork outruns) and keeps the files; where that fails within seconds, the container is killed and the sandbox reported
lost.

The profile: no network, read-only root, /workspace and /tmp and /dev/shm as tmpfs, all capabilities dropped, no new
privileges, limits on memory (no swap), processes and CPU, Docker's own system call filter. Files on tmpfs count towards
memory. Containers carry their run, owner and deadline as labels; what a dead owner left is removed at the next start.
`docker_engine` accounts for those whose creation or removal the engine did not answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import docker.types

from skyrl_thundersync.sandbox.base import HARBOR_FOLDERS, WORKSPACE, Limits, SandboxError, SandboxLost
from skyrl_thundersync.sandbox.docker_engine import DockerEngine
from skyrl_thundersync.sandbox.docker_exec import ENGINE_ERRORS, KILL_TIMEOUT_S, ExecChannel
from skyrl_thundersync.sandbox.shell import AGENT_ENV, SHELL, Channel, ShellSandbox

USER = "1000:1000"
SHM_BYTES = 16 << 20


class DockerSandbox(ShellSandbox):
    """See the module."""

    def __init__(
        self,
        engine: DockerEngine,
        image: str,
        name: str,
        run_id: str,
        limits: Limits,
        output_limit_bytes: int,
        writable_root: bool = False,
    ) -> None:
        """Create and start the container and the first shell.

        Raises:
            SandboxError: the engine refused; the message says what it said.
        """
        super().__init__(name, limits, output_limit_bytes)
        self._engine = engine
        self._container = f"thundersync-{engine.owner.pid}-{engine.owner.started}-{name}"
        try:
            engine.create(
                image,
                self._container,
                run_id,
                command=["sleep", "infinity"],
                user="0:0",
                network_disabled=True,
                working_dir=WORKSPACE,
                hostname="sandbox",
                host_config=self._host_config(writable_root),
            )
            engine.api.start(self._container)
            self._shell = self._new_shell(AGENT_ENV, grading=False)
        except ENGINE_ERRORS as error:
            self.close()
            raise SandboxError(f"starting a container of {image!r} failed: {error}") from error
        except BaseException:
            self.close()
            raise

    def _host_config(self, writable_root: bool) -> docker.types.HostConfig:
        limits = self.limits
        writable = "rw,exec,nosuid,nodev,uid=1000,gid=1000,mode=755"
        return self._engine.api.create_host_config(
            network_mode="none",
            init=True,
            read_only=not writable_root,
            tmpfs={
                WORKSPACE: f"{writable},size={limits.disk_bytes // 8 * 5}",
                "/tmp": f"rw,exec,nosuid,nodev,mode=1777,size={limits.disk_bytes // 4}",
                **{folder: f"{writable},size={limits.disk_bytes // 24}" for folder in HARBOR_FOLDERS},
            },
            shm_size=SHM_BYTES,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            mem_limit=limits.memory_bytes,
            memswap_limit=limits.memory_bytes,
            pids_limit=limits.processes,
            nano_cpus=int(limits.cpus * 1e9),
            ulimits=[
                docker.types.Ulimit(name="core", soft=0, hard=0),
                docker.types.Ulimit(name="nofile", soft=limits.open_files, hard=limits.open_files),
            ],
        )

    def _open_channel(self, env: Mapping[str, str], grading: bool) -> Channel:
        try:
            return ExecChannel(self._engine.api, self._container, [*SHELL], env, USER)
        except ENGINE_ERRORS as error:
            raise SandboxError(f"sandbox {self.name}: the engine started no shell: {error}") from error

    def _limits_command(self) -> str:
        return "true"

    def _kill_processes(self) -> None:
        try:
            killer = ExecChannel(
                self._engine.api, self._container, ["bash", "--norc", "--noprofile", "-c", "kill -9 -1"], {}, USER
            )
            try:
                deadline = time.monotonic() + KILL_TIMEOUT_S
                while data := killer.receive(deadline):
                    del data
                done = data == b"" and killer.exit_code() in (0, 1)  # 1: there was nothing to end
            finally:
                killer.close()
        except ENGINE_ERRORS:
            done = False
        if not done:
            self._engine.remove(self._container)
            raise SandboxLost("the agent's processes did not end; the container was killed")

    def _destroy(self) -> None:
        self._engine.remove(self._container)

"""Sandboxes in Docker containers (also rootless Docker, and Podman's socket) through the Docker SDK.

Differs from the usual `exec_run` per command. The container's first process is an init that only reaps: it belongs to
root, without any capability, so that the agent, user 1000, can neither end nor trace it. The agent's bash is one
long-lived exec over a hijacked socket. A time limit ends every process of user 1000 (`kill -9 -1`, one system call that
no fork outruns) and keeps the files; where that fails within seconds, the container is killed and the sandbox reported
lost.

The profile: no network, read-only root, /workspace and /tmp and /dev/shm as tmpfs, all capabilities dropped, no new
privileges, limits on memory (no swap), processes and CPU, Docker's own system call filter. Files on tmpfs count towards
memory. Containers carry their run, owner and deadline as labels; what a dead owner left is removed at the next start.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import docker
import docker.errors
from docker.types import HostConfig

from skyrl_thundersync.sandbox.base import HARBOR_FOLDERS, WORKSPACE, Limits, Owner, SandboxError, SandboxLost
from skyrl_thundersync.sandbox.docker_exec import ENGINE_ERRORS, KILL_TIMEOUT_S, ExecChannel
from skyrl_thundersync.sandbox.shell import AGENT_ENV, SHELL, Channel, ShellSandbox

LABEL = "skyrl-thundersync."
USER = "1000:1000"
SHM_BYTES = 16 << 20
LIFETIME_S = 24 * 3600.0
"""A container older than this is left over, whoever owns it."""
REQUEST_TIMEOUT_S = 120.0
CONNECTIONS = 128


def reason_unavailable() -> str | None:
    """None where an engine answers, else what is wrong and what to do."""
    try:
        client = docker.from_env(timeout=10)
    except ENGINE_ERRORS as error:
        return f"no engine answers ({error}): install and start Docker, or set DOCKER_HOST"
    try:
        client.ping()
    except ENGINE_ERRORS as error:
        return f"the engine does not answer ({error}): start it, or set DOCKER_HOST"
    finally:
        client.close()
    return None


class DockerEngine:
    """A connection to the engine, shared by all sandboxes of a pool."""

    def __init__(self) -> None:
        self.owner = Owner.current()
        try:
            self.api = docker.from_env(timeout=REQUEST_TIMEOUT_S, max_pool_size=CONNECTIONS).api
        except ENGINE_ERRORS as error:
            raise SandboxError(f"no Docker engine answers: {error}") from error

    def require_image(self, image: str) -> None:
        """Raises SandboxError when the engine does not hold `image`: nothing is pulled while agents run."""
        if not self.has_image(image):
            raise SandboxError(
                f"the Docker engine has no image {image!r}: docker pull or build it, or set thundersync.sandbox.image"
            )

    def has_image(self, image: str) -> bool:
        """Raises SandboxError when the engine does not answer."""
        try:
            self.api.inspect_image(image)
        except docker.errors.ImageNotFound:
            return False
        except ENGINE_ERRORS as error:
            raise SandboxError(f"the Docker engine does not answer: {error}") from error
        return True

    def names(self) -> set[str]:
        """All images' names, each with its tag. Raises SandboxError when the engine does not answer."""
        try:
            return {name for image in self.api.images() for name in image["RepoTags"] or ()}
        except ENGINE_ERRORS as error:
            raise SandboxError(f"the Docker engine does not answer: {error}") from error

    def labels(self, run_id: str) -> dict[str, str]:
        owner = self.owner
        values = {
            "run": run_id,
            "host": owner.host,
            "boot": owner.boot,
            "pid-namespace": owner.pid_namespace,
            "pid": str(owner.pid),
            "started": str(owner.started),
            "deadline": str(int(time.time() + LIFETIME_S)),
        }
        return {LABEL + key: value for key, value in values.items()}

    def sweep(self) -> int:
        """Remove containers whose owner is known to be dead or whose deadline has passed; how many."""
        removed = 0
        try:
            for container in self.api.containers(all=True, filters={"label": LABEL + "run"}):
                labels = container["Labels"]
                owner = Owner(
                    host=labels[LABEL + "host"],
                    boot=labels[LABEL + "boot"],
                    pid_namespace=labels[LABEL + "pid-namespace"],
                    pid=int(labels[LABEL + "pid"]),
                    started=int(labels[LABEL + "started"]),
                )
                if owner.is_dead() or time.time() > int(labels[LABEL + "deadline"]):
                    removed += self.remove(container["Id"])
        except ENGINE_ERRORS as error:
            raise SandboxError(f"sweeping the Docker engine failed: {error}") from error
        return removed

    def remove(self, container: str) -> bool:
        """Kill and remove; False where it is gone or going already."""
        try:
            self.api.remove_container(container, force=True, v=True)
        except docker.errors.NotFound:
            return False
        except docker.errors.APIError as error:
            if error.status_code == 409:  # "removal … is already in progress"
                return False
            raise
        return True

    def close(self) -> None:
        self.api.close()


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
        api = engine.api
        try:
            self._container = api.create_container(
                image,
                command=["sleep", "infinity"],
                name=f"thundersync-{engine.owner.pid}-{engine.owner.started}-{name}",
                labels=engine.labels(run_id),
                user="0:0",
                network_disabled=True,
                working_dir=WORKSPACE,
                hostname="sandbox",
                host_config=self._host_config(writable_root),
            )["Id"]
        except docker.errors.ImageNotFound as error:
            raise SandboxError(f"the Docker engine has no image {image!r}: docker pull or build it") from error
        except ENGINE_ERRORS as error:
            raise SandboxError(f"creating a container of {image!r} failed: {error}") from error
        try:
            api.start(self._container)
            self._shell = self._new_shell(AGENT_ENV, grading=False)
        except SandboxError:
            self.close()
            raise
        except ENGINE_ERRORS as error:
            self.close()
            raise SandboxError(f"starting a container of {image!r} failed: {error}") from error

    def _host_config(self, writable_root: bool) -> HostConfig:
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
            self._engine_remove()
            raise SandboxLost("the agent's processes did not end; the container was killed")

    def _destroy(self) -> None:
        self._engine_remove()

    def _engine_remove(self) -> None:
        try:
            self._engine.remove(self._container)
        except ENGINE_ERRORS as error:
            raise SandboxError(f"sandbox {self.name}: the engine did not remove its container: {error}") from error

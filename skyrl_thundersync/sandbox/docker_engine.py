"""A connection to the Docker engine, and the account of every container that was asked of it.

The engine's answer is not what decides whether there is a container: a request whose answer never came may have been done,
or may yet be done. So a container's name is chosen and noted before the engine is asked for it, and it stays noted until
the engine has said that there is no such container. What could not be removed when its sandbox ended is tried again each
time a container is asked for, and at the end.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import docker
import docker.errors

from skyrl_thundersync.sandbox.base import Owner, SandboxError
from skyrl_thundersync.sandbox.docker_exec import ENGINE_ERRORS

logger = logging.getLogger(__name__)

LABEL = "skyrl-thundersync."
LIFETIME_S = 24 * 3600.0
"""A container older than this is left over, whoever owns it."""
REQUEST_TIMEOUT_S = 120.0
SETTLE_S = 30.0
"""A request may be done so long after its answer was given up; so long the end of a run waits for what is to be gone."""
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
    """Shared by all sandboxes of a pool. Thread-safe."""

    def __init__(self) -> None:
        self.owner = Owner.current()
        try:
            self.api = docker.from_env(timeout=REQUEST_TIMEOUT_S, max_pool_size=CONNECTIONS).api
        except ENGINE_ERRORS as error:
            raise SandboxError(f"no Docker engine answers: {error}") from error
        self._lock = threading.Lock()
        self._known: dict[str, float] = {}
        """Containers asked for and not known to be gone, and until when (time.monotonic) they may yet appear."""
        self._doomed: dict[str, None] = {}
        """Those of them that are to be gone, in the order in which to try."""
        self._silent = False
        """The last removal was not answered: further ones wait for a better time."""
        self._closed = False

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

    def create(self, image: str, name: str, run_id: str, **options: Any) -> None:
        """A container called `name`, not started. `remove` it, also when this raises.

        Raises:
            SandboxError: the engine refused, or did not answer in time.
        """
        self.remove_doomed()
        with self._lock:
            if self._closed:
                raise SandboxError("the connection to the Docker engine is closed")
            self._known[name] = time.monotonic() + REQUEST_TIMEOUT_S + SETTLE_S
        try:
            self.api.create_container(image, name=name, labels=self.labels(run_id), **options)
        except docker.errors.APIError as error:
            self._answered(name)
            if isinstance(error, docker.errors.ImageNotFound):
                raise SandboxError(f"the Docker engine has no image {image!r}: docker pull or build it") from error
            raise SandboxError(f"creating a container of {image!r} failed: {error}") from error
        except ENGINE_ERRORS as error:
            raise SandboxError(f"creating a container of {image!r} failed: {error}") from error
        self._answered(name)

    def _answered(self, name: str) -> None:
        with self._lock:
            if name in self._known:
                self._known[name] = 0.0

    def remove(self, name: str) -> None:
        """Kill and remove the container `name`: now if the engine does it, else later."""
        with self._lock:
            self._doomed[name] = None
        if not self._silent and (error := self._try_to_remove(name)):
            logger.warning("the Docker engine did not remove container %s, which is tried again later: %s", name, error)

    def remove_doomed(self) -> list[str]:
        """Try again to remove what is to be gone; what is not known to be gone after that."""
        for name in self._all_doomed():
            self._try_to_remove(name)
            if self._silent:
                break
        return self._all_doomed()

    def _all_doomed(self) -> list[str]:
        with self._lock:
            return list(self._doomed)

    def _try_to_remove(self, name: str) -> Exception | None:
        """What went wrong, where something did."""
        failed = removed = None
        try:
            removed = self._remove(name)
            self._silent = False
        except ENGINE_ERRORS as error:
            failed, self._silent = error, not isinstance(error, docker.errors.APIError)
        with self._lock:
            if removed or (removed is False and time.monotonic() > self._known.get(name, 0.0)):
                self._known.pop(name, None)
                self._doomed.pop(name, None)
            elif name in self._doomed:  # to the end: another one may go
                del self._doomed[name]
                self._doomed[name] = None
        return failed

    def _remove(self, container: str) -> bool | None:
        """True where this removed it, False where there is none, None where it is being removed, which may fail yet."""
        try:
            self.api.remove_container(container, force=True, v=True)
        except docker.errors.NotFound:
            return False
        except docker.errors.APIError as error:
            if error.status_code == 409:
                return None
            raise
        return True

    def sweep(self) -> int:
        """Remove containers whose owner is known to be dead or whose deadline has passed; how many.

        Raises:
            SandboxError: the engine does not answer.
        """
        removed = 0
        try:
            for container in self.api.containers(all=True, filters={"label": LABEL + "run"}):
                if not _left_over(container["Labels"]):
                    continue
                try:
                    removed += self._remove(container["Id"]) is True
                except docker.errors.APIError as error:
                    logger.warning("left over and not removed: container %s: %s", container["Id"], error)
        except ENGINE_ERRORS as error:
            raise SandboxError(f"sweeping the Docker engine failed: {error}") from error
        return removed

    def close(self) -> None:
        """Remove what there may be of the containers asked for, and hang up. No container can be asked for after.

        Raises:
            SandboxError: a container is not known to be gone; the message says how to remove it.
        """
        with self._lock:
            self._closed = True
            self._doomed |= dict.fromkeys(self._known)
        deadline = time.monotonic() + SETTLE_S
        pause = 0.05
        try:
            while (left := self.remove_doomed()) and time.monotonic() < deadline:
                time.sleep(pause)
                pause = min(2 * pause, 2.0)
        finally:
            self.api.close()
        if left:
            raise SandboxError(
                f"the Docker engine has not said that these containers are gone: {', '.join(left)}. `docker rm -f` them; "
                "the next run on this host does so too"
            )


def _left_over(labels: dict[str, str]) -> bool:
    owner = Owner(
        host=labels[LABEL + "host"],
        boot=labels[LABEL + "boot"],
        pid_namespace=labels[LABEL + "pid-namespace"],
        pid=int(labels[LABEL + "pid"]),
        started=int(labels[LABEL + "started"]),
    )
    return owner.is_dead() or time.time() > int(labels[LABEL + "deadline"])

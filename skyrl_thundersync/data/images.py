"""Images of tasks: built once, before anything runs, and given to user 1000 where the agent works.

An agent is never root here, and most images keep their working folder for root: the last layer hands it over. Tags are made
from what goes in, so a changed environment is another image and an unchanged one is not built again.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

import docker
import docker.errors

from skyrl_thundersync.sandbox.base import SandboxError
from skyrl_thundersync.sandbox.docker_exec import ENGINE_ERRORS

BUILD_TIMEOUT_S = 3600
_NOT_GIVEN = ("/", "/bin", "/etc", "/lib", "/proc", "/sbin", "/sys", "/usr", "/var")


class BuildError(SandboxError):
    """An image could not be made; holds the end of the build's output."""


def owned_tag(base: str, workdir: str) -> str:
    """The tag of `base` with `workdir` given to user 1000."""
    name = re.sub(r"[^a-z0-9_.-]", "-", base.rpartition("/")[2].partition(":")[0].lower()).strip("-._") or "image"
    return f"thundersync-task/{name}:{hashlib.sha256(f'{base} {workdir}'.encode()).hexdigest()[:16]}"


class ImageBuilder:
    """Builds through the Docker engine. A context manager.

    `network`: give builds the engine's network, which most public Dockerfiles need. Agents' sandboxes never have one.
    """

    def __init__(self, network: bool = False) -> None:
        """Raises SandboxError when no engine answers."""
        self._network = "default" if network else "none"
        try:
            self._api = docker.from_env(timeout=BUILD_TIMEOUT_S).api
            self._api.ping()
        except ENGINE_ERRORS as error:
            raise SandboxError(f"no Docker engine answers: {error}") from error

    def __enter__(self) -> ImageBuilder:
        return self

    def __exit__(self, *_error: object) -> None:
        self._api.close()

    def present(self, tag: str) -> bool:
        try:
            self._api.inspect_image(tag)
        except docker.errors.ImageNotFound:
            return False
        return True

    def build(self, environment: Path, workdir: str, tag: str) -> bool:
        """Make `tag` from the folder `environment`, unless it is there; whether it was made.

        Raises:
            BuildError: the Dockerfile fails.
        """
        if self.present(tag):
            return False
        raw = f"{tag}-raw"
        self._run(tag, path=str(environment), tag=raw)
        self._own(raw, workdir, tag)
        return True

    def own(self, base: str, workdir: str, tag: str) -> bool:
        """Make `tag` from the image `base`, unless it is there; whether it was made.

        Raises:
            BuildError: the engine does not hold `base` and cannot get it.
        """
        if self.present(tag):
            return False
        self._own(base, workdir, tag)
        return True

    def _own(self, base: str, workdir: str, tag: str) -> None:
        lines = [f"FROM {base}", "USER 0:0"]
        if workdir not in _NOT_GIVEN:
            lines.append(f'RUN ["/bin/sh", "-c", "mkdir -p \\"$0\\" && chown -R 1000:1000 \\"$0\\"", "{workdir}"]')
        self._run(tag, fileobj=io.BytesIO("\n".join(lines).encode()), tag=tag)

    def _run(self, what: str, **arguments: object) -> None:
        said: list[str] = []
        try:
            for event in self._events(**arguments):
                said.append(event.get("stream") or event.get("error") or "")
                if "error" in event:
                    raise BuildError(f"building {what} failed: {''.join(said)[-800:].strip()}")
        except ENGINE_ERRORS as error:
            raise BuildError(f"building {what} failed: {error}") from error

    def _events(self, **arguments: object) -> Iterator[dict[str, str]]:
        return self._api.build(rm=True, forcerm=True, decode=True, network_mode=self._network, **arguments)

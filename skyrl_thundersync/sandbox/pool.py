"""All sandboxes of a run in one place: made here, counted here, and gone when the run is, however it ends."""

from __future__ import annotations

import atexit
import itertools
import threading
from types import TracebackType
from typing import TYPE_CHECKING

from skyrl_thundersync.sandbox import bubblewrap, docker
from skyrl_thundersync.sandbox.base import Limits, Sandbox, SandboxError, SandboxLost
from skyrl_thundersync.sandbox.select import choose_backend
from skyrl_thundersync.sandbox.shell import ShellSandbox

if TYPE_CHECKING:  # it imports all of SkyRL
    from skyrl_thundersync.config import SandboxConfig


class SandboxPool:
    """Thread-safe. A context manager; also closes at interpreter exit. Sweeps what dead owners left when it starts."""

    def __init__(self, config: SandboxConfig, run_id: str, limits: Limits | None = None) -> None:
        """Choose the backend and check that it works.

        Raises:
            ValueError: an option has no such value.
            SandboxError: no backend works here; the message says how to change that.
        """
        if config.output_limit_bytes < 2:
            raise ValueError(
                f"thundersync.sandbox.output_limit_bytes must be at least 2, got {config.output_limit_bytes}"
            )
        if config.command_timeout_s <= 0:
            raise ValueError(f"thundersync.sandbox.command_timeout_s must be positive, got {config.command_timeout_s}")
        self.run_id = run_id
        self.backend = choose_backend(config.backend)
        self._config = config
        self._limits = limits or Limits()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[str, ShellSandbox] = {}
        self._closed = False
        self._engine = docker.DockerEngine() if self.backend == "docker" else None
        if self._engine is not None:
            self._engine.require_image(config.image)
        self.sweep()
        atexit.register(self.close_all)

    def create(self, image: str | None = None, writable_root: bool = False) -> Sandbox:
        """A new sandbox. `image`: a Docker image other than the configured one; bubblewrap has no images.

        `writable_root`: user 1000 may write where the image lets it, beside the working folder and /tmp (Docker only; the
        size of what is written there is not limited).

        Raises:
            SandboxError: it could not be made, or the pool is closed.
        """
        with self._lock:
            self._refuse_if_closed()
            name = f"{self.run_id}-{next(self._numbers)}"
        output_limit = self._config.output_limit_bytes
        sandbox: ShellSandbox
        if self._engine is not None:
            sandbox = docker.DockerSandbox(
                self._engine, image or self._config.image, name, self.run_id, self._limits, output_limit, writable_root
            )
        elif image is not None or writable_root:
            raise SandboxError(f"image {image!r} needs thundersync.sandbox.backend=docker; bubblewrap has no images")
        else:
            sandbox = bubblewrap.BubblewrapSandbox(name, self._limits, output_limit)
        sandbox.on_close = lambda: self._forget(name)
        with self._lock:
            closed = self._closed
            if not closed:
                self._open[name] = sandbox
        if closed:
            sandbox.close()
            self._refuse_if_closed()
        return sandbox

    @property
    def open_count(self) -> int:
        """Sandboxes made and not closed."""
        with self._lock:
            return len(self._open)

    @property
    def closed(self) -> bool:
        return self._closed

    def sweep(self) -> int:
        """Remove what owners left that no longer run, on this host; how many things. What live owners hold stays."""
        swept = bubblewrap.sweep()
        return swept + self._engine.sweep() if self._engine is not None else swept

    def close_all(self) -> None:
        """Close every sandbox, also those with a command running in another thread. Nothing can be created after.

        Raises:
            ExceptionGroup: of the errors met; the other sandboxes are closed nevertheless.
        """
        atexit.unregister(self.close_all)
        with self._lock:
            self._closed = True
            left = list(self._open.values())
        errors: list[SandboxError] = []
        for sandbox in left:
            try:
                sandbox.close()
            except SandboxError as error:
                errors.append(error)
        if self._engine is not None:
            self._engine.close()
        if errors:
            raise ExceptionGroup(f"closing the sandboxes of run {self.run_id}", errors)

    def _forget(self, name: str) -> None:
        with self._lock:
            self._open.pop(name, None)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise SandboxLost(f"the sandbox pool of run {self.run_id} is closed")

    def __enter__(self) -> SandboxPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close_all()

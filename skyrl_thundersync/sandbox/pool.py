"""All sandboxes of a run in one place: made here, counted here, and gone when the run is, however it ends."""

from __future__ import annotations

import atexit
import itertools
import logging
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING

from skyrl_thundersync.sandbox import bubblewrap, docker, docker_engine
from skyrl_thundersync.sandbox.base import Limits, Sandbox, SandboxError, SandboxLost, call_all
from skyrl_thundersync.sandbox.select import choose_backend
from skyrl_thundersync.sandbox.shell import ShellSandbox
from skyrl_thundersync.sandbox.warm import Kind, WarmSandboxes

if TYPE_CHECKING:  # it imports all of SkyRL
    from skyrl_thundersync.options.schema import SandboxConfig

logger = logging.getLogger(__name__)


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
        if config.warm < 0:
            raise ValueError(f"thundersync.sandbox.warm must not be negative, got {config.warm}")
        self.run_id = run_id
        self.backend = choose_backend(config.backend)
        self.config = config
        self._limits = limits or Limits()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._open: dict[str, ShellSandbox] = {}
        self._closed = False
        self._engine = docker_engine.DockerEngine() if self.backend == "docker" else None
        if self._engine is not None:
            self._engine.require_image(config.image)
        self._plain = Kind(config.image if self._engine is not None else None, False)
        self._warm = WarmSandboxes(self._start, self._plain, config.warm)
        self.sweep()
        atexit.register(self.close_all)

    def expect(self, image: str | None = None, writable_root: bool = False) -> None:
        """`create` will be called with these arguments soon: the sandbox may be started ahead."""
        self._warm.expect(self._kind(image, writable_root))

    def create(self, image: str | None = None, writable_root: bool = False, timeout_s: float | None = None) -> Sandbox:
        """A new sandbox, within `timeout_s` where that is given.

        `image`: a Docker image other than the configured one; bubblewrap has no images.

        `writable_root`: user 1000 may write where the image lets it, beside the working folder and /tmp (Docker only; the
        size of what is written there is not limited).

        Raises:
            SandboxError: it could not be made, not in time, or the pool is closed.
        """
        kind = self._kind(image, writable_root)
        if timeout_s is None or timeout_s == math.inf:
            return self._create(kind)
        made: Future[Sandbox] = Future()
        threading.Thread(target=_fulfil, args=(made, self._create, kind), name="sandbox-start", daemon=True).start()
        try:
            return made.result(timeout_s)
        except TimeoutError as error:
            if made.done():
                raise  # the start's own
            made.add_done_callback(_close_late)
            raise SandboxError(f"no sandbox started within {timeout_s:g} s") from error

    def _create(self, kind: Kind) -> Sandbox:
        self._refuse_if_closed()
        ahead = self._warm.take(kind)
        sandbox = ahead if ahead is not None else self._start(kind)
        sandbox.started_ahead = ahead is not None
        with self._lock:
            closed = self._closed
            if not closed:
                self._open[sandbox.name] = sandbox
        if closed:
            sandbox.close()
            self._refuse_if_closed()
        return sandbox

    def _kind(self, image: str | None, writable_root: bool) -> Kind:
        return Kind(image or self._plain.image, writable_root)

    def _start(self, kind: Kind) -> ShellSandbox:
        name = f"{self.run_id}-{next(self._numbers)}"
        output_limit = self.config.output_limit_bytes
        sandbox: ShellSandbox
        if self._engine is not None:
            sandbox = docker.DockerSandbox(
                self._engine, kind.image, name, self.run_id, self._limits, output_limit, kind.writable_root
            )
        elif kind != self._plain:
            raise SandboxError(
                f"image {kind.image!r} needs thundersync.sandbox.backend=docker; bubblewrap has no images"
            )
        else:
            sandbox = bubblewrap.BubblewrapSandbox(name, self._limits, output_limit)
        sandbox.on_close = lambda: self._forget(name)
        return sandbox

    def settle(self) -> None:
        """Wait until no sandbox is being started ahead: what follows finds as many as it ever would."""
        self._warm.settle()

    @property
    def open_count(self) -> int:
        """Sandboxes made and not closed."""
        with self._lock:
            return len(self._open)

    @property
    def ready_count(self) -> int:
        """Sandboxes that were started ahead and wait for their trajectories."""
        return self._warm.ready_count

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
            SandboxError, or ExceptionGroup of several: what could not be closed; the others are nevertheless.
        """
        atexit.unregister(self.close_all)
        with self._lock:
            self._closed = True
            left = list(self._open.values())
        closes = [*(sandbox.close for sandbox in left), self._warm.close]
        if self._engine is not None:
            closes.append(self._engine.close)
        call_all(f"closing the sandboxes of run {self.run_id}", closes)

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


def _fulfil(made: Future[Sandbox], create: Callable[[Kind], Sandbox], kind: Kind) -> None:
    try:
        sandbox = create(kind)
    except BaseException as error:  # noqa: BLE001 - whoever waits gets it
        made.set_exception(error)
    else:
        made.set_result(sandbox)


def _close_late(made: Future[Sandbox]) -> None:
    """Nobody waits for it any more."""
    if (error := made.exception()) is not None:
        logger.warning("a sandbox that was given up did not start either: %s", error)
    else:
        made.result().close()

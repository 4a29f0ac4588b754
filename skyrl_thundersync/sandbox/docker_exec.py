"""A shell in a container over an exec's hijacked connection, as a channel of the persistent shell."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import docker
import docker.errors
import requests.exceptions

from skyrl_thundersync.sandbox.base import WORKSPACE, SandboxError, SandboxLost

KILL_TIMEOUT_S = 10.0
READ_BYTES = 1 << 16
ENGINE_ERRORS = (docker.errors.DockerException, requests.exceptions.RequestException)


class ExecChannel:
    """An exec's hijacked connection; the engine frames its output (8-byte header: stream, length)."""

    def __init__(
        self, api: docker.APIClient, container: str, command: list[str], env: Mapping[str, str], user: str
    ) -> None:
        self._api = api
        self._exec = self._api.exec_create(
            container,
            command,
            stdin=True,
            stdout=True,
            stderr=True,
            environment=dict(env),
            user=user,
            workdir=WORKSPACE,
        )["Id"]
        stream = self._api.exec_start(self._exec, socket=True, tty=False)
        self._stream = stream
        self._socket: socket.socket = getattr(stream, "_sock", stream)
        self._socket.setblocking(False)
        self._received = bytearray()
        self._frame_left = 0
        self._lock = threading.Lock()

    def send(self, data: bytes, deadline: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        view = memoryview(data)
        while view:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                return False
        return True

    def receive(self, deadline: float) -> bytes | None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        patience = 0.25
        while True:
            if data := self._unframed():
                return data
            left = deadline - time.monotonic()
            if not poll.poll(max(0.0, min(left, patience)) * 1000):
                if left <= patience:
                    return None
                # The engine keeps the connection open while a background child holds the output of a shell that ended.
                if not self._inspect()["Running"]:
                    return b""
                patience = min(2 * patience, 4.0)
                continue
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                return b""
            if not data:
                return b""
            self._received += data

    def _unframed(self) -> bytes:
        out = bytearray()
        while self._received:
            if self._frame_left == 0:
                if len(self._received) < 8:
                    break
                self._frame_left = int.from_bytes(self._received[4:8], "big")
                del self._received[:8]
            take = self._received[: self._frame_left]
            out += take
            del self._received[: len(take)]
            self._frame_left -= len(take)
        return bytes(out)

    def _inspect(self) -> dict[str, Any]:
        try:
            return self._api.exec_inspect(self._exec)
        except docker.errors.APIError as error:
            raise SandboxLost(f"the container is gone: {error}") from error
        except ENGINE_ERRORS as error:
            raise SandboxError(f"the Docker engine does not answer any more: {error}") from error

    def exit_code(self) -> int:
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while (state := self._inspect())["Running"]:
            if time.monotonic() > deadline:
                raise SandboxLost("the engine says that a shell whose output has ended still runs")
            time.sleep(0.005)
        return state["ExitCode"]

    def close(self) -> None:
        with self._lock:
            self._stream.close()
            self._socket.close()

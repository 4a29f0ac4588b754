"""A way to the Docker engine on which requests or answers are held up: the engine does the work, the client gives up."""

import contextlib
import re
import socket
import threading
import time
from urllib.parse import urlsplit

import docker


class SlowEngine:
    """A Unix socket in front of the engine's own. A context manager.

    A request line that matches a pattern is treated so as many times as was said; all else passes at once, hijacked
    connections too.
    """

    def __init__(self, path):
        with contextlib.closing(docker.from_env()) as client:
            self._engine = urlsplit(client.api.base_url)
            self._engine_path = "/var/run/docker.sock" if self._engine.scheme.startswith("http+") else None
        assert self._engine_path, "the tests reach the engine over its Unix socket"
        self.url = f"unix://{path}"
        self.seen = []
        self.done = threading.Event()
        """The engine has answered a request whose answer got lost."""
        self._rules = []
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)

    def lose_answers(self, pattern, times):
        """The engine gets such requests and does them; its answers get lost."""
        self._rules.append([re.compile(pattern), times, "lose", 0.0])

    def hold_requests(self, pattern, times, seconds):
        """Such requests reach the engine late, whether the client still waits or not; the answers get lost."""
        self._rules.append([re.compile(pattern), times, "hold", seconds])

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_error):
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                engine = socket.socket(socket.AF_UNIX)
                engine.connect(self._engine_path)
                lost = threading.Event()
                threading.Thread(target=self._to_engine, args=(client, engine, lost), daemon=True).start()
                threading.Thread(target=self._to_client, args=(client, engine, lost), daemon=True).start()

    def _rule(self, data):
        line = data.partition(b"\r\n")[0].decode("latin-1")
        if not re.match(r"(GET|POST|DELETE|PUT|HEAD) \S+ HTTP/1", line):
            return None
        with self._lock:
            self.seen.append(line)
            for rule in self._rules:
                if rule[1] and rule[0].search(line):
                    rule[1] -= 1
                    return rule
        return None

    def _to_engine(self, client, engine, lost):
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                if rule := self._rule(data):
                    lost.set()
                    if rule[2] == "hold":
                        time.sleep(rule[3])
                engine.sendall(data)
            if not lost.is_set():  # an engine that notices that nobody waits may leave the work undone
                engine.shutdown(socket.SHUT_WR)

    def _to_client(self, client, engine, lost):
        with contextlib.suppress(OSError):
            while data := engine.recv(1 << 16):
                if lost.is_set():
                    self.done.set()
                else:
                    client.sendall(data)
            client.shutdown(socket.SHUT_WR)

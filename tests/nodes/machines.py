"""Three machines out of this one with a Ray cluster over them (scripts/machines.sh): the head has no place for actors."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "machines.sh"
RAY = Path(sys.executable).with_name("ray")
HEAD = "10.78.0.10:6379"


def on(index: int, *command: str | Path) -> tuple[str, ...]:
    """The command that runs `command` on a machine."""
    return (str(SCRIPT), "on", str(index), *map(str, command))


def do(*arguments: str | int) -> None:
    subprocess.run([SCRIPT, *map(str, arguments)], check=True, cwd=ROOT)


@contextmanager
def cluster(count: int, places: int = 4) -> Iterator[None]:
    """`count` machines, node-0 with Ray's head, the others with `places` places each; off at the end."""
    do("down")
    do("up", count, ROOT)
    try:
        start = ("--num-cpus", "0", "--include-dashboard", "false")
        _run(on(0, RAY, "start", "--head", "--node-ip-address", "10.78.0.10", "--port", "6379", *start))
        for index in range(1, count):
            own = ("--node-ip-address", f"10.78.0.{10 + index}", "--num-cpus", str(places))
            _run(on(index, RAY, "start", "--address", HEAD, *own))
        yield
    finally:
        do("down")


def _run(command: tuple[str, ...]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def carried(index: int) -> dict[str, int]:
    """Bytes that a machine's cable brought in and took out so far, as its own interface counts them."""
    script = "print(*(open('/proc/net/dev').read().split('eth0:')[1].split()[i] for i in (0, 8)))"
    done = subprocess.run(on(index, sys.executable, "-c", script), cwd=ROOT, capture_output=True, text=True, check=True)
    taken, given = map(int, done.stdout.split())
    return {"in": taken, "out": given}


def processes(index: int) -> list[str]:
    """Command lines of a machine's processes that belong to a run: actors and agents."""
    script = (
        "import pathlib\n"
        "for p in pathlib.Path('/proc').glob('[0-9]*/cmdline'):\n"
        "    print(p.read_bytes().replace(b'\\0', b' ').decode())\n"
    )
    done = subprocess.run(on(index, sys.executable, "-c", script), cwd=ROOT, capture_output=True, text=True, check=True)
    ray_own = ("ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::IDLE")
    return [line for line in done.stdout.splitlines() if line.startswith("ray::") and not line.startswith(ray_own)]


def folders(index: int) -> list[str]:
    """What runs left below a machine's temporary folder."""
    done = subprocess.run(on(index, "find", "/tmp/skyrl_thundersync", "-mindepth", "1"), capture_output=True, text=True)
    return done.stdout.splitlines()


def settled(check, timeout: float = 30.0):
    """What `check` says once it says nothing more, or at the end of `timeout`."""
    end = time.monotonic() + timeout
    while (left := check()) and time.monotonic() < end:
        time.sleep(0.5)
    return left

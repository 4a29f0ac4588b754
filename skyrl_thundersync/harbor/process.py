"""`harbor run` as a process that ends: bounded in time and in what is kept of its output, and nothing of it stays behind.

Harbor limits each phase of a trial by itself and takes its containers down when it is interrupted. Here one deadline is
over all phases; whoever waits may be cancelled; a Harbor that does not heed an interrupt is killed with all processes that it
started; and what its trials then have in the Docker engine is removed by the name of their Compose project.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import docker

from skyrl_thundersync.sandbox.base import HeadTailBuffer, SandboxError
from skyrl_thundersync.sandbox.docker_engine import REQUEST_TIMEOUT_S
from skyrl_thundersync.sandbox.docker_exec import ENGINE_ERRORS

INTERRUPT_GRACE_S = 60.0
"""What Harbor has, after an interrupt, to take its containers down."""
REMOVE_S = 60.0
OUTPUT_BYTES = 64 << 10
READ_BYTES = 1 << 16
PROJECT = "com.docker.compose.project"

# Harbor 0.25's own limits where a task sets none; it has none for the agent.
BUILD_S, AGENT_SETUP_S, AGENT_S, VERIFIER_S = 600.0, 360.0, 3600.0, 600.0


@dataclass(frozen=True)
class Ended:
    """How `harbor run` ended.

    Attributes:
        code: its exit code, negative for a signal.
        said: head and tail of what it printed.
        timed_out: it was ended at the deadline.
    """

    code: int
    said: str
    timed_out: bool


def time_allowed(task: Path) -> float:
    """Seconds for a trial at the task folder `task`: what Harbor allows boot, agent and verifier by task.toml, added up."""
    told = tomllib.loads((task / "task.toml").read_text(encoding="utf-8"))

    def limit(of: Mapping, phase: str, default: float) -> float:
        return float((of.get(phase) or {}).get("timeout_sec") or default)

    agent, verifier = limit(told, "agent", AGENT_S), limit(told, "verifier", VERIFIER_S)
    steps = [limit(step, "agent", agent) + limit(step, "verifier", verifier) for step in told.get("steps") or []]
    build = float((told.get("environment") or {}).get("build_timeout_sec") or BUILD_S)
    return build + AGENT_SETUP_S + (sum(steps) or agent + verifier)


async def run_harbor(arguments: Sequence[str], env: Mapping[str, str], deadline_s: float, job: Path | None) -> Ended:
    """Run `arguments` for at most `deadline_s` seconds.

    At the deadline, and when the caller is cancelled, it is interrupted, and `INTERRUPT_GRACE_S` later killed, with every
    process of its group. `job`: the folder of its trials, where they are run with Docker: what they have left in the engine
    by then is removed.

    Raises:
        SandboxError: the engine did not remove it.
    """
    process = await asyncio.create_subprocess_exec(
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=env,
        start_new_session=True,  # a Ctrl-C at the terminal comes from here, once
    )
    buffer = HeadTailBuffer(OUTPUT_BYTES)
    reading = asyncio.create_task(_read(process.stdout, buffer))
    timed_out = False
    try:
        async with asyncio.timeout(deadline_s):
            await process.wait()
    except TimeoutError:
        timed_out = True
    finally:
        # In a task of its own: whoever is cancelled again while he waits for it does not stop it.
        await asyncio.shield(asyncio.create_task(_end(process, reading, job)))
    return Ended(process.returncode, buffer.text(), timed_out)


async def _read(source: asyncio.StreamReader, buffer: HeadTailBuffer) -> None:
    while data := await source.read(READ_BYTES):
        buffer.add(data)


async def _end(process: asyncio.subprocess.Process, reading: asyncio.Task[None], job: Path | None) -> None:
    interrupted = process.returncode is None
    try:
        if interrupted:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), INTERRUPT_GRACE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing of the group is left
            os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
    # A process that left the group may hold the pipe open.
    await asyncio.wait({reading}, timeout=1.0)
    reading.cancel()
    if job is not None and (interrupted or process.returncode < 0):
        await asyncio.to_thread(remove_projects, [folder.name for folder in job.glob("*/")])


def remove_projects(trials: Sequence[str]) -> None:
    """Remove containers, networks and volumes of the Compose projects of Harbor's trials called `trials`.

    Raises:
        SandboxError: the engine does not answer, or there is still one after a minute.
    """
    prefixes = tuple(f"{re.sub(r'[^a-z0-9_-]', '-', name.lower())}__" for name in trials)
    if not prefixes:
        return
    deadline = time.monotonic() + REMOVE_S
    try:
        with contextlib.closing(docker.from_env(timeout=REQUEST_TIMEOUT_S)) as client:
            while left := _of_projects(client, prefixes):
                for thing in left:
                    with contextlib.suppress(docker.errors.NotFound):
                        thing.remove(**({"force": True, "v": True} if hasattr(thing, "exec_run") else {}))
                if time.monotonic() > deadline:
                    raise SandboxError(f"the Docker engine did not remove {', '.join(thing.name for thing in left)}")
    except ENGINE_ERRORS as error:
        raise SandboxError(
            f"removing what the trials {', '.join(trials)} left in the Docker engine: {error}"
        ) from error


def _of_projects(client: docker.DockerClient, prefixes: tuple[str, ...]) -> list:
    filters = {"label": PROJECT}
    # In this order: what a container uses cannot be removed before it.
    things = [
        *client.containers.list(all=True, filters=filters, ignore_removed=True),
        *client.networks.list(filters=filters),
        *client.volumes.list(filters=filters),
    ]
    return [thing for thing in things if _labels(thing).get(PROJECT, "").startswith(prefixes)]


def _labels(thing) -> dict[str, str]:
    return thing.attrs.get("Labels") or thing.attrs.get("Config", {}).get("Labels") or {}

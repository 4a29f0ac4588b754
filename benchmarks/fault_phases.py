"""When a run is in which phase of an update, from what its processes say that they are at (`process.heartbeat`).

A phase can be some milliseconds long: the process is stopped with SIGSTOP when it says that it is there, and asked again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from skyrl_thundersync.process.heartbeat import Doing, Status, process_state, status
from tests import job

DRIVER, ROLLOUT, TEACHER = "driver", "rollout-0", "teacher-0"
START_S = 900.0
"""Until the first update, at most."""

PHASES = {
    "start-up": ("starting",),
    "rollout": ("sampling",),
    "teacher": ("scoring",),
    "forward": ("forward",),
    "sweep": ("sweep",),
    "finish": ("finish",),
    "step": ("optimizer step",),
    "publish": ("writing weights", "loading"),
    "checkpoint": ("writing a checkpoint",),
    "evaluation": ("sampling",),
}
"""What the process that the phase is named after is at (`Doing.phase`)."""

AT_WORK = {
    "rollout": ROLLOUT,
    "teacher": TEACHER,
    "forward": "learner-0",
    "sweep": "learner-0",
    "finish": "learner-0",
    "step": "learner-0",
    "publish": ROLLOUT,  # loads for longer than the learner writes
    "checkpoint": "learner-0",
    "evaluation": ROLLOUT,
    "start-up": ROLLOUT,
}
"""The process whose phase it is, where the fault hits the whole run."""


def stopped_in(run: job.Job, phase: str, watch: str, update: int) -> int:
    """Wait until the process `watch` is at `phase`, in update `update` or later. Returns its id; it is stopped.

    Raises AssertionError when the run ends before that, or it takes longer than START_S.
    """
    logs = run.run_dir / "logs"
    end = time.monotonic() + START_S
    while True:
        assert run.process.poll() is None, f"the run ended before the phase came:\n{run.output()[-2000:]}"
        assert time.monotonic() < end, f"the phase did not come within {START_S:.0f} s"
        driver = at(logs / f"{DRIVER}.status")
        if driver and _due(phase, driver.doing, update) and (pid := caught(logs / f"{watch}.alive", PHASES[phase])):
            return pid
        if not driver or driver.doing.phase != "finish":  # where a phase may be over before a sleep is
            time.sleep(0.0005 if driver and driver.doing.update is not None else 0.05)


def go_on(pid: int) -> None:
    """Let a stopped process go on, if it is still there."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def at(file: Path) -> Status | None:
    """What a process is at; None before it started."""
    try:
        return status(file)
    except FileNotFoundError:
        return None


def caught(file: Path, phases: Collection[str]) -> int:
    """Process id of the one that is at one of `phases` now, stopped there; 0 when it is at something else."""
    its = at(file)
    if its is None or its.doing.phase not in phases:
        return 0
    with suppress(ProcessLookupError):
        os.kill(its.pid, signal.SIGSTOP)
        while process_state(its.pid) not in ("T", "t", "Z", None):
            time.sleep(0.0005)
        if status(file).doing.phase in phases:
            return its.pid
        os.kill(its.pid, signal.SIGCONT)
    return 0


def _due(phase: str, driver: Doing, update: int) -> bool:
    """Whether the driver is where the phase may be struck: in update `update` or later."""
    if phase == "start-up":
        return driver.phase == "starting"
    if phase == "evaluation":
        return driver.phase == "evaluation"
    wanted = {"publish": "publishing", "checkpoint": "checkpoint", "finish": "finish", "step": "finish"}
    return driver.update is not None and driver.update >= update and driver.phase == wanted.get(phase, "rollouts")

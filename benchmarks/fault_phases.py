"""When a run is in which phase of an update, from what its processes say that they are at (`process.heartbeat`).

A phase can be some milliseconds long: the process is stopped with SIGSTOP when it says that it is there, and asked again.
"""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

from skyrl_thundersync.process.heartbeat import process_state, status
from tests import job

DRIVER, ROLLOUT, TEACHER = "driver", "rollout-0", "teacher-0"
START_S = 900.0
"""Until the first update, at most."""

PHASES = {
    "start-up": "^starting",
    "rollout": "^sampling",
    "teacher": "^scoring",
    "forward": "^forward",
    "sweep": "^sweep",
    "finish": "^finish",
    "step": "^optimizer step",
    "publish": "^(writing weights|loading version)",
    "checkpoint": "^writing a checkpoint",
    "evaluation": "^sampling",
}
"""What the process that the phase is named after says that it is at."""

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
        driver = at(logs / f"{DRIVER}.status")[1]
        if _due(phase, driver, update) and (pid := caught(logs / f"{watch}.alive", PHASES[phase])):
            return pid
        if ": finish" not in driver:  # where a phase may be over before a sleep is
            time.sleep(0.0005 if driver.partition(" ")[0] in ("update", "checkpoint", "publishing") else 0.05)


def go_on(pid: int) -> None:
    """Let a stopped process go on, if it is still there."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def at(file: Path) -> tuple[int, str]:
    """Process id and what it is at; (0, "") before it started."""
    try:
        pid, _, what = status(file)
    except (FileNotFoundError, ValueError):  # not there yet, or just made
        return 0, ""
    return pid, what


def caught(file: Path, pattern: str) -> int:
    """Process id of the one that is at `pattern` now, stopped there; 0 when it is at something else."""
    pid, what = at(file)
    if not pid or not re.search(pattern, what):
        return 0
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        while process_state(pid) not in ("T", "t", "Z", None):
            time.sleep(0.0005)
        if re.search(pattern, at(file)[1]):
            return pid
        os.kill(pid, signal.SIGCONT)
    return 0


def _due(phase: str, driver: str, update: int) -> bool:
    """Whether the driver is where the phase may be struck: in update `update` or later."""
    if phase == "start-up":
        return driver.startswith("starting")
    if phase == "evaluation":
        return driver.startswith("evaluation")
    number = re.search(r"(?:update|version) (\d+)", driver)
    if number is None or int(number[1]) < update:
        return False
    wanted = {"publish": "publishing", "checkpoint": "checkpoint", "finish": ": finish", "step": ": finish"}
    return wanted.get(phase, ": rollouts") in driver

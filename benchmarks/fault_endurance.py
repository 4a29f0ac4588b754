"""A run that is killed at random moments again and again, and one that goes on for long."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fault_chain import LEFT_S, UPDATE_S, Chain
from benchmarks.fault_phases import START_S, at
from skyrl_thundersync.process.heartbeat import status
from tests import job

SMALL = (
    # Of a replica: every block of it is in use before warm-up is over.
    "generator.inference_engine.engine_init_kwargs.kv_cache_memory_bytes=16777216",
    # The driver's threads for tools: another one starts now and then, until there are so many.
    "environment.skyrl_gym.max_env_workers=8",
)
FEW_KERNELS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
"""oneDNN keeps a kernel for each shape that it meets, 1,024 of them at most: some 0.3 MiB an update, until they are there."""
MOMENT_S = 12.0
"""Kills fall within so many seconds from the first rollout on; one in four falls into the start-up."""


@dataclass(frozen=True)
class Kill:
    """One kill: when, in what, the newest checkpoint's update, its gap to the undisturbed run, what was left."""

    seconds: float
    doing: str
    step: int
    gap: float | None
    left: tuple[str, ...]


def kills(chain: Chain, count: int, seed: int) -> list[Kill]:
    """Kill -9 the run at `count` random moments and resume it each time; then let it go on, undisturbed, for an update."""
    draw, found = random.Random(seed), []
    for index in range(count):
        with chain.running(f"kill-{index}", chain.step + 1000) as run:
            began = time.monotonic()
            driver = run.run_dir / "logs" / "driver.status"
            if draw.random() < 0.25:
                time.sleep(draw.uniform(1, 30))
            else:
                while not ((its := at(driver)) and its.doing.phase == "rollouts"):
                    assert run.process.poll() is None and time.monotonic() < began + START_S, run.output()
                    time.sleep(0.05)
                time.sleep(draw.uniform(0, MOMENT_S))
            what = str(status(driver).doing)
            os.kill(run.process.pid, signal.SIGKILL)
            seconds = time.monotonic() - began
            run.wait(10)
            left = run.left(LEFT_S)
            chain.collect(run)
        found.append(Kill(round(seconds, 1), what, chain.step, chain.gap(), tuple(sorted(left))))
        print(found[-1], flush=True)
    chain.grow(1)
    found.append(Kill(0.0, "undisturbed, after all of them", chain.step, chain.gap(), ()))
    print(found[-1], flush=True)
    return found


@dataclass
class Use:
    """What one process, or the machine, holds: after each update."""

    name: str
    values: list[float]

    def growth(self) -> float:
        """From the mean of the second quarter to that of the last: the first is warm-up."""
        n = len(self.values) // 4
        early, late = self.values[n : 2 * n], self.values[-n:]
        return sum(late) / n - sum(early) / n


def soak(chain: Chain, updates: int) -> list[Use]:
    """Train `updates` updates (at least 8) and note, after each, what every process and the disk hold; also in soak.json.

    What fills up to a limit of its own gets a small one, so that what grows for ever shows.
    """
    os.environ.update(FEW_KERNELS)
    first = chain.step
    driver, uses, seen = chain.folder / "soak" / "run" / "logs" / "driver.status", {}, first + 1
    end = time.monotonic() + START_S + updates * UPDATE_S
    with chain.running("soak", first + updates, *SMALL) as run:
        while run.process.poll() is None:
            assert time.monotonic() < end, f"not done after {START_S + updates * UPDATE_S:.0f} s"
            its = at(driver)
            if its and (its.doing.update or 0) > seen and its.doing.phase == "rollouts":
                seen = its.doing.update
                for name, value in _held(run).items():
                    uses.setdefault(name, Use(name, [])).values.append(value)
            time.sleep(0.05)
        assert run.process.returncode == 0, run.output()
        assert run.left() == set(), run.left()
        chain.collect(run)
    (chain.folder / "soak.json").write_text(json.dumps({use.name: use.values for use in uses.values()}))
    return list(uses.values())


def _held(run: job.Job) -> dict[str, float]:
    """MiB and descriptors by process, /dev/shm files, MiB of the run folder and of the checkpoints."""
    found: dict[str, float] = {}
    for pid, command in sorted(job.descendants(run.mark).items()):
        name = _name(run, pid, command)
        if name is not None:
            folder = Path(f"/proc/{pid}")
            found[f"{name}, MiB"] = int(re.search(r"VmRSS:\s+(\d+)", (folder / "status").read_text())[1]) / 1024
            found[f"{name}, descriptors"] = len(list((folder / "fd").iterdir()))
    found["processes"] = len(job.descendants(run.mark))
    found["/dev/shm, files"] = len(job.shared_memory() - run.before)
    found["/dev/shm, MiB"] = shutil.disk_usage("/dev/shm").used / 2**20
    found["run folder, MiB"] = sum(f.stat().st_size for f in run.run_dir.rglob("*") if f.is_file()) / 2**20
    return found


def _name(run: job.Job, pid: int, command: str) -> str | None:
    """What a process is called in the table; None for the short-lived ones of sandboxes."""
    if pid == run.process.pid:
        return "driver"
    for file in (run.run_dir / "logs").glob("*.alive"):
        if status(file).pid == pid:
            return file.stem
    return next((known for known in ("raylet", "gcs_server") if f"/{known} " in f"{command} "), None)

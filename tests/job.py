"""Runs `skyrl train` as a person does, and sees what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from skyrl_thundersync.quickstart.files import materialise

STARTED_BY_A_RUN = ("ray::", "raylet", "gcs_server", "bwrap", "dockerd-shim", "log_monitor", "dashboard")


def leftovers() -> set[str]:
    """What a run could leave: its processes (by pid and name) and shared-memory files."""
    found = {f"/dev/shm/{path.name}" for path in Path("/dev/shm").iterdir()}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if any(name in command for name in STARTED_BY_A_RUN):
                found.add(f"{folder.name} {command[:80]}")
    return found


@dataclass
class Job:
    """A training run in a process of its own; `run_dir` is its run folder."""

    process: subprocess.Popen
    run_dir: Path
    screen: Path
    before: set[str]

    def output(self) -> str:
        return self.screen.read_text(encoding="utf-8")

    def wait(self, timeout: float) -> int:
        """The exit status; the run is killed, and the test fails, when it takes longer."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the run did not end within {timeout} s:\n{self.output()[-2000:]}") from None

    def wait_for(self, text: str, timeout: float) -> None:
        """Until `text` is on the screen."""
        end = time.monotonic() + timeout
        while text not in self.output():
            assert self.process.poll() is None, f"the run ended ({self.process.returncode}):\n{self.output()[-2000:]}"
            assert time.monotonic() < end, f"no {text!r} within {timeout} s:\n{self.output()[-2000:]}"
            time.sleep(0.1)

    def interrupt(self) -> None:
        """Ctrl-C, as a terminal sends it: to the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def left(self) -> set[str]:
        """What is there now and was not before the run, after a moment for the kernel to reap."""
        end = time.monotonic() + 10
        while (left := leftovers() - self.before) and time.monotonic() < end:
            time.sleep(0.2)
        return left

    def updates(self) -> list[dict]:
        rows = map(json.loads, (self.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        return [row for row in rows if "timing/update" in row]


def start(folder: Path, *overrides: str, heldout: int = 8) -> Job:
    """Start the quickstart job with `overrides`; its held-out tasks are the first `heldout` ones."""
    folder.mkdir(parents=True, exist_ok=True)
    files = materialise(folder.parent / "quickstart")
    val = folder / "heldout.jsonl"
    val.write_text("".join(files.heldout.read_text().splitlines(keepends=True)[:heldout]))
    run_dir, screen = folder / "run", folder / "screen.txt"
    before = leftovers()
    command = [
        str(Path(sys.executable).with_name("skyrl-thundersync")),
        *("train", "+plugin=thundersync", "+config=opd/quickstart"),
        f"trainer.policy.model.path={files.student}",
        f"thundersync.teacher.model={files.teacher}",
        f"data.train_data=[{files.train}]",
        f"data.val_data=[{val}]",
        f"thundersync.run_dir={run_dir}",
        *overrides,
    ]
    with screen.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    return Job(process, run_dir, screen, before)

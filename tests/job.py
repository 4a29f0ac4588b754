"""Runs `skyrl train` as a person does, and sees what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from skyrl_thundersync.quickstart.files import materialise

MARK = "THUNDERSYNC_TEST_RUN"  # every process that descends from a run has it in its environment


def shared_memory() -> set[str]:
    return {f"/dev/shm/{path.name}" for path in Path("/dev/shm").iterdir()}


def unused(files: set[str]) -> set[str]:
    """Those of some shared-memory files that no living process has mapped."""
    inodes = set()  # a semaphore is mapped under the name that it was made with, not the one that it has
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # gone meanwhile, or not ours to see
            inodes |= {int(line.split()[4]) for line in maps.read_text().splitlines() if " /dev/shm/" in line}
    return {file for file in files if (path := Path(file)).exists() and path.stat().st_ino not in inodes}


def descendants(mark: str) -> dict[int, str]:
    """Command lines by pid of all live processes that a run marked `mark` started, however they were detached."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except (FileNotFoundError, ProcessLookupError, PermissionError):  # gone meanwhile, or not ours to see
                continue
    return found


@dataclass
class Job:
    """A training run in a process of its own; `run_dir` is its run folder."""

    process: subprocess.Popen
    run_dir: Path
    screen: Path
    before: set[str]
    mark: str

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

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Ctrl-C as a terminal sends it, or another signal: to the whole process group."""
        os.killpg(self.process.pid, number)

    def left(self, moment_s: float = 15.0) -> set[str]:
        """What it left, after a moment to reap: living processes, and new shared-memory files that nobody else uses."""
        end = time.monotonic() + moment_s
        while (left := self._left()) and time.monotonic() < end:
            time.sleep(0.2)
        return left

    def _left(self) -> set[str]:
        files = shared_memory() - self.before
        return {*descendants(self.mark).values(), *(unused(files) if files else ())}

    def updates(self) -> list[dict]:
        rows = map(json.loads, (self.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        return [row for row in rows if "timing/update" in row]


def hear_all() -> None:
    """In a child: no signal is ignored, as in a terminal's foreground. A script's background jobs ignore SIGINT."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)


def start(
    folder: Path, *overrides: str, heldout: int = 8, within: Sequence[str] = (), train: Sequence[str] | None = None
) -> Job:
    """Start the quickstart job with `overrides`; its held-out tasks are the first `heldout` ones.

    `within`: a command that runs the one it is followed by. `train`: in place of `skyrl train`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = materialise(folder.parent / "quickstart")
    val = folder / "heldout.jsonl"
    val.write_text("".join(files.heldout.read_text().splitlines(keepends=True)[:heldout]))
    run_dir, screen = folder / "run", folder / "screen.txt"
    before, mark = shared_memory(), uuid.uuid4().hex
    command = [
        *within,
        *(train or (str(Path(sys.executable).with_name("skyrl-thundersync")), "train")),
        *("+plugin=thundersync", "+config=opd/quickstart"),
        f"trainer.policy.model.path={files.student}",
        f"thundersync.teacher.model={files.teacher}",
        f"data.train_data=[{files.train}]",
        f"data.val_data=[{val}]",
        f"thundersync.run_dir={run_dir}",
        *overrides,
    ]
    with screen.open("w") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, MARK: mark},
            preexec_fn=hear_all,
        )
    return Job(process, run_dir, screen, before, mark)

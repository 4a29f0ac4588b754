"""One training run that everything happens to: each cell of the table resumes where the one before it left off.

A cell starts `skyrl train` on the common checkpoints, lets it do a whole update, waits until the process that the cell names
is in the cell's phase, and strikes. Afterwards it says how the run ended, what it left behind, and how far the newest
checkpoint is from the undisturbed run (`undisturbed.py`). So a cell's own update also shows that the one before was resumed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fault_cells import HANG_S, Cell
from benchmarks.fault_events import (
    GROUPS,
    control_group,
    fill,
    memory_taken,
    poisoned_model,
    poisoned_tasks,
    shut_connections,
    small_filesystem,
)
from benchmarks.fault_phases import DRIVER, START_S, go_on, stopped_in
from benchmarks.undisturbed import Undisturbed
from skyrl_thundersync.process.heartbeat import status
from tests import job

UPDATE_S = 120.0
LEFT_S = 120.0
"""How long what a run left may take to go. After a kill -9 Ray's agents ask their dead server for a minute first."""
OPTIONS = (
    "trainer.eval_interval=-1",
    "trainer.eval_before_train=false",
    "trainer.hf_save_interval=-1",
    "trainer.ckpt_interval=1",
    "trainer.max_ckpts_to_keep=3",
    "trainer.train_batch_size=2",
    "generator.n_samples_per_prompt=2",
    "thundersync.record=true",
    "thundersync.learner.accumulator=exact",
    f"thundersync.hang_timeout_s={HANG_S}",
)


@dataclass(frozen=True)
class Result:
    """One row of the table. `outcome` starts with FAILED where the product did not do what the cell asks for, with NOT
    STRUCK where the run never came to the phase."""

    fault: str
    phase: str
    outcome: str
    status: int | None
    seconds: float
    gap: float | None
    left: tuple[str, ...]
    said: str


class Chain:
    """The common checkpoints, records and undisturbed run under `folder`; `overrides` are every run's."""

    def __init__(self, folder: Path, overrides: Sequence[str]) -> None:
        self.folder, self.overrides = folder, overrides
        self.checkpoints, self.record = folder / "checkpoints", folder / "record"
        self.record.mkdir(parents=True, exist_ok=True)
        self._undisturbed: Undisturbed | None = None

    @property
    def step(self) -> int:
        """The update of the newest checkpoint; 0: none."""
        pointer = self.checkpoints / "latest_ckpt_global_step.txt"
        return int(pointer.read_text()) if pointer.is_file() else 0

    def grow(self, updates: int) -> None:
        """Go on undisturbed for some updates."""
        with self.running("undisturbed", self.step + updates) as run:
            if run.wait(START_S + updates * UPDATE_S):
                raise RuntimeError(f"the undisturbed run failed:\n{run.output()}")
            self.collect(run)

    @contextmanager
    def running(self, name: str, last: int, *options: str, within: tuple[str, ...] = ()) -> Iterator[job.Job]:
        """The run, started or resumed, up to update `last`. Nothing of it outlives the block, whatever the product left."""
        folder = self.folder / name
        shutil.rmtree(folder / "run", ignore_errors=True)
        run = job.start(
            folder,
            *OPTIONS,
            f"trainer.ckpt_path={self.checkpoints}",
            f"trainer.resume_mode={'latest' if self.step else 'none'}",
            f"trainer.max_training_steps={last}",
            *self.overrides,
            *options,
            within=within,
        )
        try:
            yield run
        finally:
            with suppress(ProcessLookupError):
                run.process.kill()
            run.process.wait()
            for pid in job.descendants(run.mark):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def run(self, cell: Cell) -> Result:
        """Run one cell. Raises only for faults of the harness itself."""
        before, with_ = self.step, ExitStack()
        sockets, groups = _sockets(), _control_groups()
        with with_:
            within = cell.within + (with_.enter_context(control_group(cell.special)) if cell.special in GROUPS else ())
            options, exhaust = self._prepared(cell, with_, within)
            last = before + (4 if 0 in cell.ends else 30)  # a phase of milliseconds is not met in every update
            run = with_.enter_context(self.running(cell.name, last, *cell.options, *options, within=within))
            try:
                began = self._strike(cell, run, before + 2, exhaust) if cell.event is not None else time.monotonic()
                status, problem = self._ended(cell, run, began)
            except AssertionError as error:
                self.collect(run)  # it may have gone on and left checkpoints that the next cell resumes from
                why = str(error).splitlines()[0]  # the screen follows
                return Result(cell.fault, cell.phase, f"NOT STRUCK: {why}", run.process.poll(), 0, None, (), "")
            seconds = time.monotonic() - began
            left = run.left(LEFT_S) | (_sockets() - sockets) | (_control_groups() - groups)
            if cell.special == "apart":
                gap = self._gap_apart(run)
            else:
                self.collect(run)
                gap = self.gap()
        swept = _control_groups() if cell.event == signal.SIGKILL and cell.victim == DRIVER else set()
        if problem is None and left - swept:
            problem = "left something behind"
        if problem is None and gap and gap > cell.tolerance:
            problem = "other parameters"
        if problem is None and cell.says and not re.search(cell.says, run.output()):
            problem = f"the screen does not name it ({cell.says})"
        if left & swept:
            left = (left - swept) | {f"{len(left & swept)} empty control groups"}
        went_on = f"continued, within {cell.tolerance:g}" if cell.tolerance else "continued, bit-identical"
        clean = went_on if status == 0 else "stopped clean"
        return Result(
            cell.fault,
            cell.phase,
            f"FAILED: {problem}" if problem else clean,
            status,
            round(seconds, 1),
            gap,
            tuple(sorted(left)),
            _last_words(run.output()),
        )

    def gap(self) -> float | None:
        """Of the newest checkpoint to the undisturbed run; None before there is one."""
        if not self.step:
            return None
        if self._undisturbed is None:
            self._undisturbed = Undisturbed(self.folder / "undisturbed" / "run")
        return self._undisturbed.gap(self.record, self.checkpoints / f"global_step_{self.step}", self.step)

    def _gap_apart(self, run: job.Job) -> float:
        """Of a run whose checkpoints are its own to the undisturbed one on the same batches."""
        checkpoints, record = run.run_dir / "checkpoints", run.run_dir / "record"
        for file in self.record.iterdir():
            if not (record / file.name).exists():
                shutil.copy2(file, record)
        step = int((checkpoints / "latest_ckpt_global_step.txt").read_text())
        alone = Undisturbed(self.folder / "undisturbed" / "run")
        self._undisturbed = None  # one at a time in this process
        return alone.gap(record, checkpoints / f"global_step_{step}", step)

    def collect(self, run: job.Job) -> None:
        """Keep the batches that the run recorded, of those that its checkpoints hold."""
        for file in (run.run_dir / "record").glob("batch_*.jsonl.gz"):
            if int(file.name[6:12]) < self.step:
                shutil.copy2(file, self.record)

    def _prepared(
        self, cell: Cell, with_: ExitStack, within: tuple[str, ...]
    ) -> tuple[list[str], Callable[[int], object] | None]:
        """Overrides, and what exhausts a resource of the process with the id that it is given."""
        folder, files = self.folder / cell.name, self.folder / "quickstart"
        resumed = ["trainer.resume_mode=from_path", f"trainer.resume_path={self.checkpoints}/global_step_{self.step}"]
        alone = [
            "trainer.resume_mode=none",
            "thundersync.replace_run=true",
            f"trainer.ckpt_path={folder / 'checkpoints'}",
        ]
        if cell.special == "apart":
            return [*resumed, f"trainer.ckpt_path={folder / 'run' / 'checkpoints'}"], None
        if cell.special == "checkpoint disk":
            disk = with_.enter_context(small_filesystem(folder / "disk", 256))
            return [*resumed, f"trainer.ckpt_path={disk}"], lambda pid: fill(disk)
        if cell.special == "run disk":
            disk = with_.enter_context(small_filesystem(folder / "run", 256))
            return [], lambda pid: fill(disk)
        if cell.special == "shm":
            return [], lambda pid: fill(Path(f"/proc/{pid}/root/dev/shm"))
        if cell.special == "some memory":
            return [], lambda pid: with_.enter_context(memory_taken(within))
        if cell.special == "NaN teacher":
            return [f"thundersync.teacher.model={poisoned_model(files / 'teacher', folder / 'teacher')}"], None
        if cell.special == "NaN teacher later":
            model = poisoned_model(files / "teacher", folder / "teacher", row=_unprobed_token())
            return [f"thundersync.teacher.model={model}"], None
        if cell.special == "NaN student":
            return [*alone, f"trainer.policy.model.path={poisoned_model(files / 'student', folder / 'student')}"], None
        if cell.special == "NaN reward":
            tasks = poisoned_tasks(files / "train.jsonl", folder / "tasks.jsonl")
            return [*alone, f"data.train_data=[{tasks}]"], None
        if cell.special == "torn checkpoint":
            copy = folder / "checkpoints"
            shutil.copytree(self.checkpoints, copy, dirs_exist_ok=True)
            weights = copy / f"global_step_{self.step}" / "student" / "model.safetensors"
            os.truncate(weights, weights.stat().st_size // 2)
            return [f"trainer.ckpt_path={copy}"], None
        return [], None

    def _strike(self, cell: Cell, run: job.Job, update: int, exhaust: Callable[[int], object] | None) -> float:
        """Wait for the phase in update `update` or a later one, then do it; the moment it was done."""
        logs = run.run_dir / "logs"
        pid = stopped_in(run, cell.phase, cell.watch, update)
        began = time.monotonic()
        if cell.event == "full":
            exhaust(pid)
        elif cell.event == "sockets":
            shut_connections(pid)
        elif cell.victim == DRIVER and (cell.special == "group" or cell.event == signal.SIGINT):
            run.interrupt(cell.event)
        elif cell.victim == DRIVER:
            os.kill(run.process.pid, cell.event)
        else:
            os.kill(status(logs / f"{cell.victim}.alive").pid, cell.event)
        if cell.event != signal.SIGSTOP:
            go_on(pid)
        return began

    def _ended(self, cell: Cell, run: job.Job, began: float) -> tuple[int | None, str | None]:
        """Exit status, and what is wrong with how it ended."""
        limit = 4 * UPDATE_S if 0 in cell.ends else cell.deadline_s
        try:
            status = run.process.wait(limit)
        except subprocess.TimeoutExpired:
            return None, f"still running after {limit:.0f} s"
        if status not in cell.ends:
            return status, f"exit status {status}, not {' or '.join(map(str, cell.ends))}"
        if "Traceback" in run.output():
            return status, "a traceback on the screen"
        return status, None


def _unprobed_token() -> int:
    """A byte of every task's prompt that the start-up's probe does not hold."""
    import random

    from skyrl_thundersync.data.byte_tokenizer import VOCAB_SIZE

    rng = random.Random(42)  # as runtime/cluster.py draws it
    probe = {rng.randrange(VOCAB_SIZE) for _ in range(64)}
    return next(byte for byte in b"e to.s" if byte not in probe)


def _sockets() -> set[str]:
    """Unix sockets in the temporary folder."""
    return {str(path) for path in Path("/tmp").iterdir() if path.is_socket()}


def _control_groups() -> set[str]:
    """Control groups of sandboxes. Those of a run that was killed whole stay, empty, until the next run sweeps them."""
    return {str(path) for path in Path("/sys/fs/cgroup").glob("**/thundersync-*")}


def _last_words(screen: str) -> str:
    lines = [
        line for line in screen.splitlines() if re.match(r"\w*(Error|Stopped|done)", line.strip()) or "Error:" in line
    ]
    return lines[0].strip()[:300] if lines else ""

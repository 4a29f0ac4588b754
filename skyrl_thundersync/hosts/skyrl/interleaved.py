"""A run that learns each batch under every schedule, from the same state: what `skyrl bench` measures.

SkyRL's loop runs as ever; its dataloader yields each batch once per schedule. Before each of these updates the learners take
up the state that they had before the round, and the replicas are given it again and drop their prefix caches: the same
weights, tasks, policy version and so the same sampling seeds. The update is the same as well, so that the round has taken
one step when the last one's result stays. The order of the schedules rotates from round to round.

Measured is the wall clock from the batch's hand-over to the last replica's acknowledgement of the new weights; putting the
state back is not part of it.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skyrl.train.utils.callbacks import TrainingCallback

from skyrl_thundersync.hosts.skyrl.experiment import ThunderSyncExperiment
from skyrl_thundersync.hosts.skyrl.train_loop import ThunderSyncTrainer
from skyrl_thundersync.runtime.driver_state import driver_random_state, restore_driver_random_state
from skyrl_thundersync.sandbox.pool import SandboxPool
from skyrl_thundersync.stream.release import SCHEDULES

ROUNDS = "rounds.jsonl"
"""In the run folder: one line an update.

round (0: warm-up), schedule, step_s, metrics (those of metrics.jsonl), ranks (cores and threads of each), parameters and
result (checksums before and after the update, of each rank).
"""

NORM_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Relative difference of gradient norms that rounding explains, by the student's dtype."""


class DifferentWorkError(RuntimeError):
    """The updates of a round are not the same update: their times cannot be compared."""


def order(round_index: int) -> tuple[str, ...]:
    """The schedules as a round takes them."""
    first = round_index % len(SCHEDULES)
    return SCHEDULES[first:] + SCHEDULES[:first]


def require_same_work(rows: list[dict[str, Any]], tolerance: float) -> None:
    """Compare a round's last row with its first. Raises DifferentWorkError saying what differs.

    tolerance: relative difference allowed between gradient norms.
    """
    first, last = rows[0], rows[-1]
    where = f"round {last['round']}: {first['schedule']} and {last['schedule']}"
    if first["parameters"] != last["parameters"]:
        raise DifferentWorkError(f"{where} did not begin with the same parameters")
    for what, key in (("N_k", "thundersync/n_scored"), ("tokens", "thundersync/n_tokens")):
        a, b = first["metrics"][key], last["metrics"][key]
        if a != b:
            raise DifferentWorkError(
                f"{where} did not learn the same rollouts: {what} {a:.0f} and {b:.0f}. Tools or graders that answer "
                "differently the second time do this, and engines whose rounding depends on which requests run together"
            )
    a, b = first["metrics"]["policy/grad_norm"], last["metrics"]["policy/grad_norm"]
    if not math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-12):
        raise DifferentWorkError(
            f"{where} found gradients of norm {a:.6g} and {b:.6g}, which differ by more than rounding ({tolerance:g})"
        )


class Repeated:
    """A dataloader that yields each batch of another one `times` times."""

    def __init__(self, loader, times: int) -> None:
        self._loader, self._times = loader, times

    def __len__(self) -> int:
        return len(self._loader) * self._times

    def __iter__(self) -> Iterator:
        for batch in self._loader:
            for _ in range(self._times):
                yield copy.deepcopy(batch)


class InterleavedTrainer(ThunderSyncTrainer):
    """`ThunderSyncTrainer` whose update k is one schedule's of a round. Its `trainer.max_training_steps` counts updates."""

    def __init__(self, *args, run_dir: Path, sandboxes: SandboxPool, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._sandboxes = sandboxes
        self._kept_dir, self._rows_file = run_dir / "round", run_dir / ROUNDS
        self._rows_file.unlink(missing_ok=True)
        self._kept: dict[str, Any] = {}
        self._version, self._random = 0, driver_random_state()
        self._rows: list[dict[str, Any]] = []  # of the running round
        self._began = 0.0
        self.add_callback(_Rows(self))

    def _build_train_dataloader_and_compute_training_steps(self) -> None:
        super()._build_train_dataloader_and_compute_training_steps()
        self.train_dataloader = Repeated(self.train_dataloader, len(SCHEDULES))
        self.total_training_steps = self.cfg.trainer.max_training_steps

    async def generate(self, input_batch):
        """Put everything where the round began, then run the update under its schedule."""
        round_index, place = divmod(self.global_step - 1, len(SCHEDULES))
        schedule = order(round_index)[place]
        if place == 0:
            self._rows = []
            shutil.rmtree(self._kept_dir, ignore_errors=True)
            self._kept = self._cluster.keep_learners(self._kept_dir)
            self._version, self._random = self._cluster.version, driver_random_state()
        # Also before the first of a round: each finds memory, files and replicas as loading leaves them.
        self._cluster.load_learners(self._kept_dir, self._kept, self._version)
        restore_driver_random_state(self._random)
        self._cluster.use_schedule(schedule)
        await self._cluster.publish()
        await self._cluster.rest()
        self._sandboxes.settle()
        stats = self._cluster.learner_stats()
        self._rows.append(
            {
                "round": round_index,
                "schedule": schedule,
                "parameters": [rank.parameters for rank in stats],
                "ranks": [{"cores": rank.cores, "threads": rank.threads} for rank in stats],
            }
        )
        self._display.say(f"[dim]{f'round {round_index}' if round_index else 'warm-up round'}: {schedule}[/dim]")
        self._began = time.perf_counter()
        return await super().generate(input_batch)

    def _published(self, publish_s: float) -> None:
        if self._rows:  # else the first publication, before any update
            self._rows[-1]["step_s"] = time.perf_counter() - self._began
        super()._published(publish_s)

    def write_row(self, metrics: dict[str, float]) -> None:
        """The update that just ended, with its metrics, into the file. Raises DifferentWorkError."""
        stats = self._cluster.learner_stats()
        self._rows[-1] |= {"metrics": dict(metrics), "result": [rank.parameters for rank in stats]}
        require_same_work(self._rows, NORM_TOLERANCE[self.cfg.thundersync.learner.dtype])
        with self._rows_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self._rows[-1], default=float) + "\n")


class _Rows(TrainingCallback):
    def __init__(self, trainer: InterleavedTrainer) -> None:
        self._trainer = trainer

    def on_log(self, trainer, callback_input, control) -> None:
        self._trainer.write_row(callback_input.logs)


class InterleavedExperiment(ThunderSyncExperiment):
    """The experiment that `skyrl bench` runs."""

    def trainer_class(self, **kwargs) -> InterleavedTrainer:
        return InterleavedTrainer(run_dir=self._run_dir, sandboxes=self._sandboxes, **kwargs)

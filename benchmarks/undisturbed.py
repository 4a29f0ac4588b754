"""The undisturbed run: the updates of a run's records in one learner that nothing ever happens to.

One rank in this process takes every recorded batch in turn. With the exact accumulator neither the number of ranks nor the
order of the work may change a bit, so a run on any ranks, stopped and resumed as often as it was, must have its parameters.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from skyrl_thundersync.telemetry.record import load_batch
from skyrl_thundersync.verify.rerun import STREAMED, Updaters, flat_parameters, read_run


class Undisturbed:
    """θ after each recorded update, from the θ_0 that the configuration in `run_dir` names."""

    def __init__(self, run_dir: Path) -> None:
        run = read_run(run_dir)
        self._updaters = Updaters(replace(run, world=1), {STREAMED: run.learner})
        self._after: list[torch.Tensor] = []

    def gap(self, record: Path, checkpoint: Path, version: int) -> float:
        """Largest difference between a checkpoint's student and the undisturbed one after `version` ≥ 1 updates; 0: no bit.

        Raises FileNotFoundError when `record` misses a batch before `version`.
        """
        while len(self._after) < version:
            batch = load_batch(record / f"batch_{len(self._after):06d}.jsonl.gz")
            alone = replace(batch, ranks=(0,) * len(batch.ranks))
            self._after.append(self._updaters.update(STREAMED, alone).parameters)
        saved = AutoModelForCausalLM.from_pretrained(checkpoint / "student", dtype=torch.float32)
        return float((flat_parameters(saved) - self._after[version - 1]).abs().max())

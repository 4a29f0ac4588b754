"""Saving and resuming a run: what its processes hold, put into a checkpoint's folder and taken out again.

The position in the data is the number of updates: the loader's order follows from its seed. Sampling needs no state, since
each turn's seed follows from the run's seed, the policy version, the trajectory and the turn; learner ranks and frozen
teachers draw no random numbers. What remains is this process's own generators.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from skyrl_thundersync.learner.answers import Shards, Written
from skyrl_thundersync.learner.checkpoint import shard_name
from skyrl_thundersync.runtime.checkpoint import (
    MARGIN,
    CheckpointError,
    choose,
    read,
    save,
)
from skyrl_thundersync.runtime.cluster import Cluster
from skyrl_thundersync.runtime.driver_state import Continued, driver_random_state, restore_driver_random_state
from skyrl_thundersync.runtime.same_run import changes, check_run, run_facts

if TYPE_CHECKING:
    from skyrl_thundersync.hosts.skyrl.config import TrainConfig


class NothingLeftError(Exception):
    """The checkpoint is of the run's last update: there is nothing to train."""


class Checkpoints:
    """The checkpoints of one run, taken at the boundary that `finished` marks.

    Attributes:
        saved_step: the update whose checkpoint this process wrote or resumed from last; 0: none.
    """

    def __init__(self, cfg: TrainConfig, cluster: Cluster, say: Callable[[str], None]) -> None:
        self._cfg, self._cluster, self._say = cfg, cluster, say
        self._folder = Path(cfg.trainer.ckpt_path).absolute()
        self._facts: dict[str, Any] | None = None
        self._finished, self._random = 0, driver_random_state()
        self.saved_step = 0

    def finished(self, step: int) -> None:
        """Update `step` was stepped on every rank: its boundary is what `save` saves until the next one."""
        self._finished, self._random = step, driver_random_state()

    @property
    def unsaved(self) -> bool:
        """Whether updates were finished since the last checkpoint."""
        return self._finished > self.saved_step

    def save(self, last: bool = False) -> Path:
        """Checkpoint the last finished update, whatever runs since then. See `checkpoint.save` for what it raises.

        last: the run ends with it, so that it may take the last free space.
        """
        path = save(
            self._folder,
            self._finished,
            self._cluster.checkpoint_bytes(),
            self._write,
            self._cfg.trainer.max_ckpts_to_keep,
            margin=0 if last else MARGIN,
        )
        self.saved_step = self._finished
        return path

    def _write(self, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        from skyrl_thundersync.options.schema import as_yaml

        ranks = self._cluster.save_learners(folder)
        steps = [rank.shards.steps for rank in ranks]
        if steps != [self._cluster.version] * len(ranks):
            raise CheckpointError(
                f"the ranks took {steps} steps, {self._cluster.version} were acknowledged: nothing saved"
            )
        (folder / "config.yaml").write_text(as_yaml(self._cfg), encoding="utf-8")
        (folder / "random.json").write_text(json.dumps(self._random), encoding="utf-8")
        facts = {
            "policy_version": self._cluster.version,
            "run": self._run_facts(),
            "optimizer": asdict(ranks[0].shards),
        }
        return facts, files_of(ranks)

    def load(self, loader, total_steps: int) -> tuple[int, Path | None, Any]:
        """Resume as `trainer.resume_mode` says.

        Returns the update to go on after (0: none), its checkpoint, and the dataloader, gone on to the right batch.
        The policy version is the checkpoint's, and no replica serves it yet: a publication must follow.

        Raises CheckpointError (see `checkpoint.read` and `check_run`), NothingLeftError when no update is left.
        """
        trainer = self._cfg.trainer
        path = choose(self._folder, trainer.resume_mode, trainer.resume_path)
        if path is None:
            return 0, None, loader
        manifest = read(path, hashes=True)
        check_run(path, manifest, self._run_facts())
        step = manifest["global_step"]
        if step >= total_steps:
            raise NothingLeftError(f"{path} is of update {step}, and the run ends with update {total_steps}")
        self._cluster.load_learners(path, Shards(**manifest["optimizer"]), manifest["policy_version"])
        loader = Continued(loader, step)
        restore_driver_random_state(json.loads((path / "random.json").read_text(encoding="utf-8")))
        self.finished(step)
        self.saved_step = step
        self._say(f"resumed after update {step} from {path}")
        if changed := changes(path, self._cfg):
            self._say(f"[yellow]with other options than its: {escape('; '.join(changed))}[/yellow]")
        return step, path, loader

    def _run_facts(self) -> dict[str, Any]:
        if self._facts is None:
            self._facts = {**run_facts(self._cfg), **asdict(self._cluster.learner_content())}
        return self._facts


def files_of(ranks: list[Written]) -> dict[str, tuple[int, str]]:
    """{file: (bytes, sha256)} of what the ranks say to have written (`save_rank`), in rank order.

    Raises CheckpointError when a part that a resume needs is in nobody's list.
    """
    files = {name: sealed for rank in ranks for name, sealed in rank.files.items()}
    needed = [shard_name(rank, len(ranks)) for rank in range(len(ranks))]
    if missing := [name for name in needed if name not in files]:
        raise CheckpointError(f"no rank wrote {', '.join(missing)}: nothing saved")
    return files

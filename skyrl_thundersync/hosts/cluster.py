"""The processes of a run: learner ranks, rollout replicas, teacher replicas, all Ray actors, started side by side.

Also the update's end, which needs all of them: `finish` (one step on every rank) and `publish` (every replica
acknowledges). Leaving the context takes everything down, whatever happened.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import ray
import torch

from skyrl_thundersync.config import TrainConfig
from skyrl_thundersync.display import Display
from skyrl_thundersync.learner.actor import LearnerActor
from skyrl_thundersync.learner.rank import RankSpec
from skyrl_thundersync.rollout.client import LocalEngineClient
from skyrl_thundersync.rollout.engine import EngineSpec, start_replicas
from skyrl_thundersync.rollout.publish import publish
from skyrl_thundersync.stream.ledger import Ledger
from skyrl_thundersync.stream.sources import Work, WorkDone
from skyrl_thundersync.trainer import LearnerRank, Teacher


class RankHandle:
    """A learner rank in its Ray actor, as `trainer.LearnerRank`."""

    def __init__(self, actor) -> None:
        self.actor = actor

    async def run(self, work: list[Work]) -> list[WorkDone]:
        return await self.actor.run_many.remote(work)


class Cluster:
    """Context manager around everything that runs beside the driver.

    Attributes:
        version: policy version that the replicas serve: updates taken so far.
        ranks: the learner ranks.
        tokenizer: the student's, set before `start`.
        saved: folder of the last model written, None before.
    """

    def __init__(self, cfg: TrainConfig, run_dir: Path, display: Display) -> None:
        self._cfg, self._run_dir, self._display = cfg, run_dir, display
        self.device = resolve_device(cfg.thundersync.device)
        self.version = 0
        self.ranks: list[LearnerRank] = []
        self.tokenizer = None
        self.saved: Path | None = None
        self._target = None
        self._teacher = None
        self._publish_pending = True
        self._probe_ids: list[int] = []

    def __enter__(self) -> Cluster:
        ray.init(
            num_cpus=None if self.device == "cuda" else 4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="warning",
            runtime_env={"env_vars": {"TOKENIZERS_PARALLELISM": "false"}},
        )
        return self

    def __exit__(self, *_error) -> None:
        ray.shutdown()
        shutil.rmtree(self._publish_dir, ignore_errors=True)

    def start(self) -> None:
        """Start every actor at once and wait until all are ready.

        Raises what an actor's constructor raised: a missing model, an unsupported layer, a vocabulary that does not fit.
        """
        begin = time.perf_counter()
        ...

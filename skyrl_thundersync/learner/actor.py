"""A learner rank as a Ray actor class. Use `ray.remote(LearnerActor).options(...).remote(spec)`."""

import os

from skyrl_thundersync.learner import checkpoint
from skyrl_thundersync.learner.answers import Content, Shards, Step, Written
from skyrl_thundersync.learner.heap import keep_pages
from skyrl_thundersync.learner.rank import LearnerRank, RankSpec
from skyrl_thundersync.process.heartbeat import at, doing
from skyrl_thundersync.process.logs import redirect
from skyrl_thundersync.stream.ledger import work_name
from skyrl_thundersync.stream.sources import Append, Work, WorkDone

CPU_NICENESS = 5
"""For ranks that leave the rollouts no core of their own: the update waits for rollouts, ranks fill what they leave."""


class LearnerActor(LearnerRank):
    """`LearnerRank` whose output goes to `spec.log_path`, when given, before anything else runs.

    It says what it is at (process/heartbeat.py).
    """

    def __init__(self, spec: RankSpec):
        if spec.log_path is not None:
            redirect(spec.log_path)
        if spec.device == "cpu" and spec.world_size * spec.learner.threads >= len(os.sched_getaffinity(0)):
            # On Linux of this thread and of those it starts, torch's among them; Ray's own threads stay as they are.
            os.nice(CPU_NICENESS)
        super().__init__(spec)
        if spec.device == "cpu":  # after the loading, whose copies go back
            keep_pages()
        at("waiting for work")

    def _run(self, work: Work, *how) -> WorkDone:
        with doing("forward" if isinstance(work, Append) else "sweep", f"of {work_name(work)}"):
            return super()._run(work, *how)

    def finish(self) -> Step:
        with doing("finish"):
            return super().finish()

    def save_weights(self, folder: str) -> None:
        with doing("writing weights"):
            super().save_weights(folder)

    # learner/checkpoint.py says what these take and return.

    def save_checkpoint(self, folder: str) -> Written:
        with doing("writing a checkpoint"):
            return checkpoint.save_rank(self, folder)

    def export(self, folder: str) -> dict[str, tuple[int, str]]:
        with doing("writing the model"):
            return checkpoint.export(self, folder)

    def keep(self, folder: str) -> Written:
        with doing("keeping its shard"):
            return checkpoint.keep_rank(self, folder)

    def load_checkpoint(self, folder: str, saved: Shards) -> None:
        checkpoint.load_rank(self, folder, saved)

    def checkpoint_bytes(self) -> int:
        return checkpoint.bytes_needed(self)

    def content(self) -> Content:
        return checkpoint.content(self)

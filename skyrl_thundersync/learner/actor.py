"""A learner rank as a Ray actor class. Use `ray.remote(LearnerActor).options(...).remote(spec)`."""

import os

from skyrl_thundersync.learner.checkpoint import bytes_needed, describe, load_rank, save_rank
from skyrl_thundersync.learner.rank import LearnerRank, RankSpec
from skyrl_thundersync.logs import redirect

CPU_NICENESS = 5
"""Of a rank that shares its cores with the rollouts, which the update waits for: the rank fills what they leave."""


class LearnerActor(LearnerRank):
    """`LearnerRank` whose output goes to `spec.log_path`, when given, before anything else runs."""

    def __init__(self, spec: RankSpec):
        if spec.log_path is not None:
            redirect(spec.log_path)
        if spec.device == "cpu":
            # On Linux of this thread and of those it starts, torch's among them; Ray's own threads stay as they are.
            os.setpriority(os.PRIO_PROCESS, 0, CPU_NICENESS)
        super().__init__(spec)

    # learner/checkpoint.py says what each takes and returns.
    checkpoint_bytes = bytes_needed
    describe = describe
    load_checkpoint = load_rank
    save_checkpoint = save_rank

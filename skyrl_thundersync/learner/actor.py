"""A learner rank as a Ray actor class. Use `ray.remote(LearnerActor).options(...).remote(spec)`."""

from skyrl_thundersync.learner.checkpoint import bytes_needed, describe, load_rank, save_rank
from skyrl_thundersync.learner.rank import LearnerRank, RankSpec
from skyrl_thundersync.logs import redirect


class LearnerActor(LearnerRank):
    """`LearnerRank` whose output goes to `spec.log_path`, when given, before anything else runs."""

    def __init__(self, spec: RankSpec):
        if spec.log_path is not None:
            redirect(spec.log_path)
        super().__init__(spec)

    # learner/checkpoint.py says what each takes and returns.
    checkpoint_bytes = bytes_needed
    describe = describe
    load_checkpoint = load_rank
    save_checkpoint = save_rank

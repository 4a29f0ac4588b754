"""A learner rank as a Ray actor class. Use `ray.remote(LearnerActor).options(...).remote(spec)`."""

from skyrl_thundersync.learner.rank import LearnerRank, RankSpec
from skyrl_thundersync.logs import redirect


class LearnerActor(LearnerRank):
    """`LearnerRank` whose output goes to `spec.log_path`, when given, before anything else runs."""

    def __init__(self, spec: RankSpec):
        if spec.log_path is not None:
            redirect(spec.log_path)
        super().__init__(spec)

"""One small file per objective. An objective turns a segment's scored tokens into the scalar to differentiate."""

from typing import Protocol

import torch

from skyrl_thundersync.objectives.grpo import Grpo
from skyrl_thundersync.objectives.opd import Opd


class Objective(Protocol):
    """What the learner asks of an objective.

    needs_teacher: whether sources must come with teacher scores. needs_group: whether a trajectory's weight depends on its
    group's rewards; then it also has `weights` and `affine`, as Grpo. divides_by_tokens: whether finish divides the sum by
    N_k.
    """

    name: str
    needs_teacher: bool
    needs_group: bool
    divides_by_tokens: bool

    def loss(
        self, logp_T: torch.Tensor, scores_T: torch.Tensor | None, weight: float | None, n_scored: int
    ) -> torch.Tensor: ...


OBJECTIVES = {"opd": Opd, "grpo": Grpo}

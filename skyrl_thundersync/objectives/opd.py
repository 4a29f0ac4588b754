"""On-policy distillation: reverse KL to a frozen teacher on the sampled tokens (PAPER.md, "OPD, exactly").

A_t = sg[log π_T − log π_θ]; the gradient accumulated is that of −Σ A_t log π_θ, unnormalised. N_k, the number of scored
tokens of the batch, is known only when the batch closes; it divides once, at finish. The learner's own log-probs at θ_k are
used, so the importance ratio is 1 and keeps its derivative.
"""

from __future__ import annotations

import torch


class Opd:
    name = "opd"
    needs_teacher = True
    needs_group = False
    """Whether a trajectory's weights are known only when its group's rewards are."""
    divides_by_tokens = True
    """Whether finish divides the sum by N_k."""

    def loss(
        self, logp_T: torch.Tensor, scores_T: torch.Tensor | None, weight: float | None, n_scored: int
    ) -> torch.Tensor:
        """The scalar whose gradient is accumulated, from a segment's T scored tokens.

        logp_T: log π_θ, differentiable. scores_T: log π_T, same dtype and shape. `weight` and `n_scored` (scored tokens
        of the whole trajectory) play no part.
        """
        return -((scores_T - logp_T.detach()) * logp_T).sum()

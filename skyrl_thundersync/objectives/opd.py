"""On-policy distillation: reverse KL to a frozen teacher on the sampled tokens (PAPER.md, "OPD, exactly").

A_t = sg[log π_T − log π_θ]; the gradient accumulated is that of −Σ A_t log π_θ, unnormalised. N_k, the number of scored
tokens of the batch, is known only when the batch closes; it divides once, at finish. The learner's own log-probs at θ_k are
used, so the importance ratio is 1 and keeps its derivative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyrl_thundersync.objectives.contract import Objective, PlainToken, Tokens

if TYPE_CHECKING:
    import torch


@dataclass
class Opd(Objective):
    needs_teacher = True

    def loss(self, tokens: Tokens) -> torch.Tensor:
        """−A_t log π_θ."""
        return -((tokens.scores_T - tokens.logp_T.detach()) * tokens.logp_T)

    def plain_weight(self, token: PlainToken) -> float:
        return token.score - token.logp

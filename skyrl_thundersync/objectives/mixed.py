"""On-policy distillation with a task reward: A_t = β (log π_T − log π_θ) + γ Â_i, one token's weight in one gradient.

The teacher's part is fixed with its scores and swept with the trajectory, whatever the reward; the reward's part goes through
the group's statistics until its advantages are known. Both belong to one token, so both are divided by N_k: Â_i is the law's
A_i for every token, not spread over the sample's as in GRPO.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyrl_thundersync.objectives.contract import PlainToken, Tokens
from skyrl_thundersync.objectives.grpo import Grpo

if TYPE_CHECKING:
    import torch


@dataclass
class Mixed(Grpo):
    """Args: as Grpo's, and

    beta: β, the weight of the teacher's part.
    gamma: γ, the weight of the reward's part.
    """

    beta: float = 1.0
    gamma: float = 1.0

    needs_teacher = True
    divides_by_tokens = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.beta) and math.isfinite(self.gamma)):
            raise ValueError(f"beta and gamma must be finite, got {self.beta} and {self.gamma}")

    def affine(self, rewards: Sequence[float | None], origin: float) -> tuple[float, float]:
        """(b, c) with A_i = ((r_i − origin) − b)·c; as Grpo's otherwise."""
        b, c = super().affine(rewards, origin)
        return b, c * sum(r is not None for r in rewards)

    def loss(self, tokens: Tokens) -> torch.Tensor:
        """−β sg[log π_T − log π_θ] log π_θ."""
        return -(self.beta * (tokens.scores_T - tokens.logp_T.detach()) * tokens.logp_T)

    def reward_loss(self, tokens: Tokens, weight: float, n_scored: int) -> torch.Tensor:
        """−γ A_i log π_θ; `weight`: A_i."""
        return -(self.gamma * weight) * tokens.logp_T

    def plain_weight(self, token: PlainToken) -> float:
        return self.beta * (token.score - token.logp) + self.gamma * token.advantage

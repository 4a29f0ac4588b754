"""Group-relative policy optimisation (PAPER.md, "GRPO, exactly"), on policy: the importance ratio is 1.

S_i = Σ_t w_t log π_θ with w_t = 1/|M_i| (each trajectory's mean over its scored tokens, under every law), H_i = ∇S_i,
g_G = (1/m) Σ A_i H_i over the group's m rewarded samples, g_k = Σ_G g_G. Every law is affine in the reward, so that H_i can
be summed before the group's mean and deviation are known: with an origin o, A_i/m = ((r_i − o) − b)·c and
g_G = c·(G1 − b·G2), G1 = Σ (r_i − o) H_i, G2 = Σ H_i. PAPER.md has o = 0; the two terms are then as large as the rewards and
cancel down to their spread, so o is one of the group's rewards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyrl_thundersync.objectives.contract import GROUP, Objective, PlainToken, Tokens

if TYPE_CHECKING:
    import torch

LAWS = ("population", "sample", "dr_grpo", "rloo")
"""(r − mean)/(population std + ε); the same with the sample std; r − mean; r − mean of the other samples."""

EPSILON = 1e-6


@dataclass
class Grpo(Objective):
    """One advantage law.

    Args:
        law: one of LAWS.
        epsilon: added to the standard deviation, under the laws that divide by it.
    """

    law: str = "population"
    epsilon: float = EPSILON

    rewards = GROUP
    divides_by_tokens = False

    def __post_init__(self) -> None:
        if self.law not in LAWS:
            raise ValueError(f"unknown advantage law {self.law!r}; known are {', '.join(LAWS)}")
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise ValueError(f"epsilon must be finite and at least 0, got {self.epsilon}")

    def affine(self, rewards: Sequence[float | None], origin: float) -> tuple[float, float]:
        """(b, c) with A_i/m = ((r_i − origin) − b)·c, in float64; `rewards` of all the group's samples, in sample order.

        None is a sample without a reward: it has no part in m, b or c. c is 0 when fewer than two samples have a reward or
        all rewards are equal, under every law. Raises ValueError for a reward that is not finite.
        """
        import torch

        r = torch.tensor([r for r in rewards if r is not None], dtype=torch.float64)
        if not bool(torch.isfinite(r).all()):
            raise ValueError(f"rewards must be finite, got {list(rewards)}")
        m = len(r)
        if m < 2 or bool((r == r[0]).all()):
            return 0.0, 0.0
        r -= origin
        b = float(r.mean())
        if self.law == "rloo":
            return b, 1 / (m - 1)
        if self.law == "dr_grpo":
            return b, 1 / m
        return b, 1 / (m * (float(r.std(correction=int(self.law == "sample"))) + self.epsilon))

    def reward_loss(self, tokens: Tokens, weight: float, n_scored: int) -> torch.Tensor:
        """−weight/|M_i| log π_θ; `weight`: A_i/m."""
        return -(weight / n_scored) * tokens.logp_T

    def plain_weight(self, token: PlainToken) -> float:
        return token.advantage / token.m / token.n_scored

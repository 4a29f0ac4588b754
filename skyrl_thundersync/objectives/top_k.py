"""On-policy distillation over the teacher's k most probable tokens instead of the sampled one alone.

At a position with support K (the k tokens that the teacher finds most probable) the reverse KL's gradient is

    Σ_v ∇π_θ(v) log(π_θ(v)/π_T(v))  =  Σ_{v∈K} ∇π_θ(v) log(π_θ(v)/π_T(v))  +  E_{y∼π_θ} [y∉K] log(π_θ(y)/π_T(y)) ∇ log π_θ(y)

(the term Σ_v ∇π_θ(v) of the logarithm's own derivative is 0 over the whole vocabulary, and left out of both parts). The first
sum is computed, not sampled: it is differentiated through π_θ of every token of K. The rest is estimated by the sampled
token where that lies outside K. So the expectation is OPD's own gradient at every k, with the less variance the more of π_θ
lies on K; with k as large as the vocabulary nothing is sampled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyrl_thundersync.objectives.contract import Objective, PlainToken, Tokens

if TYPE_CHECKING:
    import torch


@dataclass
class TopK(Objective):
    """Args:
    k: tokens of the support; the vocabulary's size for the full reverse KL.
    """

    k: int = 16

    needs_teacher = True

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k must be at least 1, got {self.k}")

    @property
    def support_size(self) -> int:
        return self.k

    def loss(self, tokens: Tokens) -> torch.Tensor:
        """−Σ_K sg[log π_T − log π_θ] π_θ − [y∉K] sg[log π_T(y) − log π_θ(y)] log π_θ(y)."""
        of = tokens.support
        advantage_TK = of.scores_TK - of.logp_TK.detach()
        outside_T = ~of.sampled_TK.any(-1) * (tokens.scores_T - tokens.logp_T.detach())
        return -(advantage_TK * of.logp_TK.exp()).sum(-1) - outside_T * tokens.logp_T

    def plain_weights(self, token: PlainToken) -> Mapping[int, float]:
        weights = {id: math.exp(logp) * (score - logp) for id, logp, score in token.support}
        return weights if token.id in weights else weights | {token.id: token.score - token.logp}

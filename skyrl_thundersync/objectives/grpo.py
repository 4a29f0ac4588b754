"""Group-relative policy optimisation (PAPER.md, "GRPO, exactly"), on policy: the importance ratio is 1.

S_i = Σ_t w_t log π_θ with w_t = 1/|M_i| (each trajectory's mean over its scored tokens), g_G = (1/m) Σ A_i ∇S_i over the
group's m samples, g_k = Σ_G g_G. A trajectory is swept once its group's rewards are known, with A_i itself as weight: no
statistics are kept. A group without reward variance contributes exactly zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

LAWS = ("population", "sample", "dr_grpo", "rloo")
"""(r − mean)/(population std + ε); the same with the sample std; r − mean; r − mean of the other samples."""


def group_advantages(rewards: Sequence[float], law: str = "population", epsilon: float = 1e-6) -> list[float]:
    """A_i = (r_i − b)/s of one group, in float64 and in the order given.

    A single sample has nothing to be compared with: 0. Equal rewards give exactly 0 under every law.

    Raises ValueError for an unknown law or a non-finite reward.
    """
    if law not in LAWS:
        raise ValueError(f"unknown advantage law {law!r}; known are {', '.join(LAWS)}")
    r = torch.tensor(list(rewards), dtype=torch.float64)
    if not bool(torch.isfinite(r).all()):
        raise ValueError(f"rewards must be finite, got {list(rewards)}")
    m = len(r)
    if m < 2 or bool((r == r[0]).all()):
        return [0.0] * m
    centred = r - r.mean()
    if law == "rloo":
        return (centred * m / (m - 1)).tolist()
    if law == "dr_grpo":
        return centred.tolist()
    return (centred / (r.std(correction=int(law == "sample")) + epsilon)).tolist()


class Grpo:
    name = "grpo"
    needs_teacher = False
    needs_group = True
    divides_by_tokens = False

    def __init__(self, law: str = "population", epsilon: float = 1e-6):
        if law not in LAWS:
            raise ValueError(f"unknown advantage law {law!r}; known are {', '.join(LAWS)}")
        self.law, self.epsilon = law, epsilon

    def weights(self, rewards: Sequence[float]) -> list[float]:
        """A_i / m of one group: what multiplies each sample's mean log-prob."""
        return [a / len(rewards) for a in group_advantages(rewards, self.law, self.epsilon)]

    def loss(
        self, logp_T: torch.Tensor, scores_T: torch.Tensor | None, advantage: float | None, n_scored: int
    ) -> torch.Tensor:
        """−(A_i/m)/|M_i| Σ log π_θ over a segment's T scored tokens; `advantage` is A_i/m, `n_scored` is |M_i|."""
        return -(advantage / n_scored) * logp_T.sum()

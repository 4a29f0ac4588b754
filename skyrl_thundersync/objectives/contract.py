"""What an objective is: one class that says what it needs, what each token loses, and the same again by hand.

The gradient of a batch is that of

    Σ_i Σ_t loss(t)  +  Σ_i w_i Σ_t reward_loss(t)          ÷ N_k where `divides_by_tokens`

over trajectories i and their scored tokens t. `loss` is fixed once the token is (and scored by the teacher, where one is
needed): it is swept as soon as no turn can follow. `reward_loss` waits for w_i, a number of the trajectory's reward, or of
its whole group's rewards. A trajectory reaches the learner in pieces that nobody promises, so both are sums over tokens.

An objective is a dataclass: its fields are its options, `thundersync.objective_options` on the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch

NONE, OWN, GROUP = "none", "own", "group"
REWARDS = (NONE, OWN, GROUP)
"""Which rewards a trajectory's weight is made of: none; its own; those of its group, through an affine law."""


@dataclass(frozen=True)
class SupportTokens:
    """The K tokens that the teacher finds most probable at the position of each of T scored tokens, best first.

    logp_TK: log π_θ of them, differentiable. scores_TK: log π_T. sampled_TK: True where one is the sampled token.
    """

    logp_TK: torch.Tensor
    scores_TK: torch.Tensor
    sampled_TK: torch.Tensor


@dataclass(frozen=True)
class Tokens:
    """T scored tokens of one trajectory, in order; all that a loss may see. It sees no reward, no other trajectory, and not
    how many tokens there will be.

    logp_T: log π_θ of the sampled tokens, differentiable. sampler_T: the same as the sampler reported it. scores_T: log π_T
    as the teacher answered, None unless `needs_teacher`. support: None unless the objective asks for a `support_size`. All
    of one dtype.
    """

    logp_T: torch.Tensor
    sampler_T: torch.Tensor
    scores_T: torch.Tensor | None = None
    support: SupportTokens | None = None


@dataclass(frozen=True)
class PlainToken:
    """One scored token as a textbook has it: plain numbers of the whole, finished batch.

    id: the token. logp: log π_θ. sampler: as the sampler reported it. score: log π_T; 0.0 without a teacher. reward: the
    trajectory's, and rewards: those of its group's samples in order (None: it has none). advantage: A_i, where weights are of
    the group; m: how many samples of the group have a reward. n_scored: |M_i|, scored tokens of the trajectory. support: (id,
    log π_θ, log π_T) of the teacher's most probable tokens at its position, where the objective asks for them.
    """

    id: int
    logp: float
    sampler: float
    score: float
    reward: float | None
    rewards: tuple[float | None, ...]
    advantage: float
    m: int
    n_scored: int
    support: tuple[tuple[int, float, float], ...] = ()


@dataclass
class Objective:
    """Derive from it (or from `grpo.Grpo`, for the group's advantage laws) and decorate with `@dataclass`.

    needs_teacher: sources are released once a teacher has scored them. rewards: one of `REWARDS`; other than "none" needs
    `reward_loss`. divides_by_tokens: the sum is divided by N_k, the batch's scored tokens, at finish.
    """

    needs_teacher: ClassVar[bool] = False
    rewards: ClassVar[str] = NONE
    divides_by_tokens: ClassVar[bool] = True

    @property
    def support_size(self) -> int:
        """How many of its most probable tokens the teacher answers at each position (K); 0: none. Needs the teacher."""
        return 0

    @property
    def has_loss(self) -> bool:
        """Whether there is a part that no reward enters."""
        return type(self).loss is not Objective.loss

    @property
    def needs_group(self) -> bool:
        """Whether a trajectory's weight is known only when its group's rewards are."""
        return self.rewards == GROUP

    def loss(self, tokens: Tokens) -> torch.Tensor:
        """Each token's loss, [T]: that of a token depends on this token alone."""
        raise NotImplementedError

    def reward_loss(self, tokens: Tokens, weight: float, n_scored: int) -> torch.Tensor:
        """Each token's part that the reward weighs, [T], linear in `weight` (w_i). n_scored: |M_i|.

        A weight of 0 (no reward, a group without variance) silences this part and no other: `loss` is learned from all the
        same. Where there is no `loss`, such a trajectory is not even run; its tokens count towards N_k.
        """
        raise NotImplementedError

    def weight(self, reward: float) -> float:
        """w_i, where `rewards` is "own"."""
        return reward

    def affine(self, rewards: Sequence[float | None], origin: float) -> tuple[float, float]:
        """(b, c) with w_i = ((r_i − origin) − b)·c, where `rewards` is "group"; of all its samples, None without a reward.

        Being affine lets a trajectory be swept before its group's last reward is known.
        """
        raise NotImplementedError

    def weights(self, rewards: Sequence[float | None]) -> list[float]:
        """w_i of each sample of a group. Exactly 0 without a reward, or where c is 0."""
        origin = next((r for r in rewards if r is not None), 0.0)
        b, c = self.affine(rewards, origin)
        return [0.0 if r is None or c == 0.0 else ((r - origin) - b) * c for r in rewards]

    def plain_weight(self, token: PlainToken) -> float:
        """What multiplies ∇ log π_θ of a sampled token in minus the gradient, in plain arithmetic: `skyrl verify` compares.

        `loss` and this are two ways to say one thing; start-up checks that they agree.
        """
        raise NotImplementedError

    def plain_weights(self, token: PlainToken) -> Mapping[int, float]:
        """The same by token id, for objectives that move other tokens than the sampled one."""
        return {token.id: self.plain_weight(token)}

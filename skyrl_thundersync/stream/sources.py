"""Objective sources and the learner work they become (PAPER.md, "Release semantics").

A *source* is the unit that can be released on its own: one sampled turn. A source is *ready* when every input of its
objective is fixed: for OPD when the frozen teacher has scored its action tokens, for GRPO when the trajectory was graded.
Everything here is immutable, picklable and holds token ids as plain integers: ids are never decoded and re-encoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class TrajectoryId(NamedTuple):
    """One sampled trajectory: `group` is its prompt's id, `sample` its index among the samples of that prompt.

    A tuple, not a dataclass: it is the key of every table here, and a tuple's hash and comparison cost a third.
    """

    group: str
    sample: int

    def __str__(self) -> str:
        return f"{self.group}_{self.sample}"


@dataclass(frozen=True, slots=True)
class Source:
    """One sampled turn, as the rollout engine answered, before its tool ran.

    The turn's context is the trajectory's prompt followed by what earlier turns left; only the difference is carried, so
    a trajectory's sources cost memory and transport linear in its tokens.

    Attributes:
        trajectory: whose turn this is.
        turn: 0-based index of the turn in its trajectory.
        prefix: how many tokens of the previous turn's context + action this turn's context repeats unchanged. Equal to
            that length when the turn extends the trajectory; smaller when earlier tokens were dropped or compacted. 0
            for turn 0.
        context_ids: the turn's unscored new context: all its context tokens after the first `prefix`. For turn 0 the
            group's whole prompt.
        action_ids: the sampled tokens, end-of-sequence token included where it was sampled. May be empty.
        mask: 1 where the action token is scored, 0 where not (for example an appended, unsampled end token). Same
            length as `action_ids`; never changes once emitted.
        sampler_logps: log-probability of each action token as the sampler reported it (same length, natural log).
        finish_reason: "stop", "length" or "abort", as the engine reported.
        policy_version: version k of the weights θ_k that sampled every token of this turn.
    """

    trajectory: TrajectoryId
    turn: int
    prefix: int
    context_ids: tuple[int, ...]
    action_ids: tuple[int, ...]
    mask: tuple[int, ...]
    sampler_logps: tuple[float, ...]
    finish_reason: str
    policy_version: int

    def __post_init__(self) -> None:
        if not len(self.action_ids) == len(self.mask) == len(self.sampler_logps):
            raise ValueError(
                f"source {self.name}: {len(self.action_ids)} action ids, {len(self.mask)} mask values and "
                f"{len(self.sampler_logps)} sampler log-probs must be equally many"
            )

    @property
    def name(self) -> str:
        """What error messages call this source."""
        return f"{self.trajectory}/turn{self.turn}"

    @property
    def n_scored(self) -> int:
        return sum(self.mask)


@dataclass(frozen=True, slots=True, eq=False)
class Support:
    """The k tokens that the teacher finds most probable at each of n positions, best first.

    ids_nk: int32 [n, k]. logps_nk: their log π_T, float32 [n, k].
    """

    ids_nk: np.ndarray
    logps_nk: np.ndarray


@dataclass(frozen=True, slots=True)
class Scores:
    """A teacher's answer on a source: log π_T of each action token; `support`, for objectives that ask for one, at the
    positions of the same tokens."""

    logps: tuple[float, ...]
    support: Support | None = None


@dataclass(frozen=True, slots=True)
class Append:
    """Learner work: add a ready source's tokens to its trajectory (and run them forward when that is worth it).

    `scores` holds log π_T of each action token (same length as `action_ids`; ignored where the mask is 0); None for
    objectives without a teacher. `support`: as in `Scores`.
    """

    source: Source
    scores: tuple[float, ...] | None
    support: Support | None = None


@dataclass(frozen=True, slots=True)
class CloseTrajectory:
    """Learner work: no turn can follow; sweep the trajectory's segments and leave adjoints on the group's prompt.

    `reward`: for group objectives only, None when the trajectory has none (its rollout or its checker failed).
    `group_rewards`: rewards of all the group's samples, in sample order, where they are known on release; group objectives
    then need no statistics.
    """

    trajectory: TrajectoryId
    reward: float | None
    group_rewards: tuple[float | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class CloseGroup:
    """Learner work: no trajectory can follow; combine the group's statistics and sweep its shared prompt."""

    group: str


Work = Append | CloseTrajectory | CloseGroup


def group_of(work: Work) -> str:
    """The group whose rank this work belongs to."""
    if isinstance(work, Append):
        return work.source.trajectory.group
    return work.trajectory.group if isinstance(work, CloseTrajectory) else work.group


@dataclass(frozen=True, slots=True)
class WorkDone:
    """A learner rank's acknowledgement of one work item.

    Attributes:
        seconds: time the rank was busy with it.
        n_scored: scored tokens that became part of the gradient with this item (they count towards N_k here, once).
        sum_kl: Σ (log π_θ − log π_T) over those tokens; 0.0 without a teacher.
        sum_logp_gap, max_logp_gap: Σ and maximum of |log π_θ(learner) − log π(sampler)| over those tokens.
        gap_counts: (b, count) pairs: so many of those tokens have a gap in [2^(b/8), 2^((b+1)/8)) nats.
        started: when the rank began with it, seconds of its machine's monotonic clock.
        held_bytes: cut states and adjoints that the rank holds after it, in device and host memory.
        moved_bytes: of them, how many moved to host memory or back with it.
        prompt_seconds: of `seconds`, those that went into the group's shared prompt: its one forward and its sweep.
        page_faults: minor page faults of the rank's process meanwhile: pages of memory that were new to it.
        cpu_seconds: CPU time of the rank's process meanwhile, over its threads: what others on its cores do not change.
    """

    seconds: float
    n_scored: int = 0
    sum_kl: float = 0.0
    sum_logp_gap: float = 0.0
    max_logp_gap: float = 0.0
    gap_counts: tuple[tuple[int, int], ...] = ()
    started: float = 0.0
    held_bytes: int = 0
    moved_bytes: int = 0
    prompt_seconds: float = 0.0
    page_faults: int = 0
    cpu_seconds: float = 0.0

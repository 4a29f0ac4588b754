"""Advantage laws, and GRPO's gradient against the textbook's."""

import math
import statistics

import pytest
import torch
from plain import batch, contexts, distance, make_rank, plain_gradient

from skyrl_thundersync.objectives.grpo import LAWS, Grpo, group_advantages
from skyrl_thundersync.stream.sources import CloseTrajectory, TrajectoryId

REWARDS = [0.0, 1.0, 0.25, 1.0, 0.5]


def test_laws():
    mean = statistics.mean(REWARDS)
    pop, sample = statistics.pstdev(REWARDS), statistics.stdev(REWARDS)
    m = len(REWARDS)
    expected = {
        "population": [(r - mean) / (pop + 1e-6) for r in REWARDS],
        "sample": [(r - mean) / (sample + 1e-6) for r in REWARDS],
        "dr_grpo": [r - mean for r in REWARDS],
        "rloo": [r - (sum(REWARDS) - r) / (m - 1) for r in REWARDS],
    }
    for law in LAWS:
        assert group_advantages(REWARDS, law) == pytest.approx(expected[law], abs=1e-12)


def test_the_sample_law_is_skyrls():
    from skyrl.backends.skyrl_train.utils.ppo_utils import compute_grpo_outcome_advantage

    token_rewards = torch.tensor(REWARDS)[:, None]
    theirs, _ = compute_grpo_outcome_advantage(token_rewards, torch.ones(len(REWARDS), 1), ["g"] * len(REWARDS))
    assert group_advantages(REWARDS, "sample") == pytest.approx(theirs[:, 0].tolist(), abs=1e-5)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("rewards", [[0.7], [0.1] * 3, [0.0, 0.0], [1 / 3] * 7])
def test_no_variance_is_exactly_zero(law, rewards):
    assert group_advantages(rewards, law) == [0.0] * len(rewards)


def test_bad_rewards_and_laws_are_refused():
    with pytest.raises(ValueError, match="finite"):
        group_advantages([0.0, math.nan])
    with pytest.raises(ValueError, match="unknown advantage law"):
        Grpo("median")


@pytest.mark.parametrize("block", [0, 5])
def test_grpo_gradient(folder_of, block):
    works = batch(seed=21, groups=3, samples=3)
    rewards = {w.trajectory: w.reward for w in works if isinstance(w, CloseTrajectory)}
    scored = {}
    for work, _ in contexts(works):
        t = work.source.trajectory
        scored[t] = scored.get(t, 0) + work.source.n_scored

    def weight_of(work, logp_T):
        t = work.source.trajectory
        group = [rewards[s] for s in sorted(rewards) if s.group == t.group]
        advantage = (rewards[t] - statistics.mean(group)) / (statistics.pstdev(group) + 1e-6)
        return torch.full_like(logp_T, advantage / len(group) / scored[t])

    plain, n = plain_gradient(folder_of("qwen3"), works, weight_of=weight_of)
    rank = make_rank(folder_of("qwen3"), "grpo", block_tokens=block)
    assert sum(rank.run(w).n_scored for w in works) == n
    assert distance(rank.gradient(), plain) <= 1e-12


def test_grpo_group_without_variance_leaves_zero_and_still_counts(folder_of):
    works = [
        CloseTrajectory(w.trajectory, 0.5) if isinstance(w, CloseTrajectory) else w
        for w in batch(seed=21, groups=1, samples=3)
    ]
    rank = make_rank(folder_of("qwen3"), "grpo")
    n = sum(rank.run(w).n_scored for w in works)
    assert n == sum(work.source.n_scored for work, _ in contexts(works)) > 0
    assert all(not g.any() for g in rank.gradient().values())


def test_grpo_needs_a_finite_reward(folder_of):
    rank = make_rank(folder_of("qwen3"), "grpo")
    for reward in (None, math.nan):
        with pytest.raises(ValueError, match="trajectory g_0: reward"):
            rank.run(CloseTrajectory(TrajectoryId("g", 0), reward))
        rank.abort_batch()

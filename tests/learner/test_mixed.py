"""The teacher's part and the reward's in one gradient: the textbook's, however a group's rewards become known."""

import pytest
import torch
from plain import FAMILIES, batch, distance, interleave, make_rank, plain_gradient
from test_objectives import advantages_by_hand, known, with_rewards

from skyrl_thundersync.objectives.grpo import LAWS
from skyrl_thundersync.stream.sources import CloseTrajectory

BETA, GAMMA = 0.5, 2.0


def rank_of(folder, law="population", **changes):
    return make_rank(folder, "mixed", law=law, options={"beta": BETA, "gamma": GAMMA}, **changes)


def mixed_plain(folder, works, law="population", dtype=torch.float64):
    """Σ_t (β (log π_T − log π_θ) + γ A_i) ∇ log π_θ, whole contexts, A_i of the finished batch."""
    rewards = {w.trajectory: w.reward for w in works if isinstance(w, CloseTrajectory)}
    advantage = {}
    for group in {t.group for t in rewards}:
        own = sorted(t for t in rewards if t.group == group)
        m = sum(rewards[t] is not None for t in own)
        for t, weight in zip(own, advantages_by_hand(law, [rewards[t] for t in own]), strict=True):
            advantage[t] = weight * m

    def weight_of(work, logp_T):
        scores = [s for s, on in zip(work.scores, work.source.mask, strict=True) if on]
        return BETA * (torch.tensor(scores, dtype=dtype) - logp_T) + GAMMA * advantage[work.source.trajectory]

    return plain_gradient(folder, works, dtype, weight_of=weight_of)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("rewards_known", ["none", "last", "all"])
def test_one_gradient_under_every_law(folder_of, law, rewards_known):
    works = batch(seed=21, groups=3, samples=3)
    plain, n = mixed_plain(folder_of("qwen3"), works, law)
    works = works if rewards_known == "none" else known(works, rewards_known)
    rank = rank_of(folder_of("qwen3"), law, block_tokens=5)
    assert sum(rank.run(w).n_scored for w in works) == n
    assert distance(rank.gradient(), plain) <= 1e-12
    assert rank.forest.groups == {}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("memory", [{}, {"retain_gib": 1.0}, {"graph_gib": 0.0}, {"state_gib": 0.0}])
def test_of_every_family_kept_run_again_or_moved(folder_of, family, memory):
    works = batch(seed=22, groups=2, samples=3)
    plain, _ = mixed_plain(folder_of(family), works)
    rank = rank_of(folder_of(family), block_tokens=6, **memory)
    for work in interleave(works, 0):
        rank.run(work)
    assert distance(rank.gradient(), plain) <= 1e-12


def test_in_fp32(folder_of):
    works = batch(seed=22, groups=2, samples=4)
    plain, _ = mixed_plain(folder_of("qwen3"), works, dtype=torch.float32)
    rank = rank_of(folder_of("qwen3"), dtype="float32", block_tokens=6)
    for work in works:
        rank.run(work)
    assert distance(rank.gradient(), plain) <= 3e-6


@pytest.mark.parametrize("accumulator", ["fp32", "exact"])
@pytest.mark.parametrize("rewards", [[0.5] * 6, [None] * 6, [1.0, None, 1.0] * 2])
def test_what_no_reward_weighs_is_learned_from_in_groups_without_variance(folder_of, accumulator, rewards):
    """Every weight is 0, known early or late: what is left is on-policy distillation, all of it."""
    works = with_rewards(batch(seed=21, groups=2, samples=3), rewards)
    plain, _ = plain_gradient(folder_of("qwen3"), works)
    plain = {name: BETA * g for name, g in plain.items()}
    for form in (works, known(works, "all")):
        rank = rank_of(folder_of("qwen3"), block_tokens=4, accumulator=accumulator, dtype="float64")
        for work in form:
            rank.run(work)
        assert distance(rank.gradient(), plain) <= (1e-12 if accumulator == "fp32" else 1e-6)


def test_exact_sums_have_the_same_bits_in_any_order(folder_of):
    works = batch(seed=11, groups=2, samples=4)
    found = []
    for seed in range(3):
        rank = rank_of(folder_of("qwen3"), dtype="float32", block_tokens=4, accumulator="exact")
        for work in interleave(works, seed):
            rank.run(work)
        found.append(rank.gradient())
    assert all(torch.equal(found[0][k], again[k]) for again in found[1:] for k in found[0])
    plain, _ = mixed_plain(folder_of("qwen3"), works, dtype=torch.float32)
    assert distance(found[0], plain) <= 3e-6

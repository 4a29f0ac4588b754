"""Advantage laws, and GRPO's gradient against the textbook's."""

import dataclasses
import math
import random
import statistics

import pytest
import torch
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from plain import FAMILIES, batch, contexts, distance, interleave, make_rank, plain_gradient

from skyrl_thundersync.objectives.grpo import LAWS, Grpo
from skyrl_thundersync.stream.sources import CloseGroup, CloseTrajectory, TrajectoryId

REWARDS = [0.0, 1.0, 0.25, 1.0, 0.5]


def advantages(rewards, law="population"):
    """A_i of one group, from the weights A_i/m that the learner uses."""
    return [len(rewards) * weight for weight in Grpo(law).weights(rewards)]


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
        assert advantages(REWARDS, law) == pytest.approx(expected[law], abs=1e-12)


def test_the_sample_law_is_skyrls():
    from skyrl.backends.skyrl_train.utils.ppo_utils import compute_grpo_outcome_advantage

    token_rewards = torch.tensor(REWARDS)[:, None]
    theirs, _ = compute_grpo_outcome_advantage(token_rewards, torch.ones(len(REWARDS), 1), ["g"] * len(REWARDS))
    assert advantages(REWARDS, "sample") == pytest.approx(theirs[:, 0].tolist(), abs=1e-5)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("rewards", [[0.7], [0.1] * 3, [0.0, 0.0], [1 / 3] * 7])
def test_no_variance_is_exactly_zero(law, rewards):
    assert advantages(rewards, law) == [0.0] * len(rewards)


def test_bad_rewards_and_laws_are_refused():
    with pytest.raises(ValueError, match="finite"):
        advantages([0.0, math.nan])
    with pytest.raises(ValueError, match="unknown advantage law"):
        Grpo("median")


def test_a_law_is_affine_in_the_reward():
    for law in LAWS:
        for origin in (0.0, 0.25, 7.0):
            b, c = Grpo(law).affine(REWARDS, origin)
            by_hand = [((r - origin) - b) * c for r in REWARDS]
            assert by_hand == pytest.approx(advantages_by_hand(law, REWARDS), abs=1e-12)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("far", [0.0, 1e3, -1e6, 1e12])
def test_a_law_does_not_depend_on_where_zero_is(law, far):
    """Rewards moved by a constant that all of them can carry exactly: the same advantages to FP64's last digits."""
    moved = Grpo(law).weights([far + r for r in REWARDS])
    assert moved == pytest.approx(Grpo(law).weights(REWARDS), rel=1e-14)


def test_samples_without_a_reward_are_as_if_never_drawn():
    for law in LAWS:
        with_gaps = Grpo(law).weights([None, *REWARDS[:2], None, *REWARDS[2:]])
        without = Grpo(law).weights(REWARDS)
        assert with_gaps == [0.0, *without[:2], 0.0, *without[2:]]
        assert Grpo(law).weights([None, 1.0, None]) == [0.0] * 3
        assert Grpo(law).weights([None, None]) == [0.0] * 2


def advantages_by_hand(law, rewards):
    """A_i/m over the rewarded samples, from Python's own statistics."""
    valid = [r for r in rewards if r is not None]
    m = len(valid)
    if len(set(valid)) < 2:
        return [0.0] * len(rewards)
    mean = statistics.mean(valid)
    scale = {
        "population": lambda: 1 / (statistics.pstdev(valid) + 1e-6),
        "sample": lambda: 1 / (statistics.stdev(valid) + 1e-6),
        "dr_grpo": lambda: 1.0,
        "rloo": lambda: m / (m - 1),
    }[law]()
    return [0.0 if r is None else (r - mean) * scale / m for r in rewards]


def grpo_plain(folder, works, law="population", dtype=torch.float64):
    """The textbook's GRPO gradient: whole contexts, A_i of the finished batch."""
    rewards = {w.trajectory: w.reward for w in works if isinstance(w, CloseTrajectory)}
    scored, weights = {}, {}
    for work, _ in contexts(works):
        t = work.source.trajectory
        scored[t] = scored.get(t, 0) + work.source.n_scored
    for group in {t.group for t in rewards}:
        samples = sorted(t for t in rewards if t.group == group)
        weights |= dict(zip(samples, advantages_by_hand(law, [rewards[t] for t in samples]), strict=True))

    def weight_of(work, logp_T):
        t = work.source.trajectory
        return torch.full_like(logp_T, weights[t] / scored[t])

    return plain_gradient(folder, works, dtype, weight_of=weight_of)


def with_rewards(works, rewards):
    """Other rewards, in order of closing."""
    rewards = iter(rewards)
    return [CloseTrajectory(w.trajectory, next(rewards)) if isinstance(w, CloseTrajectory) else w for w in works]


def known(works, which):
    """`works` whose closes bring the group's rewards, as released late: all of them, or each group's last."""
    rewards = {w.trajectory: w.reward for w in works if isinstance(w, CloseTrajectory)}
    of = {t.group: tuple(rewards[s] for s in sorted(rewards) if s.group == t.group) for t in rewards}
    last = {t.group: t for t in rewards}
    return [
        CloseTrajectory(w.trajectory, w.reward, of[w.trajectory.group])
        if isinstance(w, CloseTrajectory) and (which == "all" or last[w.trajectory.group] == w.trajectory)
        else w
        for w in works
    ]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("rewards_known", ["none", "last", "all"])
@pytest.mark.parametrize("block", [0, 5])
def test_grpo_gradient(folder_of, law, rewards_known, block):
    """Swept into statistics, with A_i itself, or some of a group's samples one way and some the other: one gradient."""
    works = batch(seed=21, groups=3, samples=3)
    plain, n = grpo_plain(folder_of("qwen3"), works, law)
    works = works if rewards_known == "none" else known(works, rewards_known)
    rank = make_rank(folder_of("qwen3"), "grpo", law=law, block_tokens=block)
    assert sum(rank.run(w).n_scored for w in works) == n
    assert distance(rank.gradient(), plain) <= 1e-12
    assert rank.forest.groups == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_grpo_gradient_of_every_family(folder_of, family):
    works = batch(seed=22, groups=2, samples=3)
    plain, _ = grpo_plain(folder_of(family), works)
    rank = make_rank(folder_of(family), "grpo", block_tokens=6, retain_gib=1.0)
    for work in interleave(works, 0):
        rank.run(work)
    assert distance(rank.gradient(), plain) <= 1e-12


def test_grpo_statistics_in_fp32(folder_of):
    works = batch(seed=22, groups=2, samples=4)
    plain, _ = grpo_plain(folder_of("qwen3"), works, dtype=torch.float32)
    rank = make_rank(folder_of("qwen3"), "grpo", dtype="float32", block_tokens=6)
    for work in works:
        rank.run(work)
    assert distance(rank.gradient(), plain) <= 3e-6


@pytest.mark.parametrize("far", [0.0, 100.0, -1000.0, 1e5])
def test_grpo_statistics_of_rewards_far_from_zero_and_close_together(folder_of, far):
    """Statistics are as near to FP64 as the sweep with A_i itself, wherever the rewards lie; 0.125 apart is exact in FP64."""
    works = with_rewards(batch(seed=22, groups=2, samples=4), [far + 0.125 * i for i in (1, 0, 2, 1, 3, 3, 0, 1)])
    plain, _ = grpo_plain(folder_of("qwen3"), works)
    errors = []
    for share in (works, known(works, "all")):
        rank = make_rank(folder_of("qwen3"), "grpo", dtype="float32", block_tokens=6)
        for work in share:
            rank.run(work)
        errors.append(distance(rank.gradient(), plain))
    assert errors[0] <= 2 * errors[1] <= 6e-6


@pytest.fixture(scope="module")
def grpo_ranks(folder_of):
    """One FP64 rank per accumulator: building one takes longer than a batch."""
    return {kind: make_rank(folder_of("qwen3"), "grpo", block_tokens=5, accumulator=kind) for kind in ("fp32", "exact")}


@given(
    seed=st.integers(0, 10**6),
    samples=st.integers(2, 4),
    empty=st.sets(st.integers(0, 3)),
    unrewarded=st.sets(st.integers(0, 3), max_size=1),
    late=st.sets(st.integers(0, 3)),
    order=st.integers(0, 10**6),
    kind=st.sampled_from(["fp32", "exact"]),
)
@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(seed=21, samples=3, empty={0}, unrewarded=set(), late=set(), order=-1, kind="fp32")
@example(seed=21, samples=3, empty={0}, unrewarded=set(), late={2}, order=-1, kind="fp32")
def test_grpo_gradient_of_any_order_with_any_sample_empty(
    folder_of, grpo_ranks, seed, samples, empty, unrewarded, late, order, kind
):
    """Branches, samples without a turn or a reward, sweeps into statistics or with A_i (`late`): the textbook's gradient.

    order: of arrival; -1 is sample by sample, so that the empty ones of the lowest numbers close first.
    """
    rng, works = random.Random(seed), []
    for work in batch(seed, groups=2, samples=samples):
        if isinstance(work, CloseTrajectory):
            works.append(CloseTrajectory(work.trajectory, rng.uniform(-1, 1)))
        elif isinstance(work, CloseGroup) or work.source.trajectory.sample not in empty:
            works.append(work)
    works = works if order < 0 else interleave(works, order)
    works = [
        CloseTrajectory(w.trajectory, None)
        if isinstance(w, CloseTrajectory) and w.trajectory.sample in unrewarded
        else w
        for w in works
    ]
    plain, n = grpo_plain(folder_of("qwen3"), works)
    full = known(works, "all")
    works = [
        b if isinstance(a, CloseTrajectory) and a.trajectory.sample in late else a
        for a, b in zip(works, full, strict=True)
    ]
    rank = grpo_ranks[kind]
    try:
        assert sum(rank.run(w).n_scored for w in works) == n
        ours = rank.gradient()
        gap = sum(float((ours[k] - plain[k]).square().sum()) for k in plain) ** 0.5
        size = sum(float(g.square().sum()) for g in plain.values()) ** 0.5
        assert gap <= (1e-12 * size + 1e-15 if kind == "fp32" else 1e-8 * size + 1e-9)
        assert rank.forest.groups == {}
    finally:
        rank.abort_batch()


def test_grpo_exact_accumulator_gives_the_same_bits_in_any_order_and_however_rewards_come(folder_of):
    works = batch(seed=22, groups=2, samples=4)
    rank = make_rank(folder_of("qwen3"), "grpo", dtype="float32", block_tokens=4, accumulator="exact")
    found = []
    for order in (works, interleave(works, 1), interleave(works, 2), known(works, "all"), known(works, "last")):
        for work in order:
            rank.run(work)
        found.append(rank.gradient())
        rank.abort_batch()
    assert all(torch.equal(g[k], found[0][k]) for g in found for k in g)
    plain, _ = grpo_plain(folder_of("qwen3"), works, dtype=torch.float32)
    assert distance(found[0], plain) <= 3e-6


@pytest.mark.parametrize("rewards", [[0.5] * 3, [None] * 3, [None, 0.7, None]], ids=["equal", "none", "one"])
@pytest.mark.parametrize("rewards_known", ["none", "all"])
@pytest.mark.parametrize("accumulator", ["fp32", "exact"])
def test_grpo_group_without_variance_leaves_zero_and_still_counts(folder_of, rewards, rewards_known, accumulator):
    works = with_rewards(batch(seed=21, groups=1, samples=3), rewards)
    works = works if rewards_known == "none" else known(works, "all")
    rank = make_rank(folder_of("qwen3"), "grpo", dtype="float32", accumulator=accumulator)
    n = sum(rank.run(w).n_scored for w in works)
    assert n == sum(work.source.n_scored for work, _ in contexts(works)) > 0
    assert all(not g.any() for g in rank.gradient().values())
    assert rank.forest.groups == {}


@pytest.mark.parametrize("rewards_known", ["none", "last", "all"])
def test_a_sample_without_a_reward_has_no_gradient_and_its_group_goes_on(folder_of, rewards_known):
    works = with_rewards(batch(seed=21, groups=1, samples=4), [1.0, None, 0.0, 0.5])
    plain, n = grpo_plain(folder_of("qwen3"), works)
    works = works if rewards_known == "none" else known(works, rewards_known)
    rank = make_rank(folder_of("qwen3"), "grpo")
    assert sum(rank.run(w).n_scored for w in works) == n
    assert distance(rank.gradient(), plain) <= 1e-12


def test_a_sample_that_never_sampled_a_turn_counts_by_its_reward(folder_of):
    """A lost member: its rollout failed before the first turn, but it was registered, closed and given a reward."""
    works = with_rewards(batch(seed=21, groups=1, samples=3), [1.0, 0.5, 0.25])
    lost = CloseTrajectory(TrajectoryId("g0", 3), 0.0)
    works = [*works[:-1], lost, works[-1]]
    plain, _ = grpo_plain(folder_of("qwen3"), works)
    rank = make_rank(folder_of("qwen3"), "grpo")
    for work in works:
        rank.run(work)
    assert distance(rank.gradient(), plain) <= 1e-12


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_names_its_trajectory(folder_of, reward):
    works = with_rewards(batch(seed=21, groups=1, samples=2), [1.0, reward])
    rank = make_rank(folder_of("qwen3"), "grpo")
    with pytest.raises(FloatingPointError, match="trajectory g0_1: its reward is"):
        for work in works:
            rank.run(work)
    rank.abort_batch()
    assert all(not g.any() for g in rank.gradient().values())


def test_grpo_of_identical_samples(folder_of):
    """Same tokens, different rewards: Σ A_i H = 0 up to rounding under every law, with or without statistics."""
    works = batch(seed=23, groups=1, samples=1)[:-1]
    twins = [*works[:-1], CloseTrajectory(TrajectoryId("g0", 0), 0.0)]
    for work in works[:-1]:
        source = dataclasses.replace(work.source, trajectory=TrajectoryId("g0", 1))
        twins.append(dataclasses.replace(work, source=source))
    twins += [CloseTrajectory(TrajectoryId("g0", 1), 1.0), CloseGroup("g0")]
    single = make_rank(folder_of("qwen3"), "grpo")
    h, _ = plain_gradient(folder_of("qwen3"), works, weight_of=lambda work, logp_T: torch.ones_like(logp_T))
    for work in twins:
        single.run(work)
    size = sum(float(g.square().sum()) for g in h.values()) ** 0.5
    assert sum(float(g.square().sum()) for g in single.gradient().values()) ** 0.5 <= 1e-12 * size

"""Under a group objective: how many groups hold statistics on a rank, and who knows which rewards."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_thundersync.stream.rewards import RewardGate
from skyrl_thundersync.stream.sources import Append, CloseGroup, CloseTrajectory, Source, TrajectoryId


def append(group, sample):
    return Append(Source(TrajectoryId(group, sample), 0, 0, (1,), (2,), (1,), (0.0,), "stop", 0), None)


def batch(rng, groups):
    """Ready work of a batch: each trajectory's turn, then its close, interleaved at random; each group's close at its end."""
    lanes = [[append(g, s), CloseTrajectory(TrajectoryId(g, s), rng.choice((0.0, 1.0, None)))] for g in groups
             for s in range(groups[g])]  # fmt: skip
    left, order = dict(groups), []
    while any(lanes):
        work = rng.choice([lane for lane in lanes if lane]).pop(0)
        order.append(work)
        if isinstance(work, CloseTrajectory):
            left[work.trajectory.group] -= 1
            if left[work.trajectory.group] == 0:
                order.append(CloseGroup(work.trajectory.group))
    return order


@given(seed=st.integers(0, 10**6), cap=st.integers(0, 3), ranks=st.integers(1, 2), lag=st.integers(0, 30))
def test_at_most_cap_groups_hold_statistics_and_everything_goes(seed, cap, ranks, lag):
    """`lag`: how many items behind a rank is; its acknowledgements come that late."""
    rng = random.Random(seed)
    groups = {f"g{i}": rng.randint(1, 4) for i in range(6)}
    rank_of = {group: rng.randrange(ranks) for group in groups}
    ready, gate = batch(rng, groups), RewardGate(cap, groups)
    rewards = {w.trajectory: w.reward for w in ready if isinstance(w, CloseTrajectory)}
    queues, gone = [[] for _ in range(ranks)], []
    holding = [set() for _ in range(ranks)]

    def enter(items):
        for rank, work in items:
            queues[rank].append(work)
            gone.append(work)
            if isinstance(work, CloseTrajectory) and work.group_rewards is None:
                holding[rank].add(work.trajectory.group)
                assert len(holding[rank]) <= cap

    def acknowledge(rank):
        work = queues[rank].pop(0)
        if isinstance(work, CloseGroup):
            holding[rank].discard(work.group)
        enter(gate.acknowledged(rank, work))

    for work in ready:
        group = work.source.trajectory.group if isinstance(work, Append) else getattr(work, "group", None)
        enter(gate.offer(rank_of[group or work.trajectory.group], work))
        for rank in range(ranks):
            while len(queues[rank]) > lag:
                acknowledge(rank)
    assert len(gone) == len(ready), "nothing waits once the last trajectory has closed"
    for rank in range(ranks):
        while queues[rank]:
            acknowledge(rank)
    bare = [CloseTrajectory(w.trajectory, w.reward) if isinstance(w, CloseTrajectory) else w for w in gone]
    assert sorted(map(repr, bare)) == sorted(map(repr, ready))
    for group, m in groups.items():
        own = [i for i, w in enumerate(gone) if isinstance(w, CloseTrajectory) and w.trajectory.group == group]
        assert gone.index(CloseGroup(group)) > max(own)
        known = tuple(rewards[TrajectoryId(group, sample)] for sample in range(m))
        told = {gone[i].group_rewards for i in own}
        assert told <= {None, known} and known in told
        if cap == 0:
            assert told == {known}
        for sample in range(m):
            close = next(i for i in own if gone[i].trajectory.sample == sample)
            assert gone.index(append(group, sample)) < close


def test_a_negative_cap_is_refused():
    with pytest.raises(ValueError, match="cap of -1"):
        RewardGate(-1, {})

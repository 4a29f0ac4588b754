"""Placement at scale and the admission cap: the least loaded rank, and never more groups with state than the cap."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_thundersync.stream.admission import Admission
from skyrl_thundersync.stream.placement import Placement
from skyrl_thundersync.stream.release import WorkPolicy
from skyrl_thundersync.stream.sources import Append, CloseGroup, Source, TrajectoryId, WorkDone, group_of
from skyrl_thundersync.trainer import Update


def append(group: str, tokens: int = 1, turn: int = 0, sample: int = 0) -> Append:
    return Append(Source(TrajectoryId(group, sample), turn, 0, (1,) * tokens, (), (), (), "stop", 0), None)


@settings(deadline=None)
@given(st.integers(1, 6), st.booleans(), st.integers(0, 2**32))
def test_a_new_group_always_goes_to_the_least_loaded_rank(ranks, growing, seed):
    rng, placement = random.Random(seed), Placement(ranks, growing)
    load = [[0, 0] for _ in range(ranks)]  # tokens, open groups: kept here by adding up
    held: dict[str, tuple[int, int]] = {}
    for _ in range(200):
        if held and rng.random() < 0.2:
            group = rng.choice(sorted(held))
            rank, tokens = held.pop(group)
            assert placement.rank(CloseGroup(group)) == rank
            placement.acknowledged(CloseGroup(group))
            load[rank] = [load[rank][0] - tokens, load[rank][1] - 1]
            continue
        group, tokens = str(rng.randrange(30)), rng.randrange(3)
        rank = placement.rank(append(group, tokens))
        if group in held:
            assert rank == held[group][0]
        else:
            assert rank == min(range(ranks), key=lambda r: (*load[r][:: -1 if growing else 1], r))
            load[rank][1] += 1
        held[group] = (rank, held.get(group, (rank, 0))[1] + tokens)
        load[rank][0] += tokens


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(0, 2**32))
def test_admission_keeps_the_cap_wastes_no_room_and_lets_everything_through_in_each_groups_order(cap, seed):
    rng, admission = random.Random(seed), Admission(cap)
    left = {
        group: [append(group, turn=t) for t in range(rng.randrange(1, 4))] + [CloseGroup(group)] for group in "abcdefg"
    }
    offered: list = []
    queue: list = []
    done: list = []
    while any(left.values()) or queue or admission.waiting:
        if queue and rng.random() < 0.5:
            done.append(queue.pop(0))
            queue += admission.acknowledged(done[-1])
        elif ready := [group for group, work in left.items() if work]:
            work = left[rng.choice(ready)].pop(0)
            offered.append(work)
            queue += admission.offer(work)
        begun = {group_of(w) for w in done + queue} - {w.group for w in done if isinstance(w, CloseGroup)}
        assert len(begun) <= cap
        assert len(begun) == cap or not admission.waiting
    for group in "abcdefg":
        assert [w for w in done if group_of(w) == group] == [w for w in offered if group_of(w) == group]


def test_a_cap_that_admits_nothing_is_refused():
    with pytest.raises(ValueError, match="admission cap of 0 groups"):
        Admission(0)


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(0, 2**32))
def test_under_a_byte_budget_groups_start_only_within_it_and_all_finish(state_bytes, seed):
    """One byte a token is held from its acknowledgement to its group's close: what starts is then known exactly."""
    rng, admission = random.Random(seed), Admission(state_bytes=state_bytes)
    left = {
        group: [append(group, rng.randrange(1, 5), turn=t) for t in range(rng.randrange(1, 4))] + [CloseGroup(group)]
        for group in "abcdefg"
    }
    queue, done, held, started = [], [], {}, set()

    def enter(works):
        new = {group_of(w) for w in works} - started
        alone, spoken_for = not held, sum(held.values()) + sum(tokens(w) for w in queue)
        for group in [g for g in dict.fromkeys(map(group_of, works)) if g in new]:
            assert alone or (done and spoken_for < state_bytes)
            alone, spoken_for = False, spoken_for + sum(tokens(w) for w in works if group_of(w) == group)
            held[group] = 0
        started.update(new)
        queue.extend(works)

    while any(left.values()) or queue or admission.waiting:
        if queue and rng.random() < 0.5:
            work = queue.pop(0)
            done.append(work)
            held[group_of(work)] += tokens(work)
            if isinstance(work, CloseGroup):
                del held[work.group]
            enter(admission.acknowledged(work, sum(held.values())))
        elif ready := [group for group, work in left.items() if work]:
            enter(admission.offer(left[rng.choice(ready)].pop(0)))
        assert queue or any(left.values()) or not admission.waiting
    assert started == set("abcdefg") and not held
    assert len(admission.waits) <= 6 and all(wait >= 0 for wait in admission.waits)


def tokens(work) -> int:
    return len(work.source.context_ids) if isinstance(work, Append) else 0


@pytest.mark.parametrize("schedule", ["thundersync", "group", "sync"])
@pytest.mark.parametrize("cap", [1, 2])
def test_an_update_under_a_cap_does_all_work_and_never_opens_more_groups_on_a_rank(schedule, cap):
    rng = random.Random(cap)

    class Rank:
        def __init__(self):
            self.open, self.most, self.seen = set(), 0, 0

        async def run(self, work):
            await asyncio.sleep(rng.random() * 0.002)
            for item in work:
                self.open.add(group_of(item))
                self.most = max(self.most, len(self.open))
                if isinstance(item, CloseGroup):
                    self.open.discard(item.group)
            self.seen += len(work)
            return [WorkDone(0.0, w.source.n_scored if isinstance(w, Append) else 0) for w in work]

    async def main():
        ranks = [Rank(), Rank()]
        update = Update(0, {group: 2 for group in "abcdefgh"}, ranks, None, WorkPolicy(schedule, cap=cap))

        async def one(trajectory):
            for turn in range(rng.randrange(1, 4)):
                await asyncio.sleep(rng.random() * 0.003)
                update.on_turn(append(trajectory.group, 3, turn, trajectory.sample).source)
            update.on_trajectory_closed(trajectory, 1.0, None)

        async def rollouts():
            await asyncio.gather(*map(one, update.ledger.trajectories))

        await asyncio.wait_for(update.run(rollouts()), 20)
        assert sum(rank.seen for rank in ranks) == len(update.acknowledged) == update.ledger.n_sources + 16 + 8
        assert all(0 < rank.most <= cap and not rank.open for rank in ranks)

    asyncio.run(main())

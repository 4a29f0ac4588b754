"""A byte budget for cut states and adjoints: what moves changes no bit, what waits never waits for ever."""

import asyncio
import random

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from plain import FAMILIES, batch, distance, interleave, make_rank, plain_gradient

from skyrl_thundersync.learner.state_budget import StateBudget
from skyrl_thundersync.stream.release import WorkPolicy
from skyrl_thundersync.stream.sources import Append, CloseTrajectory, Scores, WorkDone
from skyrl_thundersync.trainer import Update


class Copies:
    """Moves within host memory; what moved away is spoilt, so that whoever still reads it is seen."""

    def out(self, tensors):
        moved = [t.clone() for t in tensors]
        for t in tensors:
            t.fill_(-(2**40) if t.dtype == torch.int64 else float("nan"))
        return moved

    back = out

    def join(self): ...


def budgeted(rank, limit):
    """`rank`, with a budget whose states can move."""
    rank.segments.states = StateBudget(limit, Copies())
    rank.segments.states.leaving = rank.forest.budget.drop_readers
    return rank


def gradient_of(rank, works, together=False):
    done = rank.run_many(works) if together else [rank.run(work) for work in works]
    gradient = rank.gradient()
    assert rank.segments.states.held == done[-1].held_bytes == 0
    rank.abort_batch()
    return gradient, done


CACHE = {}


def one_rank(folder, *args, **changes):
    key = (folder, args, *changes.items())
    if key not in CACHE:
        CACHE[key] = make_rank(folder, *args, **changes)
    return CACHE[key]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("objective", ["opd", "grpo"])
@pytest.mark.parametrize("share", [0, 0.5])
def test_moved_states_give_the_same_bits(folder_of, family, objective, share):
    works = interleave(batch(seed=22, groups=2, samples=3), 0)
    # Room for every graph: else where segments end depends on what found room.
    rank = make_rank(folder_of(family), objective, block_tokens=4, retain_gib=1.0)
    free, done = gradient_of(rank, works)
    limit = int(share * max(d.held_bytes for d in done))
    tight, done = gradient_of(budgeted(rank, limit), works)
    assert sum(d.moved_bytes for d in done) > 0
    assert all(torch.equal(free[k], tight[k]) for k in free)
    if objective == "opd":
        assert distance(tight, plain_gradient(folder_of(family), works)[0]) <= 1e-12


@hypothesis_settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    limit=st.sampled_from((0, 2_000, 8_000, 10**9)),
    retain=st.sampled_from((0.0, 1e-5, 1.0)),
    objective=st.sampled_from(("opd", "grpo")),
    accumulator=st.sampled_from(("fp32", "exact")),
    together=st.booleans(),
)
def test_any_order_any_budget(folder_of, seed, limit, retain, objective, accumulator, together):
    works = interleave(batch(seed, groups=2, samples=3), seed)
    rank = one_rank(folder_of("qwen3"), objective, block_tokens=3, retain_gib=retain, accumulator=accumulator)
    rank.segments.states = StateBudget()
    free, _ = gradient_of(rank, works, together)
    tight, _ = gradient_of(budgeted(rank, limit), works, together)
    assert all(torch.equal(free[k], tight[k]) for k in free)


def test_after_each_work_item_the_budget_holds_and_what_is_held_is_counted(folder_of):
    rank, limit = budgeted(make_rank(folder_of("qwen3"), block_tokens=4), 5_000), 5_000
    over = 0
    for work in interleave(batch(seed=22, groups=3, samples=3), 1):
        done = rank.run(work)
        states = rank.segments.states
        assert states.resident <= limit
        assert done.held_bytes == states.held
        over += states.held > limit
    assert over > 0 and states.held == 0


def tensor_bytes(forest) -> int:
    """Bytes of all states, adjoints and statistics' adjoints of what is open, tensor by tensor."""
    tensors = {}
    for group in forest.groups.values():
        tips = [tip for t in group.open.values() for tip in (t.leaf, *(b.tip for b in t.finished)) if tip]
        segments = {s for tip in tips for s in tip.path() if s.run} | set(group.nodes)
        parts = [part for s in segments for a in (s.chunk.adjoint, s.adjoint) for part in (a.state, a.sums)]
        parts += [part for two in (group.statistics._prompt.values() if group.statistics else ()) for part in two]
        tensors |= {id(t): t.nbytes for part in parts for pair in part for t in pair if t is not None}
    return sum(tensors.values())


def test_held_bytes_are_those_of_the_tensors(folder_of):
    rank = make_rank(folder_of("qwen3_5_text"), "grpo", block_tokens=3)
    held = [0]
    for work in interleave(batch(seed=22, groups=2, samples=3), 1):
        held.append(rank.run(work).held_bytes)
        assert held[-1] == tensor_bytes(rank.forest)
    assert max(held) > 0 == held[-1]


def test_on_a_cpu_nothing_moves(folder_of):
    rank = make_rank(folder_of("qwen3"), state_gib=0.0)
    done = [rank.run(work) for work in batch(seed=3)]
    assert max(d.held_bytes for d in done) > 0
    assert all(d.moved_bytes == 0 for d in done)


class Lane:
    """A learner rank as the scheduler sees it; `open`: how many groups were open when each group began."""

    def __init__(self, rank, rng):
        self.rank, self.rng, self.open = rank, rng, []

    async def run(self, works) -> list[WorkDone]:
        await asyncio.sleep(self.rng.random() * 0.001)
        done = []
        for work in works:
            groups = self.rank.forest.groups
            if isinstance(work, Append) and work.source.trajectory.group not in groups:
                self.open.append(len(groups))
            done.append(self.rank.run(work))
        return done


@pytest.mark.parametrize("schedule", ["thundersync", "sync"])
@pytest.mark.parametrize("state_bytes", [0, 8_000])
@pytest.mark.parametrize("objective", ["opd", "grpo"])
def test_an_update_under_any_budget_ends_and_its_gradient_is_the_same(folder_of, schedule, state_bytes, objective):
    works, rng = batch(seed=31, groups=5, samples=2), random.Random(state_bytes)
    rank = one_rank(folder_of("qwen3"), objective, block_tokens=3)
    rank.segments.states = StateBudget()
    free, _ = gradient_of(rank, works)
    turns = {}
    for work in works:
        if isinstance(work, Append):
            turns.setdefault(work.source.trajectory, []).append(work)
    rewards = {w.trajectory: w.reward for w in works if isinstance(w, CloseTrajectory)}

    class Teacher:
        async def score(self, source):
            return Scores(turns[source.trajectory][source.turn].scores)

        async def close(self, trajectory): ...

    async def main():
        lane = Lane(budgeted(rank, state_bytes // 2), rng)
        groups = {f"g{g}": 2 for g in range(5)}
        cap = 1 if objective == "grpo" else None
        update = Update(0, groups, [lane], Teacher(), WorkPolicy(schedule, statistics_cap=cap, state_bytes=state_bytes))

        async def one(trajectory):
            for work in turns[trajectory]:
                await asyncio.sleep(rng.random() * 0.003)
                update.on_turn(work.source)
            update.on_trajectory_closed(trajectory, rewards[trajectory], None)

        async def rollouts():
            await asyncio.gather(*map(one, turns))

        await asyncio.wait_for(update.run(rollouts()), 60)
        return lane, update

    lane, update = asyncio.run(main())
    assert len(lane.open) == 5
    if state_bytes == 0:
        assert lane.open == [0] * 5
        assert schedule != "thundersync" or update.admission_waits
    assert distance(rank.gradient(), free) <= 1e-12
    rank.abort_batch()

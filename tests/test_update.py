"""One update under randomly timed rollouts, teachers and ranks: nothing lost, nothing twice, failures end it."""

import asyncio
import random

import pytest

from skyrl_thundersync.stream.ledger import LedgerError, work_name
from skyrl_thundersync.stream.release import WorkPolicy
from skyrl_thundersync.stream.sources import Append, CloseGroup, CloseTrajectory, Scores, Source, TrajectoryId, WorkDone
from skyrl_thundersync.trainer import Update


class Rank:
    """A rank that only keeps the order in which work reached it."""

    def __init__(self, rng):
        self.rng, self.seen = rng, []

    async def run(self, work):
        await asyncio.sleep(self.rng.random() * 0.002)
        self.seen += work
        return [WorkDone(0.001, w.source.n_scored if isinstance(w, Append) else 0) for w in work]


class Teacher:
    def __init__(self, rng, fail_at=None):
        self.rng, self.fail_at = rng, fail_at

    async def score(self, source):
        await asyncio.sleep(self.rng.random() * 0.003)
        if source.name == self.fail_at:
            raise ConnectionError(f"the teacher died at {source.name}")
        return Scores(tuple(-0.5 for _ in source.action_ids))

    async def close(self, trajectory): ...


async def rollouts(update, rng, turns):
    async def one(trajectory):
        for turn in range(turns[trajectory]):
            await asyncio.sleep(rng.random() * 0.003)
            n = rng.randrange(4)
            update.on_turn(Source(trajectory, turn, 0, (1,), (2,) * n, (1,) * n, (0.0,) * n, "stop", 7))
        update.on_trajectory_closed(trajectory, 1.0, None)

    await asyncio.gather(*(one(t) for t in update.ledger.trajectories))
    return "the host's output"


def make(seed, schedule="thundersync", ranks=2, fail_at=None, teacher=True):
    rng = random.Random(seed)
    groups = {g: rng.randrange(1, 4) for g in "abcd"}
    lanes = [Rank(rng) for _ in range(ranks)]
    caps = None if teacher else seed % 3  # without a teacher the objective is one of the group's rewards
    update = Update(
        7, groups, lanes, Teacher(rng, fail_at) if teacher else None, WorkPolicy(schedule, statistics_cap=caps)
    )
    turns = {t: rng.randrange(1, 5) for t in update.ledger.trajectories}
    return update, lanes, rng, turns


def run(update, rng, turns):
    return asyncio.run(asyncio.wait_for(update.run(rollouts(update, rng, turns)), 20))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("schedule", ["thundersync", "group", "sync"])
def test_all_work_reaches_one_rank_once_and_in_order(seed, schedule):
    update, lanes, rng, turns = make(seed, schedule, ranks=1 + seed % 3, teacher=seed % 2 == 0)
    assert run(update, rng, turns) == "the host's output"
    seen = [work_name(w) for lane in lanes for w in lane.seen]
    assert len(seen) == len(set(seen)) == sum(turns.values()) + len(turns) + 4
    for lane in lanes:
        closed = set()
        for work in lane.seen:
            if isinstance(work, Append):
                assert work.source.trajectory not in closed
                assert work.source.turn == sum(
                    isinstance(w, Append) and w.source.trajectory == work.source.trajectory
                    for w in lane.seen[: lane.seen.index(work)]
                )
            elif isinstance(work, CloseTrajectory):
                closed.add(work.trajectory)
            elif isinstance(work, CloseGroup):
                assert {TrajectoryId(work.group, i) for i in range(update.ledger.groups[work.group])} <= closed
    assert sum(done.n_scored for done in update.acknowledged) == update.ledger.n_scored
    if schedule == "sync":
        assert update.done_before_rollouts_ended == 0


def test_work_runs_while_rollouts_run():
    update, _, rng, turns = make(1)
    run(update, rng, turns)
    assert update.done_before_rollouts_ended > 0


def leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def test_a_teacher_that_fails_ends_the_update_with_its_own_error():
    update, _, rng, turns = make(2, fail_at="b_0/turn0")
    with pytest.raises(BaseExceptionGroup) as caught:
        run(update, rng, turns)
    assert "the teacher died at b_0/turn0" in str(leaf(caught.value))


def test_a_rollout_that_fails_ends_the_update_and_cancels_the_rest():
    update, _, rng, turns = make(3)

    async def broken():
        await asyncio.sleep(0.003)
        raise OSError("the sandbox is gone")

    async def main():
        await asyncio.wait_for(update.run(broken()), 5)
        assert len(asyncio.all_tasks()) == 1

    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(main())
    assert "the sandbox is gone" in str(leaf(caught.value))


def test_a_rank_that_fails_ends_the_update():
    update, lanes, rng, turns = make(4)

    async def dies(work):
        raise RuntimeError("the learner rank died")

    lanes[0].run = dies
    with pytest.raises(BaseExceptionGroup) as caught:
        run(update, rng, turns)
    assert "the learner rank died" in str(leaf(caught.value))


def one_trajectory(teacher, **options):
    """An update of one trajectory; a rank and an event that is set when the trajectory's sweep reached it."""
    rank, swept = Rank(random.Random(0)), asyncio.Event()
    update = Update(7, {"a": 1}, [rank], teacher, WorkPolicy(**options))
    do = rank.run

    async def run(work):
        done = await do(work)
        if any(isinstance(w, CloseTrajectory) for w in work):
            swept.set()
        return done

    rank.run = run
    return update, rank, swept


A0 = TrajectoryId("a", 0)


def turn(index):
    return Source(A0, index, 0, (1,), (2,), (1,), (0.0,), "stop", 7)


def test_a_trajectory_is_swept_while_the_teacher_frees_its_cache_and_the_update_waits_for_both():
    freed = []

    class Slow(Teacher):
        async def close(self, trajectory):
            await swept.wait()  # as behind requests that come after the sweep
            await asyncio.sleep(0.01)
            freed.append(trajectory)

    async def main():
        nonlocal swept
        update, rank, swept = one_trajectory(Slow(random.Random(0)))
        await update.run(rollouts(update, random.Random(0), {A0: 2}))
        assert freed == [A0]

    swept = None
    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_teacher_that_fails_to_free_a_cache_ends_the_update():
    class Broken(Teacher):
        async def close(self, trajectory):
            raise ConnectionError("the teacher kept its cache")

    update, _, _ = one_trajectory(Broken(random.Random(0)))
    with pytest.raises(BaseExceptionGroup) as caught:
        run(update, random.Random(0), {A0: 2})
    assert "the teacher kept its cache" in str(leaf(caught.value))


def test_what_needs_no_reward_is_swept_while_its_last_turn_is_graded():
    async def main():
        update, rank, swept = one_trajectory(Teacher(random.Random(0)))

        async def graded_after_its_sweep():
            update.on_turn(turn(0))
            update.on_turn(turn(1))
            update.on_last_turn(A0)
            await swept.wait()
            assert update.clock.rollouts_ended is None
            update.on_trajectory_closed(A0, 1.0, 2)
            update.on_last_turn(A0)  # said late, or again

        await update.run(graded_after_its_sweep())
        assert [work_name(work) for work in rank.seen][-2:] == ["close of trajectory a_0", "close of group a"]

    asyncio.run(asyncio.wait_for(main(), 20))


def test_what_needs_its_reward_is_swept_after_its_grading():
    async def main():
        update, rank, swept = one_trajectory(None, statistics_cap=1)

        async def graded():
            update.on_turn(turn(0))
            update.on_last_turn(A0)
            await asyncio.sleep(0.02)
            assert not swept.is_set()
            update.on_trajectory_closed(A0, 0.5, 1)

        await update.run(graded())
        assert [work.reward for work in rank.seen if isinstance(work, CloseTrajectory)] == [0.5]

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize(("scored", "message"), [(None, "a_0"), (1, "the host's loss mask holds 1")])
def test_a_swept_trajectory_that_is_not_graded_or_was_counted_otherwise_ends_the_update(scored, message):
    async def main():
        update, _, swept = one_trajectory(Teacher(random.Random(0)))

        async def ends():
            update.on_turn(turn(0))
            update.on_turn(turn(1))
            update.on_last_turn(A0)
            await swept.wait()
            if scored is not None:
                update.on_trajectory_closed(A0, 1.0, scored)

        await update.run(ends())

    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(asyncio.wait_for(main(), 20))
    assert isinstance(leaf(caught.value), LedgerError) and message in str(leaf(caught.value))


def test_a_trajectory_that_never_closes_is_named():
    update, _, rng, turns = make(5, schedule="thundersync", teacher=False)

    async def forgets():
        for trajectory in update.ledger.trajectories[1:]:
            update.on_trajectory_closed(trajectory, None, 0)

    async def main():
        await asyncio.wait_for(update.run(forgets()), 0.5)

    with pytest.raises((LedgerError, BaseExceptionGroup)) as caught:
        asyncio.run(main())
    assert "a_0" in str(leaf(caught.value))

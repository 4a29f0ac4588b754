"""The bookkeeping of a batch: what may happen, once, in which order, and where work goes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_thundersync.stream.ledger import Ledger, LedgerError
from skyrl_thundersync.stream.placement import Placement
from skyrl_thundersync.stream.queue import ReadyQueue
from skyrl_thundersync.stream.release import ReleaseGate
from skyrl_thundersync.stream.sources import Append, CloseGroup, CloseTrajectory, Source, TrajectoryId, group_of


def source(group="a", sample=0, turn=0, version=3, n=2, mask=None, context=(1, 2)) -> Source:
    mask = tuple(mask or [1] * n)
    return Source(TrajectoryId(group, sample), turn, 0, context, tuple(range(n)), mask, (0.0,) * n, "stop", version)


def test_source_refuses_lengths_that_differ():
    with pytest.raises(ValueError, match="a_0/turn0: 2 action ids, 1 mask values"):
        source(n=2, mask=[1])


def test_one_batch_with_two_policy_versions_is_refused():
    ledger = Ledger(3, {"a": 1})
    ledger.sampled(source(version=3))
    with pytest.raises(LedgerError, match="sampled by policy version 2, but this batch belongs to version 3"):
        ledger.sampled(source(turn=1, version=2))


A0 = TrajectoryId("a", 0)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([("sampled", source(group="b"))], "not registered"),
        ([("sampled", source(turn=1))], "turn 0 was expected"),
        ([("sampled", source()), ("sampled", source())], "turn 1 was expected"),
        ([("closed", A0), ("sampled", source())], "after the last turn of its trajectory"),
        ([("ended", A0), ("sampled", source())], "after the last turn of its trajectory"),
        ([("ended", TrajectoryId("b", 0))], "not registered"),
        ([("closed", A0), ("closed", A0)], "closed twice"),
        ([("sampled", source()), ("ended", A0), ("closed", A0, 1)], "the host's loss mask holds 1"),
        ([("released", CloseTrajectory(A0, None))], "before the last turn of its trajectory"),
        ([("released", CloseGroup("a"))], "before all its trajectories"),
        ([("acknowledged", Append(source(), None))], "not given"),
        ([("sampled", source()), ("closed", A0, 1)], "2 scored tokens were streamed, the host's loss mask holds 1"),
    ],
)
def test_events_that_break_the_bookkeeping_are_refused(events, message):
    ledger = Ledger(3, {"a": 1})
    with pytest.raises(LedgerError, match=message):
        for event, *arguments in events:
            getattr(ledger, event)(*arguments)


def test_a_batch_finishes_only_when_everything_closed_and_was_acknowledged():
    ledger = Ledger(3, {"a": 1})
    ledger.sampled(source())
    with pytest.raises(LedgerError, match="1 trajectories are still open: a_0"):
        ledger.require_complete()
    assert ledger.ended(TrajectoryId("a", 0)) and not ledger.ended(TrajectoryId("a", 0))
    with pytest.raises(LedgerError, match="1 trajectories are still open: a_0"):
        ledger.require_complete()
    ledger.closed(TrajectoryId("a", 0), 2)
    with pytest.raises(LedgerError, match="groups have not been swept: a"):
        ledger.require_complete()
    work = [Append(source(), None), CloseTrajectory(TrajectoryId("a", 0), 1.0), CloseGroup("a")]
    for item in work:
        ledger.released(item)
    for item in work[::-1][:2]:
        ledger.acknowledged(item)
    with pytest.raises(LedgerError, match="1 work items are not acknowledged: source a_0/turn0"):
        ledger.require_complete()
    ledger.acknowledged(work[0])
    ledger.require_complete()
    with pytest.raises(LedgerError, match="acknowledged before"):
        ledger.acknowledged(work[0])


def test_progress_counts_what_closed_what_is_open_and_what_a_learner_has_still_to_do():
    ledger = Ledger(3, {"a": 1, "b": 2})
    assert ledger.progress == (0, 3, 0, 0)
    ledger.sampled(source())
    ledger.released(work := Append(source(), None))
    assert ledger.progress == (0, 3, 4, 1)
    ledger.closed(A0)
    ledger.released(CloseTrajectory(A0, 1.0))
    assert ledger.progress == (1, 2, 4, 2)
    ledger.acknowledged(work)
    assert ledger.progress == (1, 2, 4, 1)


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 50)), max_size=60), st.integers(1, 4), st.booleans()
)
def test_a_group_stays_on_one_rank_and_new_groups_go_where_least_waits(turns, ranks, growing):
    placement, tokens, opened = Placement(ranks, growing), [0] * ranks, [0] * ranks
    groups: dict[str, int] = {}
    for turn, (group, n) in enumerate(turns):
        rank = placement.rank(Append(source(group=group, turn=turn, n=n), None))
        if group not in groups:
            assert (opened if growing else tokens)[rank] == min(opened if growing else tokens)
            opened[rank] += 1
        assert groups.setdefault(group, rank) == rank
        tokens[rank] += n + 2
    for group, rank in groups.items():
        assert placement.rank(CloseGroup(group)) == rank
        placement.acknowledged(CloseGroup(group))
    assert placement.rank(Append(source(group="z"), None)) == 0


def streamed(groups: dict[str, int]):
    """Ready events of a batch, the groups' trajectories interleaved."""
    events = []
    for sample in range(max(groups.values())):
        for group, n in groups.items():
            if sample < n:
                events += [Append(source(group=group, sample=sample), None)]
                events += [CloseTrajectory(TrajectoryId(group, sample), None)]
                events += [CloseGroup(group)] if sample == n - 1 else []
    return events


@pytest.mark.parametrize("schedule", ["thundersync", "group", "sync"])
def test_every_schedule_releases_all_work_once_and_keeps_each_groups_order(schedule):
    events = streamed({"a": 3, "b": 1, "c": 2})
    gate = ReleaseGate(schedule, {"a": 5, "b": 50, "c": 10}.get)
    before = [work for event in events for work in gate.offer(event)]
    out = before + gate.rollouts_ended()
    assert sorted(map(repr, out)) == sorted(map(repr, events))
    for group in "abc":
        assert [w for w in out if group_of(w) == group] == [w for w in events if group_of(w) == group]
    if schedule == "sync":
        assert not before
        assert [w.group for w in out if isinstance(w, CloseGroup)] == ["b", "c", "a"]
    else:
        assert len(before) == len(events)


def test_group_schedule_holds_a_group_until_its_last_trajectory_closed():
    gate = ReleaseGate("group", lambda group: 0)
    *early, last = streamed({"a": 2})
    assert not any(gate.offer(work) for work in early)
    assert gate.offer(last) == [*early, last]


def test_a_group_that_completes_after_the_last_rollout_is_released_at_once_under_sync():
    gate = ReleaseGate("sync", lambda group: 0)
    *early, last = streamed({"a": 1})
    assert not any(gate.offer(work) for work in early) and not gate.rollouts_ended()
    assert gate.offer(last) == [*early, last]


def test_a_rank_takes_its_own_work_in_ready_order():
    queue = ReadyQueue(2)
    for item in "xyz":
        queue.put(0, item)
    assert queue.take(1, 2) == []
    assert queue.take(0, 2) == ["x", "y"] and queue.take(0, 2) == ["z"] and queue.take(0, 2) == []

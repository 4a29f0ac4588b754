"""A learner rank that dies in the middle of a batch: the ranks start anew, and the run goes on as if nothing had happened."""

import os
import signal

import pytest

from benchmarks.fault_phases import go_on, stopped_in
from benchmarks.undisturbed import Undisturbed
from skyrl_thundersync.runtime.ranks import Journal
from skyrl_thundersync.stream.sources import CloseGroup, CloseTrajectory, TrajectoryId
from tests import job


def test_a_journal_gives_back_what_was_acknowledged_since_it_was_cleared(tmp_path):
    journal = Journal(tmp_path / "work")
    first = [CloseTrajectory(TrajectoryId("g", 0), 0.5), CloseGroup("g")]
    second = [CloseTrajectory(TrajectoryId("h", 1), None)]
    for work in (first, [], second):
        journal.add(work)
    assert list(journal) == [first, second] == list(journal)
    journal.add(first)
    assert list(journal) == [first, second, first]
    journal.clear()
    assert list(journal) == []
    journal.add(second)
    assert list(journal) == [second]
    assert 0 < journal.bytes < 400


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_rank_that_is_killed_in_a_sweep_costs_no_bit(tmp_path):
    run = job.start(
        tmp_path / "a",
        "trainer.max_training_steps=3",
        "trainer.eval_interval=-1",
        "trainer.eval_before_train=false",
        "trainer.hf_save_interval=-1",
        "trainer.ckpt_interval=3",
        "thundersync.record=true",
        "thundersync.learner.accumulator=exact",
        "thundersync.learner.max_restarts=1",
    )
    try:
        pid = stopped_in(run, "sweep", "learner-1", update=2)
        os.kill(pid, signal.SIGKILL)
        go_on(pid)
        assert run.wait(400) == 0, run.output()
    finally:
        run.process.kill()
    assert "learner rank 1 died; all ranks start again where the update is" in run.output()
    assert run.left() == set()
    assert not (run.run_dir / "kept").exists()
    checkpoint = run.run_dir / "checkpoints" / "global_step_3"
    assert Undisturbed(run.run_dir).gap(run.run_dir / "record", checkpoint, 3) == 0.0

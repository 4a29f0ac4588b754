"""How a run ends when it does not end well: in time, with one cause, nothing left, nothing of the update applied."""

import os
import signal

import pytest

from tests import job

pytestmark = pytest.mark.timeout(400)
LONG = ("trainer.max_training_steps=50", "trainer.eval_interval=-1", "thundersync.sandbox.latency_s=0.3")


def test_ctrl_c_while_starting(tmp_path):
    run = job.start(tmp_path / "a", *LONG)
    run.wait_for("run folder", 120)
    run.interrupt()
    assert run.wait(60) == 130, run.output()
    assert run.left() == set()


def test_ctrl_c_while_rollouts_and_learners_work(tmp_path):
    run = job.start(tmp_path / "a", *LONG)
    run.wait_for("1/50", 200)
    run.interrupt()
    assert run.wait(60) == 130, run.output()
    assert "Stopped" in run.output() and "Traceback" not in run.output()
    assert run.left() == set()


def test_a_learner_rank_that_is_killed_ends_the_run_with_its_cause(tmp_path):
    run = job.start(tmp_path / "a", *LONG)
    run.wait_for("1/50", 200)
    os.kill(child(run, "ray::LearnerActor"), signal.SIGKILL)
    assert run.wait(60) == 1, run.output()
    assert "LearnerActor" in run.output() or "actor died" in run.output().lower()
    assert run.left() == set()


def child(run: job.Job, name: str) -> int:
    """Process id of an actor that this run started."""
    return next(pid for pid, command in job.descendants(run.mark).items() if command.startswith(name))

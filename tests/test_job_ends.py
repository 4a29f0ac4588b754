"""How a run ends when it does not end well: in time, with one cause, nothing left, nothing of the update applied."""

import os
import re
import signal

import pytest

from benchmarks.fault_phases import AT_WORK, go_on, stopped_in
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


@pytest.mark.slow
@pytest.mark.parametrize("phase", AT_WORK)
def test_ctrl_c_in_each_phase(tmp_path, phase):
    """While a process is at the phase; `make faults` does the same with other events."""
    evaluation = f"trainer.eval_before_train={str(phase == 'evaluation').lower()}"
    run = job.start(
        tmp_path / "a",
        "trainer.max_training_steps=50",
        "trainer.ckpt_interval=1",
        "trainer.eval_interval=50",
        "trainer.train_batch_size=2",
        "generator.n_samples_per_prompt=2",
        evaluation,
    )
    try:
        pid = stopped_in(run, phase, AT_WORK[phase], update=2)
        run.interrupt()
        go_on(pid)
        assert run.wait(60) == 130, run.output()
        assert "Stopped" in run.output() and "Traceback" not in run.output()
        assert run.left() == set()
    finally:
        run.process.kill()


@pytest.mark.slow
def test_a_learner_rank_that_is_killed_ends_the_run_with_its_cause(tmp_path):
    run = job.start(tmp_path / "a", *LONG)
    run.wait_for("1/50", 200)
    os.kill(child(run, "ray::LearnerActor"), signal.SIGKILL)
    assert run.wait(60) == 1, run.output()
    assert re.search(r"DeadActorError: learner-\d \(process \d+\) died, at: ", run.output()), run.output()
    assert run.left() == set()


def child(run: job.Job, name: str) -> int:
    """Process id of an actor that this run started."""
    return next(pid for pid, command in job.descendants(run.mark).items() if command.startswith(name))

"""How a run ends when it does not end well: in time, with one cause, nothing left, nothing of the update applied."""

import json
import os
import re
import signal
import sys
import time

import pytest

from benchmarks.fault_phases import AT_WORK, go_on, stopped_in
from skyrl_thundersync.hosts.skyrl.checks import checked_config
from skyrl_thundersync.process.interrupts import PREEMPTING
from skyrl_thundersync.runtime.checkpoint import POINTER, read
from skyrl_thundersync.runtime.run_folder import LOCK, owned
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


SMALL = (
    *LONG,
    "trainer.eval_before_train=false",
    "trainer.hf_save_interval=-1",
    "trainer.ckpt_interval=100",
    "trainer.epochs=1000",
    "trainer.train_batch_size=2",
    "generator.n_samples_per_prompt=2",
)


@pytest.mark.slow
@pytest.mark.parametrize("number", PREEMPTING, ids=lambda number: number.name)
def test_a_schedulers_signal_to_every_process_saves_the_last_finished_update(tmp_path, number):
    run = job.start(tmp_path / "a", *SMALL)
    try:
        run.wait_for("1/50", 300)
        run.interrupt(number)
        time.sleep(0.2)
        run.interrupt(number)  # schedulers repeat themselves
        assert run.wait(90) == 128 + number, run.output()
    finally:
        run.process.kill()
    newest = int((run.run_dir / "checkpoints" / POINTER).read_text())
    saved = f"All finished updates are in {run.run_dir}/checkpoints/global_step_{newest}"
    assert f"Stopped by {number.name}. The running update was dropped. {saved}" in run.output()
    assert read(run.run_dir / "checkpoints" / f"global_step_{newest}", hashes=True)["policy_version"] == newest
    assert f" {newest}/50" in run.output() and f" {newest + 1}/50" not in run.output()
    assert run.left() == set()


@pytest.mark.slow
def test_a_folder_is_one_runs_and_what_was_ignored_at_the_start_stays_ignored(tmp_path):
    """As a job in a script's background, under nohup: neither Ctrl-C nor a hang-up ends it, starting or training."""
    deaf = ("sh", "-c", "trap '' INT HUP; exec \"$@\"", "sh")
    run = job.start(tmp_path / "a", *SMALL, within=deaf)
    try:
        run.wait_for("run folder", 120)
        run.interrupt()
        second = job.start(tmp_path / "b", *SMALL, f"thundersync.run_dir={run.run_dir}")
        assert second.wait(200) == 2, second.output()
        owner = json.loads((run.run_dir / LOCK).read_text())
        assert owner["process"] == run.process.pid
        assert f"in use by another run: process {run.process.pid} on {owner['host']}, started" in second.output()
        run.wait_for("1/50", 300)
        run.interrupt()
        run.interrupt(signal.SIGHUP)
        seen = run.output().count("/50")
        run.wait_for(f"{seen + 2}/50", 300)
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait(90) == 128 + signal.SIGTERM, run.output()
    finally:
        run.process.kill()
    assert run.left() == set()

    again = job.start(tmp_path / "a", *SMALL)
    assert again.wait(200) == 2
    assert "holds an earlier run: metrics of" in again.output() and "thundersync.replace_run=true" in again.output()
    replaced = job.start(
        tmp_path / "a",
        *SMALL,
        "trainer.max_training_steps=1",
        "trainer.hf_save_interval=1",
        "trainer.eval_interval=1",
        "thundersync.replace_run=true",
        "thundersync.learner.max_restarts=1",
    )
    assert replaced.wait(400) == 0, replaced.output()
    assert [row["step"] for row in replaced.updates()] == [1]
    assert [path.name for path in (run.run_dir / "record").iterdir()] == ["batch_000000.jsonl.gz"]
    (run.run_dir / "notes.txt").write_text("mine")
    cfg = checked_config("+config=opd/quickstart", f"thundersync.run_dir={run.run_dir}", "thundersync.replace_run=true")
    with owned(cfg):  # whatever a run writes is known
        left = {path.relative_to(run.run_dir).as_posix() for path in run.run_dir.rglob("*") if path.is_file()}
    assert left == {LOCK, "notes.txt"}


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


def test_old_weights_under_a_new_version_end_the_run(tmp_path):
    """Every replica is told of version 1 and given the files of version 0."""
    run = job.start(tmp_path / "a", *LONG, train=(sys.executable, "-m", "tests.wrong_weights"))
    assert run.wait(300) == 1, run.output()
    assert re.search(r"rollout-0 says that it serves version 1, but \d+ of \d+ groups of its weights", run.output())
    assert run.left() == set()

"""A learner rank that stops in the middle of the whole job: the other waits for it in a collective, the driver for both."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests import job


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_stopped_rank_ends_the_run_with_one_cause_that_names_it(tmp_path):
    run = job.start(
        tmp_path / "a",
        "trainer.max_training_steps=50",
        "trainer.eval_interval=-1",
        "trainer.eval_before_train=false",
        "thundersync.hang_timeout_s=10",
    )
    try:
        run.wait_for("1/50", 700)
        pid = int((run.run_dir / "logs" / "learner-1.alive").read_text().split()[0])
        os.kill(pid, signal.SIGSTOP)
        assert run.wait(60) == 1, run.output()
    finally:
        run.process.kill()
    error = next(line for line in run.output().splitlines() if "Error" in line)
    assert re.match(rf"HungActorError: learner-1 \(process {pid}\) .*it is stopped by a signal", error)
    assert "Traceback" not in run.output()
    assert "most recent call first" in Path(run.run_dir / "logs" / "learner-1.log").read_text()
    assert run.left() == set()

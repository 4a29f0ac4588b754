"""The quickstart job over three machines that share no writable disk, and what happens when one of them is gone."""

from __future__ import annotations

import os
import shutil

import pytest

from benchmarks.undisturbed import Undisturbed
from tests import job
from tests.nodes import machines

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]
OVER_THREE = (
    f"thundersync.ray_address={machines.HEAD}",
    "trainer.placement.policy_num_nodes=2",
    "generator.inference_engine.num_engines=2",
    "thundersync.teacher.replicas=2",
    "thundersync.learner.accumulator=exact",
)
QUICK = ("trainer.eval_interval=-1", "trainer.eval_before_train=false", "thundersync.hang_timeout_s=15")
SCRATCH = machines.ROOT / "runs" / "nodes"


@pytest.fixture(scope="module", autouse=True)
def folder():
    shutil.rmtree(SCRATCH, ignore_errors=True)
    yield SCRATCH
    shutil.rmtree(SCRATCH, ignore_errors=True)


@pytest.fixture
def three():
    with machines.cluster(3):
        yield


def start(name: str, *overrides: str) -> job.Job:
    return job.start(SCRATCH / name, *OVER_THREE, *QUICK, *overrides, within=machines.on(0))


def nothing_left(*indices: int) -> None:
    for index in indices:
        assert machines.settled(lambda i=index: machines.processes(i) + machines.folders(i), 60) == []


def test_three_machines_learn_what_one_does_to_the_bit_and_a_resumed_run_goes_on_so(three):
    run = start("learns", "trainer.max_training_steps=2", "trainer.ckpt_interval=1", "trainer.hf_save_interval=2")
    assert run.wait(400) == 0, run.output()
    assert (run.run_dir / "exports" / "global_step_2" / "policy" / "model.safetensors").is_file()
    logs = run.run_dir / "logs"
    assert all((logs / f"{kind}-{i}.log").stat().st_size for kind in ("learner", "rollout", "teacher") for i in (0, 1))
    nothing_left(1, 2)
    again = start("learns", "trainer.max_training_steps=3", "trainer.ckpt_interval=1", "trainer.resume_mode=latest")
    assert again.wait(400) == 0, again.output()
    undisturbed = Undisturbed(run.run_dir)
    for k in (1, 2, 3):
        checkpoint = run.run_dir / "checkpoints" / f"global_step_{k}"
        assert undisturbed.gap(run.run_dir / "record", checkpoint, k) == 0


def test_a_cluster_too_small_is_refused_with_what_is_missing_before_anything_loads(three):
    run = start("small", "trainer.placement.policy_num_nodes=3", "thundersync.learner.ranks=3")
    assert run.wait(120) == 2
    assert (
        "no room for learner: 3 x 1 CPU on machines of their own" in run.output() and "node-1 has 4 CPU" in run.output()
    )
    nothing_left(1, 2)


def test_a_cable_that_is_out_for_five_seconds_costs_five_seconds(three):
    run = start("blink", "trainer.max_training_steps=8")
    run.wait_for("  2/8", 300)
    machines.do("cable", 2, "down")
    assert len(machines.processes(2)) == 4
    machines.settled(lambda: True, 5)
    machines.do("cable", 2, "up")
    assert run.wait(200) == 0, run.output()
    nothing_left(1, 2)


@pytest.mark.parametrize("fault", [("cable", "down"), ("signal", "KILL"), ("signal", "STOP")], ids="-".join)
def test_a_machine_that_is_gone_is_named_and_nothing_of_the_run_is_left_on_any(three, fault):
    run = start("gone", "trainer.max_training_steps=60", "thundersync.replace_run=true")
    run.wait_for("  2/60", 300)
    machines.do(fault[0], 2, fault[1])
    assert run.wait(120) == 1
    assert "machine node-2 (10.78.0.12)" in run.output() and "learner-1" in run.output()
    if fault == ("signal", "STOP"):
        machines.do("signal", 2, "CONT")
    nothing_left(0, 1)
    assert machines.settled(lambda: machines.processes(2), 60) == []

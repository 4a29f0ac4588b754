"""The quickstart's job over SkyRL's own inference server, split over two workers."""

import json

import pytest

from tests import job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
SERVERS = ("thundersync.rollout=servers", "generator.inference_engine.tensor_parallel_size=2")


def evaluations(run) -> list[float]:
    rows = map(json.loads, (run.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [row["eval/all/avg_score"] for row in rows if "eval/all/avg_score" in row]


def test_the_quickstarts_student_learns_over_servers(tmp_path):
    run = job.start(tmp_path / "a", *SERVERS, heldout=64)
    assert run.wait(2000) == 0, run.output()
    before, after = evaluations(run)
    assert before < 0.2 and after > 0.6
    assert len(run.updates()) == 30
    assert run.left() == set()


def test_an_adapter_is_trained_over_servers(tmp_path):
    lora = ("trainer.policy.model.lora.rank=8", "trainer.policy.model.lora.alpha=16", "trainer.max_training_steps=3")
    run = job.start(tmp_path / "a", *SERVERS, *lora, "trainer.eval_interval=3", "trainer.hf_save_interval=3")
    assert run.wait(900) == 0, run.output()
    assert len(run.updates()) == 3 and len(evaluations(run)) == 2
    assert run.left() == set()

"""The whole job on real parts: SkyRL's loop, vLLM, the teacher, sandboxes, two learner ranks, DeepSpeed."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_thundersync.stream.sources import Append, CloseGroup, CloseTrajectory
from skyrl_thundersync.telemetry.record import load_batches
from skyrl_thundersync.verify.equivalence import report
from tests import job

UPDATES = 3
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run = job.start(
        tmp_path_factory.mktemp("job") / "a",
        f"trainer.max_training_steps={UPDATES}",
        f"trainer.eval_interval={UPDATES}",
        f"trainer.hf_save_interval={UPDATES}",
        "thundersync.record=true",
        "thundersync.sandbox.latency_s=0.2",
    )
    assert run.wait(500) == 0, run.output()
    return run


def test_the_screen_shows_one_line_an_update_and_no_chatter(trained):
    lines = trained.output().splitlines()
    assert [line.split()[0] for line in lines if re.match(r" *\d+/\d+ ", line)] == [f"{k}/3" for k in (1, 2, 3)]
    assert sum("held-out success after" in line for line in lines) == 2
    assert "attention over cut states: cpu_fused (the rule for CPUs)" in trained.output()
    assert not [line for line in lines if re.search(r"WARNING|INFO|DEBUG|Traceback", line)]
    assert max(len(line) for line in lines if "|g|" in line or re.match(r" *\d+/\d+ ", line)) <= 80


def test_nothing_is_left_behind(trained):
    assert trained.left() == set()


def test_metrics_agree_with_what_was_recorded(trained):
    rows, batches = trained.updates(), load_batches(trained.run_dir / "record")
    assert [row["thundersync/n_scored"] for row in rows] == [batch.n_scored for batch in batches]
    for row in rows:
        assert row["thundersync/stepped"] == 1.0
        assert row["opd/teacher_tokens_ratio"] <= 1.1
        assert row["logprob_gap/max"] < 1e-3
        assert row["thundersync/work_before_rollouts_ended"] > 0


def test_what_the_agents_did_can_be_read(trained):
    batches = load_batches(trained.run_dir / "record")
    for step, (row, batch) in enumerate(zip(trained.updates(), batches, strict=True), 1):
        file = trained.run_dir / "rollouts" / f"step-{step:06d}.jsonl"
        talks = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        closed = [work for work in batch.work if isinstance(work, CloseTrajectory)]
        assert len(talks) == len(closed)
        assert all(any(by == "policy" and text for by, text in talk["parts"]) for talk in talks)
        assert row["success/terminal"] == pytest.approx(sum(talk["solved"] for talk in talks) / len(talks))
        sources = [work.source for work in batch.work if isinstance(work, Append)]
        scored = [p for s in sources for p, by in zip(s.sampler_logps, s.mask, strict=True) if by]
        assert row["policy/entropy"] == pytest.approx(-sum(scored) / len(scored))


PARTS = (
    "generate",
    "postprocess_generator_output",
    "convert_to_training_input",
    "fwd_logprobs_values_reward",
    "compute_advantages_and_returns",
    "train_critic_and_policy",
    "save_checkpoints",
    "save_hf_model",
    "sync_weights",
)
"""What SkyRL times one after another within `timing/step`."""


def test_an_update_takes_what_skyrl_says_its_step_took_and_phases_and_host_add_up_to_it(trained):
    for row in trained.updates():
        parts = sum(row.get(f"timing/{part}", 0.0) for part in PARTS)
        assert parts - 0.02 <= row["timing/update"] <= row["timing/step"] + 0.5
        host = row["timing/update"] - sum(row[f"timing/{phase}"] for phase in ("rollout", "tail", "suffix"))
        assert host == pytest.approx(row["timing/host"], abs=1e-6)
        assert host > 0


def test_every_token_was_sampled_by_the_version_that_all_replicas_acknowledged_for_its_update(trained):
    """A replica captures its version when it admits a request, and changes it only inside an acknowledged publication."""
    batches = load_batches(trained.run_dir / "record")
    assert [batch.version for batch in batches] == list(range(UPDATES))
    for batch in batches:
        assert {w.source.policy_version for w in batch.work if isinstance(w, Append)} == {batch.version}


def test_both_ranks_worked_and_every_group_stayed_on_one(trained):
    for batch in load_batches(trained.run_dir / "record"):
        assert set(batch.ranks) == {0, 1}
        home = {}
        for work, rank in zip(batch.work, batch.ranks, strict=True):
            group = work.group if isinstance(work, CloseGroup) else None
            group = work.trajectory.group if isinstance(work, CloseTrajectory) else group
            group = work.source.trajectory.group if isinstance(work, Append) else group
            assert home.setdefault(group, rank) == rank


def test_the_recorded_batches_give_the_textbook_gradient_and_the_synchronous_update(trained):
    result = report(trained.run_dir, limit=2)
    assert result["findings"] == []
    assert max(result["relative_error"]["float64"]) <= 1e-12
    assert max(to_sync for to_sync, _ in result["delta"]) <= 1e-4


def test_the_saved_model_is_the_trained_one_and_loads(trained):
    (folder,) = (trained.run_dir / "exports").glob(f"global_step_{UPDATES}/policy")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert torch.isfinite(model(torch.tensor([tokenizer.encode("ls")])).logits).all()
    start = AutoModelForCausalLM.from_pretrained(
        trained.run_dir.parent.parent / "quickstart" / "student", dtype=torch.float32
    )
    moved = [float((a - b).abs().max()) for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    assert min(moved) > 0

"""What is kept of training rollouts to be read, and what a person is told of an update that earned nothing."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.generators.skyrl_gym_generator import TrajectoryOutput

sys.path.insert(0, str(Path(__file__).parent))
from models import byte_tokenizer  # noqa: E402

from skyrl_thundersync.rollout.log import LONGEST, Played, RolloutLog, played  # noqa: E402

ONE = Played("a", "set", 0, 1.0, True, None, "", "stop", 1, [("task", "do"), ("policy", "done")])


def unrewarded(task: str = "a", sample: int = 0, **fields) -> Played:
    return dataclasses.replace(ONE, task=task, sample=sample, **{"reward": 0.0, "solved": False, **fields})


def test_a_trajectory_is_told_by_who_wrote_what():
    tokenizer = byte_tokenizer()
    texts = [("ls<|im_end|>", 1), ("seen", 0), ("exit", 1)]
    ids = [tokenizer.encode(text) for text, _ in texts]
    output = TrajectoryOutput(
        response_ids=sum(ids, []),
        reward=1.0,
        stop_reason="stop",
        loss_mask=sum(([by] * len(own) for own, (_, by) in zip(ids, texts, strict=True)), []),
        prompt_ids=tokenizer.encode("do it"),
        rollout_logprobs=None,
        env_metrics={"solved": 1.0, "reason": ""},
    )
    extras = {"task_id": "t", "data_source": "mine"}
    one = played(tokenizer, TrajectoryID("g", 2), "terminal", extras, output, 1.0)
    assert one.parts == [("task", "do it"), ("policy", "ls<|im_end|>"), ("environment", "seen"), ("policy", "exit")]
    assert (one.task, one.source, one.sample, one.solved, one.turns) == ("t", "mine", 2, True, 2)
    long = dataclasses.replace(output, prompt_ids=tokenizer.encode("x" * (LONGEST + 5)))
    assert "[5 characters left out]" in played(tokenizer, TrajectoryID("g", 0), "e", {}, long, None).parts[0][1]


def test_files_are_readable_and_bounded(tmp_path):
    log = RolloutLog(tmp_path, 3_000)
    for step in range(1, 31):
        log.add(ONE)
        log.add(unrewarded("b", reason="the checker's exit code was 1"))
        metrics, _ = log.end(step)
        assert metrics == {"success/set": 0.5, "reward/zero_variance_groups": 2}
    files = sorted((tmp_path / "rollouts").glob("step-*.jsonl"))
    assert files[-1].name == "step-000030.jsonl" and 1 < len(files) < 30
    assert sum(os.path.getsize(file) for file in files) <= 3_000
    row = json.loads(files[-1].read_text().splitlines()[1])
    assert (row["task"], row["reward"], row["reason"]) == ("b", 0.0, "the checker's exit code was 1")
    tasks = json.loads((tmp_path / "rollouts" / "tasks.json").read_text())
    assert tasks["b"] == {"update": 30, "source": "set", "samples": 1, "solved": 0, "mean_reward": 0.0}
    none = RolloutLog(tmp_path / "none", 0)
    none.add(ONE)
    assert none.end(1)[0]["success/set"] == 1.0 and not (tmp_path / "none").exists()


def warnings(log: RolloutLog, *ones: Played) -> str:
    for one in ones:
        log.add(one)
    return "\n".join(log.end(1)[1])


def test_an_update_that_earned_nothing_is_told_with_tasks_and_reasons(tmp_path):
    log = RolloutLog(tmp_path, 0)
    broken = "the checker's exit code was 127: sh: tset: not found"
    told = warnings(log, *(unrewarded(task, reason=broken) for task in "abcde"))
    assert "no trajectory earned a reward" in told and "'a', 'b', 'c' and 2 more" in told and f"5 × {broken}" in told
    assert [bool(warnings(log, unrewarded())) for _ in range(10)] == [False] * 9 + [True]
    assert warnings(log, ONE) == ""
    assert "no trajectory" in warnings(log, unrewarded())


def test_a_verifier_that_fails_for_all_samples_is_told_once_a_task(tmp_path):
    log = RolloutLog(tmp_path, 0)
    failed = [unrewarded("a", sample, outcome="verifier_failed", reason="it printed 'nan'") for sample in (0, 1)]
    assert "every sample of 'a': 2 × it printed 'nan'" in warnings(log, *failed)
    assert "every sample" not in warnings(log, *failed)
    assert "every sample" not in warnings(log, failed[0], dataclasses.replace(failed[1], task="a", outcome=None))


def test_a_batch_that_is_masked_whole_is_told(tmp_path):
    masked = unrewarded(reward=None, outcome="timeout")
    assert "all 1 trajectories were masked, so there is no gradient: 1 × timeout" in warnings(
        RolloutLog(tmp_path, 0), masked
    )


@pytest.mark.parametrize("rewards, count", [((1.0, 1.0), 1), ((1.0, 0.0), 0), ((None, 1.0), 1), ((None, None), 1)])
def test_groups_without_variance_are_counted(tmp_path, rewards, count):
    log = RolloutLog(tmp_path, 0)
    for sample, reward in enumerate(rewards):
        log.add(dataclasses.replace(ONE, sample=sample, reward=reward))
    assert log.end(1)[0]["reward/zero_variance_groups"] == count

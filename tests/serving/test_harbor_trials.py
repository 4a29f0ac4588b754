"""Harbor trials in Docker as the rollouts of an update: served student, teacher, ledger, learner, gradient.

Needs Harbor, which lives in an environment of its own: `harbor` on the PATH, or its path in THUNDERSYNC_HARBOR.
"""

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from host import Hosted

from skyrl_thundersync.data.byte_tokenizer import byte_tokenizer
from skyrl_thundersync.harbor.policy_server import PolicyServer
from skyrl_thundersync.harbor.trials import HarborTrials, TrialError, chat_agent, own_agent, read_trial
from skyrl_thundersync.hosts.skyrl.client import LocalEngineClient
from skyrl_thundersync.learner.rank import LearnerRank, RankSpec
from skyrl_thundersync.objectives.opd import Opd
from skyrl_thundersync.options.schema import LearnerConfig, OutcomesConfig
from skyrl_thundersync.quickstart.files import materialise
from skyrl_thundersync.rollout.hook import TurnHook
from skyrl_thundersync.rollout.outcomes import Outcomes
from skyrl_thundersync.rollout.replica import EngineSpec
from skyrl_thundersync.sandbox import docker_engine
from skyrl_thundersync.sandbox.base import StartError
from skyrl_thundersync.stream.release import WorkPolicy
from skyrl_thundersync.stream.sources import Append, TrajectoryId, WorkDone
from skyrl_thundersync.teacher.client import TeacherClient
from skyrl_thundersync.teacher.scores import TeacherSpec
from skyrl_thundersync.telemetry.record import Batch
from skyrl_thundersync.trainer import Update
from skyrl_thundersync.verify.reference import gradient, load_model, relative_error

ROOT = Path(__file__).parents[2]
MINI = ROOT / "examples" / "terminal_bench" / "mini"
HARBOR = os.environ.get("THUNDERSYNC_HARBOR") or shutil.which("harbor")
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 48, "logprobs": 1}
CONTEXT = 1024


class Lane:
    """A learner rank in a thread of this process, as its Ray actor runs it."""

    def __init__(self, rank):
        self.rank = rank

    async def run(self, work):
        return await asyncio.to_thread(self.rank.run_many, work)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return materialise(tmp_path_factory.mktemp("quickstart"), n_train=1, n_heldout=1)


@pytest.fixture(scope="module")
def harbor():
    if HARBOR is None:
        pytest.skip("no harbor on the PATH and none named by THUNDERSYNC_HARBOR")
    if reason := docker_engine.reason_unavailable():
        pytest.skip(f"Docker: {reason}")
    if subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.skip("Harbor needs docker compose")
    return HARBOR


@pytest.mark.timeout(600)
def test_harbor_trials_stream_into_an_update_with_the_textbooks_gradient(host, harbor, files, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    student, teacher_model = str(files.student), str(files.teacher)
    engine = EngineSpec(model=student, dtype="float32", max_model_len=CONTEXT, kv_cache_gib=0.125)
    replica = Hosted(host, "harbor-student", "rollout", engine).wait()
    scoring = TeacherSpec(model=teacher_model, backend="transformers", dtype="float32", max_model_len=CONTEXT)
    teacher = TeacherClient([Hosted(host, "harbor-teacher", "transformers teacher", scoring).wait()], 120.0, 0)
    rank = LearnerRank(RankSpec(student, 0, 1, "127.0.0.1", 0, LearnerConfig(dtype="float32", block_tokens=64)))
    work = []

    async def run():
        client = LocalEngineClient([replica], byte_tokenizer(), student)
        hook = TurnHook(client, lambda: client.weight_version, seed=0)
        groups = {"sum-numbers": 2}
        version = client.weight_version
        update = Update(version, groups, [Lane(rank)], teacher, WorkPolicy(), lambda _, item: work.append(item))
        async with PolicyServer(hook, byte_tokenizer(), "student", SAMPLING, CONTEXT) as server:
            agent = own_agent("student", student, max_turns=3, max_tokens=48, max_context=CONTEXT)
            trials = HarborTrials(server, agent, Outcomes(OutcomesConfig()), tmp_path, 2, (harbor,))
            with hook.armed(update.ledger.trajectories, update.on_turn):
                ended = await update.run(trials.rollouts(update, {"sum-numbers": MINI / "sum-numbers"}))
        return update, ended, Batch(version, groups, tuple(work), (0,) * len(work), (0.0,) * len(work))

    update, ended, batch = asyncio.run(run())
    assert all(trial.outcome is None and trial.agent_tokens > 0 for trial in ended.values()), ended
    appended = [item.source for item in work if isinstance(item, Append)]
    for trajectory, trial in ended.items():
        own = [source for source in appended if source.trajectory == trajectory]
        logged = [json.loads(line) for line in (trial.folder / "agent" / "turns.jsonl").read_text().splitlines()]
        assert [list(source.action_ids) for source in own] == [turn["sampled_ids"] for turn in logged]
        held = []
        for source, turn in zip(own, logged, strict=True):
            assert held[: source.prefix] + list(source.context_ids) == turn["prompt_ids"]
            held = turn["prompt_ids"] + turn["sampled_ids"]
    assert update.done_before_rollouts_ended > 0, "turns were learned from while trials ran"
    assert update.ledger.n_scored == batch.n_scored == sum(trial.agent_tokens for trial in ended.values())

    book, n_scored = gradient(load_model(student, torch.float64, None, "cpu"), batch, Opd())
    assert n_scored == rank.n_scored == batch.n_scored
    assert relative_error({name: part.double() for name, part in rank.gradient().items()}, book) < 1e-5


class Served:
    """A policy server of which only the session's counts matter."""

    def __init__(self, sampled):
        self._sampled = sampled

    def url(self, session):
        return f"http://127.0.0.1:1/session/{session}"

    def sampled_tokens(self, session):
        return self._sampled

    def raise_failure(self): ...

    async def finish(self, session):
        return self._sampled


FAKE_HARBOR = """#!/bin/sh
while [ $# -gt 0 ]; do case $1 in -o) out=$2;; --job-name) job=$2;; esac; shift; done
mkdir -p "$out/$job/trial" && echo x >>"$out/tries"
[ -f "$out/given.json" ] && cp "$out/given.json" "$out/$job/trial/result.json"
echo "harbor broke"; exit 1
"""


def finish(tmp_path, result, sampled, **outcomes):
    """The reward that one trajectory closes with, from a `harbor` that leaves `result`."""
    command = tmp_path / "harbor"
    command.write_text(FAKE_HARBOR)
    command.chmod(0o755)
    if result is not None:
        (tmp_path / "given.json").write_text(json.dumps(result))
    closed = []

    class Rank:
        async def run(self, work):
            return [WorkDone(0.0) for _ in work]

    async def run():
        update = Update(0, {"task": 1}, [Rank()], None, WorkPolicy(statistics_cap=0))
        table = Outcomes(OutcomesConfig(**outcomes))
        trials = HarborTrials(Served(sampled), chat_agent("terminus-2", "m"), table, tmp_path, 1, (str(command),))
        update.on_trajectory_closed = lambda trajectory, reward, scored: closed.append((reward, scored))
        await trials._roll_out(update, TrajectoryId("task", 0), MINI / "sum-numbers")

    asyncio.run(run())
    return closed[0]


def failed(kind, reward=None):
    rewards = None if reward is None else {"rewards": {"reward": reward}}
    return {"verifier_result": rewards, "exception_info": {"exception_type": kind, "exception_message": "so"}}


@pytest.mark.parametrize(
    ("result", "reward"),
    [
        ({"verifier_result": {"rewards": {"reward": 1.0}}, "exception_info": None}, 1.0),
        ({"verifier_result": {"rewards": {"score": 0.25}}}, 0.25),
        (failed("AgentTimeoutError", 1.0), 1.0),
        (failed("ContextLengthExceededError", 1.0), 0.0),
        (failed("VerifierTimeoutError"), 0.0),
        ({"verifier_result": None}, 0.0),
    ],
)
def test_harbors_outcomes_close_trajectories_by_the_table(tmp_path, result, reward):
    assert finish(tmp_path, result, sampled=7) == (reward, 7)


def test_the_table_masks_and_stops(tmp_path):
    assert finish(tmp_path, failed("AgentTimeoutError", 1.0), 7, timeout="masked") == (None, 7)
    assert finish(tmp_path, failed("KeyError"), 7, crash="zero") == (0.0, 7)
    with pytest.raises(TrialError, match=r"task_0 \(sum-numbers\): KeyError: so"):
        finish(tmp_path, failed("KeyError"), 7)


def test_what_fails_before_its_first_turn_is_tried_again_and_what_was_released_never(tmp_path):
    with pytest.raises(StartError, match="harbor broke"):
        finish(tmp_path, None, sampled=0, retries=2)
    assert (tmp_path / "tries").read_text() == "x\n" * 3
    (tmp_path / "tries").unlink()
    with pytest.raises(TrialError, match="harbor broke"):
        finish(tmp_path, None, sampled=7, retries=2)
    assert (tmp_path / "tries").read_text() == "x\n"


def test_tokens_are_counted_from_what_harbor_kept(tmp_path):
    result = tmp_path / "result.json"
    details = [{"completion_token_ids": [[1, 2], [3]]}]
    result.write_text(
        json.dumps({"verifier_result": {"rewards": {"reward": 1}}, "agent_result": {"rollout_details": details}})
    )
    assert read_trial(result).agent_tokens == 3

"""Evaluation: pass@k against brute force, files that survive an interruption, attempts through the real agent loop."""

import asyncio
import itertools
import json
import random
import time
import xml.etree.ElementTree
from dataclasses import replace
from fractions import Fraction

import pytest

from skyrl_thundersync.data.harbor import read_task
from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.evaluate.attempts import Attempt, AttemptFiles, gpu_accounting, outcomes, summarise
from skyrl_thundersync.evaluate.passk import first_k, unbiased
from skyrl_thundersync.evaluate.plot import pass_plot
from skyrl_thundersync.evaluate.results import markdown
from skyrl_thundersync.options.schema import SandboxConfig
from skyrl_thundersync.sandbox.pool import SandboxPool
from skyrl_thundersync.tasks.terminal_env import register_terminal_env

ONE = Attempt("t0", 0, True, 1.0, 3, 40, 200, "stop", 1.5, 0.5, False, False, 0, 2.0)
SUBJECT = {"model": "abc", "seed": 1}


@pytest.mark.parametrize("seed", range(6))
def test_pass_at_k_is_the_mean_over_all_choices_of_k_attempts(seed):
    rng = random.Random(seed)
    n = rng.randint(5, 7)
    table = [[rng.random() < rng.random() for _ in range(n)] for _ in range(rng.randint(1, 9))]
    for k in range(1, n + 1):
        plain = [
            Fraction(
                sum(any(choice) for choice in itertools.combinations(row, k)), len(list(itertools.combinations(row, k)))
            )
            for row in table
        ]
        assert unbiased(table, k) == 100 * sum(plain) / len(table)
        assert first_k(table, k) == Fraction(100 * sum(1 in map(int, row[:k]) for row in table), len(table))
    assert unbiased(table, n) == first_k(table, n)


def test_pass_at_k_refuses_too_few_attempts():
    for formula in (first_k, unbiased):
        with pytest.raises(ValueError, match="needs 3 attempts at every task; one has 2"):
            formula([[True] * 5, [True] * 2], 3)
        with pytest.raises(ValueError, match="no task"):
            formula([], 1)
        with pytest.raises(ValueError, match="at least 1"):
            formula([[True]], 0)


def test_an_interrupted_evaluation_goes_on_where_it_stopped(tmp_path):
    files = AttemptFiles(tmp_path / "e", SUBJECT)
    files.note({"gpus": 2})
    for task in ("t0", "t1"):
        files.add(replace(ONE, task_id=task))
    files.close()
    results = tmp_path / "e" / "results.jsonl"
    results.write_bytes(results.read_bytes()[:-7])  # killed while it wrote
    files = AttemptFiles(tmp_path / "e", SUBJECT)
    assert [a.task_id for a in files.attempts] == ["t0"] and files.session == 1
    files.add(replace(ONE, task_id="t1", solved=False, session=1))
    files.close()
    summary = summarise(tmp_path / "e", ["t0", "t1"], 1)
    assert summary["pass_at_k"] == {"1": {"first_k": 50.0, "unbiased": 50.0}} and summary["solved"] == {
        "t0": 1,
        "t1": 0,
    }


def test_results_of_two_subjects_never_mix(tmp_path):
    AttemptFiles(tmp_path, SUBJECT).close()
    with pytest.raises(ConfigError, match="these differ: model, sampling"):
        AttemptFiles(tmp_path, {"model": "abd", "seed": 1, "sampling": {}})


def test_broken_results_are_named(tmp_path):
    files = AttemptFiles(tmp_path, SUBJECT)
    files.add(ONE)
    files.add(ONE)
    files.close()
    with pytest.raises(ConfigError, match="line 2: attempt 0 at t0 is there twice"):
        AttemptFiles(tmp_path, SUBJECT)
    (tmp_path / "results.jsonl").write_text('{"task_id": "t0"}\n')
    with pytest.raises(ConfigError, match="line 1: not an attempt"):
        AttemptFiles(tmp_path, SUBJECT)
    with pytest.raises(ValueError, match="3 attempts are missing, the first is 1 at t0"):
        outcomes([ONE], ["t0", "t1"], 2)


def test_gpu_hours_over_sessions(tmp_path):
    for wall, ended in ((1800.0, True), (7200.0, False)):
        files = AttemptFiles(tmp_path, SUBJECT)
        files.note({"gpus": 2})
        files.add(replace(ONE, attempt=files.session, session=files.session, at_s=wall - 60 * ended))
        if ended:
            files.note({"wall_s": wall, "startup_s": 60.0})
        files.close()
    accounting = gpu_accounting(tmp_path)
    assert accounting["gpu_hours"] == pytest.approx(2 * 0.5 + 2 * 2.0)
    assert [row["ended"] for row in accounting["sessions"]] == [True, False]


def test_table_and_plot(tmp_path):
    files = AttemptFiles(tmp_path, SUBJECT)
    files.note({"gpus": 0, "wall_s": 1.0})
    for task, attempt in itertools.product(("a<b", "c"), range(5)):
        files.add(replace(ONE, task_id=task, attempt=attempt, solved=task == "c" and attempt == 2))
    files.close()
    summary = summarise(tmp_path, ["a<b", "c"], 5)
    assert summary["pass_at_k"] == {
        "1": {"first_k": 0.0, "unbiased": 10.0},
        "3": {"first_k": 50.0, "unbiased": 30.0},
        "5": {"first_k": 50.0, "unbiased": 50.0},
    }
    drawing = xml.etree.ElementTree.fromstring(pass_plot(summary, "A & B"))
    texts = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"A & B", "pass@1", "pass@3", "pass@5", "30.0"} <= set(texts)
    assert "| pass@3 | 50.00 | 30.00 |" in markdown(summary, "x") and "| c | 1 |" in markdown(summary, "x")


class ScriptedPolicy:
    """A policy that solves a task on odd attempts, as token ids; keeps what it was asked."""

    def __init__(self, tokenizer):
        self.tokenizer, self.requests = tokenizer, []
        self.model_name, self.weight_version = "scripted", 0
        self.patience_s = 4.0  # the other attempts are through by then

    async def generate(self, batch, model=None):
        session, prompt = batch["session_ids"][0], batch["prompt_token_ids"][0]
        self.requests.append((session, list(prompt), dict(batch["sampling_params"])))
        attempt, turn = int(session.rpartition("_")[2]), prompt.count(self.tokenizer.eos_token_id)
        if "fails" in session and attempt == 1:
            await asyncio.sleep(self.patience_s)
            raise RuntimeError("engine lost")
        text = f"echo {'yes' if attempt % 2 else 'no'} >ans" if turn == 1 else "submit"
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        return {"responses": [text], "response_ids": [ids], "stop_reasons": ["stop"], "response_logprobs": None}

    async def finish_session(self, session_id): ...


@pytest.fixture(scope="module")
def loop():
    """(configuration, generator) of SkyRL's own agent loop over the scripted policy."""
    from skyrl_thundersync.data.byte_tokenizer import byte_tokenizer
    from skyrl_thundersync.hosts.skyrl.compose import build_config
    from skyrl_thundersync.hosts.skyrl.generator import GuardedGenerator

    cfg = build_config(["+config=opd/quickstart", "generator.eval_sampling_params.temperature=1.0"])
    tokenizer = byte_tokenizer()
    return cfg, GuardedGenerator(
        cfg.generator, cfg.environment.skyrl_gym, ScriptedPolicy(tokenizer), tokenizer=tokenizer
    )


def test_attempts_are_independent_counted_once_and_resumed(sandboxes, loop, tmp_path, make_task):
    from skyrl_thundersync.evaluate.episodes import attempt_seed, evaluate

    cfg, generator = loop
    policy = generator.inference_engine_client
    config = SandboxConfig(backend=sandboxes.backend)
    policy.requests.clear()
    rows = [read_task(make_task(name)).row(6) | {"image_optional": True} for name in ("fine", "fails")]
    todo = [(row["task_id"], j) for j in range(2) for row in rows]

    def session(missing, files):
        with SandboxPool(config, f"session-{files.session}") as pool:
            register_terminal_env(pool)
            asyncio.run(evaluate(cfg, generator, rows, missing, files.session, time.monotonic(), files.add))

    files = AttemptFiles(tmp_path / "e", SUBJECT)
    with pytest.raises(ExceptionGroup) as caught:
        session(todo, files)
    assert caught.group_contains(RuntimeError, match="engine lost")
    files.close()
    done = {(a.task_id, a.attempt): a for a in files.attempts}
    assert {key: a.solved for key, a in done.items()} == {("fine", 0): False, ("fails", 0): False, ("fine", 1): True}

    policy.generate, scripted = lambda batch, model=None: scripted(_renamed(batch)), policy.generate
    files = AttemptFiles(tmp_path / "e", SUBJECT)
    session([pair for pair in todo if pair not in done], files)
    files.close()
    policy.generate = scripted
    summary = summarise(tmp_path / "e", ["fine", "fails"], 2)
    assert summary["pass_at_k"]["1"] == {"first_k": 0.0, "unbiased": 50.0}
    assert summary["solved"] == {"fine": 1, "fails": 1}
    seeds = {(session, params["seed"]) for session, _, params in policy.requests}
    assert ("fine_1", attempt_seed(cfg.trainer.seed, "fine", 1)) in seeds
    assert len({seed for _, seed in seeds}) == len(todo)


def _renamed(batch):
    """The engine is well again: the policy's bad session name does not reach it."""
    return {**batch, "session_ids": [batch["session_ids"][0].replace("fails", "works")]}


def test_tasks_are_read_once_each(tmp_path):
    from skyrl_thundersync.evaluate.episodes import read_tasks

    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"task_id": name}) + "\n" for name in "ab"))
    assert [row["task_id"] for row in read_tasks([str(file)])] == ["a", "b"]
    with pytest.raises(ConfigError, match="line 1: task 'a' is there twice"):
        read_tasks([str(file), str(file)])
    with pytest.raises(ConfigError, match="no task"):
        read_tasks([])

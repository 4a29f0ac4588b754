"""SWE-bench: rows without answers, patches collected from real sandboxes, grades taken from swebench's report.

The harness itself needs its images; here it is a program of the same name that leaves a report in swebench 5's schema.
"""

import json
import sys

import pytest

from skyrl_thundersync.data.swe_bench import COLLECT, read_instances, terminal_row
from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.evaluate import swe_bench_harness as swe_bench
from skyrl_thundersync.evaluate.attempts import Attempt, AttemptFiles, read_attempts, summarise
from skyrl_thundersync.tasks.terminal_env import TerminalEnv

INSTANCE = {
    "instance_id": "a__b-1",
    "problem_statement": "It is broken.\n",
    "image": "swebench/sweb.eval.x86_64.a_1776_b-1:latest",
    "patch": "the answer",
    "test_patch": "the tests",
    "FAIL_TO_PASS": "[]",
}
HARNESS = """
import argparse, json, sys
p = argparse.ArgumentParser()
for short, name in (("-d", "--dataset_name"), ("-p", "--predictions_path"), ("-id", "--run_id"), ("-w", "--max_workers")):
    p.add_argument(short, name, required=True)
p.add_argument("--report_dir"); p.add_argument("-i", "--instance_ids", nargs="+")
o = p.parse_args()
lines = [json.loads(line) for line in open(o.predictions_path)]
assert json.load(open(o.dataset_name)) and [line["instance_id"] for line in lines] == o.instance_ids
report = {"resolved_ids": [x["instance_id"] for x in lines if "good" in x["model_patch"]], "schema_version": 2,
          "infra_failure_ids": [x["instance_id"] for x in lines if "engine" in x["model_patch"]]}
json.dump(report, open(f"{o.report_dir}/{lines[0]['model_name_or_path']}.{o.run_id}.json", "w"))
"""


def test_a_row_holds_no_answer(tmp_path):
    file = tmp_path / "verified.json"
    file.write_text(json.dumps([INSTANCE]))
    row = terminal_row(read_instances(file)[0], 300)
    assert row["task_id"] == "a__b-1" and row["workdir"] == "/testbed" and row["base_image"] == INSTANCE["image"]
    assert "answer" not in json.dumps(row) and "tests" not in json.dumps(row)
    assert row["checker"] == COLLECT


@pytest.mark.parametrize("text", ["[]", "{}", json.dumps([{"instance_id": "x"}])])
def test_a_file_without_instances_is_refused(tmp_path, text):
    file = tmp_path / "verified.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="verified.json"):
        read_instances(file)


@pytest.mark.parametrize(("checker", "collected"), [("cat made", "a\nreward=1\n"), ("false", ""), ("seq 1 100000", "")])
def test_what_an_attempt_leaves_is_collected_and_earns_nothing_by_itself(sandboxes, checker, collected):
    row = {"task_id": "t", "files": "{}", "checker": checker, "collect": True, "max_turns": 2}
    env = TerminalEnv(None, row, sandboxes=sandboxes)
    env.init([{"role": "user", "content": "go"}])
    step = env.step("printf 'a\\nreward=1\\n' >made\nsubmit")
    metrics = env.get_metrics()
    env.close()
    assert step["done"] and step["reward"] == 0.0 and metrics["solved"] == 0.0
    assert metrics["collected"] == collected and metrics["verifier_failed"] == float(collected == "")


def attempted(folder, *patches):
    """An evaluation of one task whose attempts left `patches`; None: it left none."""
    files = AttemptFiles(folder, {"model": "m"})
    for number, patch in enumerate(patches):
        files.add(Attempt("a__b-1", number, False, 0.0, 1, 1, 1, "stop", 1.0, 1.0, False, False, 0, 1.0))
        if patch is not None:
            swe_bench.keep_patch(folder, "a__b-1", number, patch)
    files.note({"gpus": 0, "wall_s": 1.0})
    files.close()


@pytest.fixture
def grade(tmp_path, monkeypatch):
    package = tmp_path / "lib" / "swebench" / "harness"
    package.mkdir(parents=True)
    (package / "run_evaluation.py").write_text(HARNESS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
    dataset = tmp_path / "verified.json"
    dataset.write_text(json.dumps([INSTANCE]))
    return lambda folder: swe_bench.grade(folder, dataset, sys.executable, 1)


def test_grades_are_the_harnesss_and_can_be_taken_again(tmp_path, grade):
    folder = tmp_path / "eval"
    attempted(folder, "bad", "good é", None)
    for _ in range(2):
        assert [attempt.solved for attempt in grade(folder)] == [False, True, False]
        assert read_attempts(folder)[1].reward == 1.0
    assert summarise(folder, ["a__b-1"], 3)["solved"] == {"a__b-1": 1}


def test_a_harness_whose_machinery_failed_gives_no_grade(tmp_path, grade):
    folder = tmp_path / "eval"
    attempted(folder, "good", "engine")
    with pytest.raises(ConfigError, match="could not grade 1 instances, a__b-1"):
        grade(folder)
    assert not any(attempt.solved for attempt in read_attempts(folder))


def test_a_missing_harness_is_named(tmp_path, grade, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")
    folder = tmp_path / "eval"
    attempted(folder, "good")
    with pytest.raises(ConfigError, match="swebench"):
        grade(folder)

"""Preparation of small sets in the public schemas: filters, families, decontamination, split, manifest, determinism."""

import hashlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from skyrl_thundersync.cli.app import app
from skyrl_thundersync.data import prepare, seta, swe_smith
from skyrl_thundersync.data.decontaminate import load_benchmark, repository_name, swe_fingerprint
from skyrl_thundersync.data.split import development_groups, normalised
from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.tasks.survey import RowChecks

BUG = "diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-x = {old}\n+x = {new}\n"


def smith(index, repo="acme__lib", **changes):
    row = {
        "instance_id": f"{repo}.0123abcd.lm_rewrite__{index}",
        "patch": BUG.format(old=index, new=-index),
        "FAIL_TO_PASS": [f"tests/test_m.py::test_{repo}_{index}"],
        "PASS_TO_PASS": ["tests/test_m.py::test_other"],
        "image_name": f"swesmith.x86_64.{repo}.0123abcd",
        "repo": f"swesmith/{repo}.0123abcd",
        "problem_statement": f"x of {repo} is wrong, case {index}",
    }
    return row | changes


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*arguments):
    result = CliRunner().invoke(app, ["data", *map(str, arguments)], standalone_mode=True)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def read(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


@pytest.mark.parametrize("count", [1, 19, 20, 21, 400])
def test_the_split_is_the_first_twentieth_by_hash_rounded_up(count):
    groups = [f"Owner/ Repo-{i}" for i in range(count)]
    plain = sorted((hashlib.sha256(f"owner/ repo-{i}".encode()).hexdigest(), f"owner/ repo-{i}") for i in range(count))
    expected = [name for _, name in plain[: -(-count // 20)]]
    assert development_groups(reversed(groups)) == expected == development_groups(groups * 3)


def test_group_ids_are_normalised():
    assert normalised("  Ａcme/Lib \t x") == "acme/lib x"
    assert repository_name("swesmith/oauthlib__oauthlib.1fd52536") == "oauthlib/oauthlib"
    assert repository_name("pallets/Flask") == "pallets/flask"
    assert seta.family("ask_ubuntu__12__b1__d1") == seta.family("ask_ubuntu__12") == "ask_ubuntu__12"
    assert seta.family("nl2bash__a__b") == "nl2bash__a__b"
    with pytest.raises(ValueError, match="without a name"):
        development_groups([" "])


def test_swe_smith_filters_split_and_manifest(tmp_path):
    rows = [smith(i, repo=f"o{r}__lib") for r in range(30) for i in range(3)]
    bad = [
        smith(900, problem_statement=""),
        smith(901, problem_statement="  \n"),
        smith(902, patch=""),
        smith(903, FAIL_TO_PASS=[]),
        smith(904, image_name=None),
        rows[0],
        {"instance_id": "x"},
    ]
    file = write_rows(tmp_path / "smith.jsonl", rows + bad)
    run("swe-smith", file, "-o", tmp_path / "out", "--max-turns", 9)
    manifest = manifest_of(tmp_path / "out")
    assert manifest["counts"]["dropped"] == {
        "schema": 1,
        "empty_problem_statement": 2,
        "empty_patch": 1,
        "no_failing_test": 1,
        "no_image": 1,
        "duplicate": 1,
        "decontamination": 0,
    }
    train, dev = read(tmp_path / "out", "train.jsonl"), read(tmp_path / "out", "dev.jsonl")
    assert (manifest["counts"]["read"], len(train), len(dev)) == (97, 84, 6)
    assert manifest["groups"]["all"] == 30 and len(manifest["groups"]["dev"]) == math.ceil(0.05 * 30)
    chosen = {row["task_id"].split(".")[0].replace("__", "/") for row in dev}
    assert chosen == set(manifest["groups"]["dev"])
    assert chosen.isdisjoint(row["task_id"].split(".")[0].replace("__", "/") for row in train)
    assert all(not RowChecks("terminal").check(row, trained=True)[1] and row["max_turns"] == 9 for row in train + dev)
    for name in ("train.jsonl", "dev.jsonl"):
        digest = hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest()
        assert manifest["outputs"][name]["sha256"] == digest


def test_order_of_reading_changes_nothing_but_the_inputs_hash(tmp_path):
    rows = [smith(i, repo=f"o{i % 7}__lib") for i in range(40)]
    one, two = write_rows(tmp_path / "a.jsonl", rows), write_rows(tmp_path / "b.jsonl", rows[::-1])
    for name, file in (("one", one), ("again", one), ("two", two)):
        run("swe-smith", file, "-o", tmp_path / name)
    assert (tmp_path / "one" / "manifest.json").read_bytes() == (tmp_path / "again" / "manifest.json").read_bytes()
    for name in ("train.jsonl", "dev.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_parquet_and_json_lines_give_the_same(tmp_path):
    import polars

    rows = [smith(i, repo=f"o{i}__lib") for i in range(5)]
    polars.DataFrame(rows).write_parquet(tmp_path / "a.parquet")
    run("swe-smith", tmp_path / "a.parquet", "-o", tmp_path / "one")
    run("swe-smith", write_rows(tmp_path / "a.jsonl", rows), "-o", tmp_path / "two")
    assert (tmp_path / "one" / "train.jsonl").read_bytes() == (tmp_path / "two" / "train.jsonl").read_bytes()


def verified(**changes):
    """A row in SWE-bench's schema, where lists are JSON text."""
    row = {
        "repo": "other/project",
        "instance_id": "other__project-1",
        "patch": BUG.format(old="a", new="b"),
        "FAIL_TO_PASS": '["tests/t.py::test"]',
        "PASS_TO_PASS": "[]",
        "problem_statement": "Something else.",
    }
    return row | changes


@pytest.mark.parametrize(
    ("overlap", "kind"),
    [
        ({"problem_statement": "X of o1__lib\n is WRONG, case 4 "}, "instruction"),
        ({"patch": BUG.format(old=-4, new=4)}, "solution"),  # the fix of the planted bug
        ({"repo": "o1/lib", "FAIL_TO_PASS": '["tests/test_m.py::test_o1__lib_4"]'}, "tests"),
    ],
)
def test_a_family_with_one_overlap_is_dropped_whole(tmp_path, overlap, kind):
    rows = [smith(i, repo=f"o{i % 3}__lib") for i in range(12)]
    bench = write_rows(tmp_path / "verified.jsonl", [verified(), verified(**overlap)])
    run("swe-smith", write_rows(tmp_path / "a.jsonl", rows), "-o", tmp_path / "out", "--decontaminate", bench)
    manifest = manifest_of(tmp_path / "out")
    assert manifest["decontamination"]["families"] == {"o1/lib": [f"{kind} of verified.jsonl"]}
    assert manifest["counts"]["dropped"]["decontamination"] == 4 and manifest["counts"]["kept"] == 8
    kept = read(tmp_path / "out", "train.jsonl") + read(tmp_path / "out", "dev.jsonl")
    assert not any(row["task_id"].startswith("o1__") for row in kept)


def test_empty_content_overlaps_with_nothing():
    empty = swe_fingerprint({"problem_statement": "", "patch": "", "FAIL_TO_PASS": "[]"}, "a/b")
    assert (empty.instruction, empty.solution, empty.tests) == (None, None, None)


def seta_set(make_task):
    for index in range(24):
        make_task(f"ask_ubuntu__{index}", root="set/SETA_Synth")
    for name in ("ask_ubuntu__3__b1", "ask_ubuntu__3__d1", "ask_ubuntu__4__b1"):
        make_task(name, root="set/SETA_Evolve")
    make_task("nl2bash__1", root="set/SETA_Synth", **{"instruction.md": " \n"})
    make_task("nl2bash__2", root="set/SETA_Synth", **{"environment/Dockerfile": None})
    make_task("nl2bash__3", root="set/SETA_Synth", **{"solution/solve.sh": None})
    make_task("nl2bash__4", root="set/SETA_Synth", **{"tests/test.sh": ""})
    make_task("nl2bash__5", root="set/SETA_Synth", **{"environment/Dockerfile": "FROM a\nRUN x\n"})
    return make_task("nl2bash__6", root="set/SETA_Synth", **{"tests/test.sh": "curl x\n"}).parents[1]


def test_seta_filters_families_and_decontamination(tmp_path, make_task):
    root = seta_set(make_task)
    # A benchmark with the solution of one variant and the instruction of another task, other text around.
    solved = "#!/bin/bash\necho   yes >/workspace/ans\n# own\n"
    (root / "SETA_Evolve" / "ask_ubuntu__3__b1" / "solution" / "solve.sh").write_text(solved)
    make_task(
        "b1", root="bench", **{"solution/run.sh": solved, "solution/solve.sh": None, "tests/test.sh": "# other\n"}
    )
    make_task(
        "b2",
        root="bench",
        **{
            "instruction.md": "<!-- canary x -->\nwrite YES to  ans (ask_ubuntu__7).",
            "solution/solve.sh": "#!/bin/sh\ntrue\n",
            "tests/test.sh": "# one more\n",
        },
    )
    run("seta", root, "-o", tmp_path / "out", "--decontaminate", tmp_path / "bench")
    manifest = manifest_of(tmp_path / "out")
    assert manifest["counts"]["read"] == 33
    assert manifest["counts"]["dropped"] == {
        "missing instruction.md": 1,
        "missing environment/Dockerfile": 1,
        "missing solution/solve.sh": 1,
        "missing tests/test.sh": 1,
        "build": 1,
        "internet": 1,
        "decontamination": 4,
    }
    assert manifest["decontamination"]["families"] == {
        "ask_ubuntu__3": ["solution of bench"],
        "ask_ubuntu__7": ["instruction of bench"],
    }
    assert manifest["groups"]["all"] == 22 and len(manifest["groups"]["dev"]) == 2
    rows = read(tmp_path / "out", "train.jsonl") + read(tmp_path / "out", "dev.jsonl")
    assert len(rows) == manifest["counts"]["kept"] == 23
    assert all(not RowChecks("terminal").check(row, trained=True)[1] for row in rows)


def test_the_same_tests_beside_another_runner_overlap(tmp_path, make_task):
    outputs = {"tests/test_outputs.py": "def test_a(): assert 1\n"}
    make_task("b", root="bench", **outputs, **{"tests/test.sh": "# theirs\n", "instruction.md": "Else.\n"})
    (tmp_path / "bench" / "b" / "solution" / "solve.sh").write_text("else\n")
    mine = prepare.harbor_fingerprint(make_task("mine", **outputs))
    assert mine.tests in load_benchmark(tmp_path / "bench").hashes["tests"]


def test_execution_checks_drop_tasks_that_the_reference_or_nothing_decides(sandboxes, tmp_path, make_task):
    host = {"task.toml": '[environment]\nnetwork_mode = "no-network"\n[metadata]\nhost_tools = true\n'}
    make_task("sound", **host)
    make_task("wrong", **host, **{"solution/solve.sh": "#!/bin/bash\necho no >/workspace/ans\n"})
    make_task("free", **host, **{"tests/test.sh": "#!/bin/bash\necho 1 >/logs/verifier/reward.txt\n"})
    make_task("broken", **host, **{"tests/test.sh": "#!/bin/bash\nexit 1\n"})
    arguments = ["harbor", tmp_path / "tasks", "-o", tmp_path / "out", "--check", "--backend", sandboxes.backend]
    run(*arguments)
    first = (tmp_path / "out" / "manifest.json").read_bytes()
    manifest = json.loads(first)
    assert manifest["execution"]["tasks"] == {"broken": "oracle", "free": "noop", "wrong": "oracle"}
    assert manifest["counts"]["dropped"]["execution"] == 3
    assert [row["task_id"] for row in read(tmp_path / "out", "train.jsonl")] == ["sound"]
    (row,) = read(tmp_path / "out", "dev.jsonl")
    assert (row["task_id"], row["partial_credit"]) == ("sound", False)
    run(*arguments)
    assert (tmp_path / "out" / "manifest.json").read_bytes() == first


def test_the_papers_counts_are_compared_where_all_of_the_data_is_there():
    def source(read, empty):
        return prepare.TaskSource("swe-smith", read, "0", [], {"empty_problem_statement": empty})

    assert prepare.prepare(source(50907, 11437)).manifest["paper"] is None
    paper = prepare.prepare(source(50908, 11437)).manifest["paper"]
    assert paper["empty_problem_statement"] == {"paper": 11437, "here": 11437}
    assert paper["kept"] == {"paper": 37084, "here": 0}


def test_mistakes_are_said_in_one_line(tmp_path, make_task):
    make_task()
    with pytest.raises(ConfigError, match="--enable gpus: must be one of"):
        run("harbor", tmp_path / "tasks", "-o", tmp_path / "o", "--enable", "gpus")
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="no Harbor task"):
        run("seta", tmp_path / "none", "-o", tmp_path / "o")
    with pytest.raises(ConfigError, match="line 1 is not JSON"):
        (tmp_path / "bad.jsonl").write_text("{\n")
        run("swe-smith", tmp_path / "bad.jsonl", "-o", tmp_path / "o")
    assert not (tmp_path / "o" / "manifest.json").exists()


def test_the_swe_smith_row_plants_the_bug_and_hides_its_history():
    row = swe_smith.terminal_row(smith(1), 5, test_files={"tests/test_m.py": "t"})
    assert row["workdir"] == "/testbed" and "rm -rf .git" in row["setup"] and "+x = -1" in row["setup"]
    tests = json.loads(row["tests"])
    assert tests["original/tests/test_m.py"] == "t"
    assert tests["wanted.txt"] == "tests/test_m.py::test_acme__lib_1\ntests/test_m.py::test_other\n"
    assert "x = " not in row["prompt"][0]["content"].replace("x of", "")


def test_swe_smith_bug_and_verifier_on_a_real_repository(tmp_path):
    """Both scripts as they are but for the folders, which are moved below a temporary one."""
    repo, tests, logs = tmp_path / "testbed", tmp_path / "tests", tmp_path / "logs"
    for folder in (repo / "tests", tests, logs):
        folder.mkdir(parents=True)
    (repo / "m.py").write_text("x = 1\n")
    original = "from m import x\n\n\ndef test_x():\n    assert x == 1\n\n\ndef test_y():\n    pass\n"
    (repo / "tests" / "test_m.py").write_text(original)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in ([*git, "init", "-q"], [*git, "add", "-A"], [*git, "commit", "-q", "-m", "the fixed state"]):
        subprocess.run(command, cwd=repo, check=True)
    named = {"FAIL_TO_PASS": ["tests/test_m.py::test_x"], "PASS_TO_PASS": ["tests/test_m.py::test_y"]}
    row = swe_smith.terminal_row(smith(1, **named), 5, test_files={"tests/test_m.py": original})

    def bash(script):
        for folder in ("testbed", "tests", "logs"):
            script = re.sub(rf"(?<![\w.]) ?/{folder}\b", f" {tmp_path}/{folder}", script)
        environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(repo)}
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        subprocess.run(["bash", "-c", script], cwd=repo, check=True, env=environment)

    def grade():
        for path, text in json.loads(row["tests"]).items():
            file = tests / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        bash((tests / "test.sh").read_text())
        summary = json.loads((logs / "verifier" / "ctrf.json").read_text())["results"]["summary"]
        return (logs / "verifier" / "reward.txt").read_text().strip(), summary["passed"]

    bash(row["setup"])
    assert (repo / "m.py").read_text() == "x = -1\n"
    history = subprocess.run(["git", "log", "--all", "-p"], cwd=repo, capture_output=True, text=True, check=True).stdout
    assert "x = 1" not in history.replace(original, "").replace("x == 1", "")
    assert grade() == ("0", 1)
    (repo / "tests" / "test_m.py").write_text("def test_x(): pass\n\n\ndef test_y(): pass\n")  # tampering
    assert grade() == ("0", 1)
    (repo / "m.py").write_text("x = 1\n")
    assert grade() == ("1", 2)

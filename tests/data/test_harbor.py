"""Reading Harbor task folders: what is taken, what is skipped and why, and what a verifier's results mean."""

import base64
import json

import pytest

from skyrl_thundersync.data.dockerfile import NeedsBuildError, last_workdir, read_dockerfile
from skyrl_thundersync.data.harbor import image_tag, read_task, read_tasks
from skyrl_thundersync.data.task_folder import Unsupported
from skyrl_thundersync.sandbox.base import CommandResult
from skyrl_thundersync.tasks.grading import Grade, read_grade
from skyrl_thundersync.tasks.terminal_env import TaskError, TerminalEnv

CLOSED = '[environment]\nnetwork_mode = "no-network"\n'


def reason(folder, *enabled):
    with pytest.raises(Unsupported) as caught:
        read_task(folder, enabled)
    return caught.value.reason


def test_a_task_as_a_row(make_task):
    folder = make_task(
        "greet",
        **{
            "task.toml": CLOSED + 'env = {A = "b c"}\n[agent]\ntimeout_sec = 90\n[verifier]\ntimeout_sec = 20.0\n'
            'env = {B = "1"}\n[metadata]\nhost_tools = true\n',
            "instruction.md": "<!-- harbor-canary GUID 1 -->\n# another canary\n\nSay hello.\n",
            "environment/Dockerfile": "FROM base:1\nENV C=d\nWORKDIR /workspace\nCOPY in.txt data/ sub/\n"
            "COPY one /workspace/two\n",
            "environment/in.txt": "x\n",
            "environment/data/deep/y.txt": "y\n",
            "environment/one": "1\n",
            "tests/blob.bin": b"\xff\x00",
        },
    )
    task = read_task(folder)
    row = task.row(max_turns=7)
    assert row["prompt"] == [{"role": "user", "content": "Say hello."}]
    assert json.loads(row["files"]) == {"sub/in.txt": "x\n", "sub/deep/y.txt": "y\n", "two": "1\n"}
    assert json.loads(row["tests"])["blob.bin"] == {"base64": base64.b64encode(b"\xff\x00").decode()}
    assert (row["image"], row["image_optional"], row["workdir"]) == ("base:1", True, "/workspace")
    assert json.loads(row["env"]) == {"C": "d", "A": "b c"} and json.loads(row["verifier_env"]) == {"B": "1"}
    assert (row["agent_timeout_s"], row["verifier_timeout_s"], row["max_turns"]) == (90.0, 20.0, 7)
    assert row["needs"] == "" and "solve" not in json.dumps(row)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"task.toml": "not toml"}, "invalid"),
        ({"instruction.md": None}, "incomplete"),
        ({"instruction.md": "<!-- canary -->\n\n"}, "incomplete"),
        ({"tests/test.sh": None}, "incomplete"),
        ({"environment/Dockerfile": None}, "incomplete"),
        ({"task.toml": '[environment]\nnetwork_mode = "public"\n'}, "internet"),
        ({"task.toml": "[environment]\nallow_internet = true\n"}, "internet"),
        ({"tests/test.sh": "#!/bin/bash\napt-get update\n"}, "internet"),
        ({"tests/test.sh": "#!/bin/bash\nif uvx pytest; then :; fi\n"}, "internet"),
        ({"task.toml": CLOSED + "gpus = 1\n"}, "gpu"),
        ({"environment/docker-compose.yaml": "services: {main: {}, db: {image: x}}\n"}, "compose"),
        ({"environment/docker-compose.yaml": "services: ["}, "invalid"),
        ({"environment/Dockerfile": "FROM a\nRUN true\nWORKDIR /workspace\n"}, "build"),
        ({"environment/Dockerfile": "FROM a\nWORKDIR /app\n"}, "build"),
        ({"environment/Dockerfile": "FROM a\nWORKDIR /workspace\nCOPY b .\n", "environment/b": b"\xff"}, "binary"),
        ({"task.toml": CLOSED + 'os = "windows"\n'}, "unsupported"),
        ({"task.toml": CLOSED + '[[steps]]\nname = "a"\n'}, "unsupported"),
        ({"task.toml": CLOSED + '[verifier]\nenvironment_mode = "separate"\n'}, "unsupported"),
        ({"task.toml": CLOSED + '[verifier]\nenv = {KEY = "${KEY}"}\n'}, "unsupported"),
    ],
)
def test_what_is_skipped_and_why(make_task, changes, why):
    assert reason(make_task(**changes)) == why


def test_a_task_that_names_no_network_runs_closed(make_task):
    assert read_task(make_task(**{"task.toml": ""})).needs == ()


def test_a_compose_file_that_only_builds_or_closes_the_one_image_is_none(make_task):
    compose = "services:\n  main:\n    build: {network: none}\n    network_mode: "
    assert read_task(make_task(**{"environment/docker-compose.yaml": compose + "none\n"})).needs == ()
    assert reason(make_task(**{"environment/docker-compose.yaml": compose + "host\n"})) == "compose"


def test_links_out_of_the_task_are_refused(make_task, tmp_path):
    (tmp_path / "secret").write_text("s")
    for part in ("tests", "solution"):
        folder = make_task(part)
        (folder / part / "link").symlink_to(tmp_path / "secret")
        assert reason(folder) == "invalid"
    folder = make_task("copied", **{"environment/Dockerfile": "FROM a\nWORKDIR /workspace\nCOPY link .\n"})
    (folder / "environment" / "link").symlink_to(tmp_path / "secret")
    assert reason(folder) in ("invalid", "build")


def test_all_tasks_are_read_or_counted(make_task, tmp_path):
    for index in range(3):
        make_task(f"good-{index}")
    make_task("net", **{"tests/test.sh": "#!/bin/bash\ncurl x\n"})
    make_task("gpu", **{"task.toml": CLOSED + "gpus = 1\n"})
    tasks, skipped = read_tasks(tmp_path)
    assert [task.task_id for task in tasks] == ["good-0", "good-1", "good-2"]
    assert skipped.counts == {"internet": 1, "gpu": 1} and len(skipped.tasks) == 2
    tasks, skipped = read_tasks(tmp_path, enabled=["internet"])
    assert len(tasks) == 4 and skipped.counts == {"gpu": 1}
    assert [task.needs for task in tasks if task.task_id == "net"] == [("internet",)]
    with pytest.raises(ValueError, match="cannot enable gpus"):
        read_tasks(tmp_path, enabled=["gpus"])
    with pytest.raises(FileNotFoundError, match="task.toml"):
        read_tasks(tmp_path / "nowhere")


def test_rows_that_need_what_the_environment_has_not_are_refused_by_name(sandboxes, make_task):
    row = read_task(make_task(**{"task.toml": CLOSED + "gpus = 1\n"}), ["gpu"]).row(3)
    with pytest.raises(TaskError, match="'needs': gpu: run it through Harbor"):
        TerminalEnv(None, row, sandboxes=sandboxes)


def test_the_image_tag_follows_the_environment_only(make_task):
    folder = make_task(**{"environment/Dockerfile": "FROM a\nRUN true\n"})
    before = image_tag(folder)
    (folder / "tests" / "more.py").write_text("x")
    assert image_tag(folder) == before
    (folder / "environment" / "Dockerfile").write_text("FROM a\nRUN false\n")
    assert image_tag(folder) != before


@pytest.mark.parametrize(
    "text",
    [
        "FROM a AS b\n",
        "FROM a\nFROM b\n",
        "FROM a\nCOPY --from=b x y\n",
        "FROM a\nCOPY *.txt .\n",
        "FROM a\nCOPY ../x .\n",
        "FROM a\nCOPY gone .\n",
        "FROM a\nADD x y\n",
        "FROM $BASE\n",
        "FROM a\nUSER bob\n",
        "WORKDIR /\n",
        "# escape=`\nFROM a\nCOPY f `\n  g/\n",
        "# syntax=docker/dockerfile:1\n# escape=`\nFROM a\n",
        "FROM a\nCOPY <<EOF /x\nhi\nEOF\n",
        "FROM a\nCOPY <<-'END' f g/\n\thi\n\tEND\n",
        "FROM a\nRUN <<EOF\ntrue\nEOF\n",
        "FROM a\nONBUILD COPY f g\n",
        "FROM a\nCOPY [f g\n",
        "FROM a\nCOPY f' g\n",
        'FROM a\nCOPY "f g" h\n',
        "FROM a\nENV A=1 B\n",
        "FROM a\nENV A='1\n",
        "FROM a\nCOPY f g\nRUN \\",
    ],
)
def test_dockerfiles_that_do_more_than_copy_need_a_build(tmp_path, text):
    (tmp_path / "Dockerfile").write_text(text)
    (tmp_path / "f").write_text("1")
    with pytest.raises(NeedsBuildError):
        read_dockerfile(tmp_path / "Dockerfile")


def test_dockerfile_continuations_comments_and_json_form(tmp_path):
    (tmp_path / "f").write_text("1")
    (tmp_path / "Dockerfile").write_text(
        '# base\nFROM a:2\nENV A=1 \\\n  # inside\n  B="two words"\nENV C three\nWORKDIR /w\nWORKDIR x\n'
        'COPY --chown=1:1 ["f", "g"]\nCMD ["bash"]\n'
    )
    read = read_dockerfile(tmp_path / "Dockerfile")
    assert (read.image, read.workdir, read.env) == ("a:2", "/w/x", {"A": "1", "B": "two words", "C": "three"})
    assert read.files == {"/w/x/g": tmp_path / "f"}


@pytest.mark.parametrize(
    ("text", "workdir", "env", "files"),
    [
        ("\ufeffFROM a\r\nWORKDIR /w\r\nCOPY f .\r\n", "/w", {}, ["/w/f"]),
        ("FROM a\nENV A=1 \\\n\n  # inside\n  B=2\n", "/", {"A": "1", "B": "2"}, []),
        ("FROM a\nWORKDIR /w\\\n/x\n", "/w/x", {}, []),
        ("FROM a\nWORKDIR '/a b'\n", "/a b", {}, []),
        ('FROM a\nENV A "x  y" z\n', "/", {"A": "x  y z"}, []),
        ("FROM a\nWORKDIR /w\nCOPY f /w\n", "/w", {}, ["/w/f"]),
        ("FROM\ta\nCOPY f /g \\", "/", {}, ["/g"]),
        ("FROM a\nCMD cat <<EOF\nWORKDIR /w\n", "/w", {}, []),
    ],
)
def test_dockerfiles_are_read_as_docker_reads_them(tmp_path, text, workdir, env, files):
    (tmp_path / "Dockerfile").write_bytes(text.encode())
    (tmp_path / "f").write_text("1")
    read = read_dockerfile(tmp_path / "Dockerfile")
    assert (read.image, read.workdir, read.env, list(read.files)) == ("a", workdir, env, files)


def test_what_a_dockerignore_keeps_out_is_not_copied(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM a\nCOPY . /w\n")
    (tmp_path / ".dockerignore").write_text("secret\n")
    (tmp_path / "secret").write_text("1")
    with pytest.raises(NeedsBuildError, match="dockerignore"):
        read_dockerfile(tmp_path / "Dockerfile")


@pytest.mark.parametrize(
    ("text", "workdir"),
    [
        ("FROM a\nWORKDIR /w\nWORKDIR x\nRUN true\n", "/w/x"),
        ("FROM a\nWORKDIR /w\nRUN <<EOF\nWORKDIR /no\nEOF\n", "/w"),
        ("FROM a\nWORKDIR /w\n# WORKDIR /no\nRUN true \\\n  WORKDIR /no\n", "/w"),
        ("FROM a AS b\nWORKDIR /w\nFROM c\nRUN true\n", "/"),
        ("FROM a AS b\nWORKDIR /w\nFROM c\nFROM b\nWORKDIR x\n", "/w/x"),
        ("RUN true\n", "/"),
    ],
)
def test_the_working_folder_of_an_image_that_is_built(tmp_path, text, workdir):
    (tmp_path / "Dockerfile").write_text(text)
    assert last_workdir(tmp_path / "Dockerfile") == workdir


def result(**files):
    lines = [f"harbor {name} {base64.b64encode(text.encode()).decode()}" for name, text in files.items()]
    return CommandResult("\n".join(lines), 0, False, False, 1.0)


@pytest.mark.parametrize(
    ("files", "official"),
    [
        ({"reward.txt": "1\n"}, 1.0),
        ({"reward.txt": "0.5"}, 0.5),
        ({"reward.json": '{"reward": 1, "style": 0}', "reward.txt": "0"}, 1.0),
        ({"reward.json": '{"score": 0.25}'}, 0.25),
        ({"reward.json": "1.0"}, 1.0),
    ],
)
def test_rewards_as_harbor_reads_them(files, official):
    assert read_grade(result(**files)) == Grade(official, None)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"reward.txt": ""},
        {"reward.txt": "nan"},
        {"reward.txt": "1e999"},
        {"reward.txt": "yes"},
        {"reward.json": "{"},
        {"reward.json": '{"reward": "1"}'},
        {"reward.json": '{"reward": NaN}'},
        {"reward.json": '{"reward": true}'},
        {"reward.json": '{"a": 1, "b": 1}'},
        {"reward.json": "{}"},
        {"reward.json": "bad", "reward.txt": "1"},
    ],
)
def test_broken_results_earn_nothing_and_say_so(files):
    grade = read_grade(result(**files))
    assert grade.official == 0.0 and not grade.solved and grade.problem
    assert grade.training_reward(True) == 0.0


def test_official_success_and_training_reward_are_two_numbers():
    half = Grade(0.0, 0.5)
    assert (half.solved, half.training_reward(True), half.training_reward(False)) == (False, 0.5, 0.0)
    assert Grade(0.0, 1.0).training_reward(True) == 0.0  # every test passed, and yet the verifier says no
    assert Grade(0.75, None).training_reward(True) == 0.75 and not Grade(0.75, None).solved
    assert Grade(1.0, 0.5).training_reward(True) == 1.0


def test_a_slow_verifier_ends_and_earns_nothing(sandboxes, make_task):
    slow = {"tests/test.sh": "#!/bin/bash\necho 1 >/logs/verifier/reward.txt\nsleep 60\n"}
    row = read_task(make_task(**slow)).row(1) | {"verifier_timeout_s": 0.5, "image_optional": True}
    env = TerminalEnv(None, row, sandboxes=sandboxes)
    env.init(row["prompt"])
    step = env.step("submit")
    assert (step["reward"], step["done"], env.get_metrics()["verifier_failed"]) == (0.0, True, 1.0)
    env.close()


def test_the_agents_time_ends_the_episode_which_is_graded(sandboxes, make_task):
    for seconds, over in ((0.001, True), (3600.0, False)):
        row = read_task(make_task()).row(50) | {"agent_timeout_s": seconds, "image_optional": True}
        env = TerminalEnv(None, row, sandboxes=sandboxes)
        env.init(row["prompt"])
        step = env.step("echo yes >ans")
        env.close()
        assert (step["reward"], step["done"]) == (0.0, over), "what comes too late is not run"


def test_env_reaches_every_shell_and_the_verifier(sandboxes, make_task):
    test = '#!/bin/bash\n[ "$A$B" = "b c1" ] && [ "$(cat ans)" = "b c" ] && echo 1 >/logs/verifier/reward.txt\n'
    toml = CLOSED + 'env = {A = "b c"}\n[verifier]\nenv = {B = "1"}\n'
    row = read_task(make_task(**{"tests/test.sh": test, "task.toml": toml})).row(5) | {"image_optional": True}
    env = TerminalEnv(None, row, sandboxes=sandboxes)
    env.init(row["prompt"])
    env.step("exit 3")
    env.step('echo "$A" >ans; echo "${B-unset}" >b')
    assert env.step("cat b")["observations"][0]["content"] == "unset"
    assert env.step("submit")["reward"] == 1.0
    env.close()


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"tests": "{"}, "tests"), ({"tests": {"../x": "y"}}, "tests"), ({"tests": {"x": 3}}, "tests"),
     ({"tests": {"x": {"base64": "é"}}}, "tests"), ({"env": "[]"}, "env"), ({"agent_timeout_s": -1}, "agent_timeout_s"),
     ({"verifier_timeout_s": "9"}, "verifier_timeout_s")],
)  # fmt: skip
def test_bad_rows_are_named_with_their_field(sandboxes, make_task, changes, field):
    row = read_task(make_task()).row(3) | changes
    with pytest.raises(TaskError, match=f"'task', field '{field}'"):
        TerminalEnv(None, row, sandboxes=sandboxes)

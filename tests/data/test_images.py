"""Tasks whose environment must be built, and run in a working folder of their own (needs a Docker engine)."""

import pytest
from test_prepare import manifest_of, read, run

from skyrl_thundersync.data.execution import attempt
from skyrl_thundersync.data.harbor import read_task
from skyrl_thundersync.data.images import BuildError, ImageBuilder, owned_tag
from skyrl_thundersync.sandbox import docker_engine

BASE = "local/bookworm-py:1"
APP = {
    "environment/Dockerfile": f"FROM {BASE}\nWORKDIR /app\nRUN mkdir -p deep && echo no >deep/state\nENV GREETING=hi\n",
    "instruction.md": "Make /app/deep/state say yes.\n",
    "solution/solve.sh": "#!/bin/bash\n[ $PWD = /app ] && echo yes >deep/state\n",
    "tests/test.sh": '#!/bin/bash\n[ "$PWD $(cat deep/state)" = "/app yes" ] && echo 1 >/logs/verifier/reward.txt\nexit 0\n',
}


@pytest.fixture
def docker_sandboxes(request):
    if reason := docker_engine.reason_unavailable():
        pytest.skip(f"Docker: {reason}")


def test_owned_tags_follow_image_and_folder():
    tags = {owned_tag("swebench/swesmith.x86_64.a__b:1", "/testbed"), owned_tag("a:1", "/w"), owned_tag("a:1", "/v")}
    assert len(tags) == 3 and all(tag.startswith("thundersync-task/") for tag in tags)
    assert owned_tag("a:1", "/w") == owned_tag("a:1", "/w")


@pytest.mark.timeout(180)
def test_a_built_task_is_solved_in_its_own_folder_by_user_1000(docker_sandboxes, tmp_path, make_task):
    folder = make_task("app", **APP)
    run("images", tmp_path / "tasks")
    output = run("images", tmp_path / "tasks")
    assert "0 images built, 1 there already, 0 failed" in output
    arguments = ["harbor", tmp_path / "tasks", "-o", tmp_path / "out", "--check", "--backend", "docker"]
    run(*arguments, "--enable", "build")
    assert manifest_of(tmp_path / "out")["execution"]["failed"] == {}
    assert [row["workdir"] for row in read(tmp_path / "out", "train.jsonl")] == ["/app"]

    from skyrl_thundersync.options.schema import SandboxConfig
    from skyrl_thundersync.sandbox.pool import SandboxPool

    config = SandboxConfig(backend="docker")
    with SandboxPool(config, "images") as pool:
        task = read_task(folder, ["build"])
        assert attempt(pool, task, "exit 3", 'echo "$PWD $(id -u)"').output == "/app 1000"
        assert "denied" in attempt(pool, task, "touch /etc/x").output.lower()


@pytest.mark.timeout(60)
def test_a_dockerfile_that_fails_says_how(docker_sandboxes, make_task):
    folder = make_task("bad", **{"environment/Dockerfile": f"FROM {BASE}\nRUN echo so; exit 3\n"})
    with ImageBuilder() as builder, pytest.raises(BuildError, match=r"(?s)so.*returned a non-zero code: 3"):
        builder.build(folder / "environment", "/app", "thundersync-task/bad:1")

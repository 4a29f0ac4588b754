"""Rows whose images the sandbox has not are named before anything starts, each image asked for once."""

import json

import docker
import pytest

from skyrl_thundersync.options.schema import SandboxConfig
from skyrl_thundersync.sandbox.docker_engine import reason_unavailable
from skyrl_thundersync.tasks.images import images_there
from skyrl_thundersync.tasks.survey import Surveyor

HELD = SandboxConfig().image
ROW = {"prompt": [{"role": "user", "content": "x"}], "env_class": "terminal", "files": "{}", "checker": "true"}


def survey(path, *changes):
    rows = [ROW | {"task_id": f"t{number}"} | change for number, change in enumerate(changes, 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = Surveyor("terminal").survey("data.train_data", str(path))
    assert found.problems == []
    return found


def test_bubblewrap_has_no_images(tmp_path):
    rows = survey(tmp_path / "a.jsonl", {"image": "x:1"}, {"image": "x:1", "image_optional": True}, {"workdir": "/app"})
    (problem,) = images_there("bubblewrap", HELD, [rows]).problems
    assert problem.startswith("2 tasks need an image ('x:1') or a working folder outside /workspace")
    assert f"{tmp_path}/a.jsonl, line 1; {tmp_path}/a.jsonl, line 3" in problem
    assert images_there("bubblewrap", HELD, [survey(tmp_path / "b.jsonl", {}, {})]).problems == ()


@pytest.mark.skipif(reason_unavailable() is not None, reason="no Docker engine answers")
def test_docker_is_asked_once_for_each_image(tmp_path, monkeypatch):
    asked = []
    inspect = docker.APIClient.inspect_image
    monkeypatch.setattr(docker.APIClient, "inspect_image", lambda api, name: asked.append(name) or inspect(api, name))
    rows = survey(
        tmp_path / "a.jsonl", {"image": HELD}, {"image": "x:1"}, {}, *[{"image": "x:1"}] * 4, {"image": "y:1"}
    )
    found = images_there("docker", HELD, [rows])
    assert sorted(asked) == ["x:1", "y:1"]
    first, second = found.problems
    assert first.startswith(f"the Docker engine has no image 'x:1', named by 5 tasks: {tmp_path}/a.jsonl, line 2; ")
    assert first.endswith("; and 2 more. docker pull or build it; `skyrl data images` builds those of prepared tasks.")
    assert f"'y:1', named by 1 tasks: {tmp_path}/a.jsonl, line 8" in second
    missing = images_there("docker", "z:1", [survey(tmp_path / "b.jsonl", {})])
    assert "'z:1', named by thundersync.sandbox.image" in missing.problems[0]

"""Task folders come from strangers: nothing outside a folder is read, however it points there, and nothing runs."""

import os

import pytest

from skyrl_thundersync.data.harbor import read_task
from skyrl_thundersync.data.task_folder import Unsupported, folder_files

FILES = {
    "task.toml": '[environment]\nnetwork_mode = "no-network"\n',
    "instruction.md": "Write yes to ans.\n",
    "environment/Dockerfile": "FROM local/bookworm-py:1\nWORKDIR /workspace\nCOPY data .\n",
    "environment/data/input": "1\n",
    "tests/test.sh": "#!/bin/bash\necho 1 >/logs/verifier/reward.txt\n",
    "solution/solve.sh": "#!/bin/bash\necho yes >/workspace/ans\n",
}
SECRET = "host-secret"


@pytest.fixture
def task(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text(SECRET)
    folder = tmp_path / "tasks" / "task"
    for path, text in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def link(folder, path, target):
    place = folder / path
    if place.is_dir() and not place.is_symlink():
        place.rename(folder / "moved")
    place.unlink(missing_ok=True)
    place.symlink_to(target)


def test_the_folder_as_it_should_be_is_read(task):
    assert read_task(task).files == {"input": "1\n"}


@pytest.mark.attack("links out of a task folder, in every part of it")
@pytest.mark.parametrize(
    "path",
    [
        "task.toml",
        "instruction.md",
        "environment/Dockerfile",
        "environment/data/input",
        "environment/data/more",
        "environment/docker-compose.yaml",
        "tests/test.sh",
        "tests/more",
        "solution/more",
    ],
)
@pytest.mark.parametrize("target", ["absolute", "relative", "/etc/passwd", "/proc/self/environ"])
def test_a_link_to_a_file_of_the_host_is_refused(task, path, target):
    secret = task.parents[1] / "outside" / "secret"
    written = {"absolute": secret, "relative": os.path.relpath(secret, (task / path).parent)}
    link(task, path, written.get(target, target))
    assert (task / path).exists()
    with pytest.raises(Unsupported, match="is a link out of the task") as refusal:
        read_task(task)
    assert SECRET not in str(refusal.value)


@pytest.mark.attack("links out of a task folder, in every part of it")
@pytest.mark.parametrize("part", ["environment", "environment/data", "tests", "solution"])
def test_a_linked_folder_is_refused(task, part):
    link(task, part, task.parents[1] / "outside")
    with pytest.raises(Unsupported, match="is a link out of the task"):
        read_task(task)
    with pytest.raises(Unsupported, match="is a link out of the task"):
        folder_files(task, part)


@pytest.mark.attack("COPY of what the agent may not have: host files, the tests, the solution")
@pytest.mark.parametrize(
    "source",
    ["../tests/test.sh", "../solution", "/etc/passwd", "../../../outside/secret", "data/../../solution/solve.sh"],
)
def test_copies_from_outside_the_build_context_are_not_made(task, source):
    (task / "environment" / "Dockerfile").write_text(f"FROM a\nWORKDIR /workspace\nCOPY {source} .\n")
    with pytest.raises(Unsupported) as refusal:
        read_task(task)
    assert refusal.value.reason == "build", "the engine refuses such a copy"


@pytest.mark.attack("COPY of what the agent may not have: host files, the tests, the solution")
def test_a_link_in_a_copied_folder_does_not_bring_the_tests(task):
    (task / "environment" / "data" / "more").symlink_to("../../tests/test.sh")
    with pytest.raises(Unsupported) as refusal:
        read_task(task)
    assert refusal.value.reason == "build"


@pytest.mark.attack("task names that are paths or commands")
@pytest.mark.parametrize("name", ["..task", "-rf", "$(touch x)", "a;b", "task\nname", "tâche"])
def test_a_strange_name_is_only_a_name(task, name):
    folder = task.rename(task.parent / name)
    read = read_task(folder)
    assert read.task_id == name and "/" not in read.image.rpartition(":")[2]

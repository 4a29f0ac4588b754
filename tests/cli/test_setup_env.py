"""The bootstrap is not fooled by a Python that is there and does not run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "dirname", "env", "uname")


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path):
    """A machine whose PATH holds a few tools and a pyenv shim of python3.12 that refuses to run, as pyenv's does."""
    shims = tmp_path / "shims"
    script(shims / "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    script(shims / "python3", "echo 'pyenv: python3: command not found' >&2; exit 127")
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in TOOLS:
        source = next(Path(folder) / tool for folder in ("/usr/bin", "/bin") if (Path(folder) / tool).exists())
        (tools / tool).symlink_to(source)
    return {"PATH": f"{shims}:{tools}", "HOME": str(tmp_path / "home")}


def found(environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["/bin/bash", str(ROOT / "scripts" / "setup_env.sh"), "--find-python"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def real_python() -> str:
    return os.path.realpath(sys.executable)


def test_a_shim_that_refuses_to_run_is_passed_over(machine, tmp_path):
    """pyenv's own folder holds the Python that the shim would not start."""
    behind = script(tmp_path / "home/.pyenv/versions/3.12.9/bin/python3.12", f'exec {real_python()} "$@"')
    assert found(machine) == str(behind)


def test_pyenv_root_is_looked_at_too(machine, tmp_path):
    behind = script(tmp_path / "elsewhere/versions/3.12.1/bin/python3.12", f'exec {real_python()} "$@"')
    assert found(machine | {"PYENV_ROOT": str(tmp_path / "elsewhere")}) == str(behind)


def test_a_later_one_on_path_is_found_behind_the_shim(machine, tmp_path):
    good = script(tmp_path / "good/python3.12", f'exec {real_python()} "$@"')
    assert found(machine | {"PATH": machine["PATH"] + f":{tmp_path / 'good'}"}) == str(good)


def test_a_python_of_another_version_is_not_taken(machine, tmp_path):
    script(tmp_path / "old/python3.12", "exit 1")
    answer = found(machine | {"PYTHON": str(tmp_path / "old/python3.12")})
    assert str(tmp_path) not in answer


def test_the_one_that_was_asked_for_comes_first(machine, tmp_path):
    mine = script(tmp_path / "mine/python", f'exec {real_python()} "$@"')
    script(tmp_path / "home/.pyenv/versions/3.12.9/bin/python3.12", f'exec {real_python()} "$@"')
    assert found(machine | {"PYTHON": str(mine)}) == str(mine)


def test_an_unknown_lock_is_refused(machine):
    done = subprocess.run(
        ["/bin/bash", str(ROOT / "scripts" / "setup_env.sh"), "tpu"], env=machine, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "cpu or gpu" in done.stderr

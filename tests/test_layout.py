"""Who may import whom, as pyproject.toml says it; and that a breach is found."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "skyrl_thundersync"


def lint(folder: Path) -> subprocess.CompletedProcess:
    program = Path(sys.executable).with_name("lint-imports")
    return subprocess.run([program, "--no-cache"], cwd=folder, capture_output=True, text=True, env={"PYTHONPATH": "."})


def test_imports_go_downwards():
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("learner/rank.py", "import skyrl.train", "SkyRL is known to its host alone"),
        ("sandbox/pool.py", "import skyrl_gym", "SkyRL-Gym is known where environments are"),
        ("stream/ledger.py", "import torch", "The schedule is plain Python"),
        ("stream/ledger.py", "import skyrl_thundersync.trainer", "The rooms, from the front door down"),
        ("learner/states.py", "import skyrl_thundersync.learner.sweep", "No circles between modules of a room"),
    ],
)
def test_a_breach_is_named(tmp_path, file, line, contract):
    shutil.copytree(ROOT / PACKAGE, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("assets", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    module = tmp_path / PACKAGE / file
    module.write_text(f"{module.read_text()}\n\ndef late():\n    {line}\n")
    done = lint(tmp_path)
    assert done.returncode == 1 and f"{contract} BROKEN" in done.stdout

"""A wheel built from this tree and unpacked, models and tasks small enough to check, and a run's arguments for them."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from cases import write_model, write_tasks

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of what a checkout holds."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("setup.cfg", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, tree)
    for name in ("skyrl_thundersync", "configs"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(out)], cwd=tree, check=True, capture_output=True, text=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="session")
def site(wheel, tmp_path_factory) -> Path:
    """A folder that holds the installed wheel: put on sys.path, its entry points are found."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture
def with_plugins(site, monkeypatch) -> Path:
    """This process sees the wheel's entry points."""
    monkeypatch.syspath_prepend(str(site))
    return site


@pytest.fixture(scope="session")
def arguments(tmp_path_factory) -> list[str]:
    """Arguments of a run that passes every check."""
    folder = tmp_path_factory.mktemp("run")
    return [
        "+config=opd/quickstart",
        f"trainer.policy.model.path={write_model(folder / 'student')}",
        f"thundersync.teacher.model={write_model(folder / 'teacher')}",
        f"data.train_data=[{write_tasks(folder / 'train.jsonl', *[{}] * 8)}]",
        f"data.val_data=[{write_tasks(folder / 'val.jsonl', {})}]",
        f"thundersync.run_dir={folder / 'run'}",
    ]


@pytest.fixture
def config(arguments):
    """A fresh configuration that passes every check, to be spoiled by a test."""
    from skyrl_thundersync.hosts.skyrl.compose import build_config
    from skyrl_thundersync.hosts.skyrl.defaults import apply_host_defaults

    cfg = build_config(arguments)
    apply_host_defaults(cfg)
    return cfg

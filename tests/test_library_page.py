"""Every block of docs/library.md, from its text: files are written, commands and Python run, in order."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(?:^`([\w.]+)`:\n\n)?^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
INSTALL = "uv pip install"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    for name, _, text in BLOCKS:
        if name:
            (folder / name).write_text(text, encoding="utf-8")
    return folder


def environment(*first: Path) -> dict[str, str]:
    path = os.pathsep.join(map(str, (*first, Path(sys.executable).parent, os.environ["PATH"])))
    return {**os.environ, "PATH": path, "COLUMNS": "200"}


def commands() -> list[str]:
    return [text for name, kind, text in BLOCKS if kind == "bash" and not name]


def run(command: list[str] | str, folder: Path, env: dict[str, str]) -> str:
    shell = isinstance(command, str)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command] if shell else command,
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout


def test_the_page_has_no_block_that_is_not_run():
    assert {kind for name, kind, _ in BLOCKS if not name} == {"python", "bash"}
    assert len(BLOCKS) == PAGE.count("```") // 2


@pytest.mark.timeout(600)
@pytest.mark.parametrize("text", [text for text in commands() if INSTALL not in text])
def test_commands(folder, text):
    """A training run, with a class of the page's in its actors, and the proof of its updates, among them."""
    said = run(text, folder, environment())
    if "+config=own.yaml" in text:
        assert "This run can start" in said
        rows = [json.loads(line) for line in (folder / "runs/own/metrics.jsonl").read_text().splitlines()]
        assert sum("timing/update" in row for row in rows) == 2
        played = "".join(file.read_text() for file in (folder / "runs/own/rollouts").glob("step-*.jsonl"))
        assert "Say dako." in played and "Copy a.txt" in played


def test_python(folder):
    """All of it in one process: later blocks use what earlier ones made."""
    text = "\n".join(text for name, kind, text in BLOCKS if kind == "python" and not name)
    said = run([sys.executable, "-c", text], folder, environment())
    assert "4 tokens in the gradient, 5 work items" in said
    tails = [float(found) for found in re.findall(r"tail ([\d.]+) s", said)]
    assert len(tails) == 2 and tails[0] <= tails[1]


def test_installing(folder, tmp_path):
    """Into another environment that has SkyRL: one that sees this one's packages."""
    uv = shutil.which("uv") or next((str(p) for p in (ROOT / ".tools").rglob("uv") if p.is_file()), None)
    if uv is None:
        pytest.skip("uv is not installed")
    venv, clone = tmp_path / "venv", tmp_path / "clone"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "outer.pth").write_text(next(p for p in sys.path if p.endswith("site-packages")) + "\n")
    for name in ("setup.cfg", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"):
        clone.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, clone)
    for name in ("skyrl_thundersync", "configs"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    (text,) = (text for text in commands() if INSTALL in text)
    env = environment(venv / "bin", Path(uv).parent) | {
        "VIRTUAL_ENV": str(venv),
        "CLONE": str(clone),
        "UV_OFFLINE": "1",
    }
    assert "opd/quickstart" in run(text, folder, env)
    assert (site / "skyrl_thundersync" / "configs" / "opd" / "quickstart.yaml").is_file()

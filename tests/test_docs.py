"""Commands in the pages: each is there, with the options it is given; those that take seconds are run."""

import re
import shlex
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples/terminal_bench/README.md"]
BIN = Path(sys.executable).parent
SHOWN = re.compile(r"\.\.\.|…|\[|\bRUN\b|FOLDER|\bNAME\b|/path/")
"""What stands for something else: such a command is not run."""


def commands() -> list[str]:
    """Indented code lines, continuations joined and comments taken off, and inline code, that call what is ours."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        lines = re.findall(r"(?m)^ {4}(\S.*)$", text) + re.findall(r"`([^`\n]+)`", text)
        lines = [re.sub(r"\s+# .*", "", line).strip() for line in lines]
        found += [re.sub(r"\s+", " ", line) for line in lines if line.startswith((".venv/bin/", "make "))]
    return sorted(set(found))


@lru_cache
def help_of(*command: str) -> str:
    done = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_commands():
    assert len(commands()) > 20


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("make ")])
def test_a_target_is_there(line):
    words = [word for word in shlex.split(line) if word != "&"]
    done = subprocess.run([*words, "-n"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith(".venv/bin/")])
@pytest.mark.timeout(300)
def test_a_command_takes_what_it_is_given(line):
    program, *words = line.split(" ")
    options = set(re.findall(r"(?<!\S)(--[a-z-]+|-[a-z])\b", line)) - {"-m", "--help"}
    if words[0] == "-m" and words[1].startswith("benchmarks."):  # by their source: most import torch
        source = (ROOT / f"{words[1].replace('.', '/')}.py").read_text(encoding="utf-8")
        assert {o for o in options if o not in source and f" {o[2:].replace('-', '_')}: " not in source} == set()
    elif Path(program).name == "skyrl":
        text = help_of(str(BIN / "skyrl"), *words[: 2 if words[0] == "data" else 1])
        assert {option for option in options if option not in text} == set()


@pytest.mark.parametrize(
    "line",
    [
        line
        for line in commands()
        if not SHOWN.search(line)
        and re.match(r"\.venv/bin/skyrl (theory|simulate|plugins|train .*config=(opd|grpo)/q)", line)
    ],
)
@pytest.mark.timeout(300)
def test_a_quick_command_runs(line, tmp_path):
    program, *words = shlex.split(line)
    if words[0] == "train" and "--dry-run" not in words:
        words += ["--dry-run", f"thundersync.run_dir={tmp_path}"]
    if "qwen3.8-27b" in line:
        pytest.skip("its models are not on this machine")
    done = subprocess.run([BIN / Path(program).name, *words], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr

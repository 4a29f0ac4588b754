"""The patches for upstream apply to the pinned release as it was shipped, and do what their headers say."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCHES = sorted((ROOT / "patches").glob("*.patch"))


def release(folder: Path) -> Path:
    """A copy of the installed SkyRL, as `folder/skyrl`."""
    source = Path(find_spec("skyrl").submodule_search_locations[0])
    shutil.copytree(source, folder / "skyrl", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def patched(tmp_path_factory) -> dict:
    """What tests/cli/patched_release.py reports, run against a release with every patch applied."""
    folder = release(tmp_path_factory.mktemp("patched"))
    for patch in PATCHES:
        apply(["patch", "-p1", "--fuzz=0", "-i", str(patch)], folder)
    env = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("patched_release.py")
    done = subprocess.run([sys.executable, str(script)], env=env, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout[done.stdout.index('{"where"') :])
    assert report["where"].startswith(str(folder))
    return report


def apply(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "offset" not in done.stdout


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)
@pytest.mark.parametrize("tool", [["patch", "-p1", "--fuzz=0", "-i"], ["git", "apply", "-p1"]], ids=["patch", "git"])
def test_each_patch_applies_alone_without_fuzz(tmp_path, patch, tool):
    apply([*tool, str(patch)], release(tmp_path))


@pytest.mark.timeout(300)
def test_the_hook_sees_every_turn_before_its_environment_step(patched):
    events, prompt_ids, response_ids, loss_mask = patched["heard"]
    assert [event[0] for event in events] == ["sampled", "step"] * 3
    turns = events[::2]
    assert [turn[2] for turn in turns] == [0, 1, 2]
    assert {turn[1] for turn in turns} == {"7_1"} or all("7" in turn[1] for turn in turns)
    assert all(turn[5] == [-0.5] * len(turn[4]) and turn[6] == "stop" and turn[7] == "eval" for turn in turns)
    whole = prompt_ids + response_ids
    sampled = [token for token, scored in zip(response_ids, loss_mask, strict=True) if scored]
    assert [token for turn in turns for token in turn[4]] == sampled
    for turn in turns:
        assert whole[: len(turn[3])] == turn[3]
        assert whole[len(turn[3]) : len(turn[3]) + len(turn[4])] == turn[4]


def test_without_an_override_nothing_changes(patched):
    assert [event[0] for event in patched["silent"][0]] == ["step"] * 3
    assert patched["silent"][1:] == patched["heard"][1:]


def test_step_wise_training_refuses_a_kl_penalty_in_the_reward(patched):
    said = patched["validation"]
    assert "use_kl_in_reward=True is not supported with step_wise_trajectories=True" in said["True True"]
    assert [key for key, text in said.items() if text] == ["True True"]


def test_step_wise_training_refuses_token_level_advantages_of_any_estimator(patched):
    said = patched["advantages"]
    assert "'pass_through' returned token-level advantages" in said["pass_through True"]
    assert [key for key, text in said.items() if text] == ["pass_through True"]

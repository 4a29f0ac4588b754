"""The check for a machine with a GPU, on one without: it refuses, and its code runs at a tiny size."""

import json
import os
import subprocess
import sys

import pytest


def check(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "benchmarks.gpu_check", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, timeout=500, check=False
    )


def test_without_a_gpu_it_says_so():
    done = check()
    assert (done.returncode, done.stdout) == (2, "")
    assert "torch sees no CUDA device here" in done.stderr


@pytest.mark.slow
def test_all_that_needs_no_gpu_holds_without_one():
    done = check("--device", "cpu")
    found = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0, done.stderr
    assert all(row["holds"] for row in found.values())
    assert {"OPD update took a step", "published bits", "cpu_fused against explicit, glm-4.7-flash"} <= set(found)

"""SWE-smith (Python) as tasks of the terminal environment.

Schema assumed, from the public dataset card (SWE-bench/SWE-smith): instance_id, patch, FAIL_TO_PASS (list of pytest ids),
PASS_TO_PASS (list), image_name, repo ("swesmith/owner__name.commit"), problem_statement; one row an instance, as .jsonl
or .parquet. `patch` plants the bug: the image holds the repository in /testbed without it, and its inverse is the
reference.

A row plants the bug before the first turn and leaves no history to look it up in. Its verifier runs the named tests; the
share that passes is the partial credit, all of them the official success. The tests themselves are the repository's own,
where the agent can reach them: `test_files` of the caller, taken from the image, put them back at grading. They run the
agent's code in the grader's process: evaluation is SWE-bench's own harness's business.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from skyrl_thundersync.data.decontaminate import repository_name, test_names
from skyrl_thundersync.data.harbor import TEST_COMMAND
from skyrl_thundersync.data.images import owned_tag

FIELDS = ("instance_id", "patch", "FAIL_TO_PASS", "PASS_TO_PASS", "image_name", "repo", "problem_statement")
WORKDIR = "/testbed"
CONDA = "/opt/miniconda3/bin/activate"
VERIFIER_TIMEOUT_S = 1800.0
AGENT_TIMEOUT_S = 8 * 3600.0
FILTERS = ("schema", "empty_problem_statement", "empty_patch", "no_failing_test", "no_image", "duplicate")

_SETUP = """git apply --whitespace=nowarn - <<'END_OF_PATCH' &&
{patch}
END_OF_PATCH
rm -rf .git && git init -q && git add -A && git -c user.name=task -c user.email=task@localhost commit -q -m start
"""
_TEST = """#!/bin/bash
# Puts the repository's own test files back, runs the named tests, and counts those that pass.
cd {workdir} || exit 1
[ -d /tests/original ] && cp -r /tests/original/. .
[ -f {conda} ] && source {conda} testbed
mapfile -t wanted </tests/wanted.txt
mapfile -t files < <(sed 's/::.*//' /tests/wanted.txt | sort -u)
python -m pytest -p no:cacheprovider --color=no --tb=no -q -rA "${{files[@]}}" >/tmp/pytest.log 2>&1
passed=0
for name in "${{wanted[@]}}"; do
  grep -qxF "PASSED $name" /tmp/pytest.log && passed=$((passed + 1))
done
mkdir -p /logs/verifier
printf '{{"results": {{"summary": {{"tests": %d, "passed": %d}}}}}}\\n' "${{#wanted[@]}}" "$passed" \\
  >/logs/verifier/ctrf.json
[ "$passed" -eq "${{#wanted[@]}}" ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
"""


def problem(row: Mapping[str, Any]) -> str | None:
    """The first of `FILTERS` (duplicates aside) that drops this row; None when it is kept."""
    if any(field not in row for field in FIELDS):
        return "schema"
    if not str(row["problem_statement"] or "").strip():
        return "empty_problem_statement"
    if not str(row["patch"] or "").strip():
        return "empty_patch"
    if not test_names(row["FAIL_TO_PASS"]):
        return "no_failing_test"
    return None if str(row["image_name"] or "").strip() else "no_image"


def group(row: Mapping[str, Any]) -> str:
    """The repository, without SWE-smith's mirror prefix and commit."""
    return repository_name(str(row["repo"]))


def repository_row(instance: Mapping[str, Any], image: str) -> dict[str, Any]:
    """What the rows of all tasks on a repository in an image begin with; the image is given to user 1000."""
    return {
        "prompt": [{"role": "user", "content": str(instance["problem_statement"]).strip()}],
        "env_class": "terminal",
        "task_id": str(instance["instance_id"]),
        "image": owned_tag(image, WORKDIR),
        "base_image": image,
        "image_optional": False,
        "workdir": WORKDIR,
        "env": "{}",
        "files": "{}",
    }


def terminal_row(
    row: Mapping[str, Any], max_turns: int, partial_credit: bool = True, test_files: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The dataset row. `test_files`: path in the repository -> text, put back before grading."""
    wanted = list(dict.fromkeys([*test_names(row["FAIL_TO_PASS"]), *test_names(row["PASS_TO_PASS"])]))
    tests = {
        "test.sh": _TEST.format(workdir=shlex.quote(WORKDIR), conda=CONDA),
        "wanted.txt": "".join(name + "\n" for name in wanted),
        **{f"original/{path}": text for path, text in (test_files or {}).items()},
    }
    return {
        **repository_row(row, str(row["image_name"])),
        "setup": _SETUP.format(patch=str(row["patch"]).rstrip("\n")),
        "checker": TEST_COMMAND,
        "tests": json.dumps(tests),
        "verifier_env": "{}",
        "partial_credit": partial_credit,
        "agent_timeout_s": AGENT_TIMEOUT_S,
        "verifier_timeout_s": VERIFIER_TIMEOUT_S,
        "max_turns": max_turns,
        "needs": "",
    }

"""SWE-bench (Verified) as tasks of the terminal environment, for evaluation only: the attempt leaves a patch.

Schema, of the data set as swebench 5 reads it: instance_id, problem_statement, image, and what the harness needs; a JSON
list, .jsonl or .parquet. A row holds neither tests nor reference patch: what the agent changed is collected as a patch and
graded by swebench's own harness (`evaluate/swe_bench_harness.py`), in fresh containers that no agent has touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_thundersync.data.swe_smith import AGENT_TIMEOUT_S, WORKDIR, repository_row
from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.tasks.rows import read_rows

FIELDS = ("instance_id", "problem_statement", "image")
COLLECT = f"cd {WORKDIR} && git add -A >/dev/null 2>&1 && git diff --cached --binary HEAD"
COLLECT_TIMEOUT_S = 300.0


def read_instances(file: Path) -> list[dict[str, Any]]:
    """The data set's instances. Raises ConfigError for a file without them, or an instance without one of `FIELDS`."""
    try:
        rows = [row for _, row in read_rows(file)]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not rows:
        raise ConfigError(f"{file}: no instances in it")
    for number, row in enumerate(rows):
        if missing := [field for field in FIELDS if not row.get(field)]:
            raise ConfigError(f"{file}: instance {row.get('instance_id', number)} has no {', '.join(missing)}")
    return rows


def terminal_row(instance: Mapping[str, Any], max_turns: int) -> dict[str, Any]:
    """The dataset row; its image is the instance's, given to user 1000 (`data images`)."""
    return {
        **repository_row(instance, str(instance["image"])),
        "setup": "",
        "checker": COLLECT,
        "collect": True,
        "agent_timeout_s": AGENT_TIMEOUT_S,
        "verifier_timeout_s": COLLECT_TIMEOUT_S,
        "max_turns": max_turns,
        "needs": "",
    }

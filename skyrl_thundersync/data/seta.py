"""SETA-Env: Harbor task folders below SETA_Synth/ and SETA_Evolve/.

Schema assumed, from the public dataset card (camel-ai/seta-env-release): a task is a folder named SOURCE__ID, evolved
variants SOURCE__ID__b1 (context changed) and SOURCE__ID__d1 (difficulty changed), with task.toml, instruction.md,
environment/Dockerfile, solution/solve.sh, tests/test.sh and tests/test_outputs.py. Sources: ask_ubuntu, kaggle_notebook,
nl2bash, stack_overflow, unix_linux_se.

A source family, the unit of splitting and decontamination, is one seed with all that was evolved from it.
"""

from __future__ import annotations

import re
from pathlib import Path

from skyrl_thundersync.data.task_folder import folder_files, instruction_of

_VARIANT = re.compile(r"(__[bd]\d+)+$")
REQUIRED = ("instruction.md", "environment/Dockerfile", "solution/solve.sh", "tests/test.sh")
FILTERS = tuple(f"missing {name}" for name in REQUIRED)


def family(name: str) -> str:
    """The seed's name: `ask_ubuntu__12__b1__d1` and `ask_ubuntu__12` are one family."""
    return _VARIANT.sub("", name)


def problem(folder: Path) -> str | None:
    """The first of `FILTERS` that drops this task: a required file that is missing or empty. None when it is kept."""
    if not instruction_of(folder):
        return FILTERS[0]
    for name, missing in zip(REQUIRED[1:], FILTERS[1:], strict=True):
        part, _, rest = name.partition("/")
        if not folder_files(folder, part).get(rest, b"").strip():
            return missing
    return None

"""One thing that `skyrl doctor`, a dry run or a run looked at."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """What was looked at, and the problems found, each with its fix (none: it is fine), or what was seen."""

    name: str
    problems: tuple[str, ...]
    seen: str = ""


def require(checks: Iterable[Check], error: type[Exception]) -> None:
    """Raises `error` with every problem, a line each, when there is one."""
    if problems := [problem for check in checks for problem in check.problems]:
        raise error("\n".join(problems))

"""One thing that `skyrl doctor` or a dry run looked at."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """What was looked at, and the problems found, each with its fix (none: it is fine), or what was seen."""

    name: str
    problems: tuple[str, ...]
    seen: str = ""

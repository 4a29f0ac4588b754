"""Does a script parse? Asked of bash itself, which executes nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from itertools import islice


def syntax_problem(script: str) -> str | None:
    """What bash says about a script that does not parse; None where it does."""
    done = _parse(script)
    if done.returncode == 0:
        return None
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return said[0].removeprefix("bash: ") if said else f"bash ends with {done.returncode}"


def unparsable(scripts: Sequence[str], most: int) -> dict[int, str]:
    """Index -> what bash says, for the first `most` of many scripts that do not parse.

    A process takes milliseconds, so scripts are parsed together, each as a function's body, and where that fails halved. Two
    scripts that are wrong alone could close each other's quotes: lines after each, comments where the script before them is
    whole, break off what is open.
    """
    return dict(islice(_search(scripts, 0), most))


def _search(scripts: Sequence[str], first: int) -> Iterator[tuple[int, str]]:
    if len(scripts) == 1:
        if problem := syntax_problem(scripts[0]):
            yield first, problem
        return
    done = _parse("".join(f"f() {{\n:\n{script}\n\n}}\n{_BREAK}" for script in scripts))
    if done.returncode != 0 or done.stderr:
        half = len(scripts) // 2
        yield from _search(scripts[:half], first)
        yield from _search(scripts[half:], first + half)


_BREAK = "# ' ) ;; }\n# \" ) ;; }\n# ` ) ;; }\n"


def _parse(script: str) -> subprocess.CompletedProcess[bytes]:
    command = ["bash", "--norc", "--noprofile", "-O", "extglob", "-n"]
    return subprocess.run(command, input=script.encode(), capture_output=True, check=False)

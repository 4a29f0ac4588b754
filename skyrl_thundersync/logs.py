"""Where the chatter of Ray, vLLM and DeepSpeed goes: one file an actor, never the user's screen."""

import os
import sys
from pathlib import Path

from skyrl_thundersync.heartbeat import beat


def redirect(path: str | Path, heartbeat: bool = True) -> None:
    """Send this process's stdout and stderr, those of C libraries included, to `path` (appended).

    With `heartbeat` it also shows that it lives, in a file beside it (heartbeat.py).
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    if heartbeat:
        beat(path.with_suffix(".alive"))

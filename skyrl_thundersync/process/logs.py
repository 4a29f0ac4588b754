"""Where the chatter of Ray, vLLM and DeepSpeed goes: one file an actor, never the user's screen."""

import os
import sys
from pathlib import Path

from skyrl_thundersync.process.heartbeat import announce, beat


def redirect(path: str | Path, heartbeat: bool = True) -> None:
    """Send this process's stdout and stderr, those of C libraries included, to `path` (appended).

    A file beside it says what the process is at: NAME.alive with `heartbeat`, which also shows that it lives (heartbeat.py),
    else NAME.status.
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
        beat(path.with_suffix(".alive"), _actor())
    else:
        announce(path.with_suffix(".status"))


def _actor() -> str | None:
    """Ray's id of this process, where it is an actor's."""
    ray = sys.modules.get("ray")
    return ray.get_runtime_context().get_actor_id() if ray is not None and ray.is_initialized() else None

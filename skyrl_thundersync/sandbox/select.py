"""Which backend runs the sandboxes: the one asked for, or the best that works here, or a refusal that says what to do."""

from __future__ import annotations

from collections.abc import Callable

from skyrl_thundersync.sandbox import bubblewrap, docker_engine
from skyrl_thundersync.sandbox.base import SandboxError

BACKENDS: dict[str, Callable[[], str | None]] = {
    "docker": docker_engine.reason_unavailable,
    "bubblewrap": bubblewrap.reason_unavailable,
}
"""Best first. Each function says None where the backend works, else what is missing and how to get it."""


def choose_backend(wanted: str) -> str:
    """ "docker" or "bubblewrap" for `thundersync.sandbox.backend` (either of them, or "auto").

    Raises:
        ValueError: no such backend.
        SandboxError: it does not work here; the message says why and how to change that.
    """
    if wanted not in (*BACKENDS, "auto"):
        raise ValueError(f"thundersync.sandbox.backend={wanted!r}: must be one of auto, {', '.join(BACKENDS)}")
    reasons = {}
    for name in BACKENDS if wanted == "auto" else (wanted,):
        reason = BACKENDS[name]()
        if reason is None:
            return name
        reasons[name] = reason
    said = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise SandboxError(f"no sandbox for the agent's commands (thundersync.sandbox.backend={wanted}). {said}")

"""The terminal agent's language: how a turn names its command, and what the agent reads of what it did.

Shared by the terminal environment and the Harbor agent, so imports nothing but the standard library.
"""

from __future__ import annotations

import re

from skyrl_thundersync.sandbox.base import HeadTailBuffer

SUBMIT = "submit"
_FENCE = re.compile(r"```(?:bash|sh)[ \t]*\n(.*?)(?:\n?```|\Z)", re.DOTALL)


def parse_action(text: str) -> tuple[str, bool]:
    """(command, submitted) of an assistant turn.

    Text up to the last `</think>` does not count. The command is the first fenced bash or sh block if there is one, else
    the whole text; a last line `submit` is taken off and ends the episode after the lines before it have run.
    """
    text = text.rpartition("</think>")[2]
    fenced = _FENCE.search(text)
    command = (fenced[1] if fenced else text).strip()
    before, _, last = command.rpartition("\n")
    return (before.strip(), True) if last.strip() == SUBMIT else (command, False)


def describe_text(
    output: str, exit_code: int, timed_out: bool = False, timeout_s: float = 0.0, new_shell_in: str | None = None
) -> str:
    """What the agent reads of a command: its output, then what it could not know from it, in brackets."""
    lines = [output.rstrip("\n")] if output.strip() else []
    if timed_out:
        lines.append(f"[timed out after {timeout_s:g} s]")
    elif exit_code != 0:
        lines.append(f"[exit {exit_code}]")
    if not lines:
        lines.append("(no output)")
    if new_shell_in is not None:
        lines.append(f"[new shell in {new_shell_in}]")
    return "\n".join(lines)


def clip(text: str, limit_bytes: int) -> str:
    """Head and tail of a long output, as a sandbox gives it."""
    buffer = HeadTailBuffer(limit_bytes)
    buffer.add(text.encode("utf-8", "replace"))
    return buffer.text()

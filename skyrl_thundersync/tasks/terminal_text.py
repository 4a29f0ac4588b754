"""The terminal agent's language: how a turn names its command, and what the agent reads of what it did.

Shared by the terminal environment and the Harbor agent, so imports nothing but the standard library.
"""

from __future__ import annotations

import re
from typing import Any

SUBMIT = "submit"
_OPEN, _CLOSE = "<think>", "</think>"
_OPENED = re.compile(r"^\s*<think>", re.MULTILINE)
_FENCE = re.compile(r"```(?:bash|sh)[ \t]*\n(.*?)(?:\n?```|\Z)", re.DOTALL)


def opens_thought(tokenizer: Any, **template_kwargs: Any) -> bool:
    """Whether the chat template's generation prompt leaves a thought open, so that a turn starts inside it.

    Raises:
        ValueError: it does, but `</think>` is a special token, which decoded turns do not show.
    """
    messages = [{"role": "user", "content": "a"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **template_kwargs)
    opened = prompt.rfind(_OPEN) > prompt.rfind(_CLOSE)
    if opened and _CLOSE in tokenizer.all_special_tokens:
        raise ValueError(
            f"the chat template opens a thought, and {_CLOSE} is a special token of the tokenizer: where the thought ends "
            "cannot be read from the text of a turn. Make it an ordinary added token"
        )
    return opened


def unfinished_thought(text: str, opened: bool = False) -> bool:
    """Whether an assistant turn ended inside a thought. `opened`: by the generation prompt (`opens_thought`).

    A turn opens a thought itself at the start of a line before its command's fence.
    """
    _, closed, rest = text.rpartition(_CLOSE)
    if opened and not closed:
        return True
    fenced = _FENCE.search(rest)
    return _OPENED.search(rest, 0, fenced.start() if fenced else len(rest)) is not None


def parse_action(text: str, thought_opened: bool = False) -> tuple[str, bool]:
    """(command, submitted) of an assistant turn; no action comes from an unfinished thought.

    Text up to the last `</think>` does not count. The command is the first fenced bash or sh block if there is one, else
    the whole text; a last line `submit` is taken off and ends the episode after the lines before it have run.
    """
    if unfinished_thought(text, thought_opened):
        return "", False
    text = text.rpartition(_CLOSE)[2]
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

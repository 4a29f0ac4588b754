"""A chat-API conversation as the token ids that the policy saw and sampled.

An agent that speaks the chat API sends its whole history as text with every request. Encoding that again would give other ids
than those that were sampled. Here the history is compared with what was said so far, message by message: what is unchanged
keeps its ids, and only what is new is encoded. Where the agent changed what was said (summarised, cut, edited), or the
template itself rewrites earlier messages, ids cannot be kept: "refuse" says so, "branch" goes on from what the template
writes for the new history. What was sampled before stays scored where it was sampled; the learner attaches the branch at the
last token that both have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from skyrl_thundersync.tasks.conversation import Conversation

REWRITTEN = ("refuse", "branch")
Message = dict[str, str]


class RewrittenHistoryError(ValueError):
    """The history of a request is not what was said before; names the first message that differs."""


class MessageError(ValueError):
    """A message that cannot be given to the policy: not text, or no role."""


class _Asked(NamedTuple):
    """A request that waits for its answer: its messages, the conversation that goes on, the context to sample from."""

    messages: list[Message]
    talk: Conversation
    ids: list[int]


class CapturedChat:
    """One session. Attributes: `branches`, how often it went on from a rewritten history.

    Args:
        tokenizer: a Hugging Face one with a chat template.
        append_only: whether its template passes `Conversation.check_template`.
        rewritten: "refuse" or "branch".
    """

    def __init__(self, tokenizer: Any, append_only: bool, rewritten: str) -> None:
        self._tokenizer, self._append_only, self._rewritten = tokenizer, append_only, rewritten
        self._talk: Conversation | None = None
        self._said: list[Message] = []
        self._asked: _Asked | None = None
        self.branches = 0

    def context(self, messages: Sequence[Message]) -> list[int]:
        """Token ids to sample the answer to `messages` from. Until `sampled` nothing has been said: it may be asked again.

        Raises:
            RewrittenHistoryError: "refuse", and the history was changed.
        """
        self._asked = self._ask(messages)
        return self._asked.ids

    def _ask(self, messages: Sequence[Message]) -> _Asked:
        if self._talk is not None:
            kept = next(
                (i for i, said in enumerate(self._said) if i >= len(messages) or messages[i] != said), len(self._said)
            )
            if kept == len(self._said) < len(messages) and self._append_only:
                return _Asked(list(messages), self._talk, self._talk.with_messages(messages[kept:]))
            if self._rewritten == "refuse":
                raise RewrittenHistoryError(_difference(self._said, messages, kept))
        talk = Conversation(self._tokenizer, list(messages))
        return _Asked(list(messages), talk, talk.ids)

    def sampled(self, ids: list[int]) -> str:
        """The answer as sampled; its text, which the agent is to send back as it is."""
        self.branches += self._talk not in (None, self._asked.talk)
        self._talk = self._asked.talk
        self._talk.ids = list(self._asked.ids)
        text = self._talk.add_sampled(ids)
        self._said = [*self._asked.messages, {"role": "assistant", "content": text}]
        return text


def plain_messages(messages: Any) -> list[Message]:
    """A request's messages as role and text.

    Raises:
        MessageError: names the message.
    """
    if not isinstance(messages, list) or not messages:
        raise MessageError("messages must be a non-empty list")
    return [_plain(index, message) for index, message in enumerate(messages)]


def _plain(index: int, message: Any) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("system", "user", "assistant"):
        raise MessageError(f"messages[{index}]: role {role!r}; only system, user and assistant are captured")
    if message.get("tool_calls"):
        raise MessageError(f"messages[{index}]: tool calls are not captured; use an agent that writes text")
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise MessageError(f"messages[{index}]: content must be text, got {type(content).__name__}")
    return {"role": role, "content": content}


def _difference(said: Sequence[Message], messages: Sequence[Message], at: int) -> str:
    if at >= len(messages):
        where = f"the history has {len(messages)} messages, fewer than the {len(said)} that were said"
    elif at == len(said):
        where = "nothing new was said, or the chat template rewrites earlier messages"
    else:
        where = f"message {at} ({messages[at]['role']}) differs from what was said there"
    return f"{where}: its token ids cannot be kept. Let the agent keep its history as it is (no summaries), or allow branches"

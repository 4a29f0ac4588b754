"""A conversation as token ids that only grow: what was sampled is kept, what the environment says is encoded on its own.

What SkyRL's generator does turn by turn, for agents that run elsewhere. The encoding of an observation is the difference that
it makes to a fixed conversation, from its last end-of-turn token on; `check_template` makes sure that the template is one for
which these pieces put together are what it would have written.

Some templates have no end-of-turn token (GLM-4): the token that opens the next message ends a turn too. It is sampled, and
the next message brings it again. Then the message's own takes the sampled one's place: where they are the same it is there
once, as sampled, and where the policy ended its turn by another (a tool's role, end of text) the context is the template's
all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyrl_thundersync.tasks.plain_contents import PlainContents

_BASE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
_PROBE = ("ls -l", "total 0", "<think>\nx\n</think>\n\n```bash\ncat y\n```", "z")


class Conversation:
    """Attributes: `ids`, the context of the next turn, generation prompt included."""

    def __init__(self, tokenizer: Any, messages: list[dict[str, str]]) -> None:
        """Begin with `messages`; `tokenizer` is a fast Hugging Face one with a chat template and an end-of-turn token."""
        self._tokenizer = tokenizer = PlainContents.of(tokenizer)
        self.ids: list[int] = _encode(tokenizer, messages, True)
        self._base = _up_to_end(_encode(tokenizer, _BASE, False), tokenizer.eos_token_id)
        self._open = ends_open(tokenizer)
        self._ended_by_role = False

    def add_sampled(self, ids: list[int]) -> str:
        """Append a turn as sampled; its text without special tokens. A turn cut short is closed with the end token."""
        self.ids += ids
        self._ended_by_role = self._open and ends_turn(self._tokenizer, ids)
        if not self._open and (not ids or ids[-1] != self._tokenizer.eos_token_id):
            self.ids.append(self._tokenizer.eos_token_id)
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def add_observation(self, text: str) -> None:
        """Append a user message and the start of the next turn. Raises as `add_messages`."""
        self.add_messages([{"role": "user", "content": text}])

    def add_messages(self, messages: Sequence[dict[str, str]]) -> None:
        """Append messages that follow a sampled turn, and the start of the next one. Raises as `with_messages`."""
        self.ids = self.with_messages(messages)
        self._ended_by_role = False

    def with_messages(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The context that `add_messages` would leave; nothing is appended.

        Raises:
            ValueError: the template rewrites earlier messages when some are added.
        """
        longer = _encode(self._tokenizer, [*_BASE, *messages], True)
        if longer[: len(self._base)] != self._base:
            raise ValueError(
                "the chat template rewrites earlier messages when one is added: token ids could not be kept"
            )
        before = self.ids[:-1] if self._ended_by_role else self.ids
        return before + longer[len(self._base) :]

    @classmethod
    def check_template(cls, tokenizer: Any) -> None:
        """Two turns put together here must be what the template writes for the whole conversation.

        Raises:
            ValueError: they are not, for instance because the template drops earlier thinking.
        """
        first, seen, second, then = _PROBE
        messages = [{"role": "user", "content": "do it"}]
        talk = cls(tokenizer, messages)
        for said, observed in ((first, seen), (second, then)):
            # also in a template whose turns end by a role's token: end of text is sampled in its place
            talk.add_sampled([*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id])
            talk.add_observation(observed)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": observed}]
        whole = _encode(tokenizer, messages, True)
        if talk.ids != whole:
            pairs = enumerate(zip(talk.ids, whole, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(talk.ids), len(whole)))
            raise ValueError(
                f"the chat template is not append-only: token {at} of a two-turn probe is "
                f"{tokenizer.decode(talk.ids[at : at + 1])!r} turn by turn and {tokenizer.decode(whole[at : at + 1])!r} over "
                "the whole conversation (many templates drop earlier thinking). Use a template that keeps every message"
            )


def ends_open(tokenizer: Any) -> bool:
    """Whether the chat template writes nothing behind a turn: the token that opens the next message ends it."""
    text = tokenizer.apply_chat_template(_BASE, add_generation_prompt=False, tokenize=False)
    return text.endswith(_BASE[-1]["content"])


def ends_turn(tokenizer: Any, ids: Sequence[int]) -> bool:
    """Whether a sampled turn came to its end by a special token, not by a limit or a stop string."""
    return bool(ids) and ids[-1] in tokenizer.all_special_ids


def _encode(tokenizer: Any, messages: list[dict[str, str]], generation: bool) -> list[int]:
    return list(
        tokenizer.apply_chat_template(messages, add_generation_prompt=generation, tokenize=True, return_dict=False)
    )


def _up_to_end(ids: list[int], end: int) -> list[int]:
    """`ids` without what follows the last end-of-turn token, which then belongs to the next message."""
    return ids[: len(ids) - ids[::-1].index(end)] if end in ids else ids

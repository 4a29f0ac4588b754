"""Chat templates over texts that nobody vouches for: what a tool prints or a task says never becomes a control token.

A chat template writes one string of its own control tokens and of the messages' texts, and a tokenizer cannot tell which is
which: a file that holds `<|im_end|>` could end a turn and forge the next. Here special tokens in messages are encoded as the
plain text that they are. Everything else, merges across the seams of template and text included, is encoded as the tokenizer
does it: messages without special tokens go to it untouched, the others to a copy of it which knows the template's control
tokens by names that cannot be guessed.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer


class PlainContents:
    """A fast Hugging Face tokenizer with another `apply_chat_template`. Thread-safe where the tokenizer is."""

    def __init__(self, tokenizer: Any) -> None:
        """Raises ValueError for a tokenizer that is not a fast one."""
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"{type(tokenizer).__name__} is no fast tokenizer: control tokens in what tools print could not be told from "
                "the chat template's. Set trainer.disable_fast_tokenizer=false"
            )
        self._tokenizer = tokenizer
        self._nonce = secrets.token_hex(8)

    @classmethod
    def of(cls, tokenizer: Any) -> PlainContents:
        """`tokenizer` so wrapped, unless it is already."""
        return tokenizer if isinstance(tokenizer, cls) else cls(tokenizer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_tokenizer":
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tokenizer(*args, **kwargs)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def apply_chat_template(self, conversation: Sequence[Any], tokenize: bool = True, **kwargs: Any) -> Any:
        """As the tokenizer's, of one conversation; token ids with `return_dict=False` alone.

        Raises:
            ValueError: special tokens in a message, and the result is asked for in another form than ids.
        """
        if not tokenize or not any(self._special.search(text) for text in _texts(conversation)):
            return self._tokenizer.apply_chat_template(conversation, tokenize=tokenize, **kwargs)
        if kwargs.pop("return_dict", True):
            raise ValueError("messages with special tokens are encoded as ids only: pass return_dict=False")
        return self._encode(conversation, kwargs)

    def _encode(self, conversation: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
        backend, renamed, id_of = self._renamed
        plain: list[str] = []

        def hide(found: re.Match[str]) -> str:
            plain.append(found[0])
            return f"{self._nonce}t{len(plain) - 1}e"

        hidden = _mapped(conversation, lambda text: self._special.sub(hide, text))
        written = self._tokenizer.apply_chat_template(hidden, tokenize=False, **kwargs)
        named = self._special.sub(lambda found: renamed[found[0]], written)
        text = re.sub(f"{self._nonce}t(\\d+)e", lambda found: plain[int(found[1])], named)
        return [id_of.get(token, token) for token in backend.encode(text, add_special_tokens=False).ids]

    @cached_property
    def _added(self) -> dict[str, int]:
        """Special tokens to their ids."""
        return {str(token): i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special}

    @cached_property
    def _special(self) -> re.Pattern[str]:
        longest_first = sorted(self._added, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @cached_property
    def _renamed(self) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
        """The tokenizer with its special tokens renamed; their new names by the old; ids of added tokens by those there."""
        data = json.loads(self._tokenizer.backend_tokenizer.to_str())
        renamed = {token: f"{self._nonce}c{i}e" for token, i in self._added.items()}
        for added in data["added_tokens"]:
            added["content"] = renamed.get(added["content"], added["content"])
        data["post_processor"] = data["truncation"] = data["padding"] = None
        backend = Tokenizer.from_str(json.dumps(data))
        # The copy numbers added tokens anew, those that are no special ones too.
        names = {str(token): i for i, token in self._tokenizer.added_tokens_decoder.items()}
        return backend, renamed, {backend.token_to_id(renamed.get(name, name)): i for name, i in names.items()}


def _texts(value: Any) -> Iterator[str]:
    """Every text in messages, their roles included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)


def _mapped(value: Any, change: Any) -> Any:
    """Messages with every text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(part, change) for key, part in value.items()}
    return [_mapped(part, change) for part in value] if isinstance(value, list | tuple) else value

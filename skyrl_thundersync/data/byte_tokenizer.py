"""A byte-level tokenizer whose ids are the bytes, with a chat template that only ever appends.

Different from the usual ByteLevel BPE tokenizers: no merges, and the token id of a byte is its value, so ids can be
read with `bytes(ids)`. Each message opens with one token that is its role and closes with `<|im_end|>`; nothing follows
a message, so the ids of a conversation are a prefix of the ids of the same conversation with more messages, and what
SkyRL's generator adds turn by turn equals the template over the whole conversation.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>")
"""Ids 256 to 260. `<|endoftext|>` pads, `<|im_end|>` ends a turn (eos), the others open a message of that role."""

VOCAB_SIZE = 264
"""Rows of the embedding. Every id has a token: those after the special tokens are reserved."""

PAD_ID = 256
END_ID = 257
USER_ID = 259
ASSISTANT_ID = 260

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('this chat template has no role ' + message['role']) -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|im_end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def byte_characters() -> list[str]:
    """The printable character that stands for each byte (index 0 to 255) in ByteLevel's alphabet."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(moved)) for byte in range(256)]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make the tokenizer. Deterministic; `save_pretrained` writes what AutoTokenizer and vLLM load."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    reserved = [f"<|reserved_{i}|>" for i in range(VOCAB_SIZE - 256 - len(SPECIAL_TOKENS))]
    backend.add_special_tokens([*SPECIAL_TOKENS, *reserved])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[*SPECIAL_TOKENS[2:], *reserved],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer

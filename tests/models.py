"""Tiny random Qwen3-shaped checkpoints with a byte-level tokenizer and a chat template, for tests."""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 byte tokens, then <|im_start|>, <|im_end|> (end of sequence) and <|endoftext|> (padding)."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_qwen3(seed: int = 0, tied: bool = True, vocab_size: int = 320, **overrides) -> Qwen3ForCausalLM:
    """A random FP32 model of 3 layers, in eval mode. Logits are spread so that its samples are not uniform noise."""
    torch.manual_seed(seed)
    shape = dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.1,
    )
    config = Qwen3Config(vocab_size=vocab_size, tie_word_embeddings=tied, **{**shape, **overrides})
    return Qwen3ForCausalLM(config).float().eval()


def save(model: Qwen3ForCausalLM, folder: Path, tokenizer: PreTrainedTokenizerFast | None = None) -> str:
    """Write `model` and a tokenizer (default: `byte_tokenizer()`) to `folder`; returns it as str."""
    tokenizer = tokenizer or byte_tokenizer()
    model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def forward_logps(model: Qwen3ForCausalLM, ids: list[int]) -> list[float]:
    """log-probs of ids[1:] by one plain forward over the whole sequence."""
    logits = model(torch.tensor([ids])).logits[0].float()
    return torch.log_softmax(logits[:-1], -1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def random_ids(seed: int, count: int) -> list[int]:
    """`count` repeatable byte ids."""
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]

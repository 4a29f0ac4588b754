"""The student and the trajectory that the learner's cost is measured on, and the plain passes that it is measured in."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from skyrl_thundersync.stream.sources import Append, Source, TrajectoryId

SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
BASELINES = ("monolithic", "checkpointed")


def save_shape(folder: Path, shape: dict = SHAPE) -> str:
    """A random FP32 Qwen3 of that shape, saved in `folder`; its path."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **shape)).float().save_pretrained(folder)
    return str(folder)


def trajectory(turns: int, turn: int = 160, action: int = 40, prompt: int = 120, group="g", sample=0) -> list[Append]:
    """`turns` turns; the first's context is the prompt, each later one's `turn - action` tokens of tool output."""
    rng, shared = random.Random(sample), random.Random(group)
    works = []
    for index in range(turns):
        n = turn - action if index else prompt
        context = tuple((rng if index else shared).randrange(8000) for _ in range(n))
        ids = tuple(rng.randrange(8000) for _ in range(action))
        scores = tuple(-rng.uniform(5, 12) for _ in ids)
        prefix = prompt + action + (index - 1) * turn if index else 0
        mask = (1,) * action
        source = Source(TrajectoryId(group, sample), index, prefix, context, ids, mask, scores, "stop", 0)
        works.append(Append(source, scores))
    return works


def whole(works: list[Append]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids [1, n]; positions and teacher scores of the scored tokens."""
    ids, at, scores = [], [], []
    for work in works:
        ids += work.source.context_ids
        at += range(len(ids), len(ids) + len(work.source.action_ids))
        ids += work.source.action_ids
        scores += work.scores
    return torch.tensor([ids]), torch.tensor(at), torch.tensor(scores)


def monolithic(model: torch.nn.Module, works: list[Append]) -> None:
    """One forward and one backward of the whole trajectory, logits of scored tokens only."""
    ids, at, scores = (x.to(model.device) for x in whole(works))
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[0, at - 1]).float()
    logp = logits.gather(-1, ids[0, at, None])[:, 0] - torch.logsumexp(logits, -1)
    (-((scores - logp.detach()) * logp).sum()).backward()


def baseline_model(folder: str, name: str, device: str = "cpu", dtype=torch.float32) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device)
    if name == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model.train()  # checkpointing needs it; the shape has no dropout
    return model.eval()

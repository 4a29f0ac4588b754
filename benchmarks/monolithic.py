"""What the learner is measured against: whole contexts, stock attention, plain autograd, FP32 sums; none of its code."""

from __future__ import annotations

import statistics
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

sys.path.insert(
    0, str(Path(__file__).parents[1] / "tests" / "learner")
)  # the tiny models and random batches of the tests
from plain import FAMILIES, batch, contexts, distance, save_model, settings  # noqa: E402, F401

from skyrl_thundersync.learner.precision import all_double  # noqa: E402
from skyrl_thundersync.stream.sources import CloseTrajectory, Work  # noqa: E402

logging.disable_progress_bar()

Gradient = dict[str, torch.Tensor]

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def stock_model(folder: str, weights: str, dtype: str, device: str) -> torch.nn.Module:
    """The model with stock attention; its parameters rounded to `weights` first, then held and run in `dtype`."""
    experts = {"experts_implementation": "eager"} if dtype == "float64" else {}  # grouped kernels take no FP64
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[weights], attn_implementation="sdpa", **experts)
    return model.to(device=device, dtype=DTYPES[dtype]).eval()


def grpo_weights(works: list[Work]) -> dict:
    """trajectory → A_i/(m·|M_i|) under the population law, from Python's own statistics."""
    rewards = {w.trajectory: w.reward for w in works if isinstance(w, CloseTrajectory)}
    n_scored, weights = dict.fromkeys(rewards, 0), {}
    for work, _ in contexts(works):
        n_scored[work.source.trajectory] += work.source.n_scored
    for group in {t.group for t in rewards}:
        own = {t: r for t, r in rewards.items() if t.group == group}
        mean, deviation = statistics.mean(own.values()), statistics.pstdev(own.values())
        for t, r in own.items():
            weights[t] = (r - mean) / (deviation + 1e-6) / len(own) / max(1, n_scored[t])
    return weights


def gradient(model: torch.nn.Module, works: list[Work], objective: str) -> Gradient:
    """−Σ w_t ∇ log π_θ over all scored tokens of a batch, one whole context per turn; FP32 sums (FP64 for an FP64 model)."""
    first = next(model.parameters())
    wide = torch.promote_types(first.dtype, torch.float32)
    total = {name: torch.zeros_like(p, dtype=wide) for name, p in model.named_parameters()}
    weight_of = grpo_weights(works) if objective == "grpo" else {}
    for work, context in contexts(works):
        scored = [i for i, on in enumerate(work.source.mask) if on]
        if not scored:
            continue
        ids = torch.tensor([context + list(work.source.action_ids)], device=first.device)
        at = torch.tensor([len(context) + i for i in scored], device=first.device)
        with all_double() if wide == torch.float64 else nullcontext():
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=at - 1).logits[0].to(wide)
        logp = torch.log_softmax(logits, -1).gather(-1, ids[0, at, None])[:, 0]
        if objective == "opd":
            scores = torch.tensor([work.scores[i] for i in scored], dtype=wide, device=first.device)
            weights = scores - logp.detach()
        else:
            weights = torch.full_like(logp, weight_of[work.source.trajectory])
        (-(weights * logp).sum()).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                total[name] += p.grad
                p.grad = None
    return {name: g.cpu() for name, g in total.items()}

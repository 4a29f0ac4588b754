"""Which attention kernel a rank uses: on a CPU by rule, on a GPU the first that agrees with explicit matmuls.

A kernel is tried over two segments, forward and backward, on the device, dtype and head shape of the student. What was
chosen and how far it is off are reported when the ranks are up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from skyrl_thundersync.learner.attention import Past, SplitCausal
from skyrl_thundersync.learner.kernels import KERNELS, Kernel

HALF = (torch.bfloat16, torch.float16)
BOUND = 0.03
"""Largest relative difference from the explicit route that a kernel may have; BF16 rounding alone gives a tenth of it."""


@dataclass(frozen=True)
class Choice:
    """A kernel's name, and why: what was tried before it and how far it is from the explicit route."""

    name: str
    why: str


def choose(config: PretrainedConfig, device: str, dtype: torch.dtype) -> Choice:
    """The kernel for the text model that `config` describes.

    device: "cpu", "cuda", or "meta", which stands for a GPU where sizes are rehearsed.
    """
    if device == "cpu":
        return Choice("cpu_fused", "the rule for CPUs")
    if dtype not in HALF:
        return Choice("explicit", f"no flash kernel takes {dtype} on {device}")
    if device == "meta":
        return Choice("cuda_fused", "assumed, nothing runs here")
    try:
        error = probe(KERNELS["cuda_fused"], device, dtype, *head_shape(config))
    except RuntimeError as refusal:  # PyTorch's: built without it, or a shape or device that it does not serve
        return Choice("explicit", f"cuda_fused does not run here: {str(refusal).splitlines()[0]}")
    if not error <= BOUND:
        return Choice("explicit", f"cuda_fused is {error:.2g} away from explicit matmuls (limit {BOUND})")
    return Choice("cuda_fused", f"{error:.2g} away from explicit matmuls, forward and backward")


def head_shape(config: PretrainedConfig) -> tuple[int, int, int]:
    """(query heads, K/V heads, width) that attention meets; MLA's latents are expanded to one K and V a query head."""
    config = config.get_text_config()
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        return heads, heads, config.qk_nope_head_dim + config.qk_rope_head_dim
    groups = getattr(config, "num_key_value_heads", None) or heads
    return heads, groups, getattr(config, "head_dim", None) or config.hidden_size // heads


def probe(kernel: Kernel, device: str, dtype: torch.dtype, heads: int, groups: int, width: int) -> float:
    """Largest relative difference (in norm) to the explicit route of the output and of all gradients, over two segments."""
    random = torch.Generator().manual_seed(0)

    def draw(rows: int, of: int) -> torch.Tensor:
        return torch.randn(1, of, rows, width, generator=random).to(device, dtype)

    q, cotangent = draw(37, heads), draw(37, heads)
    past, own = ([draw(rows, groups) for _ in "kv"] for rows in (130, 37))

    def run(kernel: Kernel) -> list[torch.Tensor]:
        inputs = [x.detach().requires_grad_() for x in (q, *own)]
        deposits: list[torch.Tensor] = []
        before = Past(*past, lambda dk, dv: deposits.extend((dk, dv)))
        out = SplitCausal.apply(*inputs, width**-0.5, (before,), kernel)
        out.backward(cotangent)
        return [x.detach().double() for x in (out, *(x.grad for x in inputs), *deposits)]

    expected = run(KERNELS["explicit"])
    pairs = zip(run(kernel), expected, strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)

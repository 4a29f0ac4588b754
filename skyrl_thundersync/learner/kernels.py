"""Attention kernels that return and take the log-sum-exp.

Only such a kernel can be called piece by piece: the pieces' results merge by their log-sum-exps, and each piece's backward
runs on the merged output (attention.py). PyTorch's own operators are all that is needed; kernel_choice.py picks one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Kernel(NamedTuple):
    """A flash-style attention: forward(q, k, v, causal, scale) → (out, lse); backward(grad, q, k, v, out, lse, causal,
    scale) → (dq, dk, dv). q [1, H, n, D], k and v [1, H, p, D], lse [1, H, n]; causal wants p = n."""

    forward: Callable
    backward: Callable


def _cpu_forward(q, k, v, causal, scale):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)


def _cpu_backward(grad, q, k, v, out, lse, causal, scale):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, scale=scale
    )


def _plain_scores(q, k, causal, scale):
    scores = torch.matmul(q.to(_wide(q)), k.to(_wide(k)).transpose(-1, -2)) * scale
    if causal:
        n = q.shape[-2]
        scores.masked_fill_(torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    return scores


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _plain_forward(q, k, v, causal, scale):
    scores = _plain_scores(q, k, causal, scale)
    lse = torch.logsumexp(scores, -1)
    return torch.matmul((scores - lse[..., None]).exp(), v.to(_wide(v))).to(q.dtype), lse


def _plain_backward(grad, q, k, v, out, lse, causal, scale):
    wide = _wide(q)
    p = (_plain_scores(q, k, causal, scale) - lse[..., None]).exp()
    grad, out = grad.to(wide), out.to(wide)
    ds = p * (torch.matmul(grad, v.to(wide).transpose(-1, -2)) - (grad * out).sum(-1, keepdim=True)) * scale
    dq, dk = torch.matmul(ds, k.to(wide)), torch.matmul(ds.transpose(-1, -2), q.to(wide))
    return dq.to(q.dtype), dk.to(k.dtype), torch.matmul(p.transpose(-1, -2), grad).to(v.dtype)


def _cuda_forward(q, k, v, causal, scale):
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]


def _cuda_backward(grad, q, k, v, out, lse, causal, scale):
    unused = torch.empty((2,), dtype=torch.uint64, device=q.device)  # the state of the dropout that there is none of
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused[0], unused[1], scale=scale
    )


KERNELS = {
    "cpu_fused": Kernel(_cpu_forward, _cpu_backward),
    "cuda_fused": Kernel(_cuda_forward, _cuda_backward),
    "explicit": Kernel(_plain_forward, _plain_backward),
}
"""By name. "cpu_fused" takes FP64, FP32, BF16 and FP16; "cuda_fused" (FlashAttention 2, not run on a GPU yet) BF16 and FP16
with heads up to 256 wide; "explicit" forms [n, p] scores in FP32 at least and runs anywhere."""

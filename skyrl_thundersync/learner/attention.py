"""Bottom-right causal attention over cut states: no mask, no concatenated past, no repeated K/V of the past.

The textbook runs one masked attention over past and own tokens. Here a segment's queries meet every earlier segment in a
fast unmasked call and their own tokens in a square causal call; the partial results are merged by their log-sum-exps.
Each backward call runs on the merged output and log-sum-exp, which makes the sum of the parts exact, and hands the
past's gradient straight to the segment that owns those keys: the adjoint of its cut state (PAPER.md, Algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from skyrl_thundersync.learner.kernels import KERNELS, Kernel

SPAN = 4096
"""Keys of an in-line past met per kernel call; bounds the scores that the explicit route forms."""


class Past(NamedTuple):
    """Keys and values of one earlier segment, in one layer, and where their gradient goes.

    keys, values: [1, G, p, D], detached. `deposit(dk, dv)` takes gradients of the same shapes.
    """

    keys: torch.Tensor
    values: torch.Tensor
    deposit: Callable[[torch.Tensor, torch.Tensor], None]


def _spread(x: torch.Tensor, r: int) -> torch.Tensor:
    """[1, G, t, D] K or V heads, each repeated for its r query heads: [1, G·r, t, D]."""
    if r == 1:
        return x
    return x[:, :, None].expand(1, x.shape[1], r, *x.shape[2:]).reshape(1, x.shape[1] * r, *x.shape[2:])


def _grouped(x: torch.Tensor, groups: int) -> torch.Tensor:
    """[1, G·r, n, …] → [1, G, r·n, …]: the r query heads of one K/V head are r·n queries of it."""
    return x.reshape(1, groups, -1, *x.shape[3:])


def _spans(k: torch.Tensor, v: torch.Tensor, inside: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The first `inside` keys and values in runs of at most SPAN."""
    cuts = [slice(a, min(a + SPAN, inside)) for a in range(0, inside, SPAN)]
    return [(k[:, :, cut], v[:, :, cut]) for cut in cuts]


class SplitCausal(torch.autograd.Function):
    """q [1, H, n, D]; k, v [1, G, p + n, D]; pasts: further keys and values that every query sees. → [1, H, n, D].

    Query i sees all pasts and keys 0 .. p + i. H must be a multiple of G. The pasts' gradients go to their `deposit`.
    """

    @staticmethod
    def forward(ctx, q, k, v, scale, pasts, kernel):
        groups, n = k.shape[1], q.shape[2]
        inside, r = k.shape[2] - n, q.shape[1] // groups
        out, lse = kernel.forward(q, _spread(k[:, :, inside:], r), _spread(v[:, :, inside:], r), True, scale)
        parts = [(past.keys, past.values) for past in pasts] + _spans(k, v, inside)
        if parts:
            merged, grouped = out.to(lse.dtype), _grouped(q, groups)
            for keys, values in parts:
                part, part_lse = kernel.forward(grouped, keys, values, False, scale)
                part, part_lse = part.reshape(out.shape), part_lse.reshape(lse.shape)
                total = torch.logaddexp(part_lse, lse)
                merged = merged.mul_((lse - total).exp_()[..., None])
                merged.add_(part.to(merged.dtype).mul_((part_lse - total).exp_()[..., None]))
                lse = total
            out = merged.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.pasts, ctx.kernel = scale, pasts, kernel
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        kernel, scale, groups, n = ctx.kernel, ctx.scale, k.shape[1], q.shape[2]
        inside, r, grad = k.shape[2] - n, q.shape[1] // k.shape[1], grad.contiguous()
        dq, dk, dv = kernel.backward(
            grad, q, _spread(k[:, :, inside:], r), _spread(v[:, :, inside:], r), out, lse, True, scale
        )
        if r > 1:
            dk, dv = (d.reshape(1, groups, r, n, -1).sum(2) for d in (dk, dv))
        if ctx.pasts or inside:
            dq = dq.to(lse.dtype)
            fixed = [_grouped(x, groups) for x in (grad, q, out, lse)]

            def backward(keys, values):
                g, queries, o, total = fixed
                return kernel.backward(g, queries, keys, values, o, total, False, scale)

            for past in ctx.pasts:
                dq_p, dk_p, dv_p = backward(past.keys, past.values)
                dq += dq_p.reshape(dq.shape)
                past.deposit(dk_p, dv_p)
            dks, dvs = [], []
            for keys, values in _spans(k, v, inside):
                dq_p, dk_p, dv_p = backward(keys, values)
                dq += dq_p.reshape(dq.shape)
                dks.append(dk_p)
                dvs.append(dv_p)
            dk, dv = torch.cat([*dks, dk], 2), torch.cat([*dvs, dv], 2)
            dq = dq.to(q.dtype)
        return dq, dk, dv, None, None, None


def cut_attention(kernel: Kernel, module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """Transformers' attention seam. query [1, H, n, D], key [1, G, p + n, D], value [1, G, p + n, Dv] → [1, n, H, Dv].

    What lies before `key` comes with it: `key.cut.pasts`, where the layer's cache left it (cut_state.py).

    Raises NotImplementedError for attention sinks, logit soft-capping, sliding windows, dropout and batches.
    """
    extras = [name for name in ("s_aux", "softcap", "sliding_window", "position_bias") if kwargs.get(name) is not None]
    if extras or dropout or query.shape[0] != 1 or attention_mask is not None:
        raise NotImplementedError(
            f"{type(module).__name__}: cut attention takes one sequence without mask or dropout; got batch "
            f"{query.shape[0]}, dropout {dropout}, mask {attention_mask is not None}, {', '.join(extras) or 'no extras'}"
        )
    pasts = vars(key).pop("cut").meet() if hasattr(key, "cut") else ()
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    narrow = query.shape[-1] - value.shape[-1]  # MLA: values are narrower than keys; zero columns change nothing
    if narrow:
        value = torch.nn.functional.pad(value, (0, narrow))
    out = SplitCausal.apply(query.contiguous(), key, value, scale, pasts, kernel)
    if narrow:
        out = out[..., :-narrow]
    return out.transpose(1, 2).contiguous(), None


def _no_mask(*args, **kwargs):
    return None


def implementation(kernel: str) -> str:
    """What cut attention by `kernel` (a name of `kernels.KERNELS`) is called in `config._attn_implementation`.

    Transformers takes any name with "flash" in it for one of its own.
    """
    return f"thundersync_cut_{kernel}"


for _name, _kernel in KERNELS.items():
    AttentionInterface.register(implementation(_name), partial(cut_attention, _kernel))
    AttentionMaskInterface.register(implementation(_name), _no_mask)

"""The batch's gradient in one flat host buffer, FP32 whatever the student's dtype (FP64 for an FP64 student).

Gradients leave each parameter the moment autograd has added them up, so the device never holds a model-sized gradient:
there is no `.grad` between backwards. The buffer is laid out in the optimizer's own flat order; a tied parameter has one
place, a frozen one none. The sum is unnormalised: N_k divides at finish (PAPER.md, "OPD, exactly").
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from skyrl_thundersync.learner.fixed_point import check_sum, from_fixed, to_fixed


@dataclass(frozen=True)
class Layout:
    """Where each trainable parameter lies in the flat buffer: (name, parameter, offset); `size`: with padding."""

    places: tuple[tuple[str, torch.nn.Parameter, int], ...]
    size: int


def trainable(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Each trainable parameter once, under its first name. Raises ValueError when there is none."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError("the student has no trainable parameter")
    return named


def contiguous_layout(named: list[tuple[str, torch.nn.Parameter]]) -> Layout:
    """Parameters one after another, in the order given."""
    places, offset = [], 0
    for name, p in named:
        places.append((name, p, offset))
        offset += p.numel()
    return Layout(tuple(places), offset)


class Accumulator:
    """Σ of gradients since `clear`.

    Args:
        layout: where each parameter goes.
        exact: sum in int64 fixed point (learner/fixed_point.py), bit-identical under any order, at twice the host memory.
    """

    def __init__(self, layout: Layout, exact: bool = False):
        self.layout, self.exact = layout, exact
        dtypes = {p.dtype for _, p, _ in layout.places}
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.flat = torch.zeros(layout.size, dtype=torch.int64 if exact else self.dtype)
        self._targets = [(self.flat, 1.0)]
        self._suspect = torch.zeros((), device=layout.places[0][1].device)
        self._handles = [
            p.register_post_accumulate_grad_hook(self._hook(slice(offset, offset + p.numel())))
            for _, p, offset in layout.places
        ]

    @contextmanager
    def collecting(self, targets: list[tuple[torch.Tensor, float]]) -> Iterator[None]:
        """Within it, gradients go to each (buffer like `flat`, factor) of `targets`, not to `flat`. For FP32 sums."""
        outer, self._targets = self._targets, targets
        try:
            yield
        finally:
            self._targets = outer

    def _hook(self, place: slice):
        def collect(p: torch.nn.Parameter) -> None:
            gradient, p.grad = p.grad.detach().reshape(-1), None
            if self.exact:
                self.flat[place].add_(to_fixed(gradient).cpu())
                check_sum(self.flat[place])
                return
            self._suspect += gradient.sum().to(self._suspect.dtype) * 0  # NaN once anything is not finite
            gradient = gradient.cpu()
            for flat, factor in self._targets:
                flat[place].add_(gradient, alpha=factor)

        return collect

    def check(self, work: str) -> None:
        """Raises FloatingPointError naming `work` when a gradient it added was not finite. (Exact sums refuse at once.)"""
        if not self.exact and not bool(torch.isfinite(self._suspect)):
            self._suspect.zero_()
            raise FloatingPointError(
                f"{work}: its gradient is not finite; this batch cannot be stepped, parameters are intact"
            )

    def clear(self) -> None:
        self.flat.zero_()
        self._suspect.zero_()

    def gradient(self) -> dict[str, torch.Tensor]:
        """The sum so far by parameter name, copies in the accumulation dtype."""
        found = {}
        for name, p, offset in self.layout.places:
            part = self.flat[offset : offset + p.numel()]
            found[name] = (from_fixed(part).to(self.dtype) if self.exact else part.clone()).view(p.shape)
        return found

    def detach(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

"""How large an autograd graph will be: predicted, since it is not known before the graph exists.

Two graphs are measured once, at start-up, with saved-tensor hooks; a graph of n tokens after a past of p takes
`per_token · n + per_past · p` bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from skyrl_thundersync.learner.segments import Segment, SegmentModel

PROBE = 64
"""Tokens in each of the two measured graphs: one chunk of the gated-delta rule."""


@dataclass(frozen=True)
class GraphSize:
    """Bytes of a graph: per_token of the segment and per_past token before it. Where layers run again in the backward
    (recompute.py): their inputs and the states that they produced, inputs_per_token and, of states that do not grow with
    their tokens, per_segment."""

    per_token: float
    per_past: float
    inputs_per_token: float
    per_segment: int

    def whole(self, n: int, past: int) -> int:
        return int(self.per_token * n + self.per_past * past)

    def run_again(self, n: int) -> int:
        return int(self.inputs_per_token * n) + self.per_segment


def measure(model: SegmentModel) -> GraphSize:
    """Of a model whose layers do not run again."""
    first = model.segment(None, [0] * PROBE, None)
    at_start = saved_bytes(model, first)
    later = saved_bytes(model, model.segment(first, [0] * PROBE, None))
    own = sum(t[..., first.rows, :].nbytes for pair in first.chunk.buffers for t in pair if t is not None)
    hidden = model.body.config.get_text_config().hidden_size * next(model.body.parameters()).element_size()
    return GraphSize(
        per_token=at_start / PROBE,
        per_past=max(0.0, (later - at_start) / PROBE),
        inputs_per_token=own / PROBE + hidden * len(model.body.layers),
        per_segment=sum(t.nbytes for pair in first.adjoint.state for t in pair if t is not None),
    )


def saved_bytes(model: SegmentModel, segment: Segment) -> int:
    """Bytes that one forward of `segment` keeps for its backward, beside parameters and earlier states."""
    # by storage, not by address: tensors without data, on which the learner is rehearsed, have none
    known = {p.untyped_storage()._cdata for p in model.body.parameters()}
    earlier = [t for held in segment.states() for pair in held.state for t in pair if t is not None]
    known |= {t.untyped_storage()._cdata for t in earlier}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        graph = model.forward(segment, grad=True)
    del graph
    return sum(saved.values())

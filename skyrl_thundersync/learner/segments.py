"""Segments: runs of tokens forwarded once, that form a tree of cut states under each group's prompt.

A segment's inputs run from the last token of its parent to its last action token but one, so each scored token's
predictor is inside the segment and no hidden state needs cutting (docs/design.md, "Alignment"). Unlike the textbook's
K/V cache, a segment can be forwarded again on detached leaves of its ancestors' states, which yields a graph that ends at
the cut; what flows through the cut backwards is kept as the adjoint of each state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.utils.checkpoint import checkpoint

from skyrl_thundersync.learner.attention import Past
from skyrl_thundersync.learner.cut_state import (
    ATTENTION,
    GATED_DELTA,
    LATENT,
    cut_cache,
    layer_kinds,
    require_met,
    step_by_chunks,
)
from skyrl_thundersync.learner.fixed_point import from_fixed
from skyrl_thundersync.learner.graph_size import GraphSize, measure
from skyrl_thundersync.learner.precision import all_double
from skyrl_thundersync.learner.recompute import by_layer
from skyrl_thundersync.learner.state_budget import StateBudget
from skyrl_thundersync.learner.states import SPAN, Adjoint, Chunk

LOGITS_BYTES = 2**29
"""Most bytes of FP32 logits that exist at once, in a forward as in its backward."""


@dataclass
class Scored:
    """The scored tokens of one segment; all of the same length T.

    positions_T: int64, index of each token's predictor among the segment's inputs. ids_T: int64, the sampled tokens.
    scores_T: log π_T as float64, or None without a teacher. sampler_T: the sampler's log-probs, float64.
    sources: name of each token's source, for errors. support: int64 ids and float64 log π_T, both [T, K], of the teacher's
    most probable tokens at each one's position, where the objective asks for them.
    """

    positions_T: torch.Tensor
    ids_T: torch.Tensor
    scores_T: torch.Tensor | None
    sampler_T: torch.Tensor
    sources: list[str]
    support: tuple[torch.Tensor, torch.Tensor] | None = None

    def __len__(self) -> int:
        return len(self.sources)


@dataclass
class Graph:
    """One forward of a segment. hidden [1, n, d]; own: per layer the two state tensors it produced; leaves: per layer the
    detached earlier states it read, where autograd leaves their gradient (None for plain attention, which deposits)."""

    hidden: torch.Tensor
    own: list[list[torch.Tensor]]
    leaves: list[list[torch.Tensor] | None]


@dataclass(eq=False)
class Segment:
    """A node of the tree. `start`: inputs before it on its path; `ids_1n`: its inputs, int64 [1, n].

    `shared`: part of a group's prompt. `exact`: adjoints are summed in fixed point. Once forwarded: K and V are `rows` of
    `chunk`, whose adjoint is theirs too; `adjoint` holds the other layers' states and their adjoint. `graph`: kept from
    arrival where the budget allows.
    """

    parent: Segment | None
    start: int
    ids_1n: torch.Tensor
    scored: Scored | None
    shared: bool = False
    exact: bool = False
    chunk: Chunk | None = None
    rows: slice = slice(0)
    adjoint: Adjoint | None = None
    graph: Graph | None = None

    @property
    def length(self) -> int:
        """Its inputs."""
        return self.ids_1n.shape[1]

    @property
    def end(self) -> int:
        return self.start + self.length

    def path(self) -> list[Segment]:
        """Root first, this segment last."""
        nodes, node = [], self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def past(self) -> list[tuple[Chunk, int]]:
        """The chunks before this segment, root first, and how many rows of each are on its path."""
        found: list[tuple[Chunk, int]] = []
        for node in self.path()[:-1]:
            if found and found[-1][0] is node.chunk:
                found.pop()
            found.append((node.chunk, node.rows.stop))
        return found

    @property
    def run(self) -> bool:
        """Whether it was forwarded, so that it has a state."""
        return self.chunk is not None

    def states(self) -> list[Adjoint]:
        """The states and adjoints on its path, its own included where it has them, root first."""
        nodes = [node for node in self.path() if node.run]
        return list(dict.fromkeys(held for node in nodes for held in (node.chunk.adjoint, node.adjoint)))

    @property
    def has_adjoint(self) -> bool:
        return self.run and max(self.chunk.adjoint.covered - self.rows.start, self.adjoint.covered) > 0

    def free(self) -> None:
        """Let go of everything but the tokens."""
        self.chunk = self.adjoint = self.graph = self.scored = None

    def cotangents(
        self, own: list[list[torch.Tensor]], apart: bool = False
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs (state tensor of this graph, its adjoint in the state's dtype), where both matter; all on the device.

        apart: the adjoint of the reward part alone.
        """
        if not self.has_adjoint:
            return
        rowed, other = ((a.apart if apart else a.sums) for a in (self.chunk.adjoint, self.adjoint))
        for layer, pair in enumerate(own):
            for part, state in enumerate(pair):
                total = rowed and rowed[layer][part]
                if total is not None:
                    total = total[..., self.rows, :]
                elif other is not None:
                    total = other[layer][part]
                if total is not None and state.requires_grad:
                    yield state, (from_fixed(total) if self.exact else total).to(state.dtype)


class SegmentModel:
    """The student seen segment by segment.

    Args:
        causal_lm: a Transformers causal LM whose attention is one of `attention.implementation`, in eval mode.
        states: where cut states and adjoints lie; by default all on the model's device.
        graph_limit: bytes of the largest graph of one pass; a segment with a larger one runs its layers again in the
            backward. None: no limit.

    Raises NotImplementedError (from `layer_kinds`) for models whose segments cannot be cut exactly.
    """

    def __init__(self, causal_lm: torch.nn.Module, states: StateBudget | None = None, graph_limit: int | None = None):
        self.states, self.graph_limit = states or StateBudget(), graph_limit
        self.kinds = layer_kinds(causal_lm.config)
        self.body = getattr(causal_lm, causal_lm.base_model_prefix)
        step_by_chunks(self.body)
        self.head = causal_lm.get_output_embeddings()
        self.rows = causal_lm.get_input_embeddings().num_embeddings
        first = next(causal_lm.parameters())
        self.device = first.device
        self.precision = all_double if first.dtype == torch.float64 else nullcontext

    @cached_property
    def graph_size(self) -> GraphSize:
        """Measured when it is first asked for."""
        limit, self.graph_limit = self.graph_limit, None
        size = measure(self)
        self.graph_limit = limit
        return size

    def runs_again(self, n: int, past: int) -> bool:
        """Whether the layers of a segment of `n` tokens after `past` run again in its backward."""
        return self.graph_limit is not None and self.graph_size.whole(n, past) > self.graph_limit

    def graph_bytes(self, n: int, past: int) -> int:
        """Predicted bytes of the graph of `n` tokens after `past`."""
        return self.graph_size.run_again(n) if self.runs_again(n, past) else self.graph_size.whole(n, past)

    def segment(
        self,
        parent: Segment | None,
        ids: list[int],
        scored: Scored | None,
        shared: bool = False,
        exact: bool = False,
    ) -> Segment:
        """A new, unrun child of `parent` with inputs `ids`."""
        ids_1n = torch.tensor([ids], dtype=torch.long, device=self.device)
        return Segment(parent, parent.end if parent else 0, ids_1n, scored, shared, exact)

    def forward(self, segment: Segment, grad: bool) -> Graph:
        """Run one segment on its ancestors' states; with `grad`, as a graph that ends at detached leaves of them."""
        self.states.bring(segment.states())
        past, pasts, leaves = segment.past(), {}, []
        for layer, kind in enumerate(self.kinds):
            if not past:
                leaves.append(None)
            elif kind == ATTENTION:
                leaves.append(None)
                pasts[layer] = tuple(_past(chunk, rows, layer) for chunk, rows in past)
            elif kind == LATENT:
                joined = [
                    _joined([chunk.buffers[layer][part][..., :rows, :] for chunk, rows in past]) for part in (0, 1)
                ]
                leaves.append([t.requires_grad_(grad) for t in joined])
            else:
                leaves.append([t.detach().requires_grad_(grad) for t in segment.parent.adjoint.state[layer]])
        cache = cut_cache(self.kinds, segment.start, leaves, pasts)
        positions = torch.arange(segment.start, segment.end, device=self.device)[None]
        again = grad and self.runs_again(segment.ids_1n.shape[1], segment.start)
        layers = by_layer(self.body, self.precision) if again else nullcontext()
        with torch.set_grad_enabled(grad), self.precision(), layers:
            hidden = self.body(
                input_ids=segment.ids_1n, position_ids=positions, past_key_values=cache, use_cache=True
            ).last_hidden_state
        require_met(cache)
        own = [layer.own for layer in cache.layers]
        if not segment.run:
            self._keep(segment, [[t.detach() for t in pair] for pair in own])
        return Graph(hidden, own, leaves)

    def _keep(self, segment: Segment, own: list[list[torch.Tensor]]) -> None:
        """Copy what a forward produced to where it stays: K and V behind the parent's where there is room."""
        parent, n = segment.parent, segment.ids_1n.shape[1]
        rowed = [pair if kind != GATED_DELTA else None for kind, pair in zip(self.kinds, own, strict=True)]
        chunk = parent.chunk if parent and parent.shared == segment.shared else None
        if chunk is None or chunk.used != parent.rows.stop or chunk.used + n > chunk.capacity:
            chunk = Chunk(rowed, max(n, min(SPAN, max(2 * n, segment.start))), segment.exact)
            self.states.add(chunk.adjoint)
        segment.chunk, segment.rows = chunk, chunk.append(rowed, n)
        # a clone keeps no larger tensor alive behind a view
        others = [[None, None] if kind != GATED_DELTA else [t.clone() for t in pair] for kind, pair in
                  zip(self.kinds, own, strict=True)]  # fmt: skip
        segment.adjoint = Adjoint(others, segment.exact)
        self.states.add(segment.adjoint)

    def logp(self, hidden: torch.Tensor, scored: Scored) -> torch.Tensor:
        """log π_θ of the scored tokens, each followed by those of its support: [T, 1 + K], FP32 at least, differentiable.

        Where their logits would be large they are formed for some rows at a time, and again in the backward.
        """
        hidden_Td, rows = hidden[0, scored.positions_T], max(1, LOGITS_BYTES // (4 * self.rows))
        ids_TI = scored.ids_T[:, None]
        if scored.support is not None:
            ids_TI = torch.cat([ids_TI, scored.support[0]], -1)
        if len(scored) <= rows:
            return self._logp(hidden_Td, ids_TI)
        parts = zip(hidden_Td.split(rows), ids_TI.split(rows), strict=True)
        return torch.cat(
            [checkpoint(self._logp, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
        )

    def _logp(self, hidden_Td: torch.Tensor, ids_TI: torch.Tensor) -> torch.Tensor:
        logits_TV = self.head(hidden_Td)
        logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
        return logits_TV.gather(-1, ids_TI) - torch.logsumexp(logits_TV, -1, keepdim=True)

    def deposit_leaves(self, segment: Segment, graph: Graph) -> None:
        """After a backward through `graph`: the leaves' gradients go to the segments that own those states."""
        for layer, pair in enumerate(graph.leaves):
            for part, leaf in enumerate(pair or []):
                if leaf.grad is None:
                    continue
                gradient, leaf.grad = leaf.grad, None
                if self.kinds[layer] == GATED_DELTA:
                    segment.parent.adjoint.deposit(layer, part, gradient)
                    continue
                start = 0
                for chunk, rows in segment.past():
                    chunk.adjoint.deposit(layer, part, gradient[..., start : start + rows, :])
                    start += rows


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """The parts one after another, detached. Of one part a view whose version does not count later writes behind it."""
    return parts[0].data if len(parts) == 1 else torch.cat(parts, -2)


def _past(chunk: Chunk, rows: int, layer: int) -> Past:
    def deposit(dk: torch.Tensor, dv: torch.Tensor) -> None:
        chunk.adjoint.deposit(layer, 0, dk)
        chunk.adjoint.deposit(layer, 1, dv)

    keys, values = chunk.buffers[layer]
    return Past(keys[..., :rows, :], values[..., :rows, :], deposit)


def pieces(n: int, size: int) -> Iterator[slice]:
    """Cut `n` tokens into nearly equal runs of at least `size` (one run when n < 2·size or size is 0)."""
    count = max(1, n // size) if size else 1
    bounds = [n * i // count for i in range(count + 1)]
    return (slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if b > a)

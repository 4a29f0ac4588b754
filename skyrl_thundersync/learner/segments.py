"""Segments: runs of tokens forwarded once, that form a tree of cut states under each group's prompt.

A segment's inputs run from the last token of its parent to its last action token but one, so each scored token's
predictor is inside the segment and no hidden state needs cutting (docs/design.md, "Alignment"). Unlike the textbook's
K/V cache, a segment can be forwarded again on detached leaves of its ancestors' states, which yields a graph that ends at
the cut; what flows through the cut backwards is kept as the adjoint of each state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from skyrl_thundersync.learner.attention import Past, attending
from skyrl_thundersync.learner.cut_state import ATTENTION, GATED_DELTA, LATENT, cut_cache, layer_kinds
from skyrl_thundersync.learner.fixed_point import from_fixed, to_fixed
from skyrl_thundersync.learner.precision import all_double


@dataclass
class Scored:
    """The scored tokens of one segment; all of the same length T.

    positions_T: int64, index of each token's predictor among the segment's inputs. ids_T: int64, the sampled tokens.
    scores_T: log π_T as float64, or None without a teacher. sampler_T: the sampler's log-probs, float64.
    sources: name of each token's source, for errors.
    """

    positions_T: torch.Tensor
    ids_T: torch.Tensor
    scores_T: torch.Tensor | None
    sampler_T: torch.Tensor
    sources: list[str]

    def __len__(self) -> int:
        return len(self.sources)


@dataclass
class Graph:
    """One forward of a segment. hidden [1, n, d]; own: per layer the two state tensors it produced; leaves: per layer the
    detached earlier states it read, where autograd leaves their gradient (None for plain attention, which deposits)."""

    hidden: torch.Tensor
    own: list[list[torch.Tensor]]
    leaves: list[list[torch.Tensor] | None]


Adjoint = list[list[torch.Tensor | None]]


def empty_adjoint(layers: int) -> Adjoint:
    """No gradient yet with respect to either state tensor of any layer."""
    return [[None, None] for _ in range(layers)]


@dataclass(eq=False)
class Segment:
    """A node of the tree. `start`: inputs before it on its path; `ids_1n`: its inputs, int64 [1, n].

    `state`: per layer two detached tensors, once forwarded. `adjoint`: per layer the gradient of the objective with
    respect to them so far, FP32 at least, allocated on first use. `graph`: kept from arrival where the budget allows.
    `exact`: adjoints are summed in fixed point, so the order in which descendants deposit cannot matter. `targets`: where
    deposits go instead of `adjoint`, and with which factor.
    """

    parent: Segment | None
    start: int
    ids_1n: torch.Tensor
    scored: Scored | None
    state: list[list[torch.Tensor]] | None = None
    adjoint: Adjoint = field(default_factory=list)
    graph: Graph | None = None
    exact: bool = False
    targets: list[tuple[Adjoint, float]] | None = None

    @property
    def end(self) -> int:
        return self.start + self.ids_1n.shape[1]

    def path(self) -> list[Segment]:
        """Root first, this segment last."""
        nodes, node = [], self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def has_adjoint(self) -> bool:
        return any(part is not None for pair in self.adjoint for part in pair)

    def deposit(self, layer: int, part: int, gradient: torch.Tensor) -> None:
        """Add a descendant's gradient to the adjoint of one state tensor, in FP32 or the state's wider dtype."""
        if self.exact:
            pair, fixed = self.adjoint[layer], to_fixed(gradient)
            pair[part] = fixed if pair[part] is None else pair[part].add_(fixed)
            return
        for adjoint, factor in self.targets or [(self.adjoint, 1.0)]:
            pair = adjoint[layer]
            if pair[part] is None:
                wide = torch.promote_types(gradient.dtype, torch.float32)
                pair[part] = torch.zeros(gradient.shape, dtype=wide, device=gradient.device)
            pair[part].add_(gradient, alpha=factor)

    @contextmanager
    def collecting(self, targets: list[tuple[Adjoint, float]]) -> Iterator[None]:
        """Within it, deposits are added to each (adjoint, factor) of `targets`, and not to the segment's own."""
        self.targets = targets
        try:
            yield
        finally:
            self.targets = None

    def cotangents(self, own: list[list[torch.Tensor]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs (state tensor of this graph, its adjoint in the state's dtype), where both matter."""
        for pair, adjoint in zip(own, self.adjoint, strict=True):
            for state, total in zip(pair, adjoint, strict=True):
                if total is not None and state.requires_grad:
                    yield state, (from_fixed(total) if self.exact else total).to(state.dtype)


class SegmentModel:
    """The student seen segment by segment.

    Args:
        causal_lm: a Transformers causal LM whose attention implementation is `attention.NAME`, in eval mode.

    Raises NotImplementedError (from `layer_kinds`) for models whose segments cannot be cut exactly.
    """

    def __init__(self, causal_lm: torch.nn.Module):
        self.kinds = layer_kinds(causal_lm.config)
        self.body = getattr(causal_lm, causal_lm.base_model_prefix)
        self.head = causal_lm.get_output_embeddings()
        self.rows = causal_lm.get_input_embeddings().num_embeddings
        first = next(causal_lm.parameters())
        self.device = first.device
        self.precision = all_double if first.dtype == torch.float64 else nullcontext

    def segment(self, parent: Segment | None, ids: list[int], scored: Scored | None, exact: bool = False) -> Segment:
        """A new, unrun child of `parent` with inputs `ids`."""
        ids_1n = torch.tensor([ids], dtype=torch.long, device=self.device)
        adjoint = empty_adjoint(len(self.kinds))
        return Segment(parent, parent.end if parent else 0, ids_1n, scored, adjoint=adjoint, exact=exact)

    def forward(self, segment: Segment, grad: bool) -> Graph:
        """Run one segment on its ancestors' states; with `grad`, as a graph that ends at detached leaves of them."""
        ancestors, pasts, leaves = segment.path()[:-1], {}, []
        for layer, kind in enumerate(self.kinds):
            if not ancestors:
                leaves.append(None)
            elif kind == ATTENTION:
                leaves.append(None)
                pasts[layer] = tuple(_past(node, layer) for node in ancestors)
            elif kind == LATENT:
                joined = [torch.cat([node.state[layer][part] for node in ancestors], -2) for part in (0, 1)]
                leaves.append([t.requires_grad_(grad) for t in joined])
            else:
                leaves.append([t.detach().requires_grad_(grad) for t in segment.parent.state[layer]])
        cache = cut_cache(self.kinds, segment.start, leaves)
        positions = torch.arange(segment.start, segment.end, device=self.device)[None]
        with torch.set_grad_enabled(grad), attending(pasts), self.precision():
            hidden = self.body(
                input_ids=segment.ids_1n, position_ids=positions, past_key_values=cache, use_cache=True
            ).last_hidden_state
        own = [layer.own for layer in cache.layers]
        if segment.state is None:
            segment.state = [[_compact(t) for t in pair] for pair in own]
        return Graph(hidden, own, leaves)

    def logp(self, hidden: torch.Tensor, scored: Scored) -> torch.Tensor:
        """log π_θ of the scored tokens: [T], FP32 at least, differentiable."""
        logits_TV = self.head(hidden[0, scored.positions_T])
        logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
        return logits_TV.gather(-1, scored.ids_T[:, None])[:, 0] - torch.logsumexp(logits_TV, -1)

    def deposit_leaves(self, segment: Segment, graph: Graph) -> None:
        """After a backward through `graph`: hand the leaves' gradients to the segments that own those states."""
        for layer, pair in enumerate(graph.leaves):
            for part, leaf in enumerate(pair or []):
                if leaf.grad is None:
                    continue
                if self.kinds[layer] == GATED_DELTA:
                    segment.parent.deposit(layer, part, leaf.grad)
                    continue
                for node in segment.path()[:-1]:
                    node.deposit(layer, part, leaf.grad[..., node.start : node.end, :])


def _compact(t: torch.Tensor) -> torch.Tensor:
    """Detached, and without a larger tensor kept alive behind a view."""
    return t.detach().clone() if t.untyped_storage().nbytes() > t.nbytes else t.detach()


def _past(node: Segment, layer: int) -> Past:
    def deposit(dk: torch.Tensor, dv: torch.Tensor) -> None:
        node.deposit(layer, 0, dk)
        node.deposit(layer, 1, dv)

    return Past(*node.state[layer], deposit)


def pieces(n: int, size: int) -> Iterator[slice]:
    """Cut `n` tokens into nearly equal runs of at least `size` (one run when n < 2·size or size is 0)."""
    count = max(1, n // size) if size else 1
    bounds = [n * i // count for i in range(count + 1)]
    return (slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if b > a)

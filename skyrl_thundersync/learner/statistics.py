"""GRPO's streaming statistics of one open group: G1 = Σ r_i H_i and G2 = Σ H_i, FP32 on the host (PAPER.md, "GRPO, exactly").

A trajectory is swept when it closes, though its group's mean and deviation are not known yet. Its gradient H_i goes into
both sums, and what its sweep leaves on the shared prompt into two adjoints. When the group closes, g = c·(G1 − b·G2) joins
the batch's gradient and c·(adj1 − b·adj2) the prompt's adjoint; for the population law c = 1/(m(σ+ε)) and b = μ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from skyrl_thundersync.learner.accumulate import Accumulator
from skyrl_thundersync.learner.segments import Segment


class GroupStatistics:
    """The sums of one group, two model-sized buffers; `samples`: whose H_i they hold."""

    def __init__(self, accumulator: Accumulator, prompt: list[Segment]):
        self.accumulator, self.samples = accumulator, set()
        self.g1, self.g2 = torch.zeros_like(accumulator.flat), torch.zeros_like(accumulator.flat)
        chunks = {id(node.chunk): node.chunk for node in prompt}.values()
        self._prompt = [
            (adjoint, adjoint.beside(), adjoint.beside())
            for adjoint in [node.adjoint for node in prompt] + [chunk.adjoint for chunk in chunks]
        ]

    @contextmanager
    def collecting(self, sample: int, reward: float) -> Iterator[None]:
        """Within it, gradients of `sample` and what they leave on the prompt are H_i: summed with weights r_i and 1."""
        self.samples.add(sample)
        with ExitStack() as stack:
            stack.enter_context(self.accumulator.collecting([(self.g1, reward), (self.g2, 1.0)]))
            for adjoint, first, second in self._prompt:
                stack.enter_context(adjoint.collecting([(first, reward), (second, 1.0)]))
            yield

    def close(self, b: float, c: float) -> None:
        """Add c·(G1 − b·G2) to the batch's gradient and the same of the adjoints to the prompt's; c = 0 adds nothing.

        The prompt's states must be on the device.
        """
        if c == 0.0:
            return
        self.accumulator.flat.add_(self.g1.sub_(self.g2, alpha=b), alpha=c)
        for adjoint, first, second in self._prompt:
            for layer, pair in enumerate(first):
                for part, adj1 in enumerate(pair):
                    if adj1 is not None:
                        adjoint.deposit(layer, part, adj1.sub_(second[layer][part], alpha=b).mul_(c))

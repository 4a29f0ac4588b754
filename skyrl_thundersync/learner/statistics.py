"""GRPO's streaming statistics of one open group: G1 = Σ (r_i − o) H_i and G2 = Σ H_i (PAPER.md, "GRPO, exactly").

A trajectory is swept when it closes, though its group's mean and deviation are not known yet. Its gradient H_i goes into
both sums, and what its sweep leaves on the shared prompt into two adjoints. When the group closes, g = c·(G1 − b·G2) joins
the batch's gradient and c·(adj1 − b·adj2) the prompt's adjoint; for the population law c = 1/(m(σ+ε)) and b = μ − o. The
origin o is the first reward that arrived: the terms then are no larger than the rewards' spread, however far they lie from 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from skyrl_thundersync.learner.accumulate import Accumulator
from skyrl_thundersync.learner.segments import Segment
from skyrl_thundersync.learner.states import Adjoint, Sums


class GroupStatistics:
    """The sums of one group, two model-sized host buffers in the accumulation dtype, and two beside each prompt adjoint.

    origin: o, the group's first reward.
    """

    def __init__(self, accumulator: Accumulator, origin: float):
        self.accumulator, self.origin = accumulator, origin
        self.g1, self.g2 = torch.zeros_like(accumulator.flat), torch.zeros_like(accumulator.flat)
        self._prompt: dict[Adjoint, tuple[Sums, Sums]] = {}

    @contextmanager
    def collecting(self, reward: float, prompt: list[Segment]) -> Iterator[None]:
        """Within it, gradients and what they leave on the group's `prompt` are of one H_i: summed with r_i − o and 1."""
        weight = reward - self.origin
        with ExitStack() as stack:
            stack.enter_context(self.accumulator.collecting([(self.g1, weight), (self.g2, 1.0)]))
            for adjoint in dict.fromkeys(held for node in prompt for held in (node.adjoint, node.chunk.adjoint)):
                if adjoint not in self._prompt:
                    self._prompt[adjoint] = adjoint.beside(), adjoint.beside()
                first, second = self._prompt[adjoint]
                stack.enter_context(adjoint.collecting([(first, weight), (second, 1.0)]))
            yield

    def close(self, b: float, c: float) -> None:
        """Add c·(G1 − b·G2) to the batch's gradient and the same of the adjoints to the prompt's; c = 0 adds nothing.

        The prompt's states must be on the device.
        """
        if c == 0.0:
            return
        self.accumulator.flat.add_(self.g1.sub_(self.g2, alpha=b), alpha=c)
        for adjoint, (first, second) in self._prompt.items():
            for layer, pair in enumerate(first):
                for part, adj1 in enumerate(pair):
                    if adj1 is not None:
                        adjoint.deposit(layer, part, adj1.sub_(second[layer][part], alpha=b).mul_(c))

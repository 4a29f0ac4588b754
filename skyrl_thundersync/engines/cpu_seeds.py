"""Seeded requests whose prompt vLLM's CPU backend prefills in parts.

vLLM samples at the end of every part, discards what the unfinished ones gave, and turns their generators back by an offset.
CPU generators have none: the engine died as soon as a batch of seeded prompts was larger than `max_num_batched_tokens`. Here
their state is put back instead, so a seed gives the same tokens however its prompt was split.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class StatefulGenerator(torch.Generator):
    """A CPU generator that takes vLLM's turning back for granted."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """Nothing: `take_back_discarded` has put the state back."""


def take_back_discarded(worker: Any) -> None:
    """Make a vLLM worker's sampler undo the draws of unfinished prefills. Call it once, before the first request."""
    runner = worker.model_runner
    sample = runner._sample

    def sample_and_take_back(*args: Any, **kwargs: Any) -> Any:
        batch, before = runner.input_batch, []
        for index in np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0].tolist():
            generator = batch.generators.get(index)
            if generator is None:
                continue
            if not isinstance(generator, StatefulGenerator):
                own = StatefulGenerator()
                own.set_state(generator.get_state())
                # The batch's may leave and come back with its request.
                generator = batch.generators[index] = runner.requests[batch.req_ids[index]].generator = own
            before.append((generator, generator.get_state()))
        output = sample(*args, **kwargs)
        for generator, state in before:
            generator.set_state(state)
        return output

    runner._sample = sample_and_take_back

"""Layers that keep their inputs alone and run again in the backward: a fifth to a fiftieth of a graph, for one more forward.

The textbook's activation checkpointing drops the cache, which a segment's layers read and write. Here a layer run again reads
the same cut states, and what it would write is there already (cut_state.py); gradients still flow into the states that the
first run produced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.utils.checkpoint import checkpoint


@contextmanager
def by_layer(body: torch.nn.Module, precision: Callable[[], AbstractContextManager]) -> Iterator[None]:
    """Within it, a forward of `body` keeps each layer's inputs, and the backward runs layers again, within `precision`."""

    def redone(forward: Callable) -> Callable:
        def within(*args, **kwargs):
            with precision():
                return forward(*args, **kwargs)

        def layer(*args, **kwargs):
            # evaluation mode draws no random numbers, so there is no state of a generator to keep
            return checkpoint(within, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return layer

    for layer in body.layers:
        layer.forward = redone(layer.forward)
    try:
        yield
    finally:
        for layer in body.layers:
            del layer.forward

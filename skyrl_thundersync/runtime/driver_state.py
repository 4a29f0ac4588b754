"""What a resumed driver goes on with beside the checkpoint's weights: its place in the data, and its random generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any


class Continued:
    """A dataloader that has gone through `taken` batches: its next epoch is the rest of the one they end in.

    The stock loader's saved state yields an empty epoch at an epoch's boundary, and other orders in later epochs. A fresh
    loader of the same seed, taken the same way, is where the first run's was.
    """

    def __init__(self, loader, taken: int) -> None:
        self._loader = loader
        epochs, batches = divmod(taken, len(loader))
        for _ in range(epochs):
            for _ in loader:
                pass
        self._rest: Iterator | None = None
        if batches:
            self._rest = iter(loader)
            for _ in range(batches):
                next(self._rest)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator:
        rest, self._rest = self._rest, None
        return rest if rest is not None else iter(self._loader)


def driver_random_state() -> dict[str, Any]:
    """The states of this process's generators (random, NumPy, torch on the host), as JSON."""
    import numpy
    import torch

    state = numpy.random.get_state(legacy=False)
    numbers = {**state["state"], "key": state["state"]["key"].tolist()}
    return {
        "random": random.getstate(),
        "numpy": {**state, "state": numbers},
        "torch": torch.get_rng_state().tolist(),
    }


def restore_driver_random_state(state: dict[str, Any]) -> None:
    """Put back what `driver_random_state` gave, after a trip through JSON."""
    import numpy
    import torch

    version, words, gauss = state["random"]
    random.setstate((version, tuple(words), gauss))
    numbers = state["numpy"]["state"]
    key = numpy.array(numbers["key"], dtype=numpy.uint32)
    numpy.random.set_state({**state["numpy"], "state": {**numbers, "key": key}})
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))

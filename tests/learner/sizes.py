"""Bytes of the tensors that PyTorch's operators make, as they come and go."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class Sizes(TorchDispatchMode):
    """Within it: live and peak bytes of storages made since, and the elements of the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, lambda tensor: self._count(tensor, given), result)
        return result

    def _count(self, tensor: torch.Tensor, given: set[int]) -> None:
        storage = tensor.untyped_storage()
        self.largest = max(self.largest, tensor.numel())
        if (key := storage._cdata) not in self._known and key not in given:  # those given are what views are of
            self._known.add(key)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size

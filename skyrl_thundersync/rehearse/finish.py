"""The update's finish: `ZeroOptimizer.step` itself, over a stand-in for DeepSpeed's engine and a process group without peers.

DeepSpeed builds its engine on real memory. Its part of the step is a shard of FP32 masters and two moments, torch's fused
AdamW on it, the rounded parameters written back and gathered from all ranks; that is what the stand-in does.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.distributed as dist

from skyrl_thundersync.learner.accumulate import Layout, contiguous_layout, trainable
from skyrl_thundersync.learner.zero import ZeroOptimizer, route
from skyrl_thundersync.options.schema import LearnerConfig, OptimizerSettings
from skyrl_thundersync.rehearse.accounting import Accounting

ALIGNMENT = 2
"""Elements that DeepSpeed pads each rank's shard to, times the ranks."""


def _alone(ranks: int) -> dist.ProcessGroup:
    """A group of so many ranks whose collectives move nothing. No other code of this process sees it."""
    from torch._C._distributed_c10d import FakeProcessGroup
    from torch.testing._internal.distributed.fake_pg import FakeStore

    group, kind = dist.ProcessGroup(FakeStore(), 0, ranks), dist.ProcessGroup.BackendType.CUSTOM
    backend = FakeProcessGroup._create_internal(0, ranks)
    group._set_default_backend(kind)
    for device in ("cpu", "meta"):
        group._register_backend(torch.device(device), kind, backend)
    return group


class _Sharded:
    """DeepSpeed's ZeRO optimizer, as `ZeroOptimizer.step` sees it."""

    def __init__(self, flat: torch.Tensor, shard: int, offload: bool, group: dist.ProcessGroup):
        self._group = group
        self.bit16_groups_flat, self.averaged_gradients = [flat], {}
        where = "cpu" if offload else flat.device
        self._master = torch.zeros(shard, dtype=torch.float32, device=where)
        self._moments = [torch.zeros_like(self._master) for _ in range(2)]
        if offload:
            self._master.grad = torch.zeros_like(self._master)
        self.single_partition_of_fp32_groups = [self._master]
        self.optimizer = SimpleNamespace(param_groups=[{"lr": 0.0}])

    def step(self) -> None:
        gradient = self._master.grad if not self.averaged_gradients else torch.cat(self.averaged_gradients.pop(0))
        torch._fused_adamw_(
            [self._master], [gradient], self._moments[:1], self._moments[1:], [], [torch.zeros((), device=gradient.device)],
            lr=0.0, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        flat = self.bit16_groups_flat[0]
        own = flat[: self._master.numel()]
        own.copy_(self._master)
        dist.all_gather_single(flat, own, group=self._group)


def optimizer_of(accounting: Accounting, model: torch.nn.Module, learner: LearnerConfig, ranks: int) -> ZeroOptimizer:
    """The optimizer of one rank among `ranks`; the trainable parameters' storage becomes its flat buffer, as DeepSpeed's."""
    named = trainable(model)
    places = contiguous_layout(named)
    shard = -(-places.size // (ranks * ALIGNMENT)) * ALIGNMENT
    first = named[0][1]
    with accounting.tagged("weights"):
        flat = torch.empty(shard * ranks, dtype=first.dtype, device=first.device)
    for _, p, offset in places.places:
        p.data = flat[offset : offset + p.numel()].view(p.shape)
    optimizer = object.__new__(ZeroOptimizer)
    optimizer.group = _alone(ranks)
    with accounting.tagged("optimizer"):
        optimizer.optimizer = _Sharded(flat, shard, learner.offload_optimizer, optimizer.group)
    optimizer.route = route(learner.zero_stage, learner.offload_optimizer, learner.dtype)
    optimizer.settings, optimizer.layout = OptimizerSettings(), Layout(places.places, flat.numel())
    optimizer.shard_size, optimizer.schedule = shard, SimpleNamespace(step=lambda: None)
    return optimizer

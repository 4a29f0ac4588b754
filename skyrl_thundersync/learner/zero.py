"""DeepSpeed's ZeRO-1/2 sharded AdamW, fed with the batch's own reduced gradient.

DeepSpeed usually owns the backward and compiles its own Adam. Here it sees shadow parameters that share storage with the
student's: none of its gradient hooks ever fires, so no collective runs before finish and ranks may do uneven work. At
finish the accumulated sum is reduce-scattered in buckets, divided by N_k, its global norm taken and clipped, and each
rank's shard put where DeepSpeed's step reads it. The step is torch's fused AdamW on FP32 masters, on every route.
"""

from __future__ import annotations

import os
import socket
import time

import torch
import torch.distributed as dist
from transformers import get_scheduler

from skyrl_thundersync.learner.accumulate import Accumulator, Layout
from skyrl_thundersync.learner.answers import Step
from skyrl_thundersync.learner.fixed_point import from_fixed, root_of_squares, square_sum
from skyrl_thundersync.options.schema import OptimizerSettings
from skyrl_thundersync.process.heartbeat import doing

ROUTES = {
    (stage, offload, dtype): "host shard" if offload else "averaged gradients"
    for stage in (1, 2)
    for offload in (False, True)
    for dtype in ("float32", "bfloat16")
}
"""(stage, optimizer offload, student dtype) → where DeepSpeed's step reads the shard. All else is refused.

"host shard": `single_partition_of_fp32_groups[0].grad`. "averaged gradients": `averaged_gradients[0]`, with DeepSpeed's own
norm off. DeepSpeed's `grad_accum_dtype` stays unset: setting it with BF16 and stage 1 selects another optimizer wrapper,
which keeps a model-sized FP32 gradient on the device.
"""

BUCKET = 2**25
"""Elements of each rank's shard reduced at a time."""

UNIT = 16
"""A shard is a multiple of so many elements: a cache line of FP32, by which torch's fused AdamW cuts its work, and no less
than a vector register holds. What is left over at a shard's end would be computed one by one, and rounded otherwise."""


def route(stage: int, offload: bool, dtype: str) -> str:
    """The route of ROUTES, before any model is loaded.

    Raises NotImplementedError for stage 3 (passes would become collective) and for combinations that have no route.
    """
    if stage == 3:
        raise NotImplementedError(
            "thundersync.learner.zero_stage=3 shards parameters, so every forward and backward would be a collective that "
            "ranks with uneven work cannot agree on; use stage 1 or 2"
        )
    if (stage, offload, dtype) not in ROUTES:
        raise NotImplementedError(
            f"no optimizer route for thundersync.learner.zero_stage={stage}, offload_optimizer={offload}, dtype={dtype}; "
            f"stages 1 and 2 with float32 or bfloat16 have one"
        )
    return ROUTES[stage, offload, dtype]


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now, for `connect`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def interface_to(address: str) -> str:
    """The network interface by which this machine reaches an IPv4 address, or which has it. Sends nothing."""
    import psutil

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        own = probe.getsockname()[0]
    return next(name for name, held in psutil.net_if_addrs().items() if own in {entry.address for entry in held})


def connect(rank: int, world_size: int, address: str, port: int, device: str) -> None:
    """Join the learner's process group: gloo on CPU, NCCL on CUDA. Joining the same group twice is a no-op.

    Between machines it goes over the interface that leads to `address`, unless the environment names one.

    Raises RuntimeError when this process is already in a group of another shape.
    """
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise RuntimeError(
                f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already and cannot become learner rank "
                f"{rank} of {world_size}"
            )
        return
    if not address.startswith("127."):
        name = interface_to(address)
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, name)
    backend = "nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://{address}:{port}", rank=rank, world_size=world_size)


class ZeroOptimizer:
    """One rank of the sharded optimizer.

    Args:
        named: the trainable parameters, each once. Their storage becomes DeepSpeed's flat buffer, padded so that every shard
            is whole `UNIT`s: an element's update then has the same bits on any number of ranks.
        stage, offload, dtype: see `route`.
        settings: AdamW and its schedule.

    Attributes:
        group: of the ranks; None: the process's default one.
    """

    group: dist.ProcessGroup | None = None

    def __init__(
        self,
        named: list[tuple[str, torch.nn.Parameter]],
        stage: int,
        offload: bool,
        dtype: str,
        settings: OptimizerSettings,
    ):
        self.route, self.settings = route(stage, offload, dtype), settings
        os.environ.setdefault("LOCAL_RANK", "0")
        first = named[0][1]
        if first.device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # also on a machine that has a GPU
        import deepspeed  # slow to import, and only ranks that step need it

        # Its shared-memory collectives would be compiled at first use, and serve no reduce-scatter.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        zero = {"stage": stage} | (
            {"offload_optimizer": {"device": "cpu"}} if offload else {"compute_grad_norm": False}
        )
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": zero,
            "bf16": {"enabled": dtype == "bfloat16"},
            "zero_force_ds_cpu_optimizer": False,
        }
        padding = -sum(p.numel() for _, p in named) % (UNIT * dist.get_world_size())
        shadow = torch.nn.ParameterList(torch.nn.Parameter(p.data) for _, p in named)
        shadow.append(torch.nn.Parameter(first.new_zeros(padding)))
        adam = torch.optim.AdamW(
            shadow, lr=settings.lr, betas=tuple(settings.adam_betas), weight_decay=settings.weight_decay, fused=True
        )
        self.engine, self.optimizer, _, _ = deepspeed.initialize(model=shadow, optimizer=adam, config=config)
        twins = list(shadow)[: len(named)]
        for (_, p), twin in zip(named, twins, strict=True):
            p.data = twin.data
        names = {id(twin): place for twin, place in zip(twins, named, strict=True)}
        offsets = self.optimizer.round_robin_bit16_offsets[0]
        places = [
            (*names[id(twin)], offset)
            for twin, offset in zip(self.optimizer.round_robin_bit16_groups[0], offsets, strict=True)
            if id(twin) in names
        ]
        self.layout = Layout(tuple(places), self.optimizer.bit16_groups_flat[0].numel())
        self.shard_size = int(self.optimizer.partition_size[0])
        self.schedule = get_scheduler(
            settings.scheduler,
            self.optimizer.optimizer,
            num_warmup_steps=settings.num_warmup_steps,
            num_training_steps=settings.num_training_steps,
        )

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return float(self.optimizer.optimizer.param_groups[0]["lr"])

    def step(self, accumulator: Accumulator, divisor: float) -> Step:
        """Reduce over ranks, ÷ divisor, global norm, clip, exactly one AdamW step. Collective. The accumulator is used up:
        its shard is reduced and divided where it lies, since host memory has no room for copies of it.

        Raises FloatingPointError, on all ranks and before anything changes, when the norm is not finite.
        """
        start = time.perf_counter()
        shard = _quotient(self._reduce_scatter(accumulator.flat), divisor)
        norm = self._exact_norm(shard) if accumulator.exact else self._norm(shard)
        if norm != norm or norm == float("inf"):
            raise FloatingPointError(f"the batch's gradient norm is {norm}; no step was taken, parameters are intact")
        limit = self.settings.max_grad_norm
        scale = min(1.0, limit / (norm + 1e-6)) if limit and limit > 0 else 1.0
        if self.route == "host shard":
            gradient = self.optimizer.single_partition_of_fp32_groups[0].grad
        else:
            gradient = torch.empty(self.shard_size, dtype=torch.float32, device=self._device)
            self.optimizer.averaged_gradients[0] = [gradient]
        for to, part in zip(gradient.split(BUCKET), shard.split(BUCKET), strict=True):
            to.copy_(part * scale)
        reduced, lr = time.perf_counter(), self.lr
        with doing("optimizer step"):
            self.optimizer.step()
        self.schedule.step()
        done = time.perf_counter()
        return Step(norm, scale < 1.0, lr, reduced - start, done - reduced)

    @property
    def steps(self) -> int:
        """Steps taken, those before a resume included."""
        return int(self.schedule.last_epoch)

    def shard_state(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """This rank's flat FP32 masters, first and second moments (zeros before the first step): (shard_size,) each, on the
        host."""
        master = self.optimizer.single_partition_of_fp32_groups[0]
        state = self.optimizer.optimizer.state.get(master, {})
        moments = (state.get(key, torch.zeros_like(master)) for key in ("exp_avg", "exp_avg_sq"))
        return tuple(t.detach().cpu().contiguous() for t in (master, *moments))

    def load_shard_state(
        self, master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, steps: int
    ) -> None:
        """Put back what `shard_state` gave after `steps` steps. The student's own parameters are the caller's to set."""
        target = self.optimizer.single_partition_of_fp32_groups[0]
        with torch.no_grad():
            target.copy_(master)
        self.optimizer.optimizer.state[target] = {
            # the fused step counts where it computes
            "step": torch.tensor(float(steps), device=target.device),
            "exp_avg": exp_avg.to(target.device),
            "exp_avg_sq": exp_avg_sq.to(target.device),
        }
        self.schedule.last_epoch, self.schedule._step_count = steps, steps + 1
        rates = [
            base * factor(steps) for base, factor in zip(self.schedule.base_lrs, self.schedule.lr_lambdas, strict=True)
        ]
        self.schedule._last_lr = rates
        for group, rate in zip(self.optimizer.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    @property
    def _device(self) -> torch.device:
        return self.optimizer.bit16_groups_flat[0].device

    def _norm(self, shard: torch.Tensor) -> float:
        square = sum(part.double().square().sum() for part in shard.split(BUCKET)).to(self._device)
        dist.all_reduce(square, group=self.group)
        return float(square.sqrt())

    def _exact_norm(self, shard: torch.Tensor) -> float:
        """The same bits for any number of ranks: squares are summed in integers, which no partition can change."""
        largest = torch.stack([part.abs().max() for part in shard.split(BUCKET)]).max().to(self._device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        if float(largest) == 0.0:
            return 0.0
        high, low = divmod(sum(square_sum(part, float(largest)) for part in shard.split(BUCKET)), 2**32)
        parts = torch.tensor([high, low], dtype=torch.int64, device=self._device)
        dist.all_reduce(parts, group=self.group)
        high, low = parts.tolist()
        return root_of_squares(high * 2**32 + low, float(largest))

    def _reduce_scatter(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum over ranks, in its place in `flat`; `BUCKET` elements of each shard at a time."""
        group = self.group or dist.group.WORLD
        whole = flat.view(group.size(), self.shard_size)
        shard = whole[group.rank()]
        for start in range(0, self.shard_size, BUCKET):
            part = whole[:, start : start + BUCKET].to(self._device).contiguous()
            out = torch.empty(part.shape[1], dtype=flat.dtype, device=self._device)
            dist.reduce_scatter_single(out, part.view(-1), group=self.group)
            shard[start : start + BUCKET] = out.cpu()
        return shard


def _quotient(shard: torch.Tensor, divisor: float) -> torch.Tensor:
    """`shard` ÷ divisor, in its own memory; a sum in fixed point becomes one in FP64."""
    found = shard.view(torch.float64) if shard.dtype == torch.int64 else shard
    for to, part in zip(found.split(BUCKET), shard.split(BUCKET), strict=True):
        to.copy_((from_fixed(part) if part.dtype == torch.int64 else part) / divisor)
    return found

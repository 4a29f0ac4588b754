"""What runs is counted, nothing is computed: bytes that live, FLOPs, traffic and copies of every operator, phase by phase.

Under `rehearsing()` tensors have shapes, dtypes, devices and autograd edges, and no data (PyTorch's fake tensors). PyTorch's
meta device stands for the GPU, since the autograd engine asks for nothing there; host tensors stay on the CPU device. Where
the code reads a value, it reads what a healthy run would: all is finite, nothing overflows, numbers are zero.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from skyrl_thundersync.rehearse.devices import LAUNCH_S, Gpu

aten = torch.ops.aten
DEVICE, HOST = "device", "host"
ATTENTION = (
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_cudnn_attention,
    aten._flash_attention_forward,
)
ATTENTION_BACKWARD = (
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
    aten._flash_attention_backward,
)


@dataclass
class Phase:
    """What one phase took.

    Attributes:
        peak: bytes that lived at most, per place; `peak_by`: of what (tag), at that moment.
        kept: bytes that live when it ends, by tag, per place.
        flops: on the device. launches: its kernels. kernels: how many of (FLOPs, bytes of traffic, widest float's bytes).
        to_host, to_device: bytes copied between the two. host_traffic: bytes that host operators read and write.
        network: bytes that collectives send from here.
    """

    name: str
    peak: dict[str, int] = field(default_factory=lambda: {DEVICE: 0, HOST: 0})
    peak_by: dict[str, dict[str, int]] = field(default_factory=lambda: {DEVICE: {}, HOST: {}})
    kept: dict[str, dict[str, int]] = field(default_factory=dict)
    flops: float = 0.0
    launches: float = 0.0
    kernels: Counter = field(default_factory=Counter)
    to_host: float = 0.0
    to_device: float = 0.0
    host_traffic: float = 0.0
    network: float = 0.0

    def bound_s(self, gpu: Gpu) -> Counter:
        """Device seconds on `gpu` by what bounds each kernel: "matmul", "memory" or "launch" (LAUNCH_S a kernel)."""
        found: Counter = Counter()
        for (flops, traffic, wide), times in self.kernels.items():
            bounds = {"matmul": flops / gpu.peak(wide), "memory": traffic / gpu.hbm, "launch": LAUNCH_S}
            bound = max(bounds, key=bounds.__getitem__)
            found[bound] += times * bounds[bound]
        return found


class _Operator(NamedTuple):
    """What an operator's schema says. alias: its results share their arguments' memory. writes: it changes an argument,
    in_place: no more than its values. reshapes: also its shape or storage."""

    alias: bool
    writes: bool
    in_place: bool
    reshapes: bool
    collective: bool


class _Work(NamedTuple):
    """What one call takes."""

    flops: float
    traffic: int
    wide: int


class Accounting(TorchDispatchMode):
    """Counts every operator within. Tensors on "meta" stand for the GPU's, fake ones on the CPU device for the host's.

    Args:
        gpu: what "meta" stands for; None where the rank's device is the CPU.
    """

    def __init__(self, gpu: Gpu | None = None):
        super().__init__()
        self.gpu, self.tag, self.phase = gpu, "other", Phase("start")
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._tags: dict[int, tuple[str, str, int]] = {}  # storage: place, tag, bytes
        self._live = {DEVICE: Counter(), HOST: Counter()}
        self._total = {DEVICE: 0, HOST: 0}
        self._operators: dict[Any, _Operator] = {}
        self._results: dict[tuple, Any] = {}  # of a call on the device: like what its results are
        self._works: dict[tuple, _Work] = {}

    @contextmanager
    def tagged(self, tag: str) -> Iterator[None]:
        """What is allocated within is `tag`."""
        outer, self.tag = self.tag, tag
        try:
            yield
        finally:
            self.tag = outer

    @contextmanager
    def counting(self, name: str) -> Iterator[Phase]:
        """A phase of its own. Peaks start from what lives now."""
        outer, self.phase = self.phase, Phase(name)
        for place in (DEVICE, HOST):
            self._peak(place)
        try:
            yield self.phase
        finally:
            self.phase.kept = {place: {tag: n for tag, n in tags.items() if n} for place, tags in self._live.items()}
            self.phase = outer

    def retag(self, tensors: Iterable[torch.Tensor], tag: str) -> None:
        """From now on these tensors' memory is `tag`."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            place, old, size = self._tags[key]
            self._live[place][old] -= size
            self._live[place][tag] += size
            self._tags[key] = place, tag, size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace == "prim":  # a fake tensor's device, asked for
            return function(*args, **kwargs)
        operator = self._operators.get(function) or self._describe(function)
        given: list[torch.Tensor] = []
        key = (function, _spec(args, given), _spec(tuple(kwargs.items()), given))
        on_host = self.gpu is None or _wants_host(kwargs, given) or any(x.device.type == "cpu" for x in given)
        if operator.in_place:
            result = (kwargs["out"] if "out" in kwargs else args[0]) if function._schema.returns else None
        elif key in self._results:
            result = self._anew(self._results[key])
        else:
            result = (
                self._on_host(function, args, kwargs) if on_host or operator.collective else function(*args, **kwargs)
            )
            if not (operator.alias or operator.reshapes or operator.writes or operator.collective):
                self._results[key] = _like(result)
        made = [x for x in tree_iter(result) if isinstance(x, torch.Tensor)]
        if not operator.alias and not operator.collective:
            for tensor in made:
                self._count(tensor)
        if not operator.alias or operator.writes:
            self._work(function, key, args, kwargs, result, given, made)
        return result

    def _describe(self, function) -> _Operator:
        schema = function._schema
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        alias = any(r.alias_info is not None for r in schema.returns)
        reshapes, collective = function._overloadpacket in _RESHAPING, function.namespace == "c10d"
        in_place = writes and not reshapes and not collective and len(schema.returns) <= 1
        self._operators[function] = found = _Operator(alias, writes, in_place, reshapes, collective)
        return found

    def _on_host(self, function, args, kwargs):
        """Run with fake tensors; what comes out for the device is a plain meta tensor."""
        with self._fake:
            given = tree_map(lambda x: self._fake_of(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
            result = function(*given[0], **given[1])
        return tree_map(lambda x: _plain(x) if isinstance(x, torch.Tensor) and x.device.type == "meta" else x, result)

    def _anew(self, like: Any) -> Any:
        """Results as an earlier call's of the same arguments were."""
        if isinstance(like, list):
            return tuple([self._anew(x) for x in like])
        if len(like) == 1:
            return like[0]
        shape, stride, dtype, device = like
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return tensor if device.type == "meta" else FakeTensor(self._fake, tensor, device)

    def _fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    def _count(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, if it is not known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._tags:
            return
        size = storage.nbytes()
        place = HOST if self.gpu is not None and tensor.device.type == "cpu" else DEVICE
        self._tags[key] = place, self.tag, size
        self._live[place][self.tag] += size
        self._total[place] += size
        weakref.finalize(storage, self._freed, key)
        self._peak(place)

    def _freed(self, key: int) -> None:
        place, tag, size = self._tags.pop(key)
        self._live[place][tag] -= size
        self._total[place] -= size

    def _peak(self, place: str) -> None:
        if self._total[place] > self.phase.peak[place]:
            self.phase.peak[place] = self._total[place]
            self.phase.peak_by[place] = dict(self._live[place])

    def _work(self, function, key, args, kwargs, result, given, made) -> None:
        phase = self.phase
        places = {x.device.type for x in (*given, *made) if x.dim() or x.device.type != "cpu"}
        if function.namespace == "c10d":
            phase.network += sum(map(_bytes, given))
            return
        if self.gpu is not None and places == {"cpu", "meta"}:
            # a copy between the two, or an operator that brings a host tensor along, which is as good as one
            if made[0].device.type == "cpu":
                phase.to_host += sum(map(_bytes, made))
            else:
                phase.to_device += sum(_bytes(x) for x in given if x.device.type == "cpu")
            return
        if (work := self._works.get(key)) is None:
            self._works[key] = work = self._cost(function._overloadpacket, args, kwargs, result, given, made)
        phase.flops += work.flops
        if self.gpu is None or places == {"cpu"}:
            phase.host_traffic += work.traffic
        else:
            phase.launches += 1
            phase.kernels[work] += 1

    def _cost(self, packet, args, kwargs, result, given, made) -> _Work:
        traffic = sum(map(_bytes, made)) + sum(map(_bytes, given))
        wide = max((x.element_size() for x in given if x.is_floating_point()), default=4)
        return _Work(_flops(packet, args, kwargs, result), traffic, wide)


_RESHAPING = (
    aten.set_, aten.resize_, aten.as_strided_, aten.squeeze_, aten.unsqueeze_, aten.transpose_, aten.t_, aten.swapaxes_,
    aten.detach_, aten.swapdims_,
)  # fmt: skip
"""In-place operators that change more than values."""


def _spec(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A hashable picture of an operator's arguments; the tensors among them go to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.device.type
    if isinstance(value, (list, tuple)):
        return tuple([_spec(item, tensors) for item in value])
    return type(value), value


def _wants_host(kwargs: dict, given: list[torch.Tensor]) -> bool:
    device = kwargs.get("device")
    return device.type == "cpu" if device is not None else not given


def _like(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.shape, result.stride(), result.dtype, result.device
    return [_like(x) for x in result] if isinstance(result, (list, tuple)) else (result,)


def _plain(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _bytes(x: torch.Tensor) -> int:
    """Bytes of a tensor that a kernel touches: no more than its storage, however it is expanded."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def _flops(packet, args, kwargs, result) -> float:
    """FLOPs of one call, a multiply-add two; of causal attention the half that is computed."""
    if packet in ATTENTION:
        q, k, v = args[:3]
        whole, causal = sdpa_flop_count(q.shape, k.shape, v.shape), _causal(args, kwargs, 4)
    elif packet in ATTENTION_BACKWARD:
        grad, q, k, v = args[:4]
        whole = sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)
        causal = _causal(args, kwargs, 7 if "for_cpu" in str(packet) else 11)
    elif packet == aten._grouped_mm:
        rows, inner = args[0].shape[-2:] if args[0].dim() == 2 else (math.prod(args[0].shape[:-1]), args[0].shape[-1])
        return 2.0 * math.prod(result.shape) * inner if args[1].dim() == 3 else 2.0 * rows * inner * args[1].shape[-1]
    elif packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=result))
    else:
        return 0.0
    return whole / 2 if causal else whole


def _causal(args, kwargs, place: int) -> bool:
    return bool(kwargs.get("is_causal", args[place] if len(args) > place else False))


class _Answers(TorchFunctionMode):
    """Values that Python asks of tensors without data: those of a healthy run."""

    _NUMBERS = (torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__index__)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in (torch.any, torch.Tensor.any):
            result = function(*args, **kwargs)
            result.says = False  # code asks whether any value is bad
            return result
        if function is torch.Tensor.__bool__:
            return getattr(args[0], "says", True)
        if function in self._NUMBERS:
            return 0.0 if args[0].is_floating_point() and function is not torch.Tensor.__int__ else 0
        if function is torch.Tensor.tolist:
            return _zeros(args[0].shape, 0.0 if args[0].is_floating_point() else 0)
        return function(*args, **kwargs)


def _zeros(shape, zero):
    return [_zeros(shape[1:], zero) for _ in range(shape[0])] if len(shape) else zero


@contextmanager
def rehearsing(gpu: Gpu | None) -> Iterator[Accounting]:
    """Within it tensors hold no data and all work is counted. `gpu`: what "meta" stands for; None: the rank is on the CPU."""
    with ExitStack() as stack:
        accounting = stack.enter_context(Accounting(gpu))
        stack.enter_context(_Answers())
        yield accounting

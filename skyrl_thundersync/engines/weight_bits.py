"""Weights as numbers that two processes can compare: order-free sums of their bits, one pair a group of tensors.

An engine holds a checkpoint's weights fused, transposed, padded with zeros and split over workers; the multiset of their
elements survives that. Of a group's elements, each cast to the served dtype and its bits read as a signed integer b, these
are

    (Σ b mod 2^64, Σ b² mod 2^64).

0.0 has b = 0, so padding counts for nothing, and the sums of the workers' parts add up. The first sum alone would not do:
where an update moves elements by a unit in the last place, as many may go up as down.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open

Bits = dict[str, tuple[int, int]]
"""Of each group, its two sums."""

MODULUS = 2**64
_WORDS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
_AT_ONCE = 2**24


def group_of(name: str) -> str:
    """The group of a tensor: "layers.3.mlp" of all in there, the module's own name outside of layers ("embed_tokens")."""
    parts = [part for part in name.split(".") if part != "base_layer"]  # what an adapter wraps
    if "layers" in parts:
        start = parts.index("layers")
        return ".".join(parts[start : start + 3])
    return parts[-2]


@torch.no_grad()
def sums(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """(Σ b, Σ b²) modulo 2^64 over the elements of `tensor`, any shape, strides and device, cast to `dtype`."""
    tensor = tensor.detach()
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)  # so that a transposed one is not copied
    first = second = 0
    for part in tensor.permute(by_stride).reshape(-1).split(_AT_ONCE):
        bits = part.to(dtype).view(_WORDS[dtype]).long()
        first += int(bits.sum())
        second += int(bits.mul_(bits).sum())
    return first % MODULUS, second % MODULUS


def added(bits: Iterable[tuple[str, tuple[int, int]]]) -> Bits:
    """The sums of each group, out of those of its parts."""
    total: Bits = {}
    for group, (first, second) in bits:
        so_far = total.get(group, (0, 0))
        total[group] = (so_far[0] + first) % MODULUS, (so_far[1] + second) % MODULUS
    return total


def weight_bits(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Bits:
    """The sums of a checkpoint's named tensors by group, as served in `dtype`."""
    return added((group_of(name), sums(tensor, dtype)) for name, tensor in tensors if tensor.is_floating_point())


def adapter_bits(tensors: Iterable[tuple[str, torch.Tensor]], scaling: float, dtype: torch.dtype) -> Bits:
    """The sums of a PEFT adapter's matrices by group, as vLLM holds them: in `dtype`, B times the adapter's `scaling`."""

    def held(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) * scaling if ".lora_B." in name else tensor

    return added((group_of(name), sums(held(name, tensor), dtype)) for name, tensor in tensors)


def adapter_folder_bits(path: str, dtype: torch.dtype) -> Bits:
    """As `adapter_bits`, of the PEFT adapter in folder `path`."""
    config = json.loads((Path(path) / "adapter_config.json").read_text(encoding="utf-8"))
    rank = math.sqrt(config["r"]) if config.get("use_rslora") else config["r"]
    return adapter_bits(read_weights(path), config["lora_alpha"] / rank, dtype)


def read_weights(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of the safetensors files in folder `path`, one at a time."""
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                yield name, tensors.get_tensor(name)

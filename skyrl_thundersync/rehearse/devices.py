"""Published figures of the GPUs that a rehearsal may be for, and what is assumed of the machine around them.

Rooflines made of peaks are lower bounds: no kernel reaches them.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """One device, SXM part.

    Attributes:
        memory: bytes that a process finds free on it.
        bf16, fp32: dense peaks in FLOP/s; fp32 without tensor cores, which is how PyTorch multiplies FP32 by default.
        hbm: device memory bandwidth, bytes/s.
        pcie: to the host, one direction, bytes/s.
        nvlink: to the other devices of the node, one direction, bytes/s.
    """

    name: str
    memory: float
    bf16: float
    fp32: float
    hbm: float
    pcie: float
    nvlink: float

    def peak(self, bytes_an_element: int) -> float:
        """FLOP/s of matrix products in a dtype so wide."""
        return self.bf16 if bytes_an_element <= 2 else self.fp32


GPUS = {
    "h100": Gpu("H100", 79.1 * GIB, 989.4e12, 66.9e12, 3.35e12, 64e9, 450e9),
    "h200": Gpu("H200", 139.8 * GIB, 989.4e12, 66.9e12, 4.8e12, 64e9, 450e9),
    "b200": Gpu("B200", 179.0 * GIB, 2250e12, 75e12, 8.0e12, 64e9, 900e9),
}

SPARE = 0.08
"""Share of a device that is to stay free: CUDA's own context, libraries, fragmentation."""
LAUNCH_S = 5e-6
"""Least time of a kernel that Python issues one at a time."""
HOST_THREAD = 5e9
"""Bytes/s that one CPU thread reads and writes when it adds BF16 to FP32 (27 B elements, 10 bytes each, take it 59 s)."""
HOST_MEMORY = 300e9
"""Bytes/s of the host's memory, all threads together."""
NETWORK = 50e9
"""Bytes/s between nodes, one direction: one 400 Gb/s adapter a GPU."""
DISK = 2e9
"""Bytes/s of the disk that weights are published over; memory (/dev/shm) is faster."""
GPUS_A_NODE = 8

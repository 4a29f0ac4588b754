"""What a learner rank answers to the driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Step:
    """The end of a batch.

    Attributes:
        grad_norm: of the normalised gradient, before clipping; 0 without a step. clipped: whether it was over the limit.
        lr: of this step. reduce_seconds, step_seconds: reduction over ranks and division; AdamW and all-gather.
        n_scored: N_k, scored tokens over all ranks. stepped: whether there was any, and so a step.
        host_peak_bytes, device_peak_bytes: most memory that this rank's process held since the batch before; 0 without a
            device.
    """

    grad_norm: float
    clipped: bool
    lr: float
    reduce_seconds: float
    step_seconds: float
    n_scored: int = 0
    stepped: bool = True
    host_peak_bytes: int = 0
    device_peak_bytes: int = 0


@dataclass(frozen=True)
class RankStats:
    """Of one rank's process.

    Attributes:
        busy_seconds: since the start.
        cut_gap: learner/student.py. kernel: the attention's, and why it was chosen.
        cores: those that the process may use. threads: torch's.
        parameters: checksum of those that the last step or checkpoint left.
    """

    busy_seconds: float
    cut_gap: float
    kernel: str
    cores: list[int]
    threads: int
    parameters: list[int]


@dataclass(frozen=True)
class Shards:
    """How the optimizer's state lies in the shards of a checkpoint, laid end to end.

    Attributes:
        steps: optimizer steps taken. places: [name, offset] of each parameter, in elements. shard_size: of each, in
            elements. ranks: how many shards there are.
    """

    steps: int
    places: list[list[Any]]
    shard_size: int
    ranks: int


@dataclass(frozen=True)
class Written:
    """What one rank wrote of a checkpoint.

    Attributes:
        shards: the same on every rank. file: its shard, relative to the checkpoint's folder. bytes: of that file.
        files: path to (bytes, sha256) of all it wrote and flushed; empty for a copy that was not flushed.
    """

    shards: Shards
    file: str
    bytes: int
    files: dict[str, tuple[int, str]]


@dataclass(frozen=True)
class Content:
    """What a checkpoint must fit: [name, shape] of each trained parameter, and a digest of what is frozen, if anything is."""

    parameters: list[list[Any]]
    frozen: str | None


@dataclass(frozen=True)
class Finish:
    """The end of a batch over all ranks: their one step, and the most memory that any rank's process held for it."""

    step: Step
    host_peak_bytes: int
    device_peak_bytes: int

"""A rank's part of a checkpoint: FP32 masters and Adam moments, found again by parameter name on any number of ranks.

ZeRO's own checkpoints hold flat shards that only the same number of ranks can read. Here every file carries a rank's flat
shard as it is, and the layout says where each parameter lies in the shards laid end to end; a reader takes the ranges it
needs from whichever files hold them. No collective: ranks write and read on their own. The student is not read back: it is
the masters, rounded to its dtype.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from skyrl_thundersync.learner.accumulate import trainable
from skyrl_thundersync.learner.answers import Content, Shards, Written
from skyrl_thundersync.learner.rank import LearnerRank
from skyrl_thundersync.process.durable import flush, seal, seal_all

KEYS = ("master", "exp_avg", "exp_avg_sq")
STUDENT, OPTIMIZER = "student", "optimizer"


def shard_name(rank: int, ranks: int) -> str:
    """A rank's file, relative to the checkpoint's folder."""
    return f"{OPTIMIZER}/rank-{rank}-of-{ranks}.safetensors"


def content(rank: LearnerRank) -> Content:
    named = trainable(rank.model)
    names = {name for name, _ in named}
    frozen = [(k, t) for k, t in rank.model.state_dict().items() if k not in names and not _tied(t, named)]
    digest = hashlib.sha256(json.dumps([(k, list(t.shape), _bits(t)) for k, t in frozen]).encode()).hexdigest()
    return Content([[name, list(p.shape)] for name, p in named], digest if frozen else None)


def bytes_needed(rank: LearnerRank) -> int:
    """What a checkpoint of the whole learner takes on disk, without the few files of other kinds."""
    student = sum(p.numel() * p.element_size() for _, p in trainable(rank.model))
    return student + 3 * 4 * rank.optimizer.layout.size


def save_rank(rank: LearnerRank, folder: str) -> Written:
    """Write this rank's shard under `folder`, rank 0 also the student (or adapter) in Hugging Face format; all flushed.

    Between updates, or with a batch open, whose gradient is not part of it.

    Raises RuntimeError when parameters changed since the last publication, OSError when the disk does not take it.
    """
    root, shard = Path(folder), keep_rank(rank, folder)
    files = {shard.file: seal(root / shard.file)}
    if rank.spec.rank == 0:
        rank.save_weights(str(root / STUDENT))
        files |= seal_all(root / STUDENT, root)
    return replace(shard, files=files)


def export(rank: LearnerRank, folder: str) -> dict[str, tuple[int, str]]:
    """Write the student (or adapter) in Hugging Face format in place of `folder`, flushed; {file: (bytes, sha256)}."""
    root = Path(folder)
    rank.save_weights(folder)
    files = seal_all(root, root)
    flush(root.parent)
    return files


def keep_rank(rank: LearnerRank, folder: str) -> Written:
    """Write this rank's shard under `folder`, not flushed: it survives the process, not the machine.

    Raises as `save_rank`.
    """
    rank.require_frozen()
    optimizer = rank.optimizer
    name = shard_name(rank.spec.rank, rank.spec.world_size)
    path = Path(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(zip(KEYS, optimizer.shard_state(), strict=True)), path)
    places = [[name, offset] for name, _, offset in optimizer.layout.places]
    shards = Shards(optimizer.steps, places, optimizer.shard_size, rank.spec.world_size)
    return Written(shards, name, path.stat().st_size, {})


def load_rank(rank: LearnerRank, folder: str, saved: Shards) -> None:
    """Take parameters, masters, moments and the schedule's position from a checkpoint of any number of ranks.

    The caller has checked that the checkpoint fits (`content`) and is whole. The learning rate and its schedule stay this
    run's own.
    """
    optimizer = rank.optimizer
    with ExitStack() as stack:
        shards = _Shards(stack, Path(folder), saved)
        lo = rank.spec.rank * optimizer.shard_size
        state = [torch.zeros(optimizer.shard_size) for _ in KEYS]
        for name, p, offset in optimizer.layout.places:
            a, b = max(offset, lo), min(offset + p.numel(), lo + optimizer.shard_size)
            if a < b:
                for key, target in zip(KEYS, state, strict=True):
                    target[a - lo : b - lo] = shards.read(key, name, a - offset, b - offset)
            with torch.no_grad():
                p.copy_(shards.read("master", name, 0, p.numel()).view(p.shape))
        optimizer.load_shard_state(*state, steps=saved.steps)
    rank.parameters_replaced()


class _Shards:
    """Reads ranges of parameters out of the files that hold them."""

    def __init__(self, stack: ExitStack, folder: Path, saved: Shards):
        self._offsets, self._size = dict(saved.places), saved.shard_size
        files = [folder / shard_name(rank, saved.ranks) for rank in range(saved.ranks)]
        self._files = [stack.enter_context(safe_open(file, "pt")) for file in files]

    def read(self, key: str, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements start … stop - 1 of a parameter, flat, FP32."""
        a, b = self._offsets[name] + start, self._offsets[name] + stop
        parts = []
        for index in range(a // self._size, (b - 1) // self._size + 1):
            lo = index * self._size
            parts.append(self._files[index].get_slice(key)[max(a, lo) - lo : min(b, lo + self._size) - lo])
        return torch.cat(parts)


def _tied(tensor: torch.Tensor, named: list[tuple[str, torch.nn.Parameter]]) -> bool:
    return any(tensor.data_ptr() == p.data_ptr() for _, p in named)


def _bits(tensor: torch.Tensor) -> int:
    """One integer of a tensor's bits: any single changed element changes it."""
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    return int(tensor.contiguous().view(words[tensor.element_size()]).sum(dtype=torch.int64))

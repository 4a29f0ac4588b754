"""Logical batches as they happened, kept for exact replay: one gzipped JSON-lines file an update.

The first line is the batch (policy version, groups); each further line a work item in release order with the rank it
went to and the second it was released. Sampler log-probs, masks and teacher scores are kept as they were used.
"""

from __future__ import annotations

import base64
import gzip
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from skyrl_thundersync.stream.sources import Append, CloseGroup, CloseTrajectory, Source, Support, TrajectoryId, Work


@dataclass(frozen=True)
class Batch:
    """A recorded batch: `work` in release order, `ranks[i]` and `seconds[i]` of its i-th item."""

    version: int
    groups: dict[str, int]
    work: tuple[Work, ...]
    ranks: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def n_scored(self) -> int:
        """N_k."""
        return sum(work.source.n_scored for work in self.work if isinstance(work, Append))


class Recorder:
    """Writes one file an update into `folder`; a file appears under its name only when its batch is complete."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = None
        self._path: Path | None = None

    def begin(self, version: int, groups: dict[str, int]) -> Callable[[int, Work], None]:
        """Start the batch of policy `version`; returns the function that records (rank, work)."""
        self._path = self._folder / f"batch_{version:06d}.jsonl.gz"
        self._file = gzip.open(self._path.with_suffix(".part"), "wt", encoding="utf-8", compresslevel=3)  # noqa: SIM115
        self._write({"version": version, "groups": groups})
        started = time.perf_counter()

        def record(rank: int, work: Work) -> None:
            self._write({"rank": rank, "t": round(time.perf_counter() - started, 4), **_encode(work)})

        return record

    def end(self) -> None:
        """The batch is complete."""
        self._file.close()
        self._path.with_suffix(".part").rename(self._path)

    def _write(self, row: dict) -> None:
        self._file.write(json.dumps(row, separators=(",", ":")) + "\n")


def load_batches(folder: Path) -> list[Batch]:
    """All complete batches in `folder`, by policy version.

    Raises:
        FileNotFoundError: there is none.
    """
    files = sorted(Path(folder).glob("batch_*.jsonl.gz"))
    if not files:
        raise FileNotFoundError(f"no recorded batch in {folder}; train with thundersync.record=true to keep some")
    return [load_batch(file) for file in files]


def load_batch(path: Path) -> Batch:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        head, *rows = (json.loads(line) for line in file)
    return Batch(
        version=head["version"],
        groups=head["groups"],
        work=tuple(_decode(row) for row in rows),
        ranks=tuple(row["rank"] for row in rows),
        seconds=tuple(row["t"] for row in rows),
    )


def _encode(work: Work) -> dict:
    if isinstance(work, Append):
        source = asdict(work.source) | {"trajectory": work.source.trajectory._asdict()}
        support = {} if work.support is None else {"support": _packed(work.support)}
        return {"kind": "append", "source": source, "scores": work.scores, **support}
    if isinstance(work, CloseTrajectory):
        known = {} if work.group_rewards is None else {"group_rewards": work.group_rewards}
        return {"kind": "close", "trajectory": work.trajectory._asdict(), "reward": work.reward, **known}
    return {"kind": "close_group", "group": work.group}


def _decode(row: dict) -> Work:
    if row["kind"] == "append":
        fields = dict(row["source"])
        trajectory = TrajectoryId(**fields.pop("trajectory"))
        fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
        scores = None if row["scores"] is None else tuple(row["scores"])
        support = _unpacked(row["support"]) if "support" in row else None
        return Append(Source(trajectory=trajectory, **fields), scores, support)
    if row["kind"] == "close":
        known = row.get("group_rewards")
        known = None if known is None else tuple(known)
        return CloseTrajectory(TrajectoryId(**row["trajectory"]), row["reward"], known)
    return CloseGroup(row["group"])


def _packed(support: Support) -> dict:
    """Little-endian bytes: as text its numbers would outweigh the rest of the record many times."""
    n, k = support.ids_nk.shape
    arrays = (support.ids_nk.astype("<i4"), support.logps_nk.astype("<f4"))
    ids, logps = (base64.b64encode(array.tobytes()).decode() for array in arrays)
    return {"n": n, "k": k, "ids": ids, "logps": logps}


def _unpacked(row: dict) -> Support:
    ids, logps = (
        np.frombuffer(base64.b64decode(row[name]), dtype).reshape(row["n"], row["k"]).copy()
        for name, dtype in (("ids", "<i4"), ("logps", "<f4"))
    )
    return Support(ids, logps)

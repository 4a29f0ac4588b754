"""A run folder belongs to one run at a time, and what is in it is one run's.

The owner holds `run.lock` with flock for as long as it lives, so that a dead owner bars nobody; who it is stands in the file.
The folder of the checkpoints, where it is another one, is held likewise. Whatever deletes in either happens under the lock.
flock is the kernel's on a local disk; whether a shared filesystem keeps it between machines is that filesystem's matter
(docs/checkpoints.md).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.process.durable import replace_text
from skyrl_thundersync.rollout.log import ROLLOUTS
from skyrl_thundersync.runtime import checkpoint

if TYPE_CHECKING:
    from skyrl_thundersync.hosts.skyrl.config import TrainConfig

LOCK = "run.lock"
NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
"""What flock says on a filesystem that keeps no locks."""
PATIENCE_S = 1.0
"""A check looks at the lock for some microseconds: a run that starts meanwhile tries again."""
METRICS, RECORD = "metrics.jsonl", "record"
WRITTEN = (
    "config.yaml",
    METRICS,
    "logs/*.log",
    "logs/*.alive",
    "logs/*.status",
    "trace/events.jsonl",
    f"{RECORD}/batch_*",
    f"{ROLLOUTS}/step-*.jsonl",
    f"{ROLLOUTS}/tasks.json",
    "tensorboard/**/events.out.tfevents.*",
    "wandb",
    "swanlab",
    "published",
    "kept",
)
"""What a run writes into its folder, as patterns; a folder among them is a run's as a whole."""
EXPORTED = ("global_step_*/policy", "global_step_*/policy.part", "global_step_*/policy.old", "dumped_*/global_step_*")
"""What it writes into `trainer.export_path`."""


@dataclass(frozen=True)
class RunOwner:
    """A process that holds a folder: `start` (clock ticks since boot) and `boot` tell it from a later one of the same id."""

    host: str
    process: int
    started: str
    start: int
    boot: str

    @classmethod
    def this(cls) -> RunOwner:
        now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        return cls(socket.gethostname(), os.getpid(), now, _start(os.getpid()), _boot())

    @property
    def gone(self) -> bool:
        """It was a process of this machine, since it booted, and is no more."""
        return self.boot == _boot() and self.host == socket.gethostname() and _start(self.process) != self.start

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, started {self.started}"


def in_use(folder: Path) -> str | None:
    """Who holds `folder`, in words; None when nobody does. Writes nothing."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(descriptor)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    finally:
        os.close(descriptor)
    return None


def problems(cfg: TrainConfig) -> list[str]:
    """Why the run that a configuration describes may not have its folders now; empty when it may. Writes nothing."""
    held = [_barred(option, folder, who) for option, folder in _folders(cfg).items() if (who := in_use(folder))]
    return held or _used(cfg)


@contextmanager
def owned(cfg: TrainConfig) -> Iterator[list[str]]:
    """Hold a run's folders, made where they are missing, and ready for it; what there is to say of it.

    A run that starts from the beginning finds nothing of an earlier one that counts (with `thundersync.replace_run` that is
    removed), one that goes on after update k nothing of updates after it but checkpoints.

    Raises ConfigError, with nothing changed, when another run holds a folder, or an earlier one used it.
    """
    with ExitStack() as held:
        remarks = []
        for option, folder in _folders(cfg).items():
            folder.mkdir(parents=True, exist_ok=True)
            remarks += held.enter_context(_locked(option, folder))
        if found := _used(cfg):
            raise ConfigError("\n".join(found))
        yield remarks + _made_ready(cfg)


@contextmanager
def _locked(option: str, folder: Path) -> Iterator[list[str]]:
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        remarks = _lock(descriptor, option, folder)
        before = _owner(descriptor)
        if before is not None and before.host != socket.gethostname() and before.boot != _boot():
            remarks.append(
                f"[yellow]{folder}: the last run here, {before}, did not end by itself. This machine cannot see whether it "
                "still runs where the filesystem keeps no locks between machines[/yellow]"
            )
        _write(descriptor, json.dumps(asdict(RunOwner.this())))
        try:
            yield remarks
        finally:
            _write(descriptor, "")
    finally:
        os.close(descriptor)


def _lock(descriptor: int, option: str, folder: Path) -> list[str]:
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return []
        except BlockingIOError:
            if time.monotonic() > end:
                raise ConfigError(_barred(option, folder, _holder(descriptor))) from None
            time.sleep(PATIENCE_S / 10)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            return [
                f"[yellow]the filesystem of {folder} keeps no locks ({os.strerror(error.errno)}): another run in {option} "
                "would not be noticed[/yellow]"
            ]


def _barred(option: str, folder: Path, who: str) -> str:
    return f"{option}: {folder} is in use by another run: {who}. Wait for its end, end it, or name another folder."


def _holder(descriptor: int) -> str:
    owner = _owner(descriptor)
    if owner is None:
        return "one that is just starting"
    if owner.gone:
        return f"{owner}; it is gone, but a process that descends from it still holds {LOCK}"
    return str(owner)


def _owner(descriptor: int) -> RunOwner | None:
    """Who wrote the lock's file last, and did not take it back; None too when that was not written whole."""
    with suppress(ValueError, TypeError):
        return RunOwner(**json.loads(os.pread(descriptor, 4096, 0)))
    return None


def _write(descriptor: int, text: str) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)


def _folders(cfg: TrainConfig) -> dict[str, Path]:
    """Option -> folder that a run needs for itself. By its real path, so that two names are one folder."""
    run, checkpoints = Path(cfg.thundersync.run_dir).resolve(), Path(cfg.trainer.ckpt_path).resolve()
    within = checkpoints.is_relative_to(run)
    return {"thundersync.run_dir": run} | ({} if within else {"trainer.ckpt_path": checkpoints})


def _used(cfg: TrainConfig) -> list[str]:
    """What an earlier run left, where this one would start from the beginning beside it. Reads no checkpoint's files."""
    if cfg.trainer.resume_mode not in (None, "none"):
        return []
    run, checkpoints, exports = _places(cfg)
    found = [f"metrics of {n} updates"] if (n := _updates(run / METRICS)) else []
    found += [f"{n} recorded batches"] if (n := len(list(run.glob(f"{RECORD}/batch_*.jsonl.gz")))) else []
    found += [f"checkpoints of updates {', '.join(map(str, ks))}"] if (ks := checkpoint.steps(checkpoints)) else []
    found += [f"{n} exported models"] if (n := len(list(exports.glob("global_step_*/policy")))) else []
    if cfg.thundersync.replace_run:
        foreign = [
            path for k in checkpoint.steps(checkpoints) if not checkpoint.own(path := checkpoint.at(checkpoints, k))
        ]
        return [f"trainer.ckpt_path: {path} is no checkpoint of this plugin's. Move it away." for path in foreign]
    if not found:
        return []
    return [
        f"thundersync.run_dir: {run} holds an earlier run: {'; '.join(found)}; and with trainer.resume_mode=none this one "
        "would start from the beginning among them. Name another folder; go on with trainer.resume_mode=latest; or, to have "
        "what that run wrote removed, set thundersync.replace_run=true."
    ]


def _made_ready(cfg: TrainConfig) -> list[str]:
    run, checkpoints, exports = _places(cfg)
    if cfg.trainer.resume_mode in (None, "none"):
        if not cfg.thundersync.replace_run:
            return []
        gone = checkpoint.remove_all(checkpoints) + _remove(run, WRITTEN) + _remove(exports, EXPORTED)
        return [f"{gone} files and folders of an earlier run removed from {run}"] if gone else []
    try:
        step, version = checkpoint.resume_point(checkpoints, cfg.trainer.resume_mode, cfg.trainer.resume_path)
    except checkpoint.CheckpointError as error:
        raise ConfigError(str(error)) from error
    rows = _cut(run / METRICS, step)
    batches = [path for path in run.glob(f"{RECORD}/batch_*") if int(path.name[6:12]) >= version]
    talks = [path for path in run.glob(f"{ROLLOUTS}/step-*.jsonl") if int(path.stem[5:]) > step]
    for path in (*batches, *talks):
        path.unlink()
    if not rows and not batches:
        return []
    return [f"what was left of updates after {step} removed: {rows} rows of {METRICS}, {len(batches)} recorded batches"]


def _places(cfg: TrainConfig) -> tuple[Path, Path, Path]:
    return Path(cfg.thundersync.run_dir), Path(cfg.trainer.ckpt_path), Path(cfg.trainer.export_path)


def _updates(metrics: Path) -> int:
    return sum("timing/update" in line for line in metrics.open(encoding="utf-8")) if metrics.is_file() else 0


def _cut(metrics: Path, step: int) -> int:
    """Take rows of updates after `step` out of a file of metrics, and half a row at its end; how many."""
    if not metrics.is_file():
        return 0
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    if len(kept) < len(lines):
        replace_text(metrics, "".join(kept))
    return len(lines) - len(kept)


def _remove(folder: Path, patterns: tuple[str, ...]) -> int:
    """Delete what matches, and the folders in between that are empty then; how many."""
    gone = {path for pattern in patterns for path in folder.glob(pattern)}
    for path in gone:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for parent in sorted(
        {p for path in gone for p in path.relative_to(folder).parents if p != Path(".")}, reverse=True
    ):
        with suppress(OSError):  # not empty: somebody else's files are in it
            (folder / parent).rmdir()
    return len(gone)


def _start(process: int) -> int:
    """Ticks since boot at which a process started; 0 when there is none."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(stat.rpartition(")")[2].split()[19])


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()

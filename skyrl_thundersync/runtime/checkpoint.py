"""Checkpoints as folders: `global_step_k`, and a pointer to the newest, under SkyRL's names and switches.

SkyRL's own save writes in place and its load goes on without what it cannot read. Here a checkpoint is written aside,
flushed, renamed and only then pointed to; one that is torn, foreign or does not fit this run is refused with what is
wrong, and the one before it is offered. Nothing is pickled: safetensors and JSON. Imports no torch at the top, so that a
resume can be refused before anything heavy loads.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

from skyrl_thundersync.process.durable import NotWrittenError, flush, replace_text, seal_claimed, sha256_all

FORMAT, FORMAT_VERSION = "skyrl_thundersync checkpoint", 1
PREFIX, POINTER, MANIFEST = "global_step_", "latest_ckpt_global_step.txt", "manifest.json"
MARGIN = 64 * 2**20
"""Bytes to leave free beside a checkpoint, for a run that goes on."""


LEFTOVERS = (f".{PREFIX}*.part", f".{PREFIX}*.old")
"""What a crash, or a replacement, left."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or resumed from. The message says which, why, and what to do."""


class ForeignError(CheckpointError):
    """It was not written by this plugin."""


def step_of(path: Path) -> int | None:
    """k of a folder named global_step_k, or the like while it is replaced."""
    found = re.fullmatch(rf"{PREFIX}(\d+)|\.{PREFIX}(\d+)\.old", path.name)
    return int(found[1] or found[2]) if found else None


def at(folder: Path, step: int) -> Path:
    """Where the checkpoint of update `step` is; still under its other name where a crash cut its replacement in two."""
    path = folder / f"{PREFIX}{step}"
    old = _replaced(path)
    return old if old.is_dir() and not path.exists() else path


def steps(folder: Path) -> list[int]:
    """The updates that `folder` has a checkpoint of, whole or not, ascending."""
    paths = [*folder.glob(f"{PREFIX}*"), *folder.glob(f".{PREFIX}*.old")]
    return sorted({k for path in paths if (k := step_of(path)) is not None})


def save(
    folder: Path,
    step: int,
    needed_bytes: int,
    write: Callable[[Path], tuple[dict, dict]],
    keep: int = -1,
    margin: int = MARGIN,
) -> Path:
    """Write the checkpoint of update `step`: all of it or nothing, then the pointer; then drop the oldest beyond `keep`.

    Args:
        needed_bytes: about what it takes on disk; with less free, and `margin` to leave, nothing is written.
        write: fills the folder it is given; returns the manifest's own facts and {file: (bytes, sha256)} of files that it,
            or another process, says to have written.
        keep: how many checkpoints to keep, of updates up to this one; negative: all.

    Nobody's word is taken for what is on the disk: every file is flushed, read back and hashed here, and what was claimed
    must be there as claimed, before the checkpoint gets its name, the pointer moves or an older one goes.

    Returns the checkpoint's folder. Raises CheckpointError for too little space and for files that are not there whole, and
    whatever `write` raises; the checkpoints before it stay as they are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _tidy(folder)
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + margin:
        takes = f"takes {needed_bytes / 2**20:.0f} MiB" + (f" and leaves {margin / 2**20:.0f} free" if margin else "")
        raise CheckpointError(
            f"the checkpoint of update {step} {takes}; {folder} has {free / 2**20:.0f} MiB free. Nothing was written. Free "
            f"some space, or set trainer.max_ckpts_to_keep. {_newest(folder)}".rstrip()
        )
    target = folder / f"{PREFIX}{step}"
    part = folder / f".{target.name}.part"
    part.mkdir()
    try:
        facts, claimed = write(part)
        files = seal_claimed(part, claimed)
        manifest = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "written_by": package_version("skyrl_thundersync"),
            "global_step": step,
            **facts,
            "files": files,
        }
        replace_text(part / MANIFEST, json.dumps({**manifest, "digest": _digest(manifest)}, indent=1))
        _manifest(part)
    except NotWrittenError as error:
        shutil.rmtree(part)
        raise CheckpointError(
            f"the checkpoint of update {step} is not whole: {error}. Does every process of the run see the same "
            f"trainer.ckpt_path? Nothing was saved. {_newest(folder)}".rstrip()
        ) from error
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    if target.exists():  # of a run that was resumed from an earlier one and came by again
        target.rename(_replaced(target))
    part.rename(target)
    flush(folder)
    replace_text(folder / POINTER, str(step))
    if keep > 0:
        for old in [k for k in steps(folder) if k <= step][:-keep]:
            _drop(folder / f"{PREFIX}{old}")
    _tidy(folder)
    return target


def choose(folder: Path, mode: str | None, resume_path: str | None) -> Path | None:
    """The checkpoint that SkyRL's `resume_mode` and `resume_path` mean; None to start from the beginning.

    "latest" follows the pointer. Where a crash came before the first one was written, it is the newest whole checkpoint.
    Changes nothing: another run may be at work there.

    Raises CheckpointError for a path that cannot be a checkpoint.
    """
    if mode in (None, "none"):
        return None
    if mode == "from_path":
        if not resume_path:
            raise CheckpointError("trainer.resume_mode=from_path needs trainer.resume_path=…/global_step_k")
        path = Path(resume_path).expanduser().absolute()
        if step_of(path) is None:
            raise CheckpointError(f"trainer.resume_path={resume_path!r}: a checkpoint's folder is named {PREFIX}k")
        return at(path.parent, step_of(path))
    pointer = folder / POINTER
    if not pointer.is_file():
        return _whole_before(folder, None)
    text = pointer.read_text(encoding="utf-8", errors="replace").strip()
    if not text.isdigit():
        raise CheckpointError(f"{pointer} holds {text!r}, no update's number. {_offer(folder, None)}")
    return at(folder, int(text))


def resume_point(folder: Path, mode: str | None, resume_path: str | None) -> tuple[int, int]:
    """The update that a run goes on after, and its policy version; zeros from the beginning. Raises CheckpointError."""
    path = choose(folder, mode, resume_path)
    if path is None:
        return 0, 0
    manifest = read(path, hashes=False)
    return manifest["global_step"], manifest["policy_version"]


def own(path: Path) -> bool:
    """Whether a folder is a checkpoint of this plugin's, whole or not."""
    try:
        _manifest(path)
    except CheckpointError as error:
        return not isinstance(error, ForeignError)
    return True


def remove_all(folder: Path) -> int:
    """Delete every checkpoint of this plugin's in a folder, the pointer first; how many things went."""
    leftovers = [path for pattern in LEFTOVERS for path in folder.glob(pattern)]
    gone = [path for k in steps(folder) if (path := folder / f"{PREFIX}{k}").is_dir() and own(path)]
    pointer = folder / POINTER
    for path in (*gone, *leftovers) if not pointer.is_file() else (pointer, *gone, *leftovers):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return len(gone) + len(leftovers)


def read(path: Path, hashes: bool) -> dict[str, Any]:
    """A checkpoint's manifest, after its files were found whole.

    Args:
        hashes: read every file and compare its sha256; otherwise sizes only.

    Raises CheckpointError for one that is missing, torn, foreign or of a newer format, and offers the one before it.
    """
    try:
        return _read(path, hashes)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {_offer(path.parent, step_of(path))}") from None


def _read(path: Path, hashes: bool) -> dict[str, Any]:
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint folder {path}")
    manifest = _manifest(path)
    if manifest["global_step"] != step_of(path):
        raise CheckpointError(f"checkpoint {path} is that of update {manifest['global_step']}, renamed")
    for name, (size, _) in manifest["files"].items():
        found = path / name
        if not found.is_file():
            raise CheckpointError(f"checkpoint {path} is torn: {name} is missing")
        if found.stat().st_size != size:
            raise CheckpointError(
                f"checkpoint {path} is torn: {name} has {found.stat().st_size} bytes, {size} were written"
            )
    if hashes:
        found = sha256_all(path / name for name in manifest["files"])
        for (name, (_, digest)), now in zip(manifest["files"].items(), found, strict=True):
            if now != digest:
                raise CheckpointError(f"checkpoint {path} is torn: the bytes of {name} are not those written")
    return manifest


def _manifest(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself. Raises CheckpointError where it is not whole, or not of this format."""
    file = path / MANIFEST
    if not file.is_file():
        if (path / "trainer_state.pt").is_file():
            raise ForeignError(f"checkpoint {path} was written by SkyRL's own trainer, whose shards this one has not")
        kind = CheckpointError if (path / "optimizer").is_dir() or (path / "student").is_dir() else ForeignError
        raise kind(f"checkpoint {path} is torn: it has no {MANIFEST}")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"checkpoint {path} is torn: {MANIFEST} is not whole ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ForeignError(f"checkpoint {path} is foreign: {MANIFEST} is not of format {FORMAT!r}")
    if manifest["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"checkpoint {path} has format {manifest['format_version']}, written by skyrl_thundersync "
            f"{manifest.get('written_by')}; this version reads format {FORMAT_VERSION}"
        )
    if manifest.pop("digest", None) != _digest(manifest):
        raise CheckpointError(f"checkpoint {path} is torn: {MANIFEST} does not match its own digest")
    return manifest


def _whole_before(folder: Path, step: int | None) -> Path | None:
    """The newest checkpoint in `folder` of an update before `step` (None: of any) whose every byte is right."""
    for k in reversed(steps(folder)):
        path = at(folder, k)
        if step is None or k < step:
            try:
                _read(path, hashes=True)
            except CheckpointError:
                continue
            return path
    return None


def _offer(folder: Path, step: int | None) -> str:
    whole = _whole_before(folder, step)
    if whole is None:
        return f"No earlier checkpoint in {folder} is whole: start again with trainer.resume_mode=none"
    return f"The one before it is whole: set trainer.resume_mode=from_path trainer.resume_path={whole}"


def _newest(folder: Path) -> str:
    pointer = folder / POINTER
    return f"The newest checkpoint is {folder / PREFIX}{pointer.read_text()}." if pointer.is_file() else ""


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _drop(path: Path) -> None:
    """Delete a checkpoint so that no half of it is ever seen under its name."""
    gone = path.with_name(f".{path.name}.part")
    path.rename(gone)
    shutil.rmtree(gone)


def _replaced(path: Path) -> Path:
    """Where a checkpoint is while the new one of the same update takes its name."""
    return path.with_name(f".{path.name}.old")


def _restore_replaced(folder: Path) -> None:
    """Undo a replacement that a crash cut in two: the old checkpoint is back under its name."""
    for old in folder.glob(f".{PREFIX}*.old"):
        target = folder / old.name[1:].removesuffix(".old")
        if not target.exists():
            old.rename(target)


def _tidy(folder: Path) -> None:
    """Take away what an earlier crash, or a replacement, left."""
    _restore_replaced(folder)
    for pattern in LEFTOVERS:
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover)

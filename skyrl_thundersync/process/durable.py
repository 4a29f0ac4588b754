"""Files that survive a crash: flushed to the disk before anything names them, and checked by their hash when read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CHUNK = 1 << 22


class NotWrittenError(OSError):
    """Files that a process says to have written are not there as it says."""


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def flush(path: Path) -> None:
    """fsync a file's bytes, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal(path: Path) -> tuple[int, str]:
    """Flush a finished file; returns its size in bytes and its sha256."""
    flush(path)
    return path.stat().st_size, sha256(path)


def seal_all(folder: Path, root: Path) -> dict[str, tuple[int, str]]:
    """`seal` every file under `folder`, by its path relative to `root`, several at a time; folders are flushed too."""
    paths = sorted(folder.rglob("*"))
    files = [path for path in paths if path.is_file()]
    sealed = dict(zip((path.relative_to(root).as_posix() for path in files), _at_once(seal, files), strict=True))
    for path in (*(path for path in paths if path.is_dir()), folder):
        flush(path)
    return sealed


def seal_claimed(folder: Path, claimed: Mapping[str, tuple[int, str]]) -> dict[str, tuple[int, str]]:
    """`seal_all` a folder that other processes wrote into, and nobody's word is taken for what is there.

    claimed: {file: (bytes, sha256)} of what they say to have written. Raises NotWrittenError for what is missing or differs.
    """
    found = seal_all(folder, folder)
    for name, (size, digest) in claimed.items():
        if name not in found:
            raise NotWrittenError(f"{name} is not in {folder}")
        if found[name][0] != size:
            raise NotWrittenError(f"{name} has {found[name][0]} bytes in {folder}, {size} were written")
        if found[name][1] != digest:
            raise NotWrittenError(f"{name} in {folder} holds other bytes than were written")
    return found


def sha256_all(paths: Iterable[Path]) -> list[str]:
    """`sha256` of each, several at a time: hashing leaves the interpreter to others."""
    return _at_once(sha256, paths)


def _at_once(action: Callable[[Path], Any], paths: Iterable[Path]) -> list:
    with ThreadPoolExecutor() as pool:
        return list(pool.map(action, paths))


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that after a crash it holds its old content or the new one, nothing else."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    flush(part)
    part.replace(path)
    flush(path.parent)

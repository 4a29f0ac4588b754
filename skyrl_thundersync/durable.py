"""Files that survive a crash: flushed to the disk before anything names them, and checked by their hash when read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

CHUNK = 1 << 22


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


def seal_all(
    folder: Path, root: Path, known: Mapping[str, tuple[int, str]] = MappingProxyType({})
) -> dict[str, tuple[int, str]]:
    """`seal` every file under `folder`, by its path relative to `root`, but those `known`; folders are flushed too."""
    sealed = dict(known)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_dir():
            flush(path)
        elif name not in known:
            sealed[name] = seal(path)
    flush(folder)
    return sealed


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that after a crash it holds its old content or the new one, nothing else."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    flush(part)
    part.replace(path)
    flush(path.parent)

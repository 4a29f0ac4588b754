"""Files on their way into a sandbox."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping


def tar(files: Mapping[str, bytes], changed: int = 0) -> bytes:
    """A tar archive of regular files, mode 0755 where the content starts with `#!`, else 0644.

    Args:
        files: path within the archive -> content.
        changed: their time of change, in Unix seconds.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, data in sorted(files.items()):
            entry = tarfile.TarInfo(path)
            entry.size, entry.mtime = len(data), changed
            entry.mode = 0o755 if data.startswith(b"#!") else 0o644
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()

"""Rows of task files: JSON lines, one JSON list, or parquet. The checks and the loader of a run read them with this."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".json", ".parquet")
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def is_hub_name(source: str) -> bool:
    """Whether a source of tasks is a data set's name, `NAME` or `NAME:SPLIT`, and no file."""
    name = source.partition(":")[0]
    return Path(source).suffix not in SUFFIXES and bool(_HUB_NAME.match(name)) and not Path(source).exists()


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of a file, in order.

    Raises:
        ValueError: the file, a line or an element cannot be read: says where and why.
    """
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    with path.open("rb") as lines:
        if path.suffix == ".json" and lines.read(4096).lstrip()[:1] == b"[":
            yield from _list(path)
            return
        lines.seek(0)
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{path}, line {number}"
                yield where, _object(_parsed(line, where), where)


def _parsed(data: bytes, where: str) -> Any:
    try:
        value = json.loads(data)
        if _SURROGATE.search(data):  # half a pair is valid JSON and no text: nothing can encode it
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"{where} holds half a surrogate pair, {half!r}, which is no text") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    return value


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not a JSON object")
    return value


def _list(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, value in enumerate(_parsed(path.read_bytes(), str(path)), 1):
        where = f"{path}, element {number}"
        yield where, _object(value, where)


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import polars

    try:
        table = polars.read_parquet(path)
    except polars.exceptions.PolarsError as error:
        raise ValueError(f"{path} is not a parquet file that can be read: {error}") from error
    for number, row in enumerate(table.iter_rows(named=True), 1):
        yield f"{path}, row {number}", row

"""Which source families overlap a benchmark: in the hash of an instruction, a solution, or the tests.

Hashes are of normalised content. White space and letter case of instructions do not count. Of a patch, only its changed lines
do, whatever their sign: a patch that plants a bug equals the benchmark's patch that takes it out again. Of Harbor
tests, test.sh counts only where it is alone: its text is the same runner in most tasks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_thundersync.data.split import normalised
from skyrl_thundersync.data.task_folder import folder_files, instruction_of, task_folders
from skyrl_thundersync.tasks.rows import read_rows

KINDS = ("instruction", "solution", "tests")


@dataclass(frozen=True)
class Fingerprint:
    """SHA-256 (hex) of each kind of content; None where the task has none of it."""

    instruction: str | None
    solution: str | None
    tests: str | None


@dataclass(frozen=True)
class Benchmark:
    """A benchmark's name, number of tasks, the hash over all its fingerprints, and these by kind."""

    name: str
    tasks: int
    sha256: str
    hashes: Mapping[str, frozenset[str]]


def harbor_fingerprint(folder: Path) -> Fingerprint:
    """Of a Harbor task folder; missing parts are None."""
    tests = folder_files(folder, "tests")
    if len(tests) > 1:
        tests = {path: data for path, data in tests.items() if path != "test.sh"}
    return Fingerprint(
        _text_hash(instruction_of(folder)), _files_hash(folder_files(folder, "solution")), _files_hash(tests)
    )


def swe_fingerprint(row: Mapping[str, Any], repository: str) -> Fingerprint:
    """Of a row in SWE-bench's or SWE-smith's schema (problem_statement, patch, FAIL_TO_PASS); `repository` is owner/name."""
    failing = sorted(test_names(row.get("FAIL_TO_PASS")))
    return Fingerprint(
        _text_hash(row.get("problem_statement") or ""),
        _patch_hash(row.get("patch") or ""),
        _hash("\n".join([repository, *failing])) if failing else None,
    )


def test_names(value: object) -> list[str]:
    """A list of test ids, given as one or as its JSON (SWE-bench stores text)."""
    if isinstance(value, str):
        value = json.loads(value) if value.strip() else []
    return [str(name) for name in value or []]


def load_benchmark(path: Path) -> Benchmark:
    """A benchmark on disk: a folder of Harbor tasks, or a .jsonl or .parquet file in SWE-bench's schema.

    Raises:
        FileNotFoundError: there is nothing of the kind.
        ValueError: a row is not JSON.
    """
    if path.is_dir():
        prints = [harbor_fingerprint(folder) for folder in task_folders(path)]
    else:
        prints = [swe_fingerprint(row, repository_name(str(row.get("repo") or ""))) for _, row in read_rows(path)]
    if not prints:
        raise FileNotFoundError(f"{path} holds no benchmark tasks")
    hashes = {kind: frozenset(value for p in prints if (value := getattr(p, kind))) for kind in KINDS}
    said = sorted(f"{p.instruction} {p.solution} {p.tests}" for p in prints)
    return Benchmark(path.name, len(prints), _hash("\n".join(said)), hashes)


def overlaps(mine: Fingerprint, benchmarks: Iterable[Benchmark]) -> list[str]:
    """Which kinds of content are also in a benchmark, as "kind of NAME"."""
    return [
        f"{kind} of {benchmark.name}"
        for benchmark in benchmarks
        for kind in KINDS
        if getattr(mine, kind) in benchmark.hashes[kind]
    ]


def contaminated_families(
    tasks: Iterable[tuple[str, Fingerprint]], benchmarks: Collection[Benchmark]
) -> dict[str, list[str]]:
    """Family -> what of it is in a benchmark, for (family, fingerprint) pairs; families without overlap are left out."""
    found: dict[str, set[str]] = {}
    for family, mine in tasks:
        if same := overlaps(mine, benchmarks):
            found.setdefault(normalised(family), set()).update(same)
    return {family: sorted(what) for family, what in sorted(found.items())}


def repository_name(repository: str) -> str:
    """owner/name in lower case. SWE-smith writes its mirrors as "swesmith/owner__name.commit"."""
    name = repository.strip().rpartition("/")[2] if repository.startswith("swesmith/") else repository.strip()
    if "__" in name and "/" not in name:
        name = name.replace("__", "/", 1)
        stem, dot, commit = name.rpartition(".")
        if dot and len(commit) == 8 and all(c in "0123456789abcdef" for c in commit):
            name = stem
    return normalised(name)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _text_hash(text: str) -> str | None:
    return _hash(normalised(text)) if text.strip() else None


def _patch_hash(patch: str) -> str | None:
    changed = sorted(
        line[1:].strip()
        for line in patch.splitlines()
        if line[:1] in "+-" and not line.startswith(("+++", "---")) and line[1:].strip()
    )
    return _hash("\n".join(changed)) if changed else None


def _files_hash(files: Mapping[str, bytes]) -> str | None:
    """Of the files' contents, names left out: a renamed copy is a copy."""
    contents = sorted(hashlib.sha256(b" ".join(data.split())).hexdigest() for data in files.values() if data.strip())
    return _hash("\n".join(contents)) if contents else None

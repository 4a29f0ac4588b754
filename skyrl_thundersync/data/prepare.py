"""From a source of tasks to train.jsonl, dev.jsonl and manifest.json: filters, decontamination, execution checks, split.

In this order, so that the split is over what is kept. Nothing depends on time, place or order of the disk: the same input
gives the same bytes. The manifest counts what every filter dropped and holds hashes of input and output.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl_thundersync import __version__
from skyrl_thundersync.data import seta, swe_smith
from skyrl_thundersync.data.decontaminate import (
    Benchmark,
    Fingerprint,
    contaminated_families,
    harbor_fingerprint,
    swe_fingerprint,
)
from skyrl_thundersync.data.harbor import HarborTask, read_task
from skyrl_thundersync.data.split import development_groups, normalised
from skyrl_thundersync.data.task_folder import Unsupported, folder_files, task_folders
from skyrl_thundersync.process.durable import replace_text
from skyrl_thundersync.tasks import schema
from skyrl_thundersync.tasks.rows import read_rows

MANIFEST_VERSION = 1
PAPER = {
    "seta": {"read": 4567, "kept": 4333},
    "swe-smith": {"read": 50908, "empty_problem_statement": 11437, "kept": 37084},
}
"""Counts that the paper gives, compared where as many tasks were read."""


@dataclass(frozen=True)
class Sample:
    """One task that passed the static filters."""

    task_id: str
    family: str
    fingerprint: Fingerprint
    row: dict[str, Any]
    task: HarborTask | None = None


@dataclass
class TaskSource:
    """What was read: samples in order of task id, how many tasks there were, and what each filter dropped.

    `dropped` maps filter -> count in the order the filters apply; `sha256` is over the input's content.
    """

    name: str
    read: int
    sha256: str
    samples: list[Sample]
    dropped: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)


def harbor_source(name: str, root: Path, max_turns: int, partial_credit: bool, enabled: Collection[str]) -> TaskSource:
    """Harbor task folders below `root`; `name` "seta" adds that set's own filters and families.

    Raises:
        FileNotFoundError: there is no task folder.
    """
    folders = task_folders(root)
    if not folders:
        raise FileNotFoundError(f"no Harbor task (a folder with task.toml) below {root}")
    strict = name == "seta"
    dropped = Counter(dict.fromkeys(seta.FILTERS if strict else (), 0))
    samples, seen, content = [], set(), []
    for folder in folders:
        content.append(f"{folder.relative_to(root)} {_folder_hash(folder)}")
        try:
            missing = seta.problem(folder) if strict else None
            task = None if missing else read_task(folder, enabled)
        except Unsupported as problem:
            missing = problem.reason if problem.reason != "incomplete" else f"incomplete: {problem.detail}"
        if missing is None and folder.name in seen:
            missing = "duplicate"
        if missing is not None:
            dropped[missing] += 1
            continue
        row = task.row(max_turns, partial_credit)
        if not _whole(row):
            dropped["row"] += 1
            continue
        seen.add(folder.name)
        family = seta.family(folder.name) if strict else folder.name
        samples.append(Sample(task.task_id, family, harbor_fingerprint(folder), row, task))
    samples.sort(key=lambda sample: sample.task_id)
    options = {"enabled": sorted(enabled), "max_turns": max_turns, "partial_credit": partial_credit}
    return TaskSource(name, len(folders), _hash("\n".join(content)), samples, dict(dropped), options)


def swe_smith_source(files: Sequence[Path], max_turns: int, partial_credit: bool) -> TaskSource:
    """SWE-smith instances from .jsonl or .parquet files."""
    dropped = Counter(dict.fromkeys(swe_smith.FILTERS, 0))
    samples, seen, read = [], set(), 0
    for row in _rows(files):
        read += 1
        problem = swe_smith.problem(row)
        if problem is None and row["instance_id"] in seen:
            problem = "duplicate"
        if problem is not None:
            dropped[problem] += 1
            continue
        made = swe_smith.terminal_row(row, max_turns, partial_credit)
        if not _whole(made):
            dropped["row"] += 1
            continue
        seen.add(row["instance_id"])
        repository = swe_smith.group(row)
        samples.append(Sample(str(row["instance_id"]), repository, swe_fingerprint(row, repository), made))
    samples.sort(key=lambda sample: sample.task_id)
    options = {"max_turns": max_turns, "partial_credit": partial_credit}
    digest = _hash("\n".join(sorted(_file_hash(file) for file in files)))
    return TaskSource("swe-smith", read, digest, samples, dict(dropped), options)


@dataclass(frozen=True)
class Prepared:
    """Rows of both splits, and the manifest without the outputs' hashes.

    `dev` is for evaluation, so its reward is the official one, without partial credit. Without a split it is all tasks.
    """

    train: list[dict[str, Any]]
    dev: list[dict[str, Any]]
    manifest: dict[str, Any]


def prepare(
    source: TaskSource,
    benchmarks: Sequence[Benchmark] = (),
    check: Callable[[list[HarborTask]], Mapping[str, str | None]] | None = None,
    split: bool = True,
) -> Prepared:
    """Decontaminate, check by execution, split.

    `check`: tasks -> task id -> why it is unsound (None: it is sound); None leaves the check out, and the manifest says so.
    """
    samples = source.samples
    bad = contaminated_families(((s.family, s.fingerprint) for s in samples), benchmarks)
    clean = [sample for sample in samples if normalised(sample.family) not in bad]
    dropped = {**source.dropped, "decontamination": len(samples) - len(clean)}
    execution: dict[str, Any] = {"checked": 0}
    if check is not None:
        problems = check([sample.task for sample in clean if sample.task is not None])
        counts = Counter(problem for problem in problems.values() if problem)
        clean = [sample for sample in clean if problems.get(sample.task_id) is None]
        dropped["execution"] = sum(counts.values())
        execution = {
            "checked": len(problems),
            "failed": dict(sorted(counts.items())),
            "tasks": {task: problem for task, problem in sorted(problems.items()) if problem},
        }
    dev_groups = development_groups(sample.family for sample in clean) if split else []
    chosen = set(dev_groups)
    train = [sample.row for sample in clean if normalised(sample.family) not in chosen]
    held = [sample for sample in clean if not split or normalised(sample.family) in chosen]
    dev = [{**sample.row, "partial_credit": False} for sample in held]
    counts = {"read": source.read, "dropped": dropped, "kept": len(clean), "train": len(train), "dev": len(dev)}
    manifest = {
        "manifest_version": MANIFEST_VERSION,
        "skyrl_thundersync": __version__,
        "source": {"name": source.name, "sha256": source.sha256},
        "options": source.options,
        "counts": counts,
        "groups": {"all": len({normalised(s.family) for s in clean}), "dev": dev_groups},
        "decontamination": {
            "benchmarks": [{"name": b.name, "tasks": b.tasks, "sha256": b.sha256} for b in benchmarks],
            "families": bad,
        },
        "execution": execution,
        "paper": _against_paper(source, counts),
    }
    return Prepared(train, dev, manifest)


def write(prepared: Prepared, folder: Path) -> dict[str, Any]:
    """Write train.jsonl, dev.jsonl and manifest.json into `folder`; returns the manifest.

    The manifest comes last and is replaced whole: a folder with one has complete files of the same run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").unlink(missing_ok=True)
    outputs = {}
    for name, rows in (("train.jsonl", prepared.train), ("dev.jsonl", prepared.dev)):
        text = "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows)
        (folder / name).write_text(text, encoding="utf-8")
        outputs[name] = {"rows": len(rows), "sha256": _hash(text)}
    manifest = {**prepared.manifest, "outputs": outputs}
    replace_text(folder / "manifest.json", json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
    return manifest


def _whole(row: Mapping[str, Any]) -> bool:
    """Whether `train` would take it, or Harbor's own runner."""
    return not [field for field, _ in schema.problems(row)[1] if field != "needs"]


def _against_paper(source: TaskSource, counts: Mapping[str, Any]) -> dict[str, Any] | None:
    """{count: {"paper": n, "here": m}} where as many tasks were read as in the paper, else None."""
    expected = PAPER.get(source.name)
    if expected is None or source.read != expected["read"]:
        return None
    here = {"read": source.read, "kept": counts["kept"], **source.dropped}
    return {name: {"paper": value, "here": here[name]} for name, value in expected.items()}


def _rows(files: Sequence[Path]) -> Iterator[Mapping[str, Any]]:
    for file in files:
        for _, row in read_rows(file):
            yield row


def _folder_hash(folder: Path) -> str:
    files = {path: data for path, data in folder_files(folder, ".").items()}
    return _hash("\n".join(f"{path} {hashlib.sha256(data).hexdigest()}" for path, data in sorted(files.items())))


def _file_hash(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

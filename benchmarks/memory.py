"""What fresh memory costs a learner rank: the same batch in a heap that gives its pages back and in one that keeps
them.

    python -m benchmarks.memory [--rounds N] [--retain-gib G]

The shape of benchmarks/learner.py, FP32, one thread: two prompts, two samples of each, 5 turns of 160 tokens. "sync":
whole trajectories at their close; "thundersync": turn by turn, all trajectories open at once. Heaps: "mapped", each
large block mapped by itself and given back; "trimmed", glibc's own, given back as a batch begins; "kept",
learner/heap.py. Every pair in a process of its own, rounds interleaved, the first not counted. Seconds are CPU time
of the process, those in the kernel beside them; faults are minor page faults of an update; a ratio is taken within a
round and heap.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from benchmarks.learner import BLOCK, WHOLE_TRAJECTORY, Options
from benchmarks.plain_pass import save_shape, trajectory
from skyrl_thundersync.learner.heap import keep_pages
from skyrl_thundersync.learner.rank import LearnerRank, RankSpec
from skyrl_thundersync.stream.sources import Append, CloseGroup, CloseTrajectory, TrajectoryId, Work

SCHEDULES = {"sync": WHOLE_TRAJECTORY, "thundersync": BLOCK}
M_MMAP_THRESHOLD = -3
SAMPLES, TURNS = 2, 5
Use = tuple[dict[str, float], float, int, int]
"""Of one update: CPU seconds by kind, of them in the kernel, faults, peak resident bytes so far."""


def mapped() -> None:
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)


HEAPS: dict[str, Callable[[], None]] = {"mapped": mapped, "trimmed": lambda: None, "kept": keep_pages}


def batch(schedule: str) -> list[Work]:
    groups = {g: [trajectory(TURNS, group=g, sample=s) for s in range(SAMPLES)] for g in ("a", "b")}
    closes = {g: [CloseTrajectory(TrajectoryId(g, s), None) for s in range(SAMPLES)] for g in groups}
    if schedule == "sync":
        by_group = [
            [*sum(([*t, c] for t, c in zip(groups[g], closes[g], strict=True)), []), CloseGroup(g)] for g in groups
        ]
        return sum(by_group, [])
    turns = [talk[turn] for turn in range(TURNS) for talks in groups.values() for talk in talks]
    return [*turns, *sum(([*closes[g], CloseGroup(g)] for g in groups), [])]


def _child(folder: str, schedule: str, heap: str, retain_gib: float, pipe) -> None:
    """One update for every message; answers with its `Use`."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    rank = LearnerRank(RankSpec(folder, 0, 1, "127.0.0.1", 0, Options(SCHEDULES[schedule], retain_gib), "opd"))
    works = batch(schedule)
    HEAPS[heap]()
    while pipe.recv():
        if heap == "trimmed":
            ctypes.CDLL(None).malloc_trim(0)
        seconds, before = dict.fromkeys(("append", "sweep", "prompt"), 0.0), resource.getrusage(resource.RUSAGE_SELF)
        for work in works:
            kind = "append" if isinstance(work, Append) else "sweep" if isinstance(work, CloseTrajectory) else "prompt"
            start = time.process_time()
            rank.run_many([work])
            seconds[kind] += time.process_time() - start
        rank.abort_batch()
        after = resource.getrusage(resource.RUSAGE_SELF)
        kernel, faults = after.ru_stime - before.ru_stime, after.ru_minflt - before.ru_minflt
        pipe.send((seconds, kernel, faults, after.ru_maxrss * 1024))


def measure(retain_gib: float, rounds: int) -> dict[tuple[str, str], list[Use]]:
    """By (heap, schedule) the counted rounds."""
    context, pipes, processes = multiprocessing.get_context("forkserver"), {}, []
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        save_shape(Path(folder))
        for case in ((heap, schedule) for heap in HEAPS for schedule in SCHEDULES):
            pipes[case], theirs = context.Pipe()
            process = context.Process(target=_child, args=(folder, case[1], case[0], retain_gib, theirs))
            process.start()
            processes.append(process)
        found: dict[tuple[str, str], list[Use]] = {case: [] for case in pipes}
        for counted in (False, *[True] * rounds):
            for case, pipe in pipes.items():
                pipe.send(True)
                found[case] += [pipe.recv()] * counted
        for pipe, process in zip(pipes.values(), processes, strict=True):
            pipe.send(False)
            process.join()
    return found


def main(
    rounds: Annotated[int, typer.Option(help="Counted, interleaved rounds.", min=1)] = 3,
    retain_gib: Annotated[float, typer.Option(help="As thundersync.learner.retain_gib.", min=0)] = 4.0,
) -> None:
    """Print the table; medians over rounds."""
    found = measure(retain_gib, rounds)
    names = ("append", "sweep", "prompt", "all", "kernel", "faults", "peak GiB", "to sync (range)")
    view = Table("heap", "schedule", *names, box=None)
    for (heap, schedule), uses in found.items():
        kinds = [f"{statistics.median(use[0][kind] for use in uses):.2f}" for kind in ("append", "sweep", "prompt")]
        total = [sum(use[0].values()) for use in uses]
        ratio = [t / sum(use[0].values()) for t, use in zip(total, found[heap, "sync"], strict=True)]
        shown = f"{statistics.median(ratio):.2f} ({min(ratio):.2f}-{max(ratio):.2f})" if schedule != "sync" else ""
        kernel, faults = statistics.median(use[1] for use in uses), statistics.median(use[2] for use in uses)
        rest = (
            f"{statistics.median(total):.2f}",
            f"{kernel:.2f}",
            f"{faults:,.0f}",
            f"{uses[-1][3] / 2**30:.2f}",
            shown,
        )
        view.add_row(heap, schedule, *kinds, *rest)
    Console().print(view)


if __name__ == "__main__":
    typer.run(main)

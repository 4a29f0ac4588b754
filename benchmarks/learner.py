"""What the learner costs: one trajectory under each release policy, as ratios to one plain forward and backward.

    python -m benchmarks.learner [--quick] [--rounds N] [--policy NAME]… [--long] [--json]

A Qwen3 shape of 15.7 M parameters, FP32, one thread; 48 turns of 160 tokens, 40 of them scored. Every policy runs in a
process of its own, so that its peak memory is its own; policies are interleaved. A ratio is taken within a round, since a
machine may be slower for a while; medians over rounds are reported, and the range of totals. Time is the process's CPU time,
which other processes disturb least. "before close" is what runs while the trajectory is still being sampled, "tail" what runs
after its last turn. Eager (the paper's text) works on the same blocks as fused. --long adds peak memory at 8k and 16k tokens,
fused against checkpointed, and what fused needs per further token beside K, V and adjoints.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from benchmarks.eager import EagerForest
from benchmarks.plain_pass import BASELINES, SHAPE, baseline_model, monolithic, save_shape, trajectory
from skyrl_thundersync.learner.rank import WHOLE_TRAJECTORY, LearnerRank, RankSpec
from skyrl_thundersync.stream.sources import CloseGroup, CloseTrajectory, TrajectoryId

BLOCK = 640
POLICIES = {
    "trajectory": {"block_tokens": WHOLE_TRAJECTORY, "retain_gib": 0.0},
    "fused": {"block_tokens": BLOCK, "retain_gib": 0.0},
    "retain": {"block_tokens": BLOCK, "retain_gib": 16.0},
    "eager": {"block_tokens": BLOCK, "retain_gib": 0.0},
}
TARGETS = {"fused": (1.40, 1.05), "retain": (1.15, 0.75)}
"""Total and tail to reach, in units of the monolithic pass."""
LONG = (51, 102)
"""Turns of the two lengths of --long: 8,160 and 16,320 tokens."""
SHARED = 0.35
"""Cost of 8 samples on one long prompt to reach, in units of 8 separate ones."""


class Options:
    """The `thundersync.learner` options of one policy."""

    dtype, zero_stage, offload_optimizer, accumulator, threads = "float32", 1, False, "fp32", 1
    state_gib = graph_gib = None

    def __init__(self, block_tokens: int, retain_gib: float, dtype: str = "float32"):
        self.block_tokens, self.retain_gib, self.dtype = block_tokens, retain_gib, dtype


def runner(folder: str, name: str, turns: int, clock: Callable[[], float] = time.process_time):
    """A function that runs the trajectory once under policy or baseline `name`: (before close, tail) in seconds."""
    works = trajectory(turns)
    if name in BASELINES:
        model = baseline_model(folder, name)

        def once() -> tuple[float, float]:
            start = clock()
            monolithic(model, works)
            seconds = clock() - start
            model.zero_grad()
            return 0.0, seconds

        return once
    rank = LearnerRank(RankSpec(folder, 0, 1, "127.0.0.1", 0, Options(**POLICIES[name]), "opd"))
    if name == "eager":
        rank.forest = EagerForest.of(rank.forest)

    def once() -> tuple[float, float]:
        start = clock()
        for work in works:
            rank.run(work)
        closed = clock()
        rank.run(CloseTrajectory(TrajectoryId("g", 0), 1.0))
        rank.run(CloseGroup("g"))
        seconds = clock() - closed
        rank.accumulator.clear()
        return closed - start, seconds

    return once


def _child(folder: str, name: str, turns: int, pipe) -> None:
    """Run once for every message; answer with the times and how far the peak lies above what was held before."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    once = runner(folder, name, turns)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while pipe.recv():
        times = once()
        pipe.send((times, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) * 1024))


@contextmanager
def isolated(folder: str, names: tuple[str, ...], turns: int) -> Iterator[dict[str, Connection]]:
    """A process a name, each of which runs once when it is sent True and ends when it is sent False."""
    save_shape(Path(folder))
    context, pipes, processes = multiprocessing.get_context("forkserver"), {}, []
    # Imported once. Not this module: where it is the main one, each process would import it again, and warn.
    context.set_forkserver_preload(["benchmarks.eager", "transformers.models.qwen3.modeling_qwen3"])
    for name in names:
        pipes[name], theirs = context.Pipe()
        processes.append(context.Process(target=_child, args=(folder, name, turns, theirs)))
        processes[-1].start()
        theirs.close()
    try:
        yield pipes
    finally:
        for pipe, process in zip(pipes.values(), processes, strict=True):
            if process.is_alive():
                pipe.send(False)
            process.join()


def long_peaks() -> dict[str, list[int]]:
    """Per policy the bytes that one run of each of LONG's lengths adds to its process's peak."""
    found: dict[str, list[int]] = {name: [] for name in ("checkpointed", "fused")}
    for turns in LONG:
        for name in found:  # one after the other: side by side they might not fit
            with tempfile.TemporaryDirectory(prefix="learner-") as folder, isolated(folder, (name,), turns) as pipes:
                pipes[name].send(True)
                found[name].append(pipes[name].recv()[1])
    return found


def state_bytes_per_token() -> int:
    """K, V and their adjoints, FP32, of SHAPE."""
    return 2 * 2 * 4 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"]


def shared_prompt(folder: str, prompt: int, samples: int = 8, clock: Callable[[], float] = time.process_time) -> float:
    """Cost of `samples` two-turn samples of one prompt of `prompt` tokens, over that of as many with a prompt each."""
    rank = LearnerRank(RankSpec(folder, 0, 1, "127.0.0.1", 0, Options(**POLICIES["fused"]), "opd"))

    def seconds(groups: list[str]) -> float:
        start = clock()
        for sample, group in enumerate(groups):
            for work in trajectory(2, prompt=prompt, group=group, sample=sample):
                rank.run(work)
            rank.run(CloseTrajectory(TrajectoryId(group, sample), 1.0))
            if group not in groups[sample + 1 :]:
                rank.run(CloseGroup(group))
        return clock() - start

    seconds(["warm-up"])
    return seconds(["g"] * samples) / seconds([f"g{i}" for i in range(samples)])


def show_long(console: Console) -> dict[str, list[int]]:
    """Print and return `long_peaks`."""
    peaks, tokens = long_peaks(), [160 * turns for turns in LONG]
    for n, fused, checkpointed in zip(tokens, peaks["fused"], peaks["checkpointed"], strict=True):
        console.print(
            f"peak at {n} tokens: fused {fused / 2**20:.0f} MiB, checkpointed {checkpointed / 2**20:.0f} MiB, "
            f"ratio {fused / checkpointed:.2f}; to reach below 1"
        )
    growth = (peaks["fused"][1] - peaks["fused"][0]) / (tokens[1] - tokens[0])
    console.print(
        f"fused grows by {growth / 1024:.1f} KiB a token; K, V and their adjoints are {state_bytes_per_token() / 1024:.1f}"
    )
    return peaks


def ratios(policy: str, runs: list[tuple[float, float]], units: list[float]) -> dict:
    """A policy's rounds, each in units of the plain pass of the same round."""
    early, tail = ([run[part] / unit for run, unit in zip(runs, units, strict=True)] for part in (0, 1))
    total = [a + b for a, b in zip(early, tail, strict=True)]
    return {
        "policy": policy,
        "total": statistics.median(total),
        "least": min(total),
        "most": max(total),
        "before_close": statistics.median(early),
        "tail": statistics.median(tail),
    }


def main(
    quick: Annotated[bool, typer.Option(help="12 turns, one repeat: about a minute, and no targets.")] = False,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds of all policies.")] = 3,
    policy: Annotated[
        list[str] | None, typer.Option(help="Only this policy beside the plain pass; repeatable.")
    ] = None,
    long: Annotated[
        bool, typer.Option("--long", help="Peak memory at 8k and 16k tokens too: some ten minutes.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Print the cost table; exit 1 when a figure misses what it is to reach."""
    turns, rounds = (12, 1) if quick else (48, rounds)
    if unknown := set(policy or ()) - {*BASELINES, *POLICIES}:
        raise typer.BadParameter(f"unknown policy {', '.join(unknown)}; known are {', '.join((*BASELINES, *POLICIES))}")
    names = tuple(dict.fromkeys(("monolithic", *(policy or (*BASELINES, *POLICIES)))))
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    peaks: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="learner-") as folder, isolated(folder, names, turns) as pipes:
        for counted in (False, *[True] * rounds):  # the first round warms up
            for name in names:
                pipes[name].send(True)
                times, peaks[name] = pipes[name].recv()
                runs[name] += [times] * counted
        torch.set_num_threads(1)
        shared = shared_prompt(folder, 512 if quick else 3072)
    units, memory = [sum(run) for run in runs["monolithic"]], peaks["monolithic"]
    unit, rows = statistics.median(units), [ratios(name, runs[name], units) for name in names]
    for row in rows:
        row["peak_memory"] = peaks[row["policy"]] / memory
    console = Console(stderr=as_json)
    view = Table("policy", "total", "range", "before close", "tail", "peak memory", "to reach (total, tail)", box=None)
    for row in rows:
        wanted = TARGETS.get(row["policy"]) if not quick else None
        rest = (f"{row[key]:.2f}" for key in ("before_close", "tail", "peak_memory"))
        total = (f"{row['total']:.2f}", f"{row['least']:.2f}-{row['most']:.2f}")
        view.add_row(row["policy"], *total, *rest, f"{wanted[0]:.2f}, {wanted[1]:.2f}" if wanted else "")
    console.print(view)
    console.print(f"unit: {unit:.2f} s CPU and {memory / 2**30:.2f} GiB, {turns} turns of 160 tokens, {rounds} rounds")
    console.print(f"8 samples on one prompt: {shared:.2f} of 8 separate; to reach {SHARED}")
    peaks_at = show_long(console) if long else None
    if as_json:
        found = {"unit_seconds": unit, "unit_bytes": memory, "shared_prompt": shared, "long_peak_bytes": peaks_at}
        print(json.dumps({**found, "rows": rows}))
    if quick:
        return
    missed = shared > SHARED or (peaks_at is not None and peaks_at["fused"][-1] > peaks_at["checkpointed"][-1])
    for row in rows:
        total, tail = TARGETS.get(row["policy"], (float("inf"), float("inf")))
        if row["total"] > total or row["tail"] > tail:
            console.print(
                f"{row['policy']}: total {row['total']:.2f} / {total}, tail {row['tail']:.2f} / {tail}: missed"
            )
            missed = True
    if missed:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)

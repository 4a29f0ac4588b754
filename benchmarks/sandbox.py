"""Latency and throughput of sandboxes: `python -m benchmarks.sandbox [--backend docker] [--json FILE]`.

For 1, 8 and 32 sandboxes at once, each in a thread of its own: how long all of them take to be up, how long one start, one
`true` over the persistent shell and one end (time limit, and close) take, and how many commands a second they run together.
Beside it, how long a trajectory waits for its sandbox when it was started ahead. Targets: a command in at most 5 ms at one
sandbox, 32 sandboxes up in at most 8 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from skyrl_thundersync.options.schema import SandboxConfig
from skyrl_thundersync.sandbox.pool import SandboxPool
from skyrl_thundersync.sandbox.select import BACKENDS

SIZES = (1, 8, 32)
COMMANDS = 100
ROUNDS_OF_ONE = 8
KILL_LIMIT_S = 0.2
COMMAND_TARGET_MS = 5.0
UP_TARGET_S = 8.0
COMMANDS_MEASURED = ("true", "ls /usr/bin >/dev/null")


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that `action` took, and what it returned."""
    started = time.perf_counter()
    result = action()
    return time.perf_counter() - started, result


def summary_ms(seconds: list[float]) -> dict[str, float]:
    """Median and 95th percentile in milliseconds."""
    ordered = sorted(seconds)
    return {
        "median": 1000 * statistics.median(ordered),
        "p95": 1000 * ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
    }


def one_size(backend: str, size: int) -> dict[str, Any]:
    """Figures of `size` sandboxes at once; a single one is started and ended several times."""
    starts: list[float] = []
    commands: dict[str, list[float]] = {command: [] for command in COMMANDS_MEASURED}
    kills: list[float] = []
    closes: list[float] = []
    ups: list[float] = []
    rates: list[float] = []
    config = SandboxConfig(backend=backend, warm=0)
    with SandboxPool(config, "bench") as pool, ThreadPoolExecutor(size) as threads:
        for _ in range(ROUNDS_OF_ONE if size == 1 else 1):
            up_s, made = timed(lambda: list(threads.map(lambda _: timed(pool.create), range(size))))
            ups.append(up_s)
            starts += [seconds for seconds, _ in made]
            boxes = [box for _, box in made]
            for command in COMMANDS_MEASURED:
                taken_s, each = timed(partial(_run_all, threads, boxes, command))
                commands[command] += [seconds for own in each for seconds in own]
                if command == COMMANDS_MEASURED[0]:
                    rates.append(size * COMMANDS / taken_s)
            limits = threads.map(lambda box: timed(lambda: box.run("sleep 60 & sleep 60", KILL_LIMIT_S))[0], boxes)
            kills += [seconds - KILL_LIMIT_S for seconds in limits]
            closes += threads.map(lambda box: timed(box.close)[0], boxes)
    return {
        "sandboxes": size,
        "up_s": statistics.median(ups),
        "start_ms": summary_ms(starts),
        "command_ms": {command: summary_ms(seconds) for command, seconds in commands.items()},
        "commands_per_s": statistics.median(rates),
        "kill_ms": summary_ms(kills),
        "close_ms": summary_ms(closes),
    }


def _run_all(threads: ThreadPoolExecutor, boxes: list[Any], command: str) -> list[list[float]]:
    return list(threads.map(lambda box: _run_many(box, command), boxes))


def _run_many(box: Any, command: str) -> list[float]:
    return [timed(lambda: box.run(command, 10.0))[0] for _ in range(COMMANDS)]


def started_ahead(backend: str, episodes: int = 12, thinking_s: float = 0.5) -> dict[str, float]:
    """Milliseconds that episodes one after the other, each `thinking_s` long, wait for a sandbox that was started ahead."""
    waits = []
    with SandboxPool(SandboxConfig(backend=backend), "bench") as pool:
        pool.create().close()
        for _ in range(episodes):
            threading.Event().wait(thinking_s)
            seconds, box = timed(pool.create)
            waits.append(seconds)
            box.close()
    return summary_ms(waits)


def table(backend: str, results: list[dict[str, Any]], ahead: dict[str, float]) -> str:
    """Markdown, one row a size."""
    pair = "{median:.1f} / {p95:.1f}".format_map
    lines = [
        f"| {backend} | all up (s) | start (ms) | `true` (ms) | `ls` (ms) | commands/s | kill (ms) | close (ms) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results:
        true, ls = (pair(row["command_ms"][command]) for command in COMMANDS_MEASURED)
        lines.append(
            f"| {row['sandboxes']} | {row['up_s']:.2f} | {pair(row['start_ms'])} | {true} | {ls} | "
            f"{row['commands_per_s']:.0f} | {pair(row['kill_ms'])} | {pair(row['close_ms'])} |"
        )
    command = results[0]["command_ms"][COMMANDS_MEASURED[1]]["median"]
    lines += [
        "",
        f"Started ahead, a trajectory waits {pair(ahead)} ms for its sandbox. "
        + against("A command", command, COMMAND_TARGET_MS, "ms")
        + " "
        + against(f"{results[-1]['sandboxes']} up", results[-1]["up_s"], UP_TARGET_S, "s"),
    ]
    return "\n".join(lines)


def against(what: str, measured: float, target: float, unit: str) -> str:
    """The figure beside its target, and by how much it was missed."""
    if measured <= target:
        return f"{what}: {measured:.1f} {unit}, target {target:g} {unit}, met."
    return f"{what}: {measured:.1f} {unit}, target {target:g} {unit}, MISSED by {measured / target - 1:.0%}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=BACKENDS, action="append", help="default: every one that works here")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    figures = {}
    for backend in options.backend or BACKENDS:
        if reason := BACKENDS[backend]():
            print(f"{backend}: left out: {reason}")
            continue
        results = [one_size(backend, size) for size in SIZES]
        ahead = started_ahead(backend)
        figures[backend] = {"sizes": results, "started_ahead_ms": ahead}
        print(table(backend, results, ahead), end="\n\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

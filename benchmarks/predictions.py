"""How well step times and speed-ups are foretold: d_i of PAPER.md ("Theory") over measured runs, e_i beside it.

    python -m benchmarks.predictions [--limit 48] [--plot FOLDER] [--json]

Each configuration runs for real under sync and then under thundersync: `trainer.Update` on the wall clock with one
`LearnerRank` (a Qwen3 shape of 0.9 M parameters, FP32, one thread, its optimizer step included), while rollouts drawn
from a `Workload` happen on timers. The simulator foretells both step times from the same draw, with speeds fitted to a few
other updates beforehand; the release law foretells the speed-up from the simulation's ρ, κ and δ alone (learner and suffix
time over rollout time; share of the work that waits for a close).

    step: simulated against measured thundersync step time;  d: simulated against measured speed-up;  e: release law against
    simulated speed-up. Percent.

A law describes many trajectories, and so e is that of the same configuration with as many as a real batch has (`MANY`); `few`
is that of the measured batch, which keeps the run short: there most of it is what so few draws happen to be.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.plain_pass import save_shape
from benchmarks.timed_update import learner, measure
from skyrl_thundersync import theory
from skyrl_thundersync.learner.rank import WHOLE_TRAJECTORY
from skyrl_thundersync.report import curves
from skyrl_thundersync.simulate.machines import Machine
from skyrl_thundersync.simulate.meter import Figures
from skyrl_thundersync.simulate.virtual_update import direct
from skyrl_thundersync.simulate.workload import Workload
from skyrl_thundersync.stream.release import WorkPolicy

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
BLOCK = 320
FEW, MANY = 16, 256
"""Trajectories of a measured batch, and of the simulated one for e."""
RETAIN_GIB = 8.0
GRID = {"kept": (True, False), "skew": (0.5, 1.0, 2.0), "turns": (4, 10), "rho": (0.5, 0.8, 1.1, 1.5)}


@dataclass(frozen=True)
class Configuration:
    """kept: graphs stay from arrival to sweep. skew, turns: as `Workload`. rho: learner time over rollout time aimed at."""

    kept: bool
    skew: float
    turns: int
    rho: float

    def workload(self, tool_s: float, trajectories: int = FEW) -> Workload:
        return Workload(
            groups=trajectories,
            samples=1,
            turns=self.turns,
            skew=self.skew,
            prompt_tokens=40,
            turn_tokens=30,
            observation_tokens=70,
            token_spread=0.3,
            tool_s=tool_s,
            tool_spread=0.3,
        )


@dataclass(frozen=True)
class Outcome:
    """One configuration: step times (s) measured and simulated, speed-ups three ways, errors in percent."""

    kept: bool
    skew: float
    turns: int
    rho: float
    sync_s: float
    step_s: float
    simulated_sync_s: float
    simulated_step_s: float
    measured: float
    simulated: float
    law: float
    step_error: float
    d: float
    e: float
    few: float


def machine_of(schedule: str, kept: bool) -> Machine:
    """Rollouts that only wait for tools, one rank, and nothing known of its speed: a token costs one second."""
    retain = 10**9 if kept or schedule == "sync" else 0
    return Machine(
        ranks=1,
        replicas=1,
        teachers=0,
        decode_rate=1e6,
        decode_peak=1e9,
        prefill_rate=1e9,
        learner_rate=1.0,
        item_s=0.0,
        block_tokens=BLOCK,
        retain_tokens=retain,
        suffix_s=0.0,
    )


def fit(ranks: dict, configurations: list[Configuration], seed: int) -> tuple[dict[str, float], float]:
    """Speeds of this machine from updates that are not predicted: learner_rate, item_s, past_tokens; and the suffix, s."""
    rows, busy, suffixes = [], [], []
    for number, configuration in enumerate(configurations):
        # What is not kept is forwarded twice, how much of it depends on the order, and that on the speed: not used to fit.
        for schedule in ("sync", "thundersync") if configuration.kept else ("sync",):
            workload = configuration.workload(0.2)
            machine = machine_of(schedule, configuration.kept)
            # Cost is linear in the two kinds of token cost: simulate once with each alone, in the order of work as measured.
            alone = direct(workload.rollouts(machine, seed + number), machine, WorkPolicy("sync"))
            past = replace(machine, past_tokens=1.0)
            both = direct(workload.rollouts(past, seed + number), past, WorkPolicy("sync"))
            token, pair = float(alone.service_s.sum()), float(both.service_s.sum())
            measured = measure(ranks[schedule, configuration.kept], workload.rollouts(machine, seed + number), schedule)
            rows.append((token, pair - token, measured.items))
            busy.append(measured.busy_s)
            suffixes.append(measured.suffix_s)
    per_token, per_pair, item_s = nonnegative_fit(np.array(rows), np.array(busy))
    past_tokens = float(per_token / per_pair) if per_pair > 0 else None
    speeds = {"learner_rate": float(1 / per_token), "item_s": float(item_s), "past_tokens": past_tokens}
    return speeds, statistics.median(suffixes)


def nonnegative_fit(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Least squares x of a @ x = b with x >= 0: noise makes no cost a gain, nor column 0 (tokens) free."""
    others = list(range(1, a.shape[1]))
    while True:
        x, kept = np.zeros(a.shape[1]), [0, *others]
        x[kept] = np.linalg.lstsq(a[:, kept], b, rcond=None)[0]
        if not others or (x >= 0).all():
            return x
        others.remove(min(others, key=lambda column: x[column] * a[:, column].mean()))


@dataclass(frozen=True)
class Foretold:
    """One configuration in virtual time: its workload at the ρ aimed at, figures by schedule, the release law's speed-up."""

    workload: Workload
    figures: dict[str, Figures]
    law: float

    @property
    def speedup(self) -> float:
        return self.figures["sync"].step_s / self.figures["thundersync"].step_s

    @property
    def e(self) -> float:
        return float(theory.release_error(self.law, self.speedup))


def foretell(configuration: Configuration, machine: dict[str, Machine], trajectories: int, seed: int) -> Foretold:
    """Simulate both schedules, each on its `machine`; the suffix grows with the batch, so that κ is the same for any."""
    machine = {name: replace(m, suffix_s=m.suffix_s * trajectories / FEW) for name, m in machine.items()}

    def simulate(workload: Workload, schedule: str) -> Figures:
        return direct(workload.rollouts(machine[schedule], seed), machine[schedule], WorkPolicy(schedule)).figures

    # Rollouts are tool time alone, so R is proportional to it.
    at_one = simulate(configuration.workload(1.0, trajectories), "sync")
    workload = configuration.workload(at_one.rho / configuration.rho, trajectories)
    figures = {schedule: simulate(workload, schedule) for schedule in machine}
    sync, ours = figures["sync"], figures["thundersync"]

    def release(u):
        return theory.opd_release(u, 1.0, configuration.turns, ours.deferred_share, configuration.skew)

    return Foretold(workload, figures, float(theory.speedup(sync.rho, sync.kappa, theory.tail(release, ours.rho))))


def compare(ranks: dict, configuration: Configuration, speeds: dict, suffix_s: float, seed: int) -> Outcome:
    """Foretell one configuration and measure it under both schedules."""
    machine = {
        schedule: replace(machine_of(schedule, configuration.kept), suffix_s=suffix_s, **speeds)
        for schedule in ("sync", "thundersync")
    }
    foretold = foretell(configuration, machine, FEW, seed)
    measured = {
        schedule: measure(
            ranks[schedule, configuration.kept], foretold.workload.rollouts(machine[schedule], seed), schedule
        )
        for schedule in machine
    }
    sync, ours = foretold.figures["sync"], foretold.figures["thundersync"]
    speedup = measured["sync"].step_s / measured["thundersync"].step_s
    return Outcome(
        **vars(configuration) | {"rho": sync.rho},
        sync_s=measured["sync"].step_s,
        step_s=measured["thundersync"].step_s,
        simulated_sync_s=sync.step_s,
        simulated_step_s=ours.step_s,
        measured=speedup,
        simulated=foretold.speedup,
        law=foretold.law,
        step_error=float(theory.measured_error(ours.step_s, measured["thundersync"].step_s)),
        d=float(theory.measured_error(foretold.speedup, speedup)),
        e=foretell(configuration, machine, MANY, seed).e,
        few=foretold.e,
    )


def points(outcomes: list[Outcome]) -> dict[str, dict[str, tuple[list[float], list[float]]]]:
    """Measured speed-ups for the theory's figures: against ρ, and at ρ near 1 against the spread of durations."""
    by_rho, by_spread = {}, {}
    for kept, name in ((True, "measured, graphs kept"), (False, "measured, forwarded again")):
        own = [o for o in outcomes if o.kept == kept]
        balanced = [o for o in own if 0.7 <= o.rho <= 1.2]
        by_rho[name] = ([o.rho for o in own], [o.measured for o in own])
        by_spread[name] = ([float(theory.spread(o.skew)) for o in balanced], [o.measured for o in balanced])
    return {"speedup_rho": by_rho, "speedup_heterogeneity": by_spread}


def main(
    limit: Annotated[int, typer.Option(help="Configurations, drawn from the grid.", min=1)] = 48,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 7,
    plot: Annotated[Path | None, typer.Option(help="Write the theory's curves with the measured points here.")] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure and foretell every configuration of the grid."""
    grid = [Configuration(*values) for values in itertools.product(*GRID.values())]
    random.Random(seed).shuffle(grid)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="predictions-") as folder:
        model = save_shape(Path(folder), SHAPE)
        sync = learner(model, WHOLE_TRAJECTORY, RETAIN_GIB)
        ours = {kept: learner(model, BLOCK, RETAIN_GIB * kept) for kept in (True, False)}
        ranks = {("sync", k): sync for k in (True, False)} | {("thundersync", k): ours[k] for k in (True, False)}
        probes = [Configuration(k, s, t, 1.0) for k, s, t in ((True, 1.0, 3), (True, 1.0, 14), (False, 2.0, 6))]
        speeds, suffix_s = fit(ranks, probes * 2, 1000)
        speeds, suffix_s = fit(ranks, probes * 2, 2000)  # the first round warmed the machine
        outcomes = [
            compare(ranks, configuration, speeds, suffix_s, seed + number)
            for number, configuration in enumerate(track(grid[:limit], "configurations", console=console))
        ]
    result = {
        "configurations": len(outcomes),
        "speeds": speeds | {"suffix_s": suffix_s},
        **{
            f"{name}_{what}": function(abs(getattr(o, name)) for o in outcomes)
            for name in ("step_error", "d", "e", "few")
            for what, function in (("mean", statistics.fmean), ("worst", max))
        },
    }
    if plot is not None:
        curves.plot(plot, points(outcomes))
    if as_json:
        print(json.dumps(result | {"outcomes": [vars(o) for o in outcomes]}))
        return
    table = Table(
        "kept", "skew", "turns", "ρ", "sync", "ours", "measured", "simulated", "law", "d", "e", "few", box=None
    )
    for o in sorted(outcomes, key=lambda o: (o.kept, o.skew, o.turns, o.rho)):
        table.add_row(
            "yes" if o.kept else "no",
            f"{o.skew:g}",
            str(o.turns),
            f"{o.rho:.2f}",
            *(f"{s:.2f} s" for s in (o.sync_s, o.step_s)),
            *(f"{x:.2f}x" for x in (o.measured, o.simulated, o.law)),
            f"{o.d:+.1f}%",
            f"{o.e:.1f}%",
            f"{o.few:.1f}%",
        )
    console = Console(width=120)
    console.print(table)
    console.print(
        f"{len(outcomes)} configurations; mean (worst): step time {result['step_error_mean']:.1f}% "
        f"({result['step_error_worst']:.1f}%), |d| {result['d_mean']:.1f}% ({result['d_worst']:.1f}%), "
        f"e {result['e_mean']:.1f}% ({result['e_worst']:.1f}%), few {result['few_mean']:.1f}% ({result['few_worst']:.1f}%)"
    )


if __name__ == "__main__":
    typer.run(main)

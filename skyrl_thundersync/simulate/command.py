"""Which split of the devices, which schedule, which admission cap: answered in virtual time, before anything is rented.

    skyrl simulate turns=30 skew=2 learner_rate=3000         the schedules side by side
    skyrl simulate --gpus 8 --caps 1,2,4,none                all splits, schedules and caps
    skyrl simulate --run RUN_FOLDER                          a recorded run's batches again
    skyrl simulate +config=opd/qwen3.8-27b turns=40          batch and split of a preset

key=value sets a field of `workload.Workload` or `machines.Machine`. The scheduler is the one that trains (virtual_update.py).
"""

from __future__ import annotations

import difflib
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from skyrl_thundersync.simulate.machines import Machine
from skyrl_thundersync.simulate.meter import Figures
from skyrl_thundersync.simulate.replay import Recording, load_recordings, predict
from skyrl_thundersync.simulate.virtual_update import direct
from skyrl_thundersync.simulate.workload import Workload
from skyrl_thundersync.stream.release import WorkPolicy

COLUMNS = """Means over the updates; _s: seconds. rollout: until the last trajectory closed; tail: learner work after that;
step: with the suffix. busy: share of the step in which a rank computes; queue_wait: of released work, 99th percentile;
state: tokens whose state a rank held at most. cap: groups that may hold state on a rank; statistics: groups that a rank may
sum before their last reward; speed-up: sync's step over this one's."""


@dataclass(frozen=True)
class Row:
    """Means over the simulated updates of one configuration; `speedup` against sync on the same split."""

    ranks: int
    replicas: int
    teachers: int
    schedule: str
    cap: int | None
    statistics_cap: int | None
    speedup: float
    figures: dict[str, float]

    @property
    def step_s(self) -> float:
        return self.figures["step_s"]


def simulate(
    workload: Workload, machine: Machine, policy: WorkPolicy, updates: int = 3, seed: int = 42
) -> list[Figures]:
    """`updates` independent updates, of seeds `seed`, `seed` + 1, …; the same trajectories for every machine and policy."""
    return [direct(workload.rollouts(machine, seed + k), machine, policy).figures for k in range(updates)]


def compare(
    workload: Workload, machine: Machine, policies: list[WorkPolicy], updates: int = 3, seed: int = 42
) -> list[Row]:
    """The policies on one machine, in the order given; speed-ups are T̄_sync / T̄ as PAPER.md's "Results" defines them."""
    mean = {policy: _mean(simulate(workload, machine, policy, updates, seed)) for policy in policies}
    sync = next((m for policy, m in mean.items() if policy.schedule == "sync"), None)
    sync = sync or _mean(simulate(workload, machine, WorkPolicy("sync"), updates, seed))
    split = (machine.ranks, machine.replicas, machine.teachers)
    return [Row(*split, p.schedule, p.cap, p.statistics_cap, sync["step_s"] / m["step_s"], m) for p, m in mean.items()]


def sweep(
    workload: Workload,
    machine: Machine,
    gpus: int,
    policies: list[WorkPolicy],
    updates: int = 3,
    seed: int = 42,
    state_limit: int | None = None,
) -> list[Row]:
    """Every split of `gpus` processes into ranks, replicas and (where `machine` has any) teachers; fastest first.

    Args:
        machine: speeds of one process each; its own split is not used.
        state_limit: drop configurations in which a rank held the cut states of more tokens than this.

    Raises:
        ValueError: too few processes for one of each role, or nothing fits the limit.
    """
    rows = [
        row
        for ranks, replicas, teachers in splits(gpus, machine.teachers > 0)
        for row in compare(
            workload, replace(machine, ranks=ranks, replicas=replicas, teachers=teachers), policies, updates, seed
        )
    ]
    fit = [row for row in rows if state_limit is None or row.figures["state_tokens_peak"] <= state_limit]
    if not fit:
        least = min(row.figures["state_tokens_peak"] for row in rows)
        raise ValueError(f"no configuration keeps a rank's state within {state_limit} tokens; the least is {least:.0f}")
    return sorted(fit, key=lambda row: row.step_s)


def splits(gpus: int, teacher: bool) -> Iterator[tuple[int, int, int]]:
    """All (ranks, replicas, teachers) that use `gpus` processes, each role at least one.

    Raises:
        ValueError: too few.
    """
    if gpus < 2 + teacher:
        raise ValueError(
            f"{gpus} devices are too few: one each for {'learner, rollout, teacher' if teacher else 'both'}"
        )
    for ranks in range(1, gpus):
        if not teacher:
            yield ranks, gpus - ranks, 0
            continue
        for replicas in range(1, gpus - ranks):
            yield ranks, replicas, gpus - ranks - replicas


def policies_of(caps: list[int | None], statistics_caps: list[int | None]) -> list[WorkPolicy]:
    """All schedules; the caps only under thundersync, since under the others no group waits for its rewards on a rank."""
    known = None if statistics_caps == [None] else 0
    ours = [WorkPolicy("thundersync", cap, statistics) for cap in caps for statistics in statistics_caps]
    return [WorkPolicy("sync", None, known), WorkPolicy("group", None, known), *ours]


def settings(arguments: list[str]) -> tuple[Workload, Machine]:
    """`[+config=GROUP/NAME] [option=value …] key=value …`: keys are fields of `Workload` and `Machine`, over `of_config`.

    Raises:
        ValueError: an unknown key (the nearest is named), or a value that is no number.
        ConfigError: the preset or an option of the run's is refused.
    """
    known = {f.name: (kind, f.type) for kind in (Workload, Machine) for f in fields(kind)}
    of_run = [a for a in arguments if a.startswith("+") or "." in a.partition("=")[0]]
    workload, machine = of_config(of_run) if of_run else ({}, {})
    chosen: dict[type, dict] = {Workload: workload, Machine: machine}
    for argument in arguments:
        if argument in of_run:
            continue
        key, _, text = argument.partition("=")
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            advice = f"did you mean {near[0]}?" if near else "--help lists the keys"
            raise ValueError(f"{argument!r}: unknown field {key!r}; {advice}")
        kind, annotation = known[key]
        chosen[kind][key] = _value(argument, text, annotation)
    return Workload(**workload), Machine(**machine)


def of_config(arguments: list[str]) -> tuple[dict, dict]:
    """What a run's configuration says of the batch and of the machine; speeds, lengths and times it does not know."""
    from skyrl_thundersync.hosts.skyrl.compose import build_config
    from skyrl_thundersync.hosts.skyrl.defaults import apply_host_defaults
    from skyrl_thundersync.objectives.registry import of
    from skyrl_thundersync.options.schema import learner_ranks
    from skyrl_thundersync.process.quiet import quiet_imports

    with Console(stderr=True).status("reading the configuration"), quiet_imports():
        cfg = build_config(arguments)
        apply_host_defaults(cfg)
    engine = cfg.generator.inference_engine
    workload = {"groups": cfg.trainer.train_batch_size, "samples": cfg.generator.n_samples_per_prompt}
    machine = {
        "ranks": learner_ranks(cfg),
        "replicas": engine.num_engines,
        "teachers": cfg.thundersync.teacher.replicas if of(cfg.thundersync).needs_teacher else 0,
        "slots": engine.max_num_seqs,
        "block_tokens": cfg.thundersync.learner.block_tokens,
    }
    return workload, machine


def keys() -> str:
    """Every key, its default and its meaning, one a line."""
    lines = []
    for kind in (Workload, Machine):
        lines.append(f"{kind.__name__}:")
        for f in fields(kind):
            default = "none" if f.default is None else str(f.default).lower()
            lines.append(f"  {f.name}={default}: {f.metadata['meaning']}")
    return "\n\n".join(lines)


def _value(argument: str, text: str, annotation: str):
    if "None" in annotation and text.lower() == "none":
        return None
    if annotation == "bool":
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{argument!r}: write true or false")
        return text.lower() == "true"
    try:
        return int(text) if "int" in annotation else float(text)
    except ValueError:
        raise ValueError(f"{argument!r}: {text!r} is not a number of the kind {annotation}") from None


def _mean(figures: list[Figures]) -> dict[str, float]:
    rows = [asdict(f) for f in figures]
    most = {"state_tokens_peak", "groups_peak", "statistics_peak", "queue_wait_max_s"}
    return {key: (max if key in most else statistics.fmean)(row[key] for row in rows) for key in rows[0]}


def _caps(text: str) -> list[int | None]:
    caps: list[int | None] = []
    for part in text.split(","):
        if part.strip() != "none" and not part.strip().isdigit():
            raise ValueError(f"caps {text!r}: write numbers of groups, or none, for example 1,2,4,none")
        caps.append(None if part.strip() == "none" else int(part))
    return caps


def _cap(cap: int | None) -> str:
    return "none" if cap is None else str(cap)


def _print(rows: list[Row], most: int | None) -> None:
    shown = ("rollout_s", "tail_s", "step_s", "busy_share", "queue_wait_p99_s", "state_tokens_peak")
    table = Table("ranks", "replicas", "teachers", "schedule", "cap", "statistics", *shown, "speed-up", box=None)
    for row in rows[:most]:
        f = row.figures
        numbers = (
            *(f"{f[key]:.1f}" for key in shown[:3]),
            f"{f['busy_share']:.0%}",
            f"{f['queue_wait_p99_s']:.1f}",
            f"{f['state_tokens_peak']:.0f}",
        )
        split, caps = map(str, (row.ranks, row.replicas, row.teachers)), map(_cap, (row.cap, row.statistics_cap))
        table.add_row(*split, row.schedule, *caps, *numbers, f"{row.speedup:.2f}x")
    console = Console(width=140)
    console.print(table)
    console.print(f"[dim]{COLUMNS}[/]", highlight=False)


def _print_replay(recordings: list[Recording], rows: list[dict]) -> None:
    table = Table("version", "schedule", "cap", "predicted step", "measured step", "error", box=None)
    for row in rows:
        measured, error = row["measured_step_s"], row["error_percent"]
        table.add_row(
            str(row["version"]),
            row["schedule"],
            _cap(row["cap"]),
            f"{row['figures']['step_s']:.2f} s",
            "" if measured is None else f"{measured:.2f} s",
            "" if error is None else f"{error:+.1f}%",
        )
    Console(width=140).print(table)
    Console().print(f"{len(recordings)} recorded batches; speeds fitted to the others' busy time for each batch")


def command(
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[+config=GROUP/NAME] [key=value]...")] = None,
    gpus: Annotated[int | None, typer.Option(help="Try every split of this many processes.")] = None,
    run: Annotated[Path | None, typer.Option(help="Replay this run folder's recorded batches instead.")] = None,
    caps: Annotated[str, typer.Option(help="Caps to try on the groups that hold state on a rank.")] = "none",
    statistics_caps: Annotated[
        str, typer.Option(help="GRPO: groups a rank may sum before their last reward (thundersync.grpo.admission_cap).")
    ] = "none",
    updates: Annotated[int, typer.Option(help="Updates to simulate of each configuration.", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the first update's draws.")] = 42,
    state_limit: Annotated[
        int | None, typer.Option(help="Most tokens whose state fits on a rank (with --gpus).")
    ] = None,
    top: Annotated[int, typer.Option(help="Rows to show (with --gpus).")] = 12,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    try:
        workload, machine = settings(arguments or [])
        policies = policies_of(_caps(caps), _caps(statistics_caps))
        if run is not None:
            recordings = load_recordings(run, machine)
            replayed = [row for index in range(len(recordings)) for row in predict(recordings, index, policies)]
            print(json.dumps(replayed)) if as_json else _print_replay(recordings, replayed)
            return
        if gpus is None:
            rows = compare(workload, machine, policies, updates, seed)
        else:
            rows = sweep(workload, machine, gpus, policies, updates, seed, state_limit)
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    _print(rows, top if gpus is not None else None)
    if gpus is not None:
        Console(width=140).print(_answer(rows))


command.__doc__ = f"""Predict step time, tail and memory of the schedules, in virtual time, with the scheduler that trains.

    skyrl simulate turns=30 skew=2 learner_rate=3000

    skyrl simulate +config=opd/qwen3.8-27b turns=40 --gpus 8

+config=GROUP/NAME and a run's options, as for `train`, set what a configuration knows: groups, samples, ranks, replicas,
teachers, slots, block_tokens. All else, and whatever is to be otherwise, is set by key=value. The keys, with their defaults:

{keys()}
"""


def _answer(rows: list[Row]) -> str:
    """Which split, which schedule, which cap; and what of it is the split's own doing."""
    best, sync = rows[0], next((row for row in rows if row.schedule == "sync"), None)
    cap = "" if best.cap is None else f", at most {best.cap} groups with state a rank"
    cap += "" if best.statistics_cap is None else f", at most {best.statistics_cap} with statistics"
    text = f"best: {_split(best)}, {best.schedule}{cap}, {best.step_s:.1f} s a step"
    if sync and sync is not best:
        text += f"; {sync.step_s / best.step_s:.2f}x sync on its own best split ({_split(sync)}, {sync.step_s:.1f} s)"
    return text


def _split(row: Row) -> str:
    return f"{row.ranks} ranks + {row.replicas} replicas" + (f" + {row.teachers} teachers" if row.teachers else "")

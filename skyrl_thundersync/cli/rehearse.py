"""The command `skyrl rehearse`: does a configuration fit a GPU, and how fast can it be at most, without having one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.rehearse.devices import GIB, GPUS

if TYPE_CHECKING:
    from skyrl_thundersync.rehearse.estimate import Estimate

FAILED = 1
TAGS = ("weights", "optimizer", "states", "graph", "head", "staging")


def command(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[+config=GROUP/NAME] [key=value]...", help="As for `train`.")
    ] = None,
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(GPUS)}.")] = "h200",
    nodes: Annotated[int, typer.Option(help="Nodes of 8 GPUs that the learner spans.", min=1)] = 1,
    tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of every trajectory; by default the most that the configuration allows.", min=1024),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Run the learner's own code at full size on tensors without data, and print what it would take on a GPU.

    Only config.json of the models is needed. Exits 1 when something does not fit. Times are rooflines of published peaks:
    no machine is faster.
    """
    if gpu not in GPUS:
        raise ConfigError(f"--gpu {gpu}: known are {', '.join(GPUS)}")
    from skyrl_thundersync.process.quiet import quiet_imports

    chosen = [argument for argument in arguments or [] if argument != "+plugin=thundersync"]
    with Console(stderr=True).status("rehearsing; a minute or more"), quiet_imports():
        from skyrl_thundersync.hosts.skyrl.compose import build_config
        from skyrl_thundersync.rehearse.estimate import estimate

        cfg = build_config([*chosen, "thundersync.device=cuda"])
        longest = cfg.generator.max_input_length + cfg.generator.sampling_params.max_generate_length
        found = estimate(cfg, GPUS[gpu], nodes, tokens or longest)
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        _print(found)
    raise typer.Exit(FAILED if found.problems else 0)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}" if size < 100 * GIB else f"{size / GIB:.0f}"


def _print(found: Estimate) -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"one rank on {found.gpu}: {found.trajectories} trajectories of {found.tokens} tokens an update")
    memory = Table("GiB at the peak", "device", *TAGS, "host", box=None, pad_edge=False)
    work = Table("each", "times", "TFLOP", "device s", "bound by", "copies s", "host s", box=None, pad_edge=False)
    for row in found.rows:
        tags = [_gib(row.device_by.get(tag, 0.0)) for tag in TAGS]
        memory.add_row(row.name, _gib(row.device_peak), *tags, _gib(row.host_peak))
        seconds = [f"{value:.3g}" for value in (row.copy_s, row.host_s)]
        work.add_row(row.name, str(row.times), f"{row.tflop:.3g}", f"{row.device_s:.3g}", row.bound, *seconds)
    console.print(memory)
    console.print(work)
    share = "" if found.mfu is None else f", MFU at most {found.mfu:.1%}"
    console.print(
        f"device peak with all trajectories open {_gib(found.device_peak)} of {_gib(found.device_room)} GiB; "
        f"a trajectory's state {_gib(found.state_trajectory)} GiB; graph {found.graph_token / 1e6:.1f} MB a token; "
        f"host {_gib(found.host_node)} GiB a node"
    )
    console.print(
        f"learner at least {found.learner_s:.0f} s an update, {found.accumulation:.0%} on top of compute for copies and "
        f"sums{share}; then {found.suffix_s:.1f} s for the step and {found.published / 1e9:.1f} GB published"
    )
    for replica in found.replicas:
        console.print(
            f"{replica.name} replica on {replica.gpus} GPU: weights {_gib(replica.weights)} GiB, "
            f"{_gib(max(0.0, replica.room))} left: K/V of {replica.tokens:.0f} tokens at {replica.kv_token / 1e3:.1f} KB "
            f"[dim]({escape(replica.origin)})[/dim]"
        )
    for problem in found.problems:
        console.print(f"[red]does not fit[/]: {escape(problem)}")
    if not found.problems:
        console.print("[green]fits[/]")

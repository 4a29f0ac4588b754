"""`skyrl train … --dry-run`: what would run, where, and everything that can be checked without starting it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from skyrl_thundersync.errors import USAGE_ERROR
from skyrl_thundersync.hosts.skyrl.checks import run_checks
from skyrl_thundersync.hosts.skyrl.compose import build_config
from skyrl_thundersync.hosts.skyrl.defaults import HOST_DEFAULTS, apply_host_defaults
from skyrl_thundersync.objectives.registry import of
from skyrl_thundersync.options.choices import CHOICES
from skyrl_thundersync.options.presets import own_presets, resolve
from skyrl_thundersync.options.schema import learner_ranks, uses_cuda
from skyrl_thundersync.preflight.memory import gpus_per_engine
from skyrl_thundersync.process.quiet import quiet_imports

if TYPE_CHECKING:
    from skyrl_thundersync.hosts.skyrl.config import TrainConfig


def run(args: list[str], full: bool = False) -> int:
    """Print configuration, placement and checks of the run that `args` describe.

    Args:
        args: `[+config=GROUP/NAME] key=value …`.
        full: print every option, not only those that differ from the defaults.

    Returns:
        0 when every check passed, 2 when one did not, as `train` exits then.

    Raises:
        ConfigError: the options cannot even be read.
    """
    from skyrl_thundersync.hosts.skyrl.config import TrainConfig

    console = Console()
    with console.status("reading the configuration"), quiet_imports():
        cfg = build_config(args)
        apply_host_defaults(cfg)
        origins = resolve(args, TrainConfig, own_presets(), HOST_DEFAULTS, CHOICES)
    console.print(
        f"[bold]Configuration[/] {'' if full else '(what differs from the defaults; --full prints everything)'}"
    )
    for line in configuration_lines(cfg, {key: leaf.origin for key, leaf in origins.items()}, full):
        console.print(line, soft_wrap=True, highlight=False)
    console.print(placement_table(cfg))
    failed = False
    console.print("\n[bold]Checks[/]")
    for check in run_checks(cfg):
        failed = failed or bool(check.problems)
        mark = "[red]refused[/]" if check.problems else "[green]ok[/]     "
        seen = f"[dim] · {escape(check.seen)}[/]" if check.seen else ""
        console.print(f"  {mark} {escape(check.name)}{seen}", soft_wrap=True)
        for problem in check.problems:
            console.print(f"          {escape(problem)}", soft_wrap=True)
    console.print("\n[red]This run would not start.[/]" if failed else "\nThis run can start. Nothing was started.")
    return USAGE_ERROR if failed else 0


def leaves(block: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted option, value) of a configuration object, depth first, optional blocks opened where they are set."""
    for field in dataclasses.fields(block):
        value = getattr(block, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def configuration_lines(cfg: TrainConfig, origins: dict[str, str], full: bool) -> Iterator[str]:
    """`option=value`, the default that it replaces and where it came from; only what differs, or with `full` everything."""
    from skyrl_thundersync.hosts.skyrl.config import TrainConfig

    stock = dict(leaves(TrainConfig()))
    for option, value in leaves(cfg):
        changed = value != stock.get(option)
        if not full and not changed:
            continue
        note = ""
        if changed:
            origin = origins.get(option, "derived")
            if origin.endswith((".yaml", ".yml")):
                origin = "/".join(Path(origin).parts[-2:])
            note = f"  [dim]was {escape(str(stock.get(option)))}, {escape(origin)}[/]"
        yield f"  {escape(f'{option}={value}')}{note}"


def placement_table(cfg: TrainConfig) -> Table:
    """Who runs where: processes and devices of learner, rollout and teacher."""
    ts, engine = cfg.thundersync, cfg.generator.inference_engine
    device = "GPU" if uses_cuda(cfg) else "CPU"
    table = Table(
        "part", "processes", "devices", "how", box=None, pad_edge=False, title="\nPlacement", title_justify="left"
    )
    ranks, per_engine = learner_ranks(cfg), gpus_per_engine(cfg)
    placed = f"{device} each" if device == "CPU" else "1 GPU each"
    lora = cfg.trainer.policy.model.lora.rank
    table.add_row(
        "learner",
        _count(ranks, "rank"),
        placed,
        f"{ts.learner.dtype}, ZeRO-{ts.learner.zero_stage}{f', LoRA r={lora}' if lora else ''}",
    )
    table.add_row(
        "rollout",
        _count(engine.num_engines, "replica"),
        f"{per_engine} GPU each" if device == "GPU" else placed,
        f"vLLM, {engine.model_dtype}, {cfg.trainer.train_batch_size} x {cfg.generator.n_samples_per_prompt} trajectories",
    )
    if of(ts).needs_teacher:
        teacher = ts.teacher
        table.add_row(
            "teacher",
            _count(teacher.replicas, "replica"),
            f"{teacher.tensor_parallel_size} GPU each" if device == "GPU" else placed,
            f"{teacher.backend}, {teacher.dtype}",
        )
    table.add_row("schedule", ts.schedule, "", f"{ts.objective}; run folder {ts.run_dir}")
    return table


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"

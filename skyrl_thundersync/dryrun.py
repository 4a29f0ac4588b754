"""`skyrl train … --dry-run`: what would run, where, and everything that can be checked without starting it."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from skyrl_thundersync.checks import Check
from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.host_defaults import HOST_DEFAULTS, apply_host_defaults, uses_cuda
from skyrl_thundersync.options import CHOICES
from skyrl_thundersync.presets import build_config, own_presets, resolve
from skyrl_thundersync.quiet import quiet_imports
from skyrl_thundersync.validate import option_problems, skyrl_agrees

if TYPE_CHECKING:
    from skyrl_thundersync.config import TrainConfig

GIB = 2**30


def run(args: list[str], full: bool = False) -> int:
    """Print configuration, placement and checks of the run that `args` describe.

    Args:
        args: `[+config=GROUP/NAME] key=value …`.
        full: print every option, not only those that differ from the defaults.

    Returns:
        0 when every check passed, 1 when one did not.

    Raises:
        ConfigError: the options cannot even be read.
    """
    from skyrl_thundersync.config import TrainConfig

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
    for check in checks(cfg):
        failed = failed or bool(check.problems)
        mark = "[red]refused[/]" if check.problems else "[green]ok[/]     "
        console.print(f"  {mark} {check.name}[dim]{' · ' + escape(check.seen) if check.seen else ''}[/]")
        for problem in check.problems:
            console.print(f"          {escape(problem)}", soft_wrap=True)
    console.print("\n[red]This run would not start.[/]" if failed else "\nThis run can start. Nothing was started.")
    return int(failed)


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
    from skyrl_thundersync.config import TrainConfig

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
    if ts.objective == "opd":
        table.add_row(
            "teacher", _count(ts.teacher.replicas, "replica"), placed, f"{ts.teacher.backend}, {ts.teacher.dtype}"
        )
    table.add_row("schedule", ts.schedule, "", f"{ts.objective}; run folder {ts.run_dir}")
    return table


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def learner_ranks(cfg: TrainConfig) -> int:
    """Learner processes: `thundersync.learner.ranks`, or one per policy GPU."""
    placement = cfg.trainer.placement
    return cfg.thundersync.learner.ranks or placement.policy_num_gpus_per_node * placement.policy_num_nodes


def gpus_per_engine(cfg: TrainConfig) -> int:
    """GPUs that one rollout replica spans."""
    engine = cfg.generator.inference_engine
    return engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size


def checks(cfg: TrainConfig) -> Iterator[Check]:
    """Every check, cheapest first; each is made although an earlier one failed."""
    from skyrl_thundersync import inputs

    options = option_problems(cfg)
    yield Check("options fit early release and the objective", tuple(options))
    models_there = True
    for option, path in inputs.models(cfg).items():
        problems = inputs.model_problems(option, path) or inputs.context_problems(cfg, option, path)
        models_there = models_there and not problems and Path(path).is_dir()
        on_disk = "" if path and Path(path).is_dir() else "hub name, downloaded when the run starts"
        yield Check(f"model {path}", tuple(problems), on_disk)
    yield from _tasks(cfg)
    if not options:
        yield Check("SkyRL's own validation", _caught(lambda: skyrl_agrees(cfg)))
    if models_there:
        yield _chat_template(cfg)
        if cfg.thundersync.objective == "opd":
            yield _teacher(cfg)
    yield _devices(cfg)
    yield _sandbox(cfg)
    yield _disk(cfg)


def _tasks(cfg: TrainConfig) -> Iterator[Check]:
    from skyrl_thundersync import inputs

    named = [("data.train_data", path) for path in cfg.data.train_data]
    named += [("data.val_data", path) for path in cfg.data.val_data if cfg.trainer.eval_interval > 0]
    if not cfg.data.train_data:
        yield Check("tasks", ("data.train_data is empty: name at least one file of tasks.",))
    wrong = False
    for option, path in named:
        problems = inputs.task_problems(option, path, cfg.environment.env_class)
        rows = sum(1 for _ in inputs.read_rows(Path(path))) if not problems and Path(path).is_file() else None
        yield Check(f"tasks {path}", tuple(problems), f"{rows} tasks" if rows is not None else "")
        wrong = wrong or bool(problems)
    if named and not wrong:
        yield Check("enough tasks for a batch", tuple(inputs.batch_problems(cfg)))


def _caught(action: Callable[[], Any]) -> tuple[str, ...]:
    try:
        action()
    except ConfigError as error:
        return tuple(str(error).splitlines())
    return ()


def _chat_template(cfg: TrainConfig) -> Check:
    from transformers import AutoTokenizer

    path = cfg.trainer.policy.model.path
    tokenizer = AutoTokenizer.from_pretrained(path)
    problems = []
    if not tokenizer.chat_template:
        problems.append(
            f"trainer.policy.model.path={path!r}: its tokenizer has no chat template, which multi-turn chat needs."
        )
    if tokenizer.eos_token_id is None:
        problems.append(f"trainer.policy.model.path={path!r}: its tokenizer has no end-of-sequence token.")
    return Check("student's tokenizer and chat template", tuple(problems), f"{len(tokenizer)} tokens")


def _teacher(cfg: TrainConfig) -> Check:
    from transformers import AutoTokenizer

    from skyrl_thundersync.inputs import model_config
    from skyrl_thundersync.teacher.preflight import PreflightError, check_vocabularies

    student, teacher = cfg.trainer.policy.model.path, cfg.thundersync.teacher.model
    config = model_config(teacher)
    rows = config.get("vocab_size") or config["text_config"]["vocab_size"]
    try:
        check_vocabularies(AutoTokenizer.from_pretrained(student), AutoTokenizer.from_pretrained(teacher), rows)
    except PreflightError as error:
        return Check("teacher means the same tokens", (f"thundersync.teacher.model={teacher!r}: {error}.",))
    return Check("teacher means the same tokens", ())


def _devices(cfg: TrainConfig) -> Check:
    import torch

    if not uses_cuda(cfg):
        return Check("devices", (), f"CPU, {os.cpu_count()} cores")
    needed = learner_ranks(cfg) + cfg.generator.inference_engine.num_engines * gpus_per_engine(cfg)
    if cfg.thundersync.objective == "opd":
        needed += cfg.thundersync.teacher.replicas
    found = torch.cuda.device_count()
    problems = ()
    if found < needed and cfg.trainer.placement.policy_num_nodes == 1:
        problems = (
            f"the placement needs {needed} GPUs, torch sees {found}. Lower ranks or replicas, or run on a larger node.",
        )
    return Check("devices", problems, f"{found} GPUs, {needed} needed")


def _sandbox(cfg: TrainConfig) -> Check:
    from skyrl_thundersync.sandbox.base import SandboxError
    from skyrl_thundersync.sandbox.select import choose_backend

    try:
        return Check("sandbox for agents' commands", (), choose_backend(cfg.thundersync.sandbox.backend))
    except SandboxError as error:
        return Check("sandbox for agents' commands", (str(error),))


def _disk(cfg: TrainConfig) -> Check:
    """Room for one checkpoint (weights, FP32 masters and moments: 7 times BF16 weights) and two published versions."""
    folder = Path(cfg.thundersync.run_dir)
    while not folder.exists():
        folder = folder.parent
    model = Path(cfg.trainer.policy.model.path or "")
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors")) if model.is_dir() else 0
    checkpoints = 7 * weights if cfg.trainer.ckpt_interval > 0 else 0
    needed = GIB + 2 * weights + checkpoints
    free = shutil.disk_usage(folder).free
    problems = ()
    if free < needed:
        problems = (
            f"{folder} has {free / GIB:.1f} GiB free; this run may write {needed / GIB:.1f} GiB. "
            "Free some, or set thundersync.run_dir.",
        )
    return Check("disk space", problems, f"{free / GIB:.0f} GiB free")

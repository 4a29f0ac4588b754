"""The one list of what is checked before a run. `skyrl train` raises its problems, `--dry-run` and `skyrl doctor` print it.

A new check is a function of the configuration, a generator of `Check`, and its name in `LIGHT`, or in `HEAVY` where it
imports what takes seconds. `train` stops after `LIGHT` where that found something, so that most refusals are quick.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.hosts.skyrl import validate
from skyrl_thundersync.hosts.skyrl.compose import build_config
from skyrl_thundersync.hosts.skyrl.defaults import apply_host_defaults
from skyrl_thundersync.hosts.skyrl.loggers import logger_problems, names
from skyrl_thundersync.objectives.registry import of
from skyrl_thundersync.options.schema import ray_address, uses_cuda
from skyrl_thundersync.preflight import memory as split
from skyrl_thundersync.preflight import models as inputs
from skyrl_thundersync.process import limits as machine_limits
from skyrl_thundersync.process.check import Check, require
from skyrl_thundersync.process.quiet import quiet_imports
from skyrl_thundersync.runtime import run_folder
from skyrl_thundersync.tasks.images import images_there
from skyrl_thundersync.tasks.survey import Survey, Surveyor

if TYPE_CHECKING:
    from skyrl_thundersync.hosts.skyrl.config import TrainConfig

GIB = 2**30


def run_checks(cfg: TrainConfig) -> Iterator[Check]:
    """Every check of the list; one that builds on what another has refused is left out."""
    return chain(*(checks(cfg) for checks in (*LIGHT, *HEAVY)))


def require_fit(cfg: TrainConfig) -> None:
    """Refuse a run that cannot work.

    Raises:
        ConfigError: with every problem found, one a line.
    """
    for part in (LIGHT, HEAVY):
        require(chain(*(checks(cfg) for checks in part)), ConfigError)


@lru_cache(maxsize=1)
def checked_config(*arguments: str) -> TrainConfig:
    """The complete configuration of a run from its arguments (as `compose.build_config`'s), with everything checked.

    The same arguments are checked once in a process: the command refuses before it loads SkyRL, and the entry point, which
    SkyRL calls, asks again.

    Raises:
        ConfigError: what the user has to put right.
    """
    with quiet_imports():
        cfg = build_config(arguments)
        apply_host_defaults(cfg)
        require_fit(cfg)
    return cfg


def machine(cfg: TrainConfig) -> Iterator[Check]:
    yield from machine_limits.cheap_checks()


def options(cfg: TrainConfig) -> Iterator[Check]:
    yield Check("options fit early release and the objective", tuple(validate.option_problems(cfg)))


def folders(cfg: TrainConfig) -> Iterator[Check]:
    yield machine_limits.writable("thundersync.run_dir", cfg.thundersync.run_dir)
    for name in ("ckpt_path", "export_path", "log_path"):
        path = getattr(cfg.trainer, name)
        if not Path(path).is_relative_to(cfg.thundersync.run_dir) and "://" not in path:
            yield machine_limits.writable(f"trainer.{name}", path)


def loggers(cfg: TrainConfig) -> Iterator[Check]:
    yield Check("loggers", tuple(logger_problems(cfg)), ", ".join(names(cfg)))


def models(cfg: TrainConfig) -> Iterator[Check]:
    for option, path in inputs.models(cfg).items():
        problems = inputs.model_problems(option, path) or inputs.context_problems(cfg, option, path)
        on_disk = "" if path and Path(path).is_dir() else "hub name, downloaded when the run starts"
        yield Check(f"model {path}", tuple(problems), on_disk)


def tasks(cfg: TrainConfig) -> Iterator[Check]:
    """Task files, then what their rows ask of the sandbox."""
    named = [("data.train_data", path) for path in cfg.data.train_data]
    named += [("data.val_data", path) for path in cfg.data.val_data if cfg.trainer.eval_interval > 0]
    if not cfg.data.train_data:
        problem = "data.train_data=[]: there is nothing to train on. Name at least one file of tasks."
        yield Check("tasks", (problem,))
    surveyor = Surveyor(cfg.environment.env_class)
    surveys = {}
    for option, path in named:
        surveys[option, path] = found = surveyor.survey(option, path)
        seen = "hub data set, read when the run starts" if found.rows is None else f"{found.rows} tasks"
        yield Check(f"tasks {path}", tuple(found.problems), "" if found.problems else seen)
    if surveys and not any(found.problems for found in surveys.values()):
        yield _batch(cfg, [found.rows for (option, _), found in surveys.items() if option == "data.train_data"])
    yield from sandbox(cfg, list(surveys.values()))


def _batch(cfg: TrainConfig, counts: list[int | None]) -> Check:
    wanted, problems = cfg.trainer.train_batch_size, ()
    if None not in counts and (rows := sum(counts)) < wanted:
        problems = (
            f"data.train_data has {rows} tasks and trainer.train_batch_size={wanted}: an update needs that many. Add "
            "tasks, or lower the batch size.",
        )
    return Check("enough tasks for a batch", problems)


def sandbox(cfg: TrainConfig, surveys: list[Survey]) -> Iterator[Check]:
    """The backend, and whether it has what the surveyed rows ask for."""
    from skyrl_thundersync.sandbox.base import SandboxError
    from skyrl_thundersync.sandbox.select import choose_backend

    name, wanted = "sandbox for agents' commands", cfg.thundersync.sandbox.backend
    try:
        taken = choose_backend(wanted)
    except SandboxError as error:
        yield Check(name, (str(error),))
        return
    yield Check(name, (), f"{taken} (thundersync.sandbox.backend={wanted})")
    yield images_there(taken, cfg.thundersync.sandbox.image, surveys)


def resume(cfg: TrainConfig) -> Iterator[Check]:
    from skyrl_thundersync.runtime.same_run import resume_problems

    yield Check("checkpoint to resume from", tuple(resume_problems(cfg)), cfg.trainer.resume_mode or "none")


def one_run(cfg: TrainConfig) -> Iterator[Check]:
    yield Check("run folder is free", tuple(run_folder.problems(cfg)), cfg.thundersync.run_dir)


def disk(cfg: TrainConfig) -> Iterator[Check]:
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
    yield Check("disk space", problems, f"{free / GIB:.0f} GiB free")


def memory(cfg: TrainConfig) -> Iterator[Check]:
    if ray_address(cfg) != "local":
        yield Check("memory", (), "of a Ray cluster: not foreseen")
    elif _models_there(cfg):
        yield split.memory(cfg)


def host_agrees(cfg: TrainConfig) -> Iterator[Check]:
    if not validate.option_problems(cfg):
        yield Check("SkyRL's own validation", tuple(validate.skyrl_problems(cfg)))


def tokenizers(cfg: TrainConfig) -> Iterator[Check]:
    if not _models_there(cfg):
        return
    from transformers import AutoTokenizer

    from skyrl_thundersync.teacher.preflight import PreflightError, check_vocabularies

    read, broken = {}, []
    for option, path in inputs.models(cfg).items():
        try:
            read[option] = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            broken.append(f"{option}={path!r}: its tokenizer cannot be loaded: {error}. Save it again.")
    if broken:
        yield Check("tokenizers", tuple(broken))
        return
    option, tokenizer = next(iter(read.items()))
    path = cfg.trainer.policy.model.path
    problems = []
    if not tokenizer.chat_template:
        problems.append(f"{option}={path!r}: its tokenizer has no chat template, which multi-turn chat needs.")
    if tokenizer.eos_token_id is None:
        problems.append(f"{option}={path!r}: its tokenizer has no end-of-sequence token.")
    yield Check("student's tokenizer and chat template", tuple(problems), f"{len(tokenizer)} tokens")
    for option, other in list(read.items())[1:]:
        config = inputs.model_config(cfg.thundersync.teacher.model)
        rows = config.get("vocab_size") or config["text_config"]["vocab_size"]
        problems = []
        try:
            check_vocabularies(tokenizer, other, rows)
        except PreflightError as error:
            problems.append(f"{option}={cfg.thundersync.teacher.model!r}: {error}.")
        yield Check("teacher means the same tokens", tuple(problems))


def objective(cfg: TrainConfig) -> Iterator[Check]:
    from skyrl_thundersync.objectives.check import problems

    yield Check("the objective keeps its contract", tuple(problems(of(cfg.thundersync))), cfg.thundersync.objective)


def devices(cfg: TrainConfig) -> Iterator[Check]:
    if not uses_cuda(cfg):
        yield Check("devices", (), f"CPU, {os.cpu_count()} cores")
        return
    if ray_address(cfg) != "local":
        yield Check("devices", (), f"those of the Ray cluster at {ray_address(cfg)}, reserved when the run starts")
        return
    import torch

    needed = split.learner_ranks(cfg) + cfg.generator.inference_engine.num_engines * split.gpus_per_engine(cfg)
    if of(cfg.thundersync).needs_teacher:
        needed += cfg.thundersync.teacher.replicas * cfg.thundersync.teacher.tensor_parallel_size
    found = torch.cuda.device_count()
    problems = ()
    if found < needed:
        problems = (
            f"the placement needs {needed} GPUs, torch sees {found}. Lower ranks or replicas, or run on a larger node.",
        )
    yield Check("devices", problems, f"{found} GPUs, {needed} needed")


def _models_there(cfg: TrainConfig) -> bool:
    """Every model is a folder on this machine, and complete."""
    named = inputs.models(cfg)
    return all(path and Path(path).is_dir() for path in named.values()) and not any(
        inputs.model_problems(option, path) for option, path in named.items()
    )


Checks = Callable[["TrainConfig"], Iterator[Check]]

LIGHT: tuple[Checks, ...] = (machine, options, folders, one_run, loggers, models, tasks, resume, disk, memory)
HEAVY: tuple[Checks, ...] = (host_agrees, objective, tokenizers, devices)

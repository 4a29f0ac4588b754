"""One session of an evaluation: replicas up, the attempts that are missing made, everything down, the summary written."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from rich.console import Console
from transformers import AutoTokenizer

from skyrl_thundersync.engines.weight_bits import adapter_folder_bits
from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.evaluate import results
from skyrl_thundersync.evaluate import swe_bench_harness as swe_bench
from skyrl_thundersync.evaluate.attempts import AttemptFiles, summarise
from skyrl_thundersync.evaluate.episodes import evaluate, read_tasks
from skyrl_thundersync.hosts.skyrl.checks import sandbox
from skyrl_thundersync.hosts.skyrl.client import LocalEngineClient
from skyrl_thundersync.hosts.skyrl.compose import build_config
from skyrl_thundersync.hosts.skyrl.defaults import apply_host_defaults
from skyrl_thundersync.hosts.skyrl.generator import GuardedGenerator
from skyrl_thundersync.options.schema import uses_cuda
from skyrl_thundersync.preflight import models as inputs
from skyrl_thundersync.process.limits import raise_own_limits
from skyrl_thundersync.process.quiet import quiet_imports
from skyrl_thundersync.rollout.publication import AdapterIgnoredError, probe_ids, serve_adapter
from skyrl_thundersync.rollout.replica import LORA_NAME, engine_spec, start_replicas
from skyrl_thundersync.sandbox.pool import SandboxPool
from skyrl_thundersync.tasks.survey import Surveyor
from skyrl_thundersync.tasks.terminal_env import register_terminal_env

OPTION = "trainer.policy.model.path"
ATTEMPTS = 5
PROBE_TOKENS = 16


def run(
    arguments: list[str],
    attempts: int | None,
    adapter: Path | None,
    output: Path,
    console: Console,
    grade: Callable[[Path], object] | None = None,
) -> dict[str, Any]:
    """Make what is missing of `attempts` at each task of `data.val_data`, and write and return the summary.

    `attempts`: None stands for `ATTEMPTS`, and for 1 at temperature 0, where all would be the same.
    A model folder that holds an adapter means the model that the adapter names, with the adapter.
    `grade`: called with the output folder when all are made, for tasks that are graded elsewhere.

    Raises:
        ConfigError: what the user has to put right.
    """
    with quiet_imports():
        cfg = build_config(arguments)
        apply_host_defaults(cfg)
    adapter = _resolve_adapter(cfg, adapter, console)
    greedy = cfg.generator.eval_sampling_params.temperature == 0
    attempts = attempts or (1 if greedy else ATTEMPTS)
    _check(cfg, attempts, adapter)
    tasks = read_tasks(cfg.data.val_data)
    task_ids = [task["task_id"] for task in tasks]
    output = output.absolute()
    files = AttemptFiles(output, subject(cfg, tasks, adapter))
    try:
        done = {(a.task_id, a.attempt) for a in files.attempts}
        # Attempt by attempt, not task by task: what there is after an interruption is a whole pass@1 first.
        todo = [(task, j) for j in range(attempts) for task in task_ids if (task, j) not in done]
        if done:
            console.print(f"{len(done)} attempts are done, {len(todo)} to do")
        if todo:
            _session(cfg, tasks, todo, files, adapter, console)
    finally:
        files.close()
    if grade is not None:
        with console.status("grading"):
            grade(output)
    summary = summarise(output, task_ids, attempts)
    results.write(summary, Path(cfg.trainer.policy.model.path).name, output)
    return summary


def subject(cfg: Any, tasks: list[dict[str, Any]], adapter: Path | None) -> dict[str, Any]:
    """What an evaluation is of: everything that changes what an attempt does. Results of two subjects never mix."""
    return {
        "model": _weights_hash(Path(cfg.trainer.policy.model.path).expanduser()),
        "adapter": _weights_hash(adapter) if adapter else None,
        "tasks": hashlib.sha256(json.dumps(tasks, sort_keys=True).encode()).hexdigest(),
        "sampling": {k: v for k, v in vars(cfg.generator.eval_sampling_params).items() if v is not None},
        "seed": cfg.trainer.seed,
        "max_turns": cfg.generator.max_turns,
        "max_input_length": cfg.generator.max_input_length,
        "dtype": cfg.generator.inference_engine.model_dtype,
        "command_timeout_s": cfg.thundersync.sandbox.command_timeout_s,
        "output_limit_bytes": cfg.thundersync.sandbox.output_limit_bytes,
    }


def _resolve_adapter(cfg: Any, adapter: Path | None, console: Console) -> Path | None:
    """The adapter to serve; the model's option then names a model."""
    model = cfg.trainer.policy.model
    folder = Path(model.path or "").expanduser()
    base = inputs.adapter_base(folder) if model.path else None
    if not base:
        return adapter
    if adapter is not None and adapter.resolve() != folder.resolve():
        raise ConfigError(
            f"{OPTION}={model.path!r} holds an adapter over {base}, and --adapter names another one. Name the model there."
        )
    if problems := inputs.model_problems(OPTION, base):
        raise ConfigError(
            f"{OPTION}={model.path!r} holds an adapter over {base!r}. {' '.join(problems)} Name the model there, and the "
            f"adapter with --adapter {folder}."
        )
    console.print(f"{folder} holds an adapter: evaluating it over {base}", soft_wrap=True)
    model.path = base
    return folder


def _check(cfg: Any, attempts: int, adapter: Path | None) -> None:
    model = cfg.trainer.policy.model.path
    turns = {"eval_sampling_params": cfg.generator.eval_sampling_params.max_generate_length}
    problems = inputs.model_problems(OPTION, model) or inputs.context_problems(cfg, OPTION, model, turns)
    if adapter is not None and inputs.adapter_base(adapter) is None:
        problems.append(f"--adapter {adapter}: there is no adapter_config.json in it")
    surveyor = Surveyor(cfg.environment.env_class)
    surveys = {file: surveyor.survey("data.val_data", file) for file in cfg.data.val_data}
    for file, found in surveys.items():
        problems += found.problems
        if found.rows is None and not found.problems:
            problems.append(f"data.val_data: {file!r} is no file: an evaluation reads its tasks from files.")
    problems += [problem for check in sandbox(cfg, list(surveys.values())) for problem in check.problems]
    if attempts > 1 and cfg.generator.eval_sampling_params.temperature == 0:
        problems.append(
            f"generator.eval_sampling_params.temperature=0: {attempts} attempts would all be the same. Set it to 1.0, or "
            "leave --attempts out, which then is 1."
        )
    if problems:
        raise ConfigError("\n".join(problems))


def _session(
    cfg: Any,
    tasks: list[dict[str, Any]],
    todo: list[tuple[str, int]],
    files: AttemptFiles,
    adapter: Path | None,
    console: Console,
) -> None:
    started = time.monotonic()
    engine = cfg.generator.inference_engine
    device = "cuda" if uses_cuda(cfg) else "cpu"
    record = {
        "device": device,
        "gpus": engine.num_engines * engine.tensor_parallel_size if device == "cuda" else 0,
        "replicas": engine.num_engines,
        "planned": len(todo),
    }
    files.note(record)
    tokenizer = AutoTokenizer.from_pretrained(cfg.trainer.policy.model.path)
    os.environ.setdefault("RAY_worker_niceness", "0")
    with SandboxPool(cfg.thundersync.sandbox, run_id=f"eval-{files.folder.name}") as pool:
        register_terminal_env(pool)
        raise_own_limits()
        ray.init(
            address="local",
            num_cpus=None if device == "cuda" else 8,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="warning",
            runtime_env={"env_vars": {"TOKENIZERS_PARALLELISM": "false"}},
        )
        try:
            with console.status("starting the engine"):
                client = asyncio.run(_serve(cfg, tokenizer, device, adapter, files.folder / "logs"))
            startup = time.monotonic() - started
            generator = GuardedGenerator(
                generator_cfg=cfg.generator,
                skyrl_gym_cfg=cfg.environment.skyrl_gym,
                inference_engine_client=client,
                tokenizer=tokenizer,
                policy_model_name=LORA_NAME if adapter else cfg.trainer.policy.model.path,
            )
            with console.status("") as status:

                def add(attempt: Any) -> None:
                    files.add(attempt)
                    solved = sum(a.solved for a in files.attempts)
                    status.update(f"{len(files.attempts)} attempts done, {solved} solved")

                keep = partial(swe_bench.keep_patch, files.folder)
                asyncio.run(evaluate(cfg, generator, tasks, todo, files.session, started, add, keep))
        finally:
            ray.shutdown()
    files.note({**record, "startup_s": startup, "wall_s": time.monotonic() - started, "backend": pool.backend})


async def _serve(cfg: Any, tokenizer: Any, device: str, adapter: Path | None, logs: Path) -> LocalEngineClient:
    engine = cfg.generator.inference_engine
    longest = cfg.generator.max_input_length + cfg.generator.eval_sampling_params.max_generate_length
    spec = engine_spec(cfg, longest, _rank(adapter) if adapter else 0, device)
    client = LocalEngineClient(start_replicas(spec, engine.num_engines, logs), tokenizer, cfg.trainer.policy.model.path)
    await client.ready()
    if adapter:
        folder, ids = str(adapter.absolute()), probe_ids(tokenizer, PROBE_TOKENS)
        bits = adapter_folder_bits(folder, getattr(torch, engine.model_dtype))
        try:
            await serve_adapter(folder, 1, client, bits, ids, cfg.thundersync.publish.tolerance)
        except AdapterIgnoredError as error:
            raise ConfigError(f"{error}. Nothing was evaluated.") from error
    return client


def _rank(adapter: Path) -> int:
    return int(json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["r"])


def _weights_hash(folder: Path) -> str:
    """SHA-256 over the folder's configuration and weights; a hub name stands for itself."""
    if not folder.is_dir():
        return str(folder)
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix in (".json", ".safetensors", ".bin", ".model", ".jinja"):
            with file.open("rb") as handle:
                digest.update(file.name.encode() + hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()

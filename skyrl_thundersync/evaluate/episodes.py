"""Independent attempts of a served policy at terminal tasks: SkyRL's own agent loop, our sandboxes and engine replicas.

The path is the training's: the same generator, environment and token handling. What differs: each attempt has a sampling
seed of its own, made from the evaluation's seed, the task and the number of the attempt, so an attempt that is made again
after an interruption samples from the same stream, whatever ran before it; and what counts is the official success.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.evaluate.attempts import Attempt
from skyrl_thundersync.tasks.rows import read_rows

if TYPE_CHECKING:
    from skyrl_thundersync.hosts.skyrl.config import TrainConfig
    from skyrl_thundersync.hosts.skyrl.generator import GuardedGenerator


def read_tasks(files: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of all files in order. Raises ConfigError when there is none, or a task id comes twice."""
    rows: dict[str, dict[str, Any]] = {}
    for file in files:
        for where, row in read_rows(Path(file).expanduser()):
            if "task_id" not in row:
                raise ConfigError(f"{where}: `task_id` is missing; attempts are counted by it")
            if row["task_id"] in rows:
                raise ConfigError(f"{where}: task {row['task_id']!r} is there twice; attempts are counted by task id")
            rows[row["task_id"]] = row
    if not rows:
        raise ConfigError("data.val_data names no task to evaluate on")
    return list(rows.values())


def attempt_seed(seed: int, task_id: str, attempt: int) -> int:
    """A 31-bit sampling seed, another one for every attempt."""
    digest = hashlib.sha256(f"{seed}\0{task_id}\0{attempt}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


async def evaluate(
    cfg: TrainConfig,
    generator: GuardedGenerator,
    tasks: Sequence[Mapping[str, Any]],
    todo: Sequence[tuple[str, int]],
    session: int,
    started: float,
    add: Callable[[Attempt], None],
    keep: Callable[[str, int, str], None] = lambda task_id, attempt, collected: None,
) -> None:
    """Make every attempt of `todo`, at most `generator.inference_engine.max_num_seqs` x replicas at a time; `add` each.

    `keep` gets what a row with `collect` left, before its attempt is added.

    Any error ends the evaluation; attempts that `add` got stay.
    """
    by_id = {task["task_id"]: task for task in tasks}
    engine = cfg.generator.inference_engine
    places = asyncio.Semaphore(min(engine.max_num_seqs * engine.num_engines, cfg.environment.skyrl_gym.max_env_workers))

    async def one(task_id: str, attempt: int) -> None:
        async with places:
            add(await _attempt(cfg, generator, by_id[task_id], attempt, session, started, keep))

    async with asyncio.TaskGroup() as group:
        for task_id, attempt in todo:
            group.create_task(one(task_id, attempt))


async def _attempt(
    cfg: TrainConfig,
    generator: GuardedGenerator,
    task: Mapping[str, Any],
    attempt: int,
    session: int,
    started: float,
    keep: Callable[[str, int, str], None],
) -> Attempt:
    begin = time.monotonic()
    seed = attempt_seed(cfg.trainer.seed, task["task_id"], attempt)
    output = await generator.attempt(cfg, task, attempt, seed)
    metrics = output.env_metrics
    if "collected" in metrics:
        keep(task["task_id"], attempt, metrics["collected"])
    return Attempt(
        task_id=task["task_id"],
        attempt=attempt,
        solved=metrics.get("solved", output.reward) >= 1.0,
        reward=output.reward,
        turns=metrics["turns"],
        sampled_tokens=sum(output.loss_mask),
        context_tokens=len(output.prompt_ids) + len(output.response_ids),
        stop_reason=output.stop_reason,
        seconds=time.monotonic() - begin,
        tool_seconds=metrics.get("tool_seconds", 0.0),
        verifier_failed=metrics.get("verifier_failed", 0.0) == 1.0,
        sandbox_lost=metrics.get("sandbox_lost", 0.0) == 1.0,
        session=session,
        at_s=time.monotonic() - started,
    )

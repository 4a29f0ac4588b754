"""Execution checks of Harbor-format tasks: the reference solution solves the task and doing nothing does not.

Both go through the terminal environment that training uses, so a task that passes is one that can be solved there: closed, as
user 1000, within its limits.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from skyrl_thundersync.data.harbor import HarborTask
from skyrl_thundersync.sandbox.archive import tar
from skyrl_thundersync.sandbox.pool import SandboxPool
from skyrl_thundersync.tasks.terminal_env import SUBMIT, TerminalEnv


@dataclass(frozen=True)
class Execution:
    """One attempt without a model: training reward, official success, seconds in tools, and the last thing printed."""

    reward: float
    solved: bool
    verifier_failed: bool
    tool_seconds: float
    output: str


@dataclass(frozen=True)
class ExecutionCheck:
    """What the two attempts at a task gave."""

    task_id: str
    oracle: Execution
    noop: Execution

    @property
    def problem(self) -> str | None:
        """ "oracle" where the reference does not solve it, "noop" where nothing does, None where the task is sound."""
        if not self.oracle.solved:
            return "oracle"
        return "noop" if self.noop.solved else None


def oracle_action(task: HarborTask) -> str:
    """An assistant turn that puts solution/ into /solution and runs its solve.sh, as Harbor's oracle agent does.

    Raises:
        ValueError: the task has no solution/solve.sh.
    """
    if "solve.sh" not in task.solution:
        raise ValueError(f"task {task.task_id!r} has no solution/solve.sh")
    archive = base64.encodebytes(tar(task.solution)).decode()
    unpack = f"base64 -d <<'END_OF_SOLUTION' | tar -x -f - --no-same-owner -C /solution\n{archive}END_OF_SOLUTION"
    return f"```bash\n{unpack}\nbash /solution/solve.sh </dev/null\n```"


def attempt(sandboxes: SandboxPool, task: HarborTask, *actions: str) -> Execution:
    """Play `actions` and then `submit`.

    Raises:
        TaskError, SandboxError: from the environment.
    """
    env = TerminalEnv(None, task.row(max_turns=len(actions) + 1), sandboxes=sandboxes)
    prompt = [{"role": "user", "content": task.instruction}]
    try:
        env.init(prompt)
        output = ""
        for action in (*actions, SUBMIT):
            step = env.step(action)
            for message in step["observations"]:
                output = message["content"]
            if step["done"]:
                break
        metrics = env.get_metrics()
    finally:
        env.close()
    return Execution(
        float(step["reward"]),
        metrics["solved"] == 1.0,
        metrics["verifier_failed"] == 1.0,
        metrics["tool_seconds"],
        output,
    )


def check(sandboxes: SandboxPool, task: HarborTask) -> ExecutionCheck:
    """Both attempts at one task."""
    return ExecutionCheck(
        task.task_id, oracle=attempt(sandboxes, task, oracle_action(task)), noop=attempt(sandboxes, task)
    )


def check_all(sandboxes: SandboxPool, tasks: Iterable[HarborTask], workers: int) -> Iterator[ExecutionCheck]:
    """`check` of each task, `workers` at a time, in order."""
    with ThreadPoolExecutor(workers) as threads:
        yield from threads.map(partial(check, sandboxes), tasks)

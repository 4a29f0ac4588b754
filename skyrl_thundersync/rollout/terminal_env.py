"""The terminal agent's environment: each assistant turn is a shell command, run in a sandbox of the trajectory's own.

A `skyrl_gym` environment, registered as "terminal". Differs from the usual text environment in what it does not trust:
commands run in a closed sandbox, output is bounded, and the checker that gives the reward comes into the sandbox only
after the last process of the agent has ended. Methods run in SkyRL's thread pool; one environment is used by one thread
at a time, different ones concurrently.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from skyrl_gym.envs.registration import registry

from skyrl_thundersync.sandbox.base import WORKSPACE, CommandResult, Sandbox, SandboxLost
from skyrl_thundersync.sandbox.pool import SandboxPool

if TYPE_CHECKING:  # it imports all of SkyRL
    from skyrl_thundersync.config import SandboxConfig

logger = logging.getLogger(__name__)

ENV_ID = "terminal"
SUBMIT = "submit"
CHECKER_TIMEOUT_S = 60.0
_FENCE = re.compile(r"```(?:bash|sh)[ \t]*\n(.*?)(?:\n?```|\Z)", re.DOTALL)
_REWARD = re.compile(r"reward=(\S+)")

_pool: SandboxPool | None = None
_config: SandboxConfig | None = None


class TaskError(ValueError):
    """A task (dataset row) cannot be run; says which task and which field."""

    def __init__(self, task_id: object, field: str, problem: str) -> None:
        super().__init__(f"task {task_id!r}, field {field!r}: {problem}")
        self.task_id = task_id
        self.field = field


def configure(pool: SandboxPool, config: SandboxConfig) -> None:
    """Where environments made from now on get their sandboxes. Called once by the driver, before the first rollout."""
    global _pool, _config
    _pool, _config = pool, config


def register_terminal_env() -> None:
    """Make `env_class: terminal` known to SkyRL. May be called again."""
    if ENV_ID not in registry:
        skyrl_gym.register(id=ENV_ID, entry_point=f"{__name__}:TerminalEnv")


def parse_action(text: str) -> tuple[str, bool]:
    """(command, submitted) of an assistant turn.

    Text up to the last `</think>` does not count. The command is the first fenced bash or sh block if there is one, else
    the whole text; a last line `submit` is taken off and ends the episode after the lines before it have run.
    """
    text = text.rpartition("</think>")[2]
    fenced = _FENCE.search(text)
    command = (fenced[1] if fenced else text).strip()
    before, _, last = command.rpartition("\n")
    return (before.strip(), True) if last.strip() == SUBMIT else (command, False)


def describe(result: CommandResult, timeout_s: float) -> str:
    """What the agent reads of a command: its output, then what it could not know from it, in brackets."""
    lines = [result.output.rstrip("\n")] if result.output.strip() else []
    if result.timed_out:
        lines.append(f"[timed out after {timeout_s:g} s]")
    elif result.exit_code != 0:
        lines.append(f"[exit {result.exit_code}]")
    if not lines:
        lines.append("(no output)")
    if result.shell_ended:
        lines.append(f"[new shell in {WORKSPACE}]")
    return "\n".join(lines)


class TerminalEnv(BaseTextEnv):
    """One episode.

    `extras` is the dataset row: task_id (str), files ({relative path: text} or its JSON), checker (bash), max_turns
    (int), image (optional, Docker only). `env_config` is not used.
    """

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        """Raises:
        TaskError: a field is missing or has no such value.
        RuntimeError: `configure` has not been called.
        """
        super().__init__()
        if _pool is None or _config is None:
            raise RuntimeError("terminal_env.configure(pool, config) must be called before the first episode")
        extras = extras or {}
        self._pool, self._config = _pool, _config
        self.task_id = _field(extras, "task_id", str)
        self._files = _files(self.task_id, extras)
        self._checker = _field(extras, "checker", str)
        self._image = extras.get("image")
        self.max_turns = _field(extras, "max_turns", int)
        if self.max_turns < 1:
            raise TaskError(self.task_id, "max_turns", f"must be at least 1, got {self.max_turns}")
        self._sandbox: Sandbox | None = None
        self._reward = 0.0
        self._done = False
        self._tool_seconds = 0.0
        self._timed_out = 0
        self._lost = False

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Make the sandbox and put the task's files into it. Returns the prompt as it is.

        Raises:
            TaskError: the files cannot be put there.
            SandboxError: there is no sandbox to be had.
        """
        self._sandbox = self._pool.create(self._image)
        try:
            self._sandbox.write_files(self._files)
        except ValueError as error:
            self.close()
            raise TaskError(self.task_id, "files", str(error)) from error
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Run the turn's command; grade after `submit` or the last turn.

        Raises:
            TaskError: the checker printed a reward that is not a finite number.
            SandboxError: the machinery failed.
        """
        if self._sandbox is None or self._done:
            raise RuntimeError(f"task {self.task_id!r}: step() needs init() before it and no step after the last")
        self.turns += 1
        command, submitted = parse_action(action)
        observation = None
        started = time.monotonic()
        try:
            if command:
                result = self._sandbox.run(command, self._config.command_timeout_s)
                self._timed_out += result.timed_out
                observation = describe(result, self._config.command_timeout_s)
            elif not submitted:
                observation = "(no command)"
            # Stands for a slow tool, so it is there whatever the command was.
            time.sleep(self._config.latency_s)
            self._tool_seconds += time.monotonic() - started
            self._done = submitted or self.turns >= self.max_turns
            if self._done:
                self._reward = self._grade(self._sandbox)
        except SandboxLost as error:
            # The agent made its own sandbox unusable: its episode ends without reward, the run goes on. When the pool
            # is closing, the run is over and so is this.
            if self._pool.closed:
                raise
            logger.warning("task %r, turn %d: %s", self.task_id, self.turns, error)
            self._lost = True
            self._done, observation = True, f"[the sandbox was lost: {error}]"
        observations = [] if observation is None else [{"role": "user", "content": observation}]
        return BaseTextEnvStepOutput(
            observations=observations,
            reward=self._reward if self._done else 0.0,
            done=self._done,
            metadata={"task_id": self.task_id},
            postprocessed_action=None,
        )

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    def get_metrics(self) -> dict[str, Any]:
        """Turns taken, 1.0 where the full reward was earned, seconds in tools (latency included), commands timed
        out, 1.0 where the agent lost its sandbox."""
        return {
            "turns": self.turns,
            "solved": float(self._reward >= 1.0),
            "tool_seconds": self._tool_seconds,
            "commands_timed_out": self._timed_out,
            "sandbox_lost": float(self._lost),
        }

    def _grade(self, sandbox: Sandbox) -> float:
        result = sandbox.check(self._checker, CHECKER_TIMEOUT_S)
        if result.timed_out:
            return 0.0
        lines = result.output.rstrip().splitlines()
        match = _REWARD.fullmatch(lines[-1].strip()) if lines else None
        if match is None:
            return float(result.exit_code == 0)
        try:
            reward = float(match[1])
        except ValueError:
            reward = math.nan
        if not math.isfinite(reward):
            raise TaskError(self.task_id, "checker", f"printed {match[0]!r}: the reward must be a finite number")
        return reward


def _field(extras: Mapping[str, Any], name: str, kind: type) -> Any:
    value = extras.get(name)
    if isinstance(value, kind) and not isinstance(value, bool) and value != "":
        return value
    problem = "is missing" if value is None or value == "" else f"must be {kind.__name__}, got {value!r}"
    raise TaskError(extras.get("task_id", "?"), name, problem)


def _files(task_id: str, extras: Mapping[str, Any]) -> dict[str, str]:
    files = extras.get("files")
    if files is None:
        raise TaskError(task_id, "files", "is missing (a task without files has {})")
    if isinstance(files, str):
        try:
            files = json.loads(files)
        except json.JSONDecodeError as error:
            raise TaskError(task_id, "files", f"is no valid JSON: {error}") from error
    if not isinstance(files, Mapping):
        raise TaskError(task_id, "files", f"must map paths to texts, got {type(files).__name__}")
    # A table of rows gives every row the union of all paths, with None where a row has no such file.
    return {path: text for path, text in files.items() if text is not None}

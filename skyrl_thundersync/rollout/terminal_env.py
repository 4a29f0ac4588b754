"""The terminal agent's environment: each assistant turn is a shell command, run in a sandbox of the trajectory's own.

A `skyrl_gym` environment, registered as "terminal". Differs from the usual text environment in what it does not trust:
commands run in a closed sandbox, output is bounded, and the checker that gives the reward comes into the sandbox only
after the last process of the agent has ended. Methods run in SkyRL's thread pool; one environment is used by one thread
at a time, different ones concurrently.
"""

from __future__ import annotations

import logging
import math
import re
import shlex
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from skyrl_gym.envs.registration import registry

from skyrl_thundersync import timeline
from skyrl_thundersync.rollout.harbor_verifier import Grade, grading_script, read_grade
from skyrl_thundersync.rollout.task_row import TaskError, field, mapping, seconds, task_files, task_tests
from skyrl_thundersync.rollout.terminal_text import SUBMIT, describe_text, parse_action
from skyrl_thundersync.sandbox.base import (
    WORKSPACE,
    CommandResult,
    Sandbox,
    SandboxError,
    SandboxLost,
    StartError,
)
from skyrl_thundersync.sandbox.pool import SandboxPool

if TYPE_CHECKING:  # it imports all of SkyRL
    from skyrl_thundersync.config import SandboxConfig

__all__ = [
    "ENV_ID",
    "SUBMIT",
    "TaskError",
    "TerminalEnv",
    "configure",
    "describe",
    "parse_action",
    "register_terminal_env",
]

logger = logging.getLogger(__name__)

ENV_ID = "terminal"
CHECKER_TIMEOUT_S = 60.0
SETUP_TIMEOUT_S = 300.0
_REWARD = re.compile(r"reward=(\S+)")

_pool: SandboxPool | None = None
_config: SandboxConfig | None = None
_crash_stops = True


def configure(pool: SandboxPool, config: SandboxConfig, crash_stops: bool = True) -> None:
    """Where environments made from now on get their sandboxes. Called once by the driver, before the first rollout.

    `crash_stops`: machinery that fails during an episode raises; else the episode ends there, and its metrics say so.
    """
    global _pool, _config, _crash_stops
    _pool, _config, _crash_stops = pool, config, crash_stops


def register_terminal_env() -> None:
    """Make `env_class: terminal` known to SkyRL. May be called again."""
    if ENV_ID not in registry:
        skyrl_gym.register(id=ENV_ID, entry_point=f"{__name__}:TerminalEnv")


def describe(result: CommandResult, timeout_s: float, workdir: str = WORKSPACE) -> str:
    """What the agent reads of a command's result."""
    shell = workdir if result.shell_ended else None
    return describe_text(result.output, result.exit_code, result.timed_out, timeout_s, shell)


class TerminalEnv(BaseTextEnv):
    """One episode.

    `extras` is the dataset row: task_id (str), files ({relative path: text} or its JSON), checker (bash), max_turns
    (int). `env_config` is not used. Optional:

    - image: Docker only, unless image_optional is true: bubblewrap then does without;
    - workdir: where commands start and the checker runs, if not /workspace; the root file system can then be written
      to where user 1000 may; env: variables of the agent's shell ({name: value} or its JSON);
    - setup: bash, run once in the agent's shell before the first turn;
    - tests: {path: text or {"base64": …}} or its JSON: the checker is a Harbor verifier (`harbor_verifier`), which finds
      them in /tests and nobody before; verifier_env beside it; partial_credit (default true): its training reward;
    - collect: what the checker prints is kept (metric `collected`) and graded elsewhere: evaluation only;
    - agent_timeout_s: the episode ends, and is graded, after the first turn past it; verifier_timeout_s;
    - needs: what this environment has not, comma-separated; a row with any is refused;
    - on_last_turn: called once the turn in work is known to be the last, at the latest before the grading.
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
        self.task_id = field(extras, "task_id", str)
        self._files = task_files(self.task_id, extras)
        self._checker = field(extras, "checker", str)
        if extras.get("needs") not in (None, "", "build"):
            raise TaskError(self.task_id, "needs", f"{extras['needs']}: run it through Harbor, not in this environment")
        self._image = extras.get("image")
        if self._pool.backend == "bubblewrap" and extras.get("image_optional"):
            self._image = None
        self._workdir = extras.get("workdir") or WORKSPACE
        self._env = mapping(self.task_id, extras, "env")
        self._setup = extras.get("setup") or ""
        self._tests = task_tests(self.task_id, extras)
        self._verifier_env = mapping(self.task_id, extras, "verifier_env")
        self._collect = extras.get("collect") is True
        self._collected = ""
        self._partial_credit = extras.get("partial_credit") is not False
        self._agent_timeout_s = seconds(extras, "agent_timeout_s", math.inf)
        self._verifier_timeout_s = seconds(extras, "verifier_timeout_s", CHECKER_TIMEOUT_S)
        self.max_turns = field(extras, "max_turns", int)
        if self.max_turns < 1:
            raise TaskError(self.task_id, "max_turns", f"must be at least 1, got {self.max_turns}")
        self._sandbox: Sandbox | None = None
        self._reward = 0.0
        self._solved = False
        self._verifier_failed = False
        self._deadline = math.inf
        self._done = False
        self._tool_seconds = 0.0
        self._timed_out = 0
        self._lost = False
        self._crashed = False
        self._out_of_time = False
        self._start_seconds = 0.0
        self._started_ahead = False
        self._say_last: Callable[[], None] = extras.get("on_last_turn") or (lambda: None)
        self._pool.expect(self._image, self._workdir != WORKSPACE)

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Make the sandbox and put the task's files into it. Returns the prompt as it is.

        Raises:
            TaskError: the files cannot be put there.
            StartError: there is no sandbox to be had.
        """
        self._deadline = time.monotonic() + self._agent_timeout_s
        asked = time.monotonic()
        try:
            self._sandbox = self._pool.create(self._image, writable_root=self._workdir != WORKSPACE)
            self._start_seconds = time.monotonic() - asked
            self._started_ahead = self._sandbox.started_ahead
            self._sandbox.write_files(self._files)
            self._enter_workdir(self._sandbox)
            self._run_first(self._sandbox, "setup", self._setup)
        except TaskError:
            self.close()
            raise
        except ValueError as error:
            self.close()
            raise TaskError(self.task_id, "files", str(error)) from error
        except SandboxError as error:
            self.close()
            if self._pool.closed:
                raise
            raise StartError(f"task {self.task_id!r}: {error}") from error
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Run the turn's command; grade after `submit` or the last turn.

        Raises:
            TaskError: the checker printed a reward that is not a finite number.
            SandboxError: the machinery failed, where `configure` said that this is the end.
        """
        if self._sandbox is None or self._done:
            raise RuntimeError(f"task {self.task_id!r}: step() needs init() before it and no step after the last")
        self.turns += 1
        command, submitted = parse_action(action)
        if submitted or self.turns >= self.max_turns:
            self._say_last()
        observation = None
        started = time.monotonic()
        try:
            if command:
                result = self._sandbox.run(command, self._config.command_timeout_s)
                self._timed_out += result.timed_out
                observation = describe(result, self._config.command_timeout_s, self._workdir)
                if result.shell_ended and not submitted:
                    self._enter_workdir(self._sandbox)
            elif not submitted:
                observation = "(no command)"
            # Stands for a slow tool, so it is there whatever the command was.
            time.sleep(self._config.latency_s)
            ended = time.monotonic()
            timeline.add("tools", "command", started, ended, task=self.task_id)
            self._tool_seconds += ended - started
            self._out_of_time = time.monotonic() > self._deadline and not submitted
            self._done = submitted or self.turns >= self.max_turns or self._out_of_time
            if self._done:
                self._say_last()
                self._reward = self._grade(self._sandbox)
                timeline.add("tools", "checker", ended, time.monotonic(), task=self.task_id)
        except SandboxError as error:
            # A sandbox is lost when the agent made it unusable: its episode ends without reward, the run goes on. When the
            # pool is closing, the run is over and so is this.
            self._lost = isinstance(error, SandboxLost)
            self._crashed = not self._lost
            if self._pool.closed or (self._crashed and _crash_stops):
                raise
            logger.warning("task %r, turn %d: %s", self.task_id, self.turns, error)
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
        """Turns taken, 1.0 where the full (official) reward was earned, seconds in tools (latency included), commands
        timed out, 1.0 where the agent lost its sandbox, 1.0 where a Harbor verifier gave no reward, seconds that the sandbox
        was waited for and 1.0 where it had been started ahead. For `outcomes`: 1.0 where the episode came to an end in here
        (0.0: the host ran out of context), where its time ran out, and where the machinery failed."""
        collected = {"collected": self._collected} if self._collect else {}
        return collected | {
            "turns": self.turns,
            "solved": float(self._solved),
            "tool_seconds": self._tool_seconds,
            "commands_timed_out": self._timed_out,
            "sandbox_lost": float(self._lost),
            "verifier_failed": float(self._verifier_failed),
            "finished": float(self._done),
            "agent_timed_out": float(self._out_of_time),
            "crashed": float(self._crashed),
            "sandbox_start_seconds": self._start_seconds,
            "sandbox_started_ahead": float(self._started_ahead),
        }

    def _enter_workdir(self, sandbox: Sandbox) -> None:
        """What a new shell of the agent's starts with."""
        words = [f"export {name}={shlex.quote(value)}" for name, value in self._env.items()]
        if self._workdir != WORKSPACE:
            words.append(f"cd {shlex.quote(self._workdir)}")
        self._run_first(sandbox, "workdir", " && ".join(words))

    def _run_first(self, sandbox: Sandbox, field: str, script: str) -> None:
        if script and (result := sandbox.run(script, SETUP_TIMEOUT_S)).exit_code != 0:
            raise TaskError(self.task_id, field, f"exit code {result.exit_code}: {result.output.strip()}")

    def _grade(self, sandbox: Sandbox) -> float:
        if self._tests is not None:
            return self._grade_by_harbor(sandbox, self._tests)
        reward = self._grade_by_checker(sandbox)
        self._solved = reward >= 1.0
        return reward

    def _grade_by_harbor(self, sandbox: Sandbox, tests: Mapping[str, bytes]) -> float:
        script = grading_script(self._checker, tests, self._workdir, self._env | self._verifier_env)
        grade: Grade = read_grade(sandbox.check(script, self._verifier_timeout_s))
        if grade.problem is not None:
            logger.warning("task %r: graded 0: %s", self.task_id, grade.problem)
        self._verifier_failed = grade.problem is not None
        self._solved = grade.solved
        return grade.training_reward(self._partial_credit)

    def _grade_by_checker(self, sandbox: Sandbox) -> float:
        result = sandbox.check(self._checker, self._verifier_timeout_s)
        if self._collect:
            whole = result.exit_code == 0 and not result.truncated
            self._collected, self._verifier_failed = result.output if whole else "", not whole
            return 0.0
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

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
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from skyrl_gym.envs.registration import EnvSpec, registry

from skyrl_thundersync.sandbox.base import (
    WORKSPACE,
    Sandbox,
    SandboxError,
    SandboxLost,
    StartError,
)
from skyrl_thundersync.sandbox.pool import SandboxPool
from skyrl_thundersync.tasks.grading import Grade, grading_script, read_grade
from skyrl_thundersync.tasks.reward import REWARD_RULE, usable_reward
from skyrl_thundersync.tasks.schema import TaskError, TaskRow
from skyrl_thundersync.tasks.terminal_text import SUBMIT, describe_text, parse_action, unfinished_thought
from skyrl_thundersync.telemetry import timeline

__all__ = [
    "ENV_ID",
    "SUBMIT",
    "TaskError",
    "TerminalEnv",
    "parse_action",
    "register_terminal_env",
]

logger = logging.getLogger(__name__)

ENV_ID = "terminal"
OF_GENERATOR = ("thought_opened", "on_last_turn")
"""Extras that are no fields of a row."""
LEAST_VERIFIER_S = 0.1
"""What a verifier gets however long its agent took: a trajectory is graded, or said not to have been."""
SETUP_TIMEOUT_S = 300.0
RESTART_TIMEOUT_S = 30.0
_REWARD = re.compile(r"reward=(.*)")


def register_terminal_env(sandboxes: SandboxPool) -> None:
    """Make `env_class: terminal` known to SkyRL: episodes made from now on run in these sandboxes."""

    class InSandboxes(TerminalEnv):
        """A class, no partial: SkyRL asks it for `aggregate_metrics`, too."""

        def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
            super().__init__(env_config, extras, sandboxes=sandboxes)

    registry[ENV_ID] = EnvSpec(ENV_ID, InSandboxes)


class TerminalEnv(BaseTextEnv):
    """One episode.

    `extras` is the dataset row (`tasks.schema.TaskRow`) with `max_turns` set; `env_config` is not used. `agent_timeout_s`
    counts from the start of the sandbox on: set-up and commands are cut there, and the episode ends, graded, with the turn
    that reaches it; `verifier_timeout_s` from there on. Beside the row, of the generator:

    - thought_opened: the chat template opens every turn inside a thought (`terminal_text.opens_thought`);
    - on_last_turn: called once the turn in work is known to be the last, at the latest before the grading.
    """

    def __init__(
        self, env_config: Any = None, extras: Mapping[str, Any] | None = None, *, sandboxes: SandboxPool
    ) -> None:
        """Raises:
        TaskError: a field is missing or has no such value.
        """
        super().__init__()
        self._pool, self._config = sandboxes, sandboxes.config
        extras = extras or {}
        row = TaskRow.of({name: value for name, value in extras.items() if name not in OF_GENERATOR})
        if row.max_turns is None:
            raise TaskError(row.task_id, "max_turns", "is missing")
        self.task_id, self.max_turns = row.task_id, row.max_turns
        self._files, self._setup = row.files, row.setup
        self._image = row.image
        if self._pool.backend == "bubblewrap" and row.image_optional:
            self._image = None
        self._workdir, self._env = row.workdir, row.env
        self._checker, self._tests, self._verifier_env = row.checker, row.tests, row.verifier_env
        self._collect, self._collected = row.collect, ""
        self._partial_credit = row.partial_credit
        self._agent_timeout_s, self._verifier_timeout_s = row.agent_timeout_s, row.verifier_timeout_s
        self._sandbox: Sandbox | None = None
        self._reward = 0.0
        self._solved = False
        self._reason = ""
        self._verifier_failed = False
        self._thought_opened = extras.get("thought_opened") is True
        self._thoughts_cut = 0
        self._deadline = math.inf  # of start, set-up and agent; the verifier's own time comes on top
        self._done = False
        self._tool_seconds = 0.0
        self._timed_out = 0
        self._lost = False
        self._out_of_time = False
        self._start_seconds = 0.0
        self._started_ahead = False
        self._say_last: Callable[[], None] = extras.get("on_last_turn") or (lambda: None)
        self._pool.expect(self._image, self._workdir != WORKSPACE)

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Make the sandbox and put the task's files into it. Returns the prompt as it is.

        Raises:
            TaskError: the files cannot be put there, or the set-up fails.
            StartError: there is no sandbox to be had, or agent_timeout_s passed before the set-up had run.
        """
        asked = time.monotonic()
        self._deadline = asked + self._agent_timeout_s
        try:
            whole = self._agent_timeout_s + self._verifier_timeout_s
            self._sandbox = self._pool.create(self._image, self._workdir != WORKSPACE, whole)
            self._start_seconds = time.monotonic() - asked
            self._started_ahead = self._sandbox.started_ahead
            self._sandbox.write_files(self._files)
            words = [*self._exports, *([f"cd {shlex.quote(self._workdir)}"] if self._workdir != WORKSPACE else [])]
            self._run_first(self._sandbox, "workdir", " && ".join(words))
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
        """Run the turn's command; grade after `submit`, the last turn, or the end of the agent's time.

        Raises:
            SandboxError: the machinery failed.
        """
        if self._sandbox is None or self._done:
            raise RuntimeError(f"task {self.task_id!r}: step() needs init() before it and no step after the last")
        self.turns += 1
        command, submitted = parse_action(action, self._thought_opened)
        if submitted or self.turns >= self.max_turns:
            self._say_last()
        started = time.monotonic()
        try:
            observation, cut = self._observe(self._sandbox, action, command, submitted)
            # Stands for a slow tool, so it is there whatever the command was.
            time.sleep(min(self._config.latency_s, self._left()))
            ended = time.monotonic()
            timeline.add("tools", "command", started, ended, task=self.task_id)
            self._tool_seconds += ended - started
            self._out_of_time = self._left() == 0 and (cut or not submitted)
            self._done = submitted or self.turns >= self.max_turns or self._out_of_time
            if self._out_of_time:
                self._reason = f"the agent's {self._agent_timeout_s:g} s were over"
            if self._done:
                self._say_last()
                self._reward = self._grade(self._sandbox)
                timeline.add("tools", "checker", ended, time.monotonic(), task=self.task_id)
        except SandboxLost as error:
            # A sandbox is lost when the agent made it unusable: its episode ends without reward, the run goes on. When the
            # pool is closing, the run is over and so is this.
            if self._pool.closed:
                raise
            logger.warning("task %r, turn %d: %s", self.task_id, self.turns, error)
            self._lost, self._done, self._reason = True, True, str(error)
            observation = f"[the sandbox was lost: {error}]"
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
        timed out, turns that ended inside a thought, 1.0 where the agent lost its sandbox, 1.0 where the checker gave no
        reward, 1.0 where the agent's time ran out, seconds that the sandbox was waited for and 1.0 where it had been started
        ahead; `reason`, text, is why it was graded 0 or cut short."""
        collected = {"collected": self._collected} if self._collect else {}
        return collected | {
            "turns": self.turns,
            "solved": float(self._solved),
            "tool_seconds": self._tool_seconds,
            "commands_timed_out": self._timed_out,
            "thoughts_cut": self._thoughts_cut,
            "sandbox_lost": float(self._lost),
            "verifier_failed": float(self._verifier_failed),
            "agent_timed_out": float(self._out_of_time),
            "sandbox_start_seconds": self._start_seconds,
            "sandbox_started_ahead": float(self._started_ahead),
            "reason": self._reason,
        }

    def _left(self, most: float = math.inf) -> float:
        """Seconds of the agent's time that are left, at most `most`."""
        return max(0.0, min(most, self._deadline - time.monotonic()))

    @property
    def _verifier_left(self) -> float:
        """Seconds for the verifier: its own, less what start and agent took beyond theirs."""
        over = max(0.0, time.monotonic() - self._deadline)
        return max(LEAST_VERIFIER_S, self._verifier_timeout_s - over)

    def _observe(self, sandbox: Sandbox, action: str, command: str, submitted: bool) -> tuple[str | None, bool]:
        """Run the command; what the agent reads of it, and whether a time limit cut it."""
        if unfinished_thought(action, self._thought_opened):
            self._thoughts_cut += 1
            return "(no command: the turn ended inside a thought)", False
        if not command:
            return (None if submitted else "(no command)"), False
        limit = self._left(self._config.command_timeout_s)
        if limit == 0:
            return "(not run: the time is over)", True
        result = sandbox.run(command, limit)
        self._timed_out += result.timed_out
        shell = self._enter_again(sandbox) if result.shell_ended and not submitted else None
        said = describe_text(result.output, result.exit_code, result.timed_out, round(limit, 1), shell)
        return said, result.timed_out

    @property
    def _exports(self) -> list[str]:
        """What a new shell of the agent's starts with."""
        return [f"export {name}={shlex.quote(value)}" for name, value in self._env.items()]

    def _enter_again(self, sandbox: Sandbox) -> str:
        """Prepare a new shell over what the agent did to its folders; the folder that it starts in.

        That is the working folder if it can be entered, for its owner made so if need be, and else /workspace.
        """
        folder = shlex.quote(self._workdir)
        enter = f"{{ cd {folder} || {{ chmod u+rwx {folder} && cd {folder}; }} || cd {WORKSPACE}; }} >/dev/null 2>&1"
        result = sandbox.run("; ".join([*self._exports, enter, 'printf %s "$PWD"']), RESTART_TIMEOUT_S)
        if result.exit_code != 0:
            raise SandboxLost(f"no shell of the agent's starts any more: exit code {result.exit_code}: {result.output}")
        return result.output

    def _run_first(self, sandbox: Sandbox, field: str, script: str) -> None:
        if not script:
            return
        limit = self._left(SETUP_TIMEOUT_S)
        result = sandbox.run(script, limit)
        if result.timed_out and limit < SETUP_TIMEOUT_S:
            raise StartError(f"agent_timeout_s={self._agent_timeout_s:g} was over before its {field} had run")
        if result.exit_code != 0:
            raise TaskError(self.task_id, field, f"exit code {result.exit_code}: {result.output.strip()}")

    def _grade(self, sandbox: Sandbox) -> float:
        if self._tests is not None:
            return self._grade_by_harbor(sandbox, self._tests)
        reward = self._grade_by_checker(sandbox)
        self._solved = reward >= 1.0
        return reward

    def _grade_by_harbor(self, sandbox: Sandbox, tests: Mapping[str, bytes]) -> float:
        script = grading_script(self._checker, tests, self._workdir, self._env | self._verifier_env)
        grade: Grade = read_grade(sandbox.check(script, self._verifier_left))
        if grade.problem is not None:
            self._graded_zero(grade.problem)
        self._solved = grade.solved
        return grade.training_reward(self._partial_credit)

    def _grade_by_checker(self, sandbox: Sandbox) -> float:
        result = sandbox.check(self._checker, self._verifier_left)
        if self._collect:
            whole = result.exit_code == 0 and not result.truncated
            self._collected, self._verifier_failed = result.output if whole else "", not whole
            return 0.0
        if result.timed_out:
            return self._graded_zero(f"the checker ran into its time limit ({self._verifier_timeout_s:g} s)")
        lines = result.output.rstrip().splitlines()
        match = _REWARD.fullmatch(lines[-1].strip()) if lines else None
        if match is None:
            if result.exit_code != 0:
                self._reason = f"the checker's exit code was {result.exit_code}{': ' + lines[-1] if lines else ''}"
            return float(result.exit_code == 0)
        reward = usable_reward(match[1])
        if reward is None:
            return self._graded_zero(f"the checker printed {match[0]!r}: {REWARD_RULE}")
        return reward

    def _graded_zero(self, reason: str) -> float:
        """There is no grade, which an agent can bring about: what it is worth is up to `thundersync.outcomes`."""
        logger.warning("task %r: graded 0: %s", self.task_id, reason)
        self._verifier_failed, self._reason = True, reason
        return 0.0

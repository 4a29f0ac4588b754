"""Any SkyRL-Gym environment, watched: what goes wrong in it becomes an outcome of its trajectory, or an error with its name.

`thundersync.outcomes` is told by metrics. `finished` and `crashed` are set here, for whatever environment. One that knows
more says so with metrics of its own, 1.0 in `agent_timed_out`, `sandbox_lost` or `verifier_failed` and a text in `reason`, or
raises `SandboxLost` from a step and `StartError` from `init`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
from skyrl_gym.envs.registration import registry

from skyrl_thundersync.sandbox.base import SandboxLost, StartError
from skyrl_thundersync.tasks import environments
from skyrl_thundersync.tasks.schema import TaskError

logger = logging.getLogger(__name__)

ENV_ID = "thundersync-guarded"
GUARD = "thundersync_guard"


class EnvironmentFailedError(RuntimeError):
    """An environment raised, or returned what is no answer of one; says which, on which task, at which turn."""


@dataclass(frozen=True)
class Guard:
    """What is watched, and how.

    Attributes:
        env_class, env_config: as for `skyrl_gym.make`.
        task: the task's name, for messages.
        max_turns: of this task; SkyRL writes its own option over the row's.
        crash_stops: an error at a step is raised; else the episode ends there, without reward.
        too_long: what is wrong with the length of a first prompt; None where nothing is.
    """

    env_class: str
    env_config: Any
    task: str
    max_turns: int
    crash_stops: bool
    too_long: Callable[[ConversationType], str | None]


def register_guarded_env() -> None:
    """Make `ENV_ID` known to SkyRL. May be called again."""
    if ENV_ID not in registry:
        skyrl_gym.register(id=ENV_ID, entry_point=f"{__name__}:GuardedEnv")


class GuardedEnv(BaseTextEnv):
    """The environment of `extras[GUARD]`, made of the other extras.

    Errors of any kind are caught from it: it is somebody else's code, and its errors do not say what they were about.
    """

    def __init__(self, env_config: Any, extras: Mapping[str, Any]) -> None:
        """Raises:
        EnvironmentFailedError: it cannot be made.
        TaskError: as it raised it.
        """
        super().__init__()
        extras = dict(extras)
        self._guard: Guard = extras.pop(GUARD)
        extras["max_turns"] = self._guard.max_turns
        self._reason = ""
        self._finished = False
        self._crashed = self._lost = False
        try:
            environments.require(self._guard.env_class)
            self._env = skyrl_gym.make(self._guard.env_class, env_config=self._guard.env_config, extras=extras)
        except TaskError:
            raise
        except Exception as error:
            raise self._failed("could not be made", error) from error

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Raises:
        StartError: it raised; nothing has been sampled.
        TaskError: as it raised it.
        EnvironmentFailedError: its first prompt leaves no room for a turn.
        """
        try:
            prompt, info = self._env.init(prompt)
        except (StartError, TaskError):
            raise
        except Exception as error:
            raise StartError(str(self._failed("did not start", error))) from error
        if problem := self._guard.too_long(prompt):
            raise EnvironmentFailedError(f"{self._name}: {problem}")
        return prompt, info

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Raises:
        EnvironmentFailedError: it raised, and the run is to stop for it.
        """
        self.turns += 1
        try:
            answer = _checked(self._env.step(action))
        except SandboxLost as error:
            self._lost, self._reason = True, str(error)
        except Exception as error:
            failed = self._failed(f"turn {self.turns}", error)
            if self._guard.crash_stops:
                raise failed from error
            self._crashed, self._reason = True, str(failed)
        else:
            self._finished = answer["done"]
            return answer
        logger.warning("%s: %s", self._name, self._reason)
        self._finished = True
        return BaseTextEnvStepOutput(observations=[], reward=0.0, done=True, metadata={}, postprocessed_action=None)

    def get_metrics(self) -> dict[str, Any]:
        """Its own; `turns`, `finished` (0.0: the host ran out of context) and `crashed` of every environment's."""
        try:
            metrics = dict(self._env.get_metrics())
        except Exception as error:
            failed = self._failed("get_metrics", error)
            if self._guard.crash_stops:
                raise failed from error
            logger.warning("%s", failed)
            metrics, self._crashed, self._reason = {}, True, self._reason or str(failed)
        metrics = {"turns": self.turns} | metrics | {"finished": float(self._finished), "crashed": float(self._crashed)}
        if self._lost:
            metrics["sandbox_lost"] = 1.0
        if self._reason:
            metrics["reason"] = self._reason
        return metrics

    def close(self) -> None:
        """Raises:
        EnvironmentFailedError: it raised, and the run is to stop for it.
        """
        try:
            self._env.close()
        except Exception as error:
            failed = self._failed("close", error)
            if self._guard.crash_stops:
                raise failed from error
            logger.warning("%s", failed)

    @property
    def _name(self) -> str:
        return f"environment {self._guard.env_class!r}, task {self._guard.task!r}"

    def _failed(self, where: str, error: Exception) -> EnvironmentFailedError:
        return EnvironmentFailedError(f"{self._name}, {where}: {type(error).__name__}: {error}")


def _checked(answer: Any) -> BaseTextEnvStepOutput:
    """Raises TypeError, KeyError or ValueError for what is no answer of an environment."""
    for message in answer["observations"]:
        if not isinstance(message["role"], str) or not isinstance(message["content"], str | list):
            raise TypeError(f"an observation is a message of role and content, got {message!r:.200}")
    float(answer["reward"])
    bool(answer["done"])
    return answer

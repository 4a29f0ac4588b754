"""Harbor trials as the rollouts of an update.

Harbor runs in a process of its own (`harbor run`, one trial each, its own retries off), so it may live in another Python
environment. The agent asks the policy server under its trajectory's name; every answer is a source before the agent has it.
When the trial ends, its reward and what ended it are read from result.json, and the trajectory closes by the table of
`thundersync.outcomes`: a trial that fails before its first turn may be tried again, one that fails later keeps what was
released.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_thundersync.harbor.process import run_harbor, time_allowed
from skyrl_thundersync.rollout.outcomes import Outcomes
from skyrl_thundersync.sandbox.base import SandboxError, StartError

if TYPE_CHECKING:
    from skyrl_thundersync.harbor.policy_server import PolicyServer
    from skyrl_thundersync.stream.sources import TrajectoryId
    from skyrl_thundersync.trainer import Update

OWN_AGENT = "skyrl_thundersync.harbor.agent:ThunderSyncAgent"
OUTCOMES = {
    "timeout": ("AgentTimeoutError",),
    "context_overflow": (
        "ContextLengthExceededError",
        "ContextWindowExceededError",
        "OutputLengthExceededError",
        "OutputTokenExceededError",
    ),
    "sandbox_lost": ("MemoryLimitExceededError", "SandboxLikelyOutOfMemoryError"),
    "verifier_failed": (
        "RewardFileEmptyError",
        "RewardFileNotFoundError",
        "VerifierOutputParseError",
        "VerifierTimeoutError",
    ),
}
"""Harbor 0.25's exceptions by what they mean here. Any other is "crash", or "start_failed" before the first turn."""
_OF = {name: outcome for outcome, names in OUTCOMES.items() for name in names}

AgentArguments = Callable[[str], list[str]]
"""The policy server's URL of a trajectory -> arguments of `harbor run`."""


class TrialError(SandboxError):
    """A trial failed, and the table of outcomes stops the run for it; holds what Harbor said and where its files are."""


@dataclass(frozen=True)
class Trial:
    """A trial that ended.

    Attributes:
        reward: Harbor's; 0.0 where there is none.
        outcome: a key of `thundersync.outcomes`; None where it came to its own end.
        detail: Harbor's exception, for messages.
        agent_tokens: sampled tokens as the agent counted them; None where it did not.
        folder: the trial's.
    """

    reward: float
    outcome: str | None
    detail: str
    agent_tokens: int | None
    folder: Path


def own_agent(model: str, tokenizer: str, **options: Any) -> AgentArguments:
    """`ThunderSyncAgent`, token ids in and out; `options` are its keyword arguments."""

    def arguments(url: str) -> list[str]:
        given = {"url": url, "tokenizer": tokenizer, **options}
        return ["-a", OWN_AGENT, "-m", model, *(word for k, v in given.items() for word in ("--ak", f"{k}={v}"))]

    return arguments


def chat_agent(name: str, model: str, **options: Any) -> AgentArguments:
    """An agent of Harbor's that takes an OpenAI base URL as `api_base`, such as terminus-2."""

    def arguments(url: str) -> list[str]:
        given = {"api_base": f"{url}/v1", **options}
        return ["-a", name, "-m", f"openai/{model}", *(word for k, v in given.items() for word in ("--ak", f"{k}={v}"))]

    return arguments


class HarborTrials:
    """Rolls the trajectories of an update out as Harbor trials.

    Args:
        server: the policy, over the armed turn hook.
        agent: how Harbor is told which agent to run.
        outcomes: the table.
        jobs: folder for Harbor's own files, a job a trial.
        concurrent: trials at once.
        command: how Harbor is started, for instance ("/opt/harbor/bin/harbor",).
        environment: Harbor's environment type.
        deadline_s: seconds for a trial, boot, agent and verifier together; None: what the task allows all three. A trial
            that is ended there has the outcome "timeout"; before its first turn it did not start.
    """

    def __init__(
        self,
        server: PolicyServer,
        agent: AgentArguments,
        outcomes: Outcomes,
        jobs: Path,
        concurrent: int = 8,
        command: Sequence[str] = ("harbor",),
        environment: str = "docker",
        deadline_s: float | None = None,
    ) -> None:
        self._server, self._agent, self._outcomes = server, agent, outcomes
        self._jobs, self._places = jobs, asyncio.Semaphore(concurrent)
        self._command, self._environment = tuple(command), environment
        self._deadline_s = deadline_s

    async def rollouts(self, update: Update, tasks: Mapping[str, Path]) -> dict[TrajectoryId, Trial]:
        """Every trajectory of the batch: `tasks` maps its group to a task folder. Await through `Update.run`.

        Raises:
            TrialError, StartError: by the table; also whatever went wrong in the policy server.
        """
        async with asyncio.TaskGroup() as group:
            running = {
                trajectory: group.create_task(self._roll_out(update, trajectory, tasks[trajectory.group]))
                for trajectory in update.ledger.trajectories
            }
        return {trajectory: task.result() for trajectory, task in running.items()}

    async def _roll_out(self, update: Update, trajectory: TrajectoryId, task: Path) -> Trial:
        name = str(trajectory)
        async with self._places:
            trial = await self._outcomes.play(name, partial(self._try, name, task))
        sampled = await self._server.finish(name)
        if trial.outcome is not None and self._outcomes.stops(trial.outcome):
            raise TrialError(f"trajectory {name} ({task.name}): {trial.detail}; its files are in {trial.folder}")
        # The agent's own count where it has one: a turn that it never got, or got twice, must not go unnoticed.
        counted = trial.agent_tokens if trial.outcome is None and trial.agent_tokens is not None else sampled
        update.on_trajectory_closed(trajectory, self._outcomes.reward_for(trial.outcome, trial.reward), counted)
        return trial

    async def _try(self, name: str, task: Path) -> Trial:
        trial = await self._run(name, task)
        self._server.raise_failure()
        if trial.outcome == "crash" and self._server.sampled_tokens(name) == 0:
            raise StartError(f"trajectory {name} ({task.name}): {trial.detail}; its files are in {trial.folder}")
        return trial

    async def _run(self, name: str, task: Path) -> Trial:
        """`harbor run` of one trial."""
        job = f"{name}-{uuid.uuid4().hex[:8]}".replace("/", "-")
        arguments = [*self._command, "run", "-p", str(task), "-e", self._environment, "-n", "1", "-y"]
        arguments += [
            "-o",
            str(self._jobs),
            "--job-name",
            job,
            "--max-retries",
            "0",
            *self._agent(self._server.url(name)),
        ]
        folder = self._jobs / job
        folder.parent.mkdir(parents=True, exist_ok=True)
        env = os.environ | {
            "HARBOR_TELEMETRY": "0",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENAI_API_KEY": "unused",
        }
        allowed = time_allowed(task) if self._deadline_s is None else self._deadline_s
        ended = await run_harbor(arguments, env, allowed, folder if self._environment == "docker" else None)
        said = ended.said.strip()[-800:]
        if ended.timed_out:  # whatever it wrote while it was being ended
            outcome = "timeout" if self._server.sampled_tokens(name) else "crash"
            detail = f"not over after {allowed:g} s, boot, agent and verifier together: {said}"
            return Trial(0.0, outcome, detail, None, folder)
        results = sorted(folder.glob("*/result.json"))
        if not results:
            return Trial(0.0, "crash", f"harbor ended with {ended.code}: {said}", None, folder)
        return read_trial(results[0])


def read_trial(result: Path) -> Trial:
    """A trial from its result.json."""
    told = json.loads(result.read_text(encoding="utf-8"))
    rewards = (told.get("verifier_result") or {}).get("rewards") or {}
    failed = told.get("exception_info")
    reward = rewards.get("reward", next(iter(rewards.values()), None))
    outcome, detail = None, ""
    if failed:
        outcome = _OF.get(failed["exception_type"], "crash")
        detail = f"{failed['exception_type']}: {failed['exception_message']}"
    elif reward is None:
        outcome, detail = "verifier_failed", "the verifier gave no reward"
    return Trial(float(reward or 0.0), outcome, detail, _agent_tokens(told.get("agent_result") or {}), result.parent)


def _agent_tokens(agent: Mapping[str, Any]) -> int | None:
    details = agent.get("rollout_details")
    if not details:
        return None
    return sum(len(ids) for part in details for ids in part.get("completion_token_ids") or [])

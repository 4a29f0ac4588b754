"""What becomes of a training trajectory that did not come to its own end: the table `thundersync.outcomes`.

| disposition | meaning |
|---|---|
| trained | its tokens are learned from, with the reward that grading gave |
| zero | its tokens are learned from, with reward 0 |
| masked | it has no part in its group's baseline nor in the gradient: a sample without a reward |
| retried | it is rolled out again, `retries` times; then the run stops |
| stop | the run stops with the error |

A source that was released is not taken back. Hence "retried" is only for what fails before the first turn is sampled, and
"masked" only for objectives of which rewards weigh all (GRPO): turns of OPD are learned from whatever their reward.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from skyrl_thundersync.sandbox.base import StartError

if TYPE_CHECKING:  # it imports all of SkyRL
    from skyrl_thundersync.options.schema import OutcomesConfig

logger = logging.getLogger(__name__)
T = TypeVar("T")

ALLOWED = {
    "start_failed": ("retried", "stop"),
    "timeout": ("trained", "zero", "masked"),
    "context_overflow": ("zero", "masked"),
    "sandbox_lost": ("zero", "masked"),
    "verifier_failed": ("zero", "masked"),
    "crash": ("stop", "zero", "masked"),
}
"""Dispositions that each outcome may have."""

_RELEASED = (
    "what was released to the learner is not taken back, so it cannot be retried, nor masked where turns are learned "
    "from without a reward, as under OPD"
)
WHY = {
    "start_failed": "it happens before the first turn, when there is nothing to learn from",
    "timeout": _RELEASED,
    "context_overflow": f"it has no grade to be trained with; {_RELEASED}",
    "sandbox_lost": f"it has no grade to be trained with; {_RELEASED}",
    "verifier_failed": f"it has no grade to be trained with; {_RELEASED}",
    "crash": f"it has no grade to be trained with; {_RELEASED}",
}
"""Why the other dispositions are refused."""

_FROM_METRICS = (  # the first that applies
    ("crashed", "crash"),
    ("sandbox_lost", "sandbox_lost"),
    ("verifier_failed", "verifier_failed"),
    ("agent_timed_out", "timeout"),
)


def allowed(outcome: str, by_reward: bool) -> tuple[str, ...]:
    """Dispositions that `outcome` may have. by_reward: the reward weighs all that a trajectory's gradient is made of."""
    return tuple(d for d in ALLOWED[outcome] if d != "masked" or by_reward)


def outcome_of(env_metrics: Mapping[str, Any]) -> str | None:
    """A key of `ALLOWED`, from the environment's metrics; None for a trajectory that came to its own end."""
    for metric, outcome in _FROM_METRICS:
        if env_metrics.get(metric):
            return outcome
    return "context_overflow" if env_metrics.get("finished", 1.0) == 0.0 else None


class Outcomes:
    """The table, applied."""

    def __init__(self, config: OutcomesConfig) -> None:
        self._of = {outcome: getattr(config, outcome) for outcome in ALLOWED}
        self._retries = config.retries

    def __str__(self) -> str:
        said = ", ".join(f"{outcome} {disposition}" for outcome, disposition in self._of.items())
        return f"{said}, retries {self._retries}"

    def reward(self, graded: float, env_metrics: Mapping[str, Any]) -> float | None:
        """The reward that the trajectory is learned from with; None where it is masked."""
        return self.reward_for(outcome_of(env_metrics), graded)

    def reward_for(self, outcome: str | None, graded: float) -> float | None:
        """The same, of an outcome that is known."""
        disposition = "trained" if outcome is None else self._of[outcome]
        if disposition == "masked":
            return None
        return 0.0 if disposition == "zero" else graded

    def stops(self, outcome: str) -> bool:
        """Whether the run ends with this outcome."""
        return self._of[outcome] == "stop"

    async def play(self, name: str, episode: Callable[[], Awaitable[T]]) -> T:
        """Roll out; again where it could not start and the table says so. `StartError` says that nothing was sampled.

        Raises:
            StartError: "stop", or the last retry failed too.
        """
        left = self._retries if self._of["start_failed"] == "retried" else 0
        while True:
            try:
                return await episode()
            except StartError as error:
                if left == 0:
                    raise
                left -= 1
                logger.warning("trajectory %s did not start, once more (%d left after it): %s", name, left, error)

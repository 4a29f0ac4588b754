"""SkyRL's generator as this plugin uses it, to train and to evaluate.

What it adds: texts of tasks and tools never become control tokens (`plain_contents`), the environment knows whether the chat
template opens a thought, a task's own `max_turns` holds where it is less than `generator.max_turns`, and what goes wrong in
an environment has the environment's and the task's name (`guarded_env`). `turn_ends` adds what some chat templates need.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend
from skyrl.train.generators.base import TRAINING_PHASE_EVAL, TrajectoryID

from skyrl_thundersync.hosts.skyrl.turn_ends import TemplateTurns
from skyrl_thundersync.tasks.guarded_env import ENV_ID, GUARD, Guard, register_guarded_env
from skyrl_thundersync.tasks.plain_contents import PlainContents
from skyrl_thundersync.tasks.reward import REWARD_RULE, usable_reward
from skyrl_thundersync.tasks.terminal_text import opens_thought

if TYPE_CHECKING:
    from skyrl_thundersync.hosts.skyrl.config import TrainConfig


class RewardError(ValueError):
    """A trajectory's reward is no number to learn from; names environment and task."""


class GuardedGenerator(TemplateTurns):
    """One reward a trajectory: the sum of its steps', as a float. Arguments as SkyRL's; crash_stops as `Guard`'s."""

    def __init__(self, *args, tokenizer, crash_stops: bool = True, **kwargs) -> None:
        super().__init__(*args, tokenizer=PlainContents.of(tokenizer), **kwargs)
        self._thought_opened = opens_thought(tokenizer, **self.generator_cfg.chat_template_kwargs)
        self._crash_stops = crash_stops
        register_guarded_env()

    async def agent_loop(
        self, prompt, env_class: str, env_extras: dict[str, Any], max_tokens: int, max_input_length: int, **kwargs
    ):
        """As SkyRL's.

        Raises:
            RewardError: the reward is no number by `REWARD_RULE`.
        """
        host_id, own_turns = kwargs.get("trajectory_id"), env_extras.get("max_turns")
        guard = Guard(
            env_class=env_class,
            env_config=getattr(self.skyrl_gym_cfg, env_class, {}),
            task=str(env_extras.get("task_id") or getattr(host_id, "instance_id", "?")),
            max_turns=self.max_turns if own_turns is None else min(own_turns, self.max_turns),
            crash_stops=self._crash_stops,
            too_long=partial(self._too_long, max_input_length),
        )
        extras = {**env_extras, "thought_opened": self._thought_opened, GUARD: guard}
        output = await super().agent_loop(prompt, ENV_ID, extras, max_tokens, max_input_length, **kwargs)
        # One reward a trajectory: a trajectory without a single response token has no token to carry it.
        said = sum(output.reward) if isinstance(output.reward, list) else output.reward
        reward = usable_reward(said)
        if reward is None:
            raise RewardError(f"environment {env_class!r}, task {guard.task!r}: reward {said!r}: {REWARD_RULE}")
        output.reward = reward
        return output

    async def attempt(self, cfg: TrainConfig, task: Mapping[str, Any], number: int, seed: int):
        """SkyRL's output of one evaluation attempt, numbered `number`, at a task's row; it samples with `seed`."""
        sampling = get_sampling_params_for_backend("vllm", cfg.generator.eval_sampling_params)
        return await self.agent_loop(
            [dict(message) for message in task["prompt"]],
            task.get("env_class") or cfg.environment.env_class,
            {key: value for key, value in task.items() if key not in ("prompt", "env_class")},
            max_tokens=cfg.generator.eval_sampling_params.max_generate_length,
            max_input_length=cfg.generator.max_input_length,
            sampling_params=sampling | {"seed": seed},
            trajectory_id=TrajectoryID(task["task_id"], number),
            training_phase=TRAINING_PHASE_EVAL,
        )

    def _too_long(self, most: int, prompt) -> str | None:
        ids = self.tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=False, **self.generator_cfg.chat_template_kwargs
        )
        problem = f"its first prompt has {len(ids)} tokens, generator.max_input_length is {most}"
        return problem if len(ids) > most else None

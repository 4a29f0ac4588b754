"""Run by test_patches.py in its own process, with a patched copy of SkyRL first on the path. Prints one JSON object."""

import asyncio
import json
import sys
from types import SimpleNamespace

import numpy as np
import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import register_advantage_estimator
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.generators import skyrl_gym_generator
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils import validate_cfg
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.registration import register

from skyrl_thundersync.data.byte_tokenizer import byte_tokenizer

EVENTS: list[list] = []


class Counting(BaseTextEnv):
    """Ends after three turns; every step is recorded."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.steps = 0

    def step(self, action):
        self.steps += 1
        EVENTS.append(["step", action])
        done = self.steps == 3
        observations = [] if done else [{"role": "user", "content": f"output {self.steps}"}]
        return BaseTextEnvStepOutput(observations=observations, reward=float(done), done=done, metadata={})


class Engine:
    """Answers turn k with the letter k twice and the end token."""

    def __init__(self, tokenizer):
        self.tokenizer, self.turn = tokenizer, 0

    async def generate(self, batch, model=None):
        text = "abc"[self.turn] * 2
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        self.turn += 1
        logprobs = [-0.5] * len(ids)
        return dict(responses=[text], response_ids=[ids], stop_reasons=["stop"], response_logprobs=[logprobs])

    async def finish_session(self, session):
        pass


class Listening(skyrl_gym_generator.SkyRLGymGenerator):
    def _on_turn_sampled(self, *turn):
        EVENTS.append(["sampled", *turn])


def sampled_turns(generator_class) -> list:
    """Events of one trajectory of three turns, and what the generator returned for it."""
    EVENTS.clear()
    tokenizer = byte_tokenizer()
    cfg = SkyRLTrainConfig()
    cfg.generator.max_turns, cfg.generator.max_input_length = 3, 1000
    generator = generator_class(cfg.generator, cfg.environment.skyrl_gym, Engine(tokenizer), tokenizer)
    prompt = [{"role": "user", "content": "go"}]
    output = asyncio.run(
        generator.agent_loop(
            prompt, "counting", {}, 48, 1000, trajectory_id=TrajectoryID("7", 1), training_phase="eval"
        )
    )
    events = [[str(part) if isinstance(part, TrajectoryID) else part for part in event] for event in EVENTS]
    return [events, output.prompt_ids, output.response_ids, output.loss_mask]


def refusal(action) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return ""


def validation(step_wise: bool, kl_in_reward: bool) -> str:
    cfg = SkyRLTrainConfig.from_cli_overrides(
        {
            "generator.step_wise_trajectories": step_wise,
            "trainer.algorithm.use_kl_in_reward": kl_in_reward,
            "trainer.algorithm.use_kl_loss": False,
            "trainer.logger": "console",
        }
    )
    return refusal(lambda: validate_cfg(cfg))


def advantages(estimator: str, step_wise: bool) -> str:
    """Two trajectories of one group, two steps each, through SkyRL's own method."""
    cfg = SkyRLTrainConfig()
    cfg.generator.step_wise_trajectories = step_wise
    cfg.trainer.algorithm.advantage_estimator = estimator

    class Batch(dict):
        metadata = {"uids": ["g"] * 4, "is_last_step": [False, True] * 2, "avg_response_length": 3.0}

        def to(self, device):
            return self

    rewards = torch.zeros(4, 3)
    rewards[1] = torch.tensor([0.1, 0.2, 0.7])
    data = Batch(rewards=rewards, response_mask=torch.ones(4, 3, dtype=torch.long), values=None)
    data.metadata = dict(Batch.metadata, uids=np.array(["g"] * 4).tolist())
    trainer = SimpleNamespace(cfg=cfg, all_metrics={})
    return refusal(lambda: RayPPOTrainer.compute_advantages_and_returns(trainer, data))


@register_advantage_estimator("pass_through")
def pass_through(token_level_rewards, **kwargs):
    return token_level_rewards, token_level_rewards


register(id="counting", entry_point=f"{__name__}:Counting")
json.dump(
    {
        "where": skyrl_gym_generator.__file__,
        "heard": sampled_turns(Listening),
        "silent": sampled_turns(skyrl_gym_generator.SkyRLGymGenerator),
        "validation": {f"{s} {k}": validation(s, k) for s in (True, False) for k in (True, False)},
        "advantages": {f"{e} {s}": advantages(e, s) for e in ("grpo", "pass_through") for s in (True, False)},
    },
    sys.stdout,
)

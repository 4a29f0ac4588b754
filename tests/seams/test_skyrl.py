"""What this plugin relies on in SkyRL and SkyRL does not promise (docs/seams.md), seen without a line of the plugin."""

import asyncio
import inspect
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import skyrl_gym  # noqa: E402
import torch  # noqa: E402
from models import byte_tokenizer  # noqa: E402
from skyrl.backends.skyrl_train.inference_servers import base  # noqa: E402
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch  # noqa: E402
from skyrl.backends.utils import convert_vllm_prompt_logprobs  # noqa: E402
from skyrl.train.config.config import BaseConfig, SkyRLTrainConfig, overrides_dict_to_dotlist  # noqa: E402
from skyrl.train.dataset import PromptDataset  # noqa: E402
from skyrl.train.entrypoints import main_base  # noqa: E402
from skyrl.train.generators.base import TRAINING_PHASE_EVAL, TRAINING_PHASE_TRAIN, TrajectoryID  # noqa: E402
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator  # noqa: E402
from skyrl.train.generators.utils import get_metrics_from_generator_output  # noqa: E402
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402
from skyrl.train.utils.callbacks import TrainingCallback  # noqa: E402
from skyrl.train.utils.utils import prepare_runtime_environment  # noqa: E402
from skyrl_gym.envs.registration import registry  # noqa: E402


def test_main_calls_the_module_that_the_command_line_names(tmp_path, monkeypatch):
    (tmp_path / "an_entry_point.py").write_text("import sys\ndef main():\n    return sys.argv[1:]\n")
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["trainer.override_entrypoint=an_entry_point", "no.such.option=1"]
    monkeypatch.setattr(sys, "argv", ["main_base", *arguments])
    assert main_base.main() == arguments  # before its own, strict, reading of the options


def test_options_are_read_from_pairs_and_their_classes_can_be_extended():
    @dataclass
    class Block(BaseConfig):
        path: str | None = None
        share: float = 0.5

    @dataclass
    class Config(SkyRLTrainConfig):
        block: Block = field(default_factory=Block)

    values = {"trainer.seed": 7, "block.path": "a b", "block.share": 0.25, "data.train_data": ["x, y.jsonl"]}
    cfg = Config.from_cli_overrides(overrides_dict_to_dotlist(values))
    assert (cfg.trainer.seed, cfg.block.path, cfg.block.share) == (7, "a b", 0.25)
    assert cfg.data.train_data == ["x, y.jsonl"]
    with pytest.raises(ValueError, match=r"\+"):
        Config.from_cli_overrides(["+config=a"])


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "tasks.jsonl"
    rows = [{"prompt": [{"role": "user", "content": f"task {i}"}], "env_class": "seam", "own": i} for i in range(4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptDataset([str(file)], byte_tokenizer(), 64, num_workers=1)


def config(**more) -> SkyRLTrainConfig:
    return SkyRLTrainConfig.from_cli_overrides(
        {
            "trainer.train_batch_size": 2,
            "trainer.policy_mini_batch_size": 2,
            "trainer.critic_mini_batch_size": 2,
            "trainer.epochs": 1,
            "trainer.eval_interval": -1,
            "trainer.ckpt_interval": 1,
            "trainer.hf_save_interval": -1,
            "trainer.resume_mode": "latest",
            "trainer.placement.colocate_all": False,
            "trainer.algorithm.use_kl_loss": False,
            "trainer.enable_ray_gpu_monitor": False,
            "generator.inference_engine.enable_ray_prometheus_stats": False,
            "data.dataloader.num_workers": 0,
            "trainer.max_training_steps": 1,
            "environment.skyrl_gym.max_env_workers": 2,
            **more,
        }
    )


def test_the_train_loop_calls_what_this_plugin_overrides_in_this_order(prompts):
    """And asks nothing else of the workers' dispatch: the object here has these methods alone."""
    calls = []

    class Dispatch:
        def get_lcm_dp_size(self):
            return 1

        def init_weight_sync_state(self, client):
            calls.append("init_weight_sync_state")

        async def save_weights_for_sampler(self, model_id=None):
            calls.append("save_weights_for_sampler")

        def get_timing_metrics(self):
            return {}

        def finalize_pending_saves(self, model):
            calls.append("finalize_pending_saves")

    class Trainer(RayPPOTrainer):
        async def generate(self, input_batch):
            calls.append("generate")
            assert [t.repetition_id for t in input_batch["trajectory_ids"]] == [0, 1, 0, 1]
            assert len({t.instance_id for t in input_batch["trajectory_ids"]}) == 2
            assert {"own", "max_turns"} & set(input_batch["env_extras"][0]) == {"own"}
            return {"rewards": [0.0] * 4, "response_ids": [[1]] * 4}

        def postprocess_generator_output(self, generator_output, uids):
            calls.append("postprocess_generator_output")
            return generator_output, uids

        def convert_to_training_input(self, generator_output, uids):
            calls.append("convert_to_training_input")
            batch = TrainingInputBatch({"rewards": torch.zeros(4)})
            batch.metadata = {"uids": uids}
            return batch

        def fwd_logprobs_values_reward(self, training_input):
            calls.append("fwd_logprobs_values_reward")
            return training_input

        def compute_advantages_and_returns(self, data):
            calls.append("compute_advantages_and_returns")
            return data

        def train_critic_and_policy(self, data):
            calls.append("train_critic_and_policy")
            return {}

        def save_checkpoints(self):
            calls.append("save_checkpoints")
            return "there"

        def load_checkpoints(self):
            calls.append("load_checkpoints")
            return 0, None

    class Events(TrainingCallback):
        def on_step_end(self, trainer, callback_input, control):
            calls.append("on_step_end")

        def on_log(self, trainer, callback_input, control):
            calls.append("on_log")
            logged.update(callback_input.logs)

    class Tracker:
        def log(self, *args, **kwargs): ...

        def finish(self): ...

    logged = {}
    trainer = Trainer(
        cfg=config(**{"generator.n_samples_per_prompt": 2}),
        tracker=Tracker(),
        tokenizer=byte_tokenizer(),
        train_dataset=prompts,
        inference_engine_client=object(),
        generator=object(),
    )
    trainer.dispatch = Dispatch()
    trainer.add_callback(Events())
    asyncio.run(trainer.train())
    assert calls == [
        "init_weight_sync_state",
        "load_checkpoints",
        "save_weights_for_sampler",
        "generate",
        "postprocess_generator_output",
        "convert_to_training_input",
        "fwd_logprobs_values_reward",
        "compute_advantages_and_returns",
        "train_critic_and_policy",
        "on_step_end",
        "save_checkpoints",
        "save_weights_for_sampler",
        "on_log",
        *calls[13:],
    ]
    assert set(calls[13:]) <= {"save_checkpoints", "finalize_pending_saves", "save_weights_for_sampler"}
    assert {"timing/step", "timing/generate", "trainer/global_step"} <= set(logged)


class Scripted(base.InferenceEngineInterface):
    """Answers with the next of some id lists and keeps what it was asked; everything else is not to be called."""

    model_name = "a-model"

    def __init__(self, answers, events):
        self.answers, self.events, self.asked = list(answers), events, []

    async def generate(self, input_batch, model=None):
        self.asked.append({**input_batch, "prompt_token_ids": [list(p) for p in input_batch["prompt_token_ids"]]})
        self.events.append("generate")
        ids = self.answers.pop(0)
        return {
            "responses": [byte_tokenizer().decode(ids, skip_special_tokens=True)],
            "response_ids": [ids],
            "stop_reasons": ["stop"],
            "response_logprobs": None,
        }

    async def finish_session(self, session_id):
        self.events.append(f"finish_session {session_id}")


for name in base.InferenceEngineInterface.__abstractmethods__ - {"generate", "finish_session", "model_name"}:
    setattr(Scripted, name, None)
Scripted.__abstractmethods__ = frozenset()


class Env(skyrl_gym.envs.base_text_env.BaseTextEnv):
    """Two turns; keeps the events of its life."""

    events: list = []
    extras: dict = {}

    def __init__(self, env_config, extras):
        super().__init__()
        Env.extras = extras

    def init(self, prompt):
        self.events.append("init")
        return prompt, {}

    def step(self, action):
        self.turns += 1
        self.events.append("step")
        done = self.turns == 2
        observations = [] if done else [{"role": "user", "content": "seen"}]
        return {"observations": observations, "reward": 0.5, "done": done, "metadata": {}}

    def get_metrics(self):
        self.events.append("get_metrics")
        return {"mine": 1.0}

    def close(self):
        self.events.append("close")


def test_an_episode_in_the_order_and_with_the_tokens_that_sources_are_made_from(monkeypatch):
    """The client sees each turn before the environment does; ids go in as they came out; one reward entry a token."""
    tokenizer, events = byte_tokenizer(), []
    monkeypatch.setattr(Env, "events", events)
    monkeypatch.setitem(registry, "seam", skyrl_gym.envs.registration.EnvSpec(id="seam", entry_point=Env))
    end = tokenizer.eos_token_id
    answers = [[40, 41, end], [42, end]]
    client = Scripted(answers, events)
    cfg = config()
    generator = SkyRLGymGenerator(
        generator_cfg=cfg.generator,
        skyrl_gym_cfg=cfg.environment.skyrl_gym,
        inference_engine_client=client,
        tokenizer=tokenizer,
        policy_model_name="a-model",
    )
    own = {"max_turns": 1, "own": "x"}
    prompt = [{"role": "user", "content": "do"}]
    output = asyncio.run(
        generator.agent_loop(prompt, "seam", own, 16, 512, None, trajectory_id=TrajectoryID("g", 3), cache_salt=None)
    )
    assert events == [
        *("init", "generate", "step", "generate", "step", "get_metrics", "close"),
        "finish_session g_3",
    ]
    first, second = client.asked
    assert first["session_ids"] == second["session_ids"] == ["g_3"]
    assert first["sampling_params"] is None  # in training the engine's own
    start = first["prompt_token_ids"][0]
    assert second["prompt_token_ids"][0][: len(start) + 3] == start + answers[0]
    sampled = [i for i, scored in enumerate(output.loss_mask) if scored]
    assert [output.response_ids[i] for i in sampled] == answers[0] + answers[1]
    assert len(output.reward) == len(output.response_ids) and sum(output.reward) == 1.0
    assert output.env_metrics == {"mine": 1.0}
    assert Env.extras["max_turns"] == cfg.generator.max_turns  # whatever the task says
    assert TRAINING_PHASE_EVAL != TRAINING_PHASE_TRAIN


def test_the_client_interface_has_no_method_that_is_not_answered():
    assert base.InferenceEngineInterface.__abstractmethods__ == {
        *("model_name", "generate", "get_endpoint_url", "chat_completion", "render_chat_completion", "completion"),
        *("wake_up", "sleep", "update_named_weights", "load_lora_adapter", "teardown", "reset_prefix_cache"),
        *("pause_generation", "resume_generation", "finish_session", "get_world_size"),
    }


def test_what_a_generator_is_asked_by_keyword():
    asked = inspect.signature(SkyRLGymGenerator.agent_loop).parameters
    assert {"trajectory_id", "training_phase", "sampling_params"} <= set(asked)


def test_the_experiment_asks_for_its_parts_one_by_one():
    parts = ("get_train_dataset", "get_eval_dataset", "get_inference_client", "get_generator", "get_trainer")
    for part in (*parts, "get_tracker", "get_trajectory_logger", "_setup_trainer"):
        assert callable(getattr(main_base.BasePPOExp, part))
    assert list(inspect.signature(main_base.BasePPOExp.get_generator).parameters)[1:] == [
        *("cfg", "tokenizer", "inference_engine_client"),
    ]


def test_metrics_of_a_batch():
    output = {"rewards": [1.0, 0.0, 0.0, 0.0], "response_ids": [[1]] * 4}
    found = get_metrics_from_generator_output(output, ["a", "a", "b", "b"])
    assert (found["avg_score"], found["pass_at_n"]) == (0.25, 0.5)


def test_log_probs_over_http_are_keyed_by_text_ids():
    answer = [None, {"7": {"logprob": -1.5}, "9": {"logprob": -0.5}}]
    assert convert_vllm_prompt_logprobs([3, 7], answer)[0] == [None, -1.5]


def test_the_actors_environment_is_text():
    assert all(isinstance(value, str) for value in prepare_runtime_environment(config()).values())


def test_registered_environments_are_a_dictionary():
    assert isinstance(registry, dict)
    assert "gsm8k" in registry

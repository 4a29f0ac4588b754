"""Every option that cannot be honoured is refused by name, with what to do; and inputs are checked before anything runs."""

import pytest
from cases import write_model, write_tasks

from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.hosts.skyrl.checks import models, require_fit, tasks
from skyrl_thundersync.hosts.skyrl.rules import RULES
from skyrl_thundersync.hosts.skyrl.validate import option_problems
from skyrl_thundersync.preflight import models as inputs
from skyrl_thundersync.rollout.replica import engine_spec

BAD = {
    "generator.step_wise_trajectories": True,
    "generator.merge_stepwise_output": True,
    "generator.use_conversation_multi_turn": False,
    "generator.chat_template.name_or_path": "qwen3_with_thinking",
    "generator.batched": True,
    "generator.apply_overlong_filtering": True,
    "trainer.algorithm.zero_variance_filter": True,
    "trainer.algorithm.dynamic_sampling.type": "filter",
    "generator.zero_reward_on_non_stop": True,
    "generator.vision_language_generator": True,
    "generator.sampling_params.temperature": 0.7,
    "generator.sampling_params.top_p": 0.95,
    "generator.sampling_params.top_k": 20,
    "generator.sampling_params.min_p": 0.05,
    "generator.sampling_params.repetition_penalty": 1.1,
    "trainer.algorithm.temperature": 0.7,
    "generator.sampling_params.additional_kwargs": {"logit_bias": {}},
    "generator.sampling_params.logprobs": None,
    "generator.inference_engine.run_engines_locally": False,
    "generator.inference_engine.external_proxy_url": "http://x",
    "generator.inference_engine.external_server_urls": ["http://x"],
    "generator.inference_engine.speculative_config": {"method": "mtp"},
    "generator.inference_engine.fp8_weight_sync_mode": "blockwise",
    "generator.inference_engine.enable_return_routed_experts": True,
    "generator.inference_engine.enable_return_sample_support_set": True,
    "trainer.algorithm.enable_sample_support_replay": True,
    "trainer.policy_mini_batch_size": 4,
    "trainer.update_epochs_per_batch": 2,
    "trainer.fully_async.enabled": True,
    "trainer.placement.colocate_all": True,
    "trainer.placement.colocate_policy_ref": True,
    "trainer.critic.model.path": "some/critic",
    "trainer.algorithm.use_kl_loss": True,
    "trainer.algorithm.use_kl_in_reward": True,
    "trainer.algorithm.use_entropy_loss": True,
    "trainer.algorithm.advantage_batch_normalize": True,
    "trainer.algorithm.policy_loss_type": "gspo",
    "trainer.algorithm.loss_reduction": "sequence_mean",
    "trainer.algorithm.advantage_estimator": "gae",
    "trainer.algorithm.use_tis": True,
    "trainer.algorithm.off_policy_correction.tis_ratio_type": "token",
    "trainer.algorithm.off_policy_correction.sequence_mask_metric": "product",
    "trainer.algorithm.off_policy_correction.outlier_token_is_threshold_low": 1e-4,
    "trainer.algorithm.off_policy_correction.outlier_token_is_threshold_high": 100.0,
    "trainer.algorithm.off_policy_correction.token_mask_is_threshold_low": 0.1,
    "trainer.algorithm.off_policy_correction.token_mask_is_threshold_high": 10.0,
    "generator.inference_engine.engine_init_kwargs": {"enable_expert_parallel": True},
    "thundersync.teacher.model": None,
    "thundersync.learner.zero_stage": 3,
    "trainer.mtp.enabled": True,
    "trainer.policy.sequence_parallel_size": 2,
    "trainer.policy.torch_profiler_config.enable": True,
    "trainer.policy.model.lora.dropout": 0.1,
    "trainer.policy.model.lora.sync_mode": "memory",
    "trainer.policy.model.lora.target_modules": ["q_proj", "model.embed_tokens"],
    "generator.inference_engine.model_dtype": "bfloat16",
    "thundersync.publish.tolerance": 0.0,
    "trainer.ckpt_path": "s3://bucket/checkpoints",
    "thundersync.rollouts_mib": -1.0,
    "thundersync.hang_timeout_s": 1.0,
    "thundersync.learner.ranks": 0,
    "thundersync.learner.block_tokens": 0,
    "thundersync.learner.retain_gib": -1.0,
    "thundersync.learner.graph_gib": -1.0,
    "thundersync.learner.state_gib": -1.0,
    "thundersync.learner.threads": 0,
    "thundersync.learner.max_restarts": -1,
    "thundersync.learner.restart_gib": -1,
    "thundersync.grpo.epsilon": -1.0,
    "thundersync.grpo.admission_cap": -1,
    "thundersync.teacher.replicas": 0,
    "thundersync.teacher.tensor_parallel_size": 2,  # its backend is transformers
    "thundersync.teacher.engine_init_kwargs": {"max_model_len": 100},
    "thundersync.teacher.max_num_batched_tokens": 0,
    "thundersync.teacher.request_timeout_s": 0.0,
    "thundersync.teacher.max_retries": -1,
    "thundersync.outcomes.start_failed": "masked",
    "thundersync.outcomes.timeout": "retried",
    "thundersync.outcomes.context_overflow": "trained",
    "thundersync.outcomes.sandbox_lost": "masked",  # the objective is OPD
    "thundersync.outcomes.verifier_failed": "trained",
    "thundersync.outcomes.crash": "ignored",
    "thundersync.outcomes.retries": -1,
    "thundersync.sandbox.command_timeout_s": 0.0,
    "thundersync.sandbox.output_limit_bytes": 1,
    "thundersync.sandbox.latency_s": -1.0,
    "thundersync.sandbox.warm": -1,
    "thundersync.publish.probe_tokens": 1,
    "generator.n_samples_per_prompt": 0,
    "generator.max_turns": 0,
    "generator.sampling_params.max_generate_length": 0,
    "generator.inference_engine.num_engines": 0,
    "trainer.max_prompt_length": 100000,
    "generator.max_input_length": 0,
    "generator.eval_n_samples_per_prompt": 0,
    "generator.eval_sampling_params.max_generate_length": 0,
    "generator.eval_sampling_params.temperature": -0.5,
    "generator.eval_sampling_params.top_p": 0.0,
    "generator.inference_engine.tensor_parallel_size": 0,
    "generator.inference_engine.pipeline_parallel_size": 0,
    "generator.inference_engine.data_parallel_size": 0,
    "generator.inference_engine.max_num_seqs": 0,
    "generator.inference_engine.max_num_batched_tokens": 0,
    "generator.inference_engine.gpu_memory_utilization": 1.5,
    "environment.skyrl_gym.max_env_workers": -1,
    "trainer.train_batch_size": 0,
    "trainer.eval_batch_size": 0,
    "trainer.epochs": 0,
    "trainer.max_training_steps": 0,
    "trainer.eval_interval": 0,
    "trainer.ckpt_interval": -2,
    "trainer.hf_save_interval": 0,
    "trainer.placement.policy_num_gpus_per_node": 0,
    "trainer.placement.policy_num_nodes": 0,
    "trainer.policy.model.lora.rank": -1,
    "trainer.policy.model.lora.alpha": 0,
    "trainer.policy.optimizer_config.lr": float("nan"),
    "trainer.policy.optimizer_config.weight_decay": -1.0,
    "trainer.policy.optimizer_config.max_grad_norm": float("inf"),
    "trainer.policy.optimizer_config.num_warmup_steps": -1,
    "trainer.policy.optimizer_config.adam_betas": [0.9, 1.0],
    "trainer.policy.optimizer_config.scheduler": "cosin",
}


def input_problems(cfg) -> list[str]:
    return [problem for checks in (models, tasks) for check in checks(cfg) for problem in check.problems]


def set_option(cfg, option: str, value) -> None:
    block, _, name = option.rpartition(".")
    for part in block.split("."):
        cfg = getattr(cfg, part)
    assert hasattr(cfg, name)
    setattr(cfg, name, value)


def test_the_reference_configuration_is_accepted(config):
    assert option_problems(config) == []
    require_fit(config)


def test_there_is_a_case_for_every_rule():
    assert set(BAD) == {rule.option for rule in RULES}


@pytest.mark.parametrize("option", BAD)
def test_an_option_that_cannot_be_honoured_is_refused_by_name(config, option):
    set_option(config, option, BAD[option])
    problems = [problem for problem in option_problems(config) if problem.startswith(f"{option}=")]
    assert len(problems) == 1
    assert problems[0].endswith(".")
    assert "is refused: " in problems[0]


def test_every_problem_is_reported_at_once(config):
    set_option(config, "generator.batched", True)
    set_option(config, "trainer.update_epochs_per_batch", 3)
    with pytest.raises(ConfigError) as refusal:
        require_fit(config)
    assert "generator.batched" in str(refusal.value)
    assert "trainer.update_epochs_per_batch" in str(refusal.value)


def test_a_choice_set_past_the_option_reader_is_refused_too(config):
    config.thundersync.learner.accumulator = "exakt"
    assert any("'exact'" in problem for problem in option_problems(config))


def test_bfloat16_needs_a_tolerance_it_can_meet(config):
    config.thundersync.learner.dtype = config.generator.inference_engine.model_dtype = "bfloat16"
    assert [p for p in option_problems(config) if p.startswith("thundersync.publish.tolerance")]
    config.thundersync.publish.tolerance = 0.1
    assert option_problems(config) == []


def test_grpo_needs_no_teacher(config):
    config.thundersync.objective, config.thundersync.teacher.model = "grpo", None
    require_fit(config)


def test_skyrls_own_refusals_come_through(config):
    config.trainer.max_ckpts_to_keep = 0
    with pytest.raises(ConfigError, match="SkyRL's own validation.*max_ckpts_to_keep"):
        require_fit(config)


def test_a_missing_model_folder_is_refused(config, tmp_path):
    config.trainer.policy.model.path = str(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="trainer.policy.model.path=.*no such model folder"):
        require_fit(config)


@pytest.mark.parametrize(
    ("gone", "says"),
    [("config.json", "no config.json"), ("model.safetensors", "no weights"), ("tokenizer*", "no tokenizer")],
)
def test_an_incomplete_model_folder_is_refused(config, tmp_path, gone, says):
    folder = write_model(tmp_path / "model")
    for file in folder.glob(gone):
        file.unlink()
    config.thundersync.teacher.model = str(folder)
    problems = input_problems(config)
    assert len(problems) == 1
    assert says in problems[0]
    assert "thundersync.teacher.model" in problems[0]


@pytest.mark.parametrize("option", ["trainer.policy.model.path", "thundersync.teacher.model"])
def test_a_context_longer_than_the_model_is_refused(config, tmp_path, option):
    """976 input tokens and 48 of a turn are 1,024: that many positions are enough, one less is not."""
    set_option(config, option, str(write_model(tmp_path / "enough", positions=1024)))
    assert input_problems(config) == []
    set_option(config, option, str(write_model(tmp_path / "short", positions=1023)))
    problems = input_problems(config)
    assert len(problems) == 1
    assert option in problems[0]
    assert "976 + 48 = 1024" in problems[0]
    assert "1023" in problems[0]


def test_the_longer_turn_of_training_and_evaluation_counts(config, tmp_path):
    config.thundersync.teacher.model = str(write_model(tmp_path / "short", positions=1100))
    assert input_problems(config) == []
    config.generator.eval_sampling_params.max_generate_length = 200
    assert "generator.eval_sampling_params.max_generate_length = 976 + 200" in input_problems(config)[0]
    config.trainer.eval_interval = -1
    assert input_problems(config) == []


def test_replicas_hold_the_longer_turn_of_training_and_evaluation_and_the_teacher_that_of_training(config, tmp_path):
    from skyrl_thundersync.hosts.skyrl.parts import SkyRLParts
    from skyrl_thundersync.runtime.cluster import Cluster

    config.generator.eval_sampling_params.max_generate_length = 200
    cluster = Cluster(config, tmp_path, None, SkyRLParts())
    assert cluster._replica_spec().max_model_len == 976 + 200
    assert cluster._teacher_spec().max_model_len == 976 + 48
    config.generator.eval_sampling_params.max_generate_length = 8
    assert cluster._replica_spec().max_model_len == 976 + 48


def test_an_adapter_named_as_a_model_is_told_with_the_model_it_is_over(config, tmp_path):
    adapter = tmp_path / "policy"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "/models/base", "r": 8}')
    (adapter / "adapter_model.safetensors").touch()
    config.trainer.policy.model.path = str(adapter)
    (problem,) = input_problems(config)
    assert "holds a LoRA adapter over /models/base, not a model" in problem and f"eval --adapter {adapter}" in problem


def test_fewer_tasks_than_a_batch_are_refused(config, tmp_path):
    config.data.train_data = [str(write_tasks(tmp_path / "few.jsonl", *[{}] * 7))]
    assert "7 tasks and trainer.train_batch_size=8" in input_problems(config)[0]


def test_a_replica_without_gpus_takes_its_cache_by_vllms_name(config):
    assert engine_spec(config, 512, 0, "cpu").kv_cache_gib == 1.0
    config.generator.inference_engine.engine_init_kwargs = {"kv_cache_memory_bytes": 2**29}
    assert option_problems(config) == []
    assert engine_spec(config, 512, 0, "cpu").kv_cache_gib == 0.5
    config.generator.inference_engine.engine_init_kwargs = {"kv_cache_memory_bytes": "half"}
    assert "kv_cache_memory_bytes" in option_problems(config)[0]


def test_a_context_longer_than_the_engine_is_refused(config):
    config.generator.inference_engine.engine_init_kwargs = {"max_model_len": 1000}
    assert "max_model_len is 1000" in input_problems(config)[0]


def test_the_language_model_inside_a_multimodal_one_sets_the_limit():
    assert inputs.longest_context({"text_config": {"max_position_embeddings": 7}}) == 7
    assert inputs.longest_context({}) is None


def test_an_empty_dataset_is_refused(config, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    config.data.train_data = [str(empty)]
    with pytest.raises(ConfigError, match="data.train_data: .*empty.jsonl holds no tasks"):
        require_fit(config)
    config.data.train_data = []
    with pytest.raises(ConfigError, match="nothing to train on"):
        require_fit(config)


def test_without_gpus_there_is_one_server(config):
    config.generator.inference_engine.num_engines = 2
    assert option_problems(config) == []
    config.thundersync.rollout = "servers"
    assert [p for p in option_problems(config) if p.startswith("generator.inference_engine.num_engines=2")]

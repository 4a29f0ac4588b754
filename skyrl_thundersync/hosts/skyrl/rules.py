"""What this plugin must refuse of SkyRL's options and of its own, option by option, with the reason and what to do.

Early release is exact only while a source's tokens, mask and weights cannot change after it was released, and only
while the objective is the paper's.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyrl_thundersync.objectives.registry import of
from skyrl_thundersync.options.schema import uses_cuda, uses_servers
from skyrl_thundersync.rollout import outcomes

if TYPE_CHECKING:
    from skyrl_thundersync.hosts.skyrl.config import TrainConfig

_USUAL_LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_NO_LORA = ("embed_tokens", "lm_head", "gate", "router")
_CPU_ENGINE = ("kv_cache_memory_bytes", "max_model_len")
_OF_TEACHER = ("model", "max_model_len", "enable_prefix_caching", "worker_extension_cls", "tensor_parallel_size")
_SAMPLER_CHANGES = (
    "allowed_token_ids",
    "bad_words",
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "min_p",
    "min_tokens",
    "n",
    "presence_penalty",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
)


SCHEDULERS = (
    "constant",
    "constant_with_warmup",
    "cosine",
    "cosine_with_restarts",
    "inverse_sqrt",
    "linear",
    "polynomial",
)


@dataclass(frozen=True)
class Rule:
    """One option and what must hold of its value.

    Attributes:
        option: dotted name.
        holds: whether `value` is acceptable in this configuration.
        why: the reason, as a clause.
        advice: what to do.
    """

    option: str
    holds: Callable[[Any, TrainConfig], bool]
    why: str
    advice: str


def get(cfg: TrainConfig, option: str) -> Any:
    """The value of a dotted option."""
    return operator.attrgetter(option)(cfg)


def _must_be(option: str, value: Any, why: str) -> Rule:
    text = value if isinstance(value, str) else json.dumps(value)
    return Rule(option, lambda got, cfg: got == value, why, f"Set {option}={text}")


def _at_least(option: str, bound: float, unit: str) -> Rule:
    return Rule(
        option,
        lambda got, cfg: got is None or bound <= got < math.inf,
        f"at least {bound} {unit} is needed, and a finite number",
        "Change it",
    )


def _share(option: str) -> Rule:
    return Rule(option, lambda got, cfg: 0 < got <= 1, "it is a share, above 0 and at most 1", "Change it")


def _interval(option: str) -> Rule:
    return Rule(
        option, lambda got, cfg: got == -1 or got >= 1, "it counts updates", "Set it to -1 for never, or to 1 or more"
    )


def _outcome(name: str) -> Rule:
    return Rule(
        f"thundersync.outcomes.{name}",
        lambda got, cfg: got in outcomes.allowed(name, not of(cfg.thundersync).has_loss),
        outcomes.WHY[name],
        f"Set it to one of {', '.join(outcomes.ALLOWED[name])}"
        + " (masked: where the reward weighs all, as under GRPO)" * ("masked" in outcomes.ALLOWED[name]),
    )


def _distribution(option: str, value: Any) -> Rule:
    return _must_be(
        option,
        value,
        "the learner's and the teacher's log-probs are those of the full distribution at temperature 1; sampling from "
        "another one biases the gradient",
    )


_LATE_MASK = "it changes loss masks after the batch closed, when early-released turns are already part of the gradient"
_LATE_REWARD = "it changes rewards after a trajectory closed, when its gradient may already be summed"
_ONE_STEP = "an update is exactly one optimizer step over the whole logical batch"
_PREFIX = "only token-in-token-out multi-turn chat keeps every earlier token and mask unchanged when a turn is added"
_NOT_THE_OBJECTIVE = "the objective is what thundersync.objective says, nothing added"
_OWN_DEVICES = "overlap needs the learner and the samplers on devices of their own"

RULES: tuple[Rule, ...] = (
    # Turns as sources: tokens and masks that never change once sampled.
    _must_be("generator.step_wise_trajectories", False, "turns are already released one by one, with their own scores"),
    _must_be("generator.merge_stepwise_output", False, "it belongs to step-wise trajectories, which are refused"),
    _must_be("generator.use_conversation_multi_turn", True, _PREFIX),
    _must_be(
        "generator.chat_template.name_or_path", None, f"a custom chat template re-tokenizes the history; {_PREFIX}"
    ),
    _must_be("generator.batched", False, "batched generation is single-turn and has no turns to release"),
    _must_be("generator.apply_overlong_filtering", False, _LATE_MASK),
    _must_be("trainer.algorithm.zero_variance_filter", False, _LATE_MASK),
    _must_be(
        "trainer.algorithm.dynamic_sampling.type", None, "it drops or replaces trajectories that were already released"
    ),
    _must_be("generator.zero_reward_on_non_stop", False, _LATE_REWARD),
    _must_be("generator.vision_language_generator", False, "sources carry token ids only"),
    # Sampling: every token from the full distribution of exactly one policy version.
    _distribution("generator.sampling_params.temperature", 1.0),
    _distribution("generator.sampling_params.top_p", 1.0),
    _distribution("generator.sampling_params.top_k", -1),
    _distribution("generator.sampling_params.min_p", 0.0),
    _distribution("generator.sampling_params.repetition_penalty", 1.0),
    _distribution("trainer.algorithm.temperature", 1.0),
    Rule(
        "generator.sampling_params.additional_kwargs",
        lambda got, cfg: not set(got or ()) & set(_SAMPLER_CHANGES),
        f"these change the distribution that is sampled from: {', '.join(_SAMPLER_CHANGES)}",
        "Take them out",
    ),
    Rule(
        "generator.sampling_params.logprobs",
        lambda got, cfg: got in (0, 1),
        "sources carry the sampler's log-probs, which the sampler-learner gap is measured with",
        "Set generator.sampling_params.logprobs=1",
    ),
    _must_be(
        "generator.inference_engine.run_engines_locally", True, "each replica must confirm the weights that it serves"
    ),
    _must_be(
        "generator.inference_engine.external_proxy_url", None, "each replica must confirm the weights that it serves"
    ),
    _must_be(
        "generator.inference_engine.external_server_urls", None, "each replica must confirm the weights that it serves"
    ),
    _must_be("generator.inference_engine.speculative_config", None, "the draft model would be left at old weights"),
    _must_be(
        "generator.inference_engine.fp8_weight_sync_mode", None, "the learner's and the sampler's weights would differ"
    ),
    _must_be(
        "generator.inference_engine.enable_return_routed_experts", False, "the learner does not replay expert routing"
    ),
    _must_be(
        "generator.inference_engine.enable_return_sample_support_set", False, "sampling is from the full distribution"
    ),
    _must_be("trainer.algorithm.enable_sample_support_replay", False, "sampling is from the full distribution"),
    # One synchronous step.
    Rule(
        "trainer.policy_mini_batch_size",
        lambda got, cfg: got == cfg.trainer.train_batch_size,
        _ONE_STEP,
        "Set it equal to trainer.train_batch_size, or leave it out",
    ),
    _must_be("trainer.update_epochs_per_batch", 1, _ONE_STEP),
    _must_be("trainer.fully_async.enabled", False, "every token of an update is sampled by the newest weights"),
    _must_be("trainer.placement.colocate_all", False, _OWN_DEVICES),
    _must_be("trainer.placement.colocate_policy_ref", False, _OWN_DEVICES),
    # The objective.
    _must_be("trainer.critic.model.path", None, f"there is no critic: {_NOT_THE_OBJECTIVE}"),
    _must_be("trainer.algorithm.use_kl_loss", False, _NOT_THE_OBJECTIVE),
    _must_be("trainer.algorithm.use_kl_in_reward", False, _NOT_THE_OBJECTIVE),
    _must_be("trainer.algorithm.use_entropy_loss", False, _NOT_THE_OBJECTIVE),
    _must_be(
        "trainer.algorithm.advantage_batch_normalize",
        False,
        "batch statistics are known only when every trajectory has closed",
    ),
    Rule(
        "trainer.algorithm.policy_loss_type",
        lambda got, cfg: got in ("regular", "importance_sampling"),
        "the learner's own log-probs make the importance ratio 1; clipped or sequence-level losses do not apply",
        "Leave it out",
    ),
    Rule(
        "trainer.algorithm.loss_reduction",
        lambda got, cfg: not of(cfg.thundersync).divides_by_tokens or got == "token_mean",
        "this objective divides by the number of scored tokens of the batch",
        "Set trainer.algorithm.loss_reduction=token_mean, or leave it out",
    ),
    Rule(
        "trainer.algorithm.advantage_estimator",
        lambda got, cfg: got in ("grpo", "rloo"),
        "only outcome-based estimators affine in the reward can be summed before a group's rewards are known",
        "Set trainer.algorithm.advantage_estimator=grpo, or leave it out",
    ),
    _must_be("trainer.algorithm.use_tis", False, "nothing is off-policy here"),
    _must_be("trainer.algorithm.off_policy_correction.tis_ratio_type", None, "nothing is off-policy here"),
    _must_be("trainer.algorithm.off_policy_correction.sequence_mask_metric", None, "nothing is off-policy here"),
    _must_be(
        "trainer.algorithm.off_policy_correction.outlier_token_is_threshold_low", None, "nothing is off-policy here"
    ),
    _must_be(
        "trainer.algorithm.off_policy_correction.outlier_token_is_threshold_high", None, "nothing is off-policy here"
    ),
    _must_be("trainer.algorithm.off_policy_correction.token_mask_is_threshold_low", None, "nothing is off-policy here"),
    _must_be(
        "trainer.algorithm.off_policy_correction.token_mask_is_threshold_high", None, "nothing is off-policy here"
    ),
    Rule(
        "thundersync.teacher.model",
        lambda got, cfg: not of(cfg.thundersync).needs_teacher or bool(got),
        "this objective needs a teacher",
        "Set thundersync.teacher.model to a model folder or hub name, or thundersync.objective=grpo",
    ),
    # The learner.
    Rule(
        "thundersync.learner.zero_stage",
        lambda got, cfg: got in (1, 2),
        "stage 3 shards parameters, so that every pass is collective and ranks cannot work on different sources; "
        "stage 0 shards nothing",
        "Set thundersync.learner.zero_stage=1 or 2",
    ),
    _must_be("trainer.mtp.enabled", False, "the learner trains no multi-token-prediction heads"),
    _must_be("trainer.policy.sequence_parallel_size", 1, "a learner rank holds whole segments"),
    _must_be(
        "trainer.policy.torch_profiler_config.enable",
        False,
        "SkyRL's profiler watches SkyRL's workers, which are not used",
    ),
    _must_be(
        "trainer.policy.model.lora.dropout",
        0.0,
        "a segment is forwarded again in the sweep and must give the same values",
    ),
    _must_be("trainer.policy.model.lora.sync_mode", "disk", "adapters reach vLLM as PEFT folders"),
    Rule(
        "trainer.policy.model.lora.target_modules",
        lambda got, cfg: not _targets(got) & set(_NO_LORA),
        f"vLLM serves no adapter on {', '.join(_NO_LORA)}",
        f"Name layers of attention and MLP ({', '.join(_USUAL_LORA_TARGETS)}), or all-linear",
    ),
    Rule(
        "generator.inference_engine.engine_init_kwargs",
        lambda got, cfg: all(name in _CPU_ENGINE and isinstance(got[name], int) for name in got) or uses_cuda(cfg),
        f"without GPUs a replica takes whole numbers for {' and '.join(_CPU_ENGINE)}, and nothing else here",
        "Take out what is not of that kind",
    ),
    Rule(
        "generator.inference_engine.model_dtype",
        lambda got, cfg: got == cfg.thundersync.learner.dtype,
        "the sampler must serve the weights that the learner computes with",
        "Set it equal to thundersync.learner.dtype",
    ),
    Rule(
        "thundersync.publish.tolerance",
        lambda got, cfg: got > 0 and (cfg.generator.inference_engine.model_dtype != "bfloat16" or got >= 0.01),
        "in bfloat16 two kernels' log-probs differ by more for the same weights: every publication would be refused",
        "Set thundersync.publish.tolerance=0.5 for bfloat16, 0.001 for float32",
    ),
    Rule(
        "trainer.ckpt_path",
        lambda got, cfg: "://" not in got,
        "checkpoints are flushed and renamed, which object stores cannot do",
        "Name a folder that every node mounts",
    ),
    _at_least("thundersync.rollouts_mib", 0, "MiB"),
    _at_least("thundersync.hang_timeout_s", 5, "seconds"),
    _at_least("thundersync.learner.ranks", 1, "rank"),
    _at_least("thundersync.learner.block_tokens", 1, "token"),
    _at_least("thundersync.learner.retain_gib", 0, "GiB"),
    _at_least("thundersync.learner.graph_gib", 0, "GiB"),
    _at_least("thundersync.learner.state_gib", 0, "GiB"),
    _at_least("thundersync.learner.threads", 1, "thread"),
    _at_least("thundersync.learner.max_restarts", 0, "restarts"),
    _at_least("thundersync.learner.restart_gib", 0, "GiB"),
    _at_least("thundersync.grpo.epsilon", 0, "(it is added to a deviation)"),
    _at_least("thundersync.grpo.admission_cap", 0, "groups"),
    _at_least("thundersync.teacher.replicas", 1, "replica"),
    Rule(
        "thundersync.teacher.tensor_parallel_size",
        lambda got, cfg: got == 1 or (got > 1 and cfg.thundersync.teacher.backend == "vllm"),
        "it is a whole number of devices, and only vLLM splits a teacher over several",
        "Set 1, or thundersync.teacher.backend=vllm",
    ),
    Rule(
        "thundersync.teacher.engine_init_kwargs",
        lambda got, cfg: not got or (cfg.thundersync.teacher.backend == "vllm" and not set(got) & set(_OF_TEACHER)),
        f"these are arguments of vLLM's engine, without {', '.join(_OF_TEACHER)}, which scoring relies on",
        "Use the options of thundersync.teacher, and take out what it does not take",
    ),
    _at_least("thundersync.teacher.max_num_batched_tokens", 1, "token"),
    _at_least("thundersync.teacher.request_timeout_s", 0.001, "second"),
    _at_least("thundersync.teacher.max_retries", 0, "retries"),
    *(_outcome(name) for name in outcomes.ALLOWED),
    _at_least("thundersync.outcomes.retries", 0, "retries"),
    _at_least("thundersync.sandbox.command_timeout_s", 0.001, "second"),
    _at_least("thundersync.sandbox.output_limit_bytes", 64, "bytes"),
    _at_least("thundersync.sandbox.latency_s", 0, "seconds"),
    _at_least("thundersync.sandbox.warm", 0, "sandboxes"),
    _at_least("thundersync.publish.probe_tokens", 2, "tokens"),
    _at_least("generator.n_samples_per_prompt", 1, "sample"),
    _at_least("generator.max_turns", 1, "turn"),
    _at_least("generator.sampling_params.max_generate_length", 1, "token"),
    _at_least("generator.inference_engine.num_engines", 1, "replica"),
    Rule(
        "generator.inference_engine.num_engines",
        lambda got, cfg: got == 1 or uses_cuda(cfg) or not uses_servers(cfg),
        "without GPUs there is one of SkyRL's servers: its router is not there",
        "Set 1, or thundersync.rollout=replicas",
    ),
    _at_least("generator.max_input_length", 1, "token"),
    _at_least("generator.eval_n_samples_per_prompt", 1, "sample"),
    _at_least("generator.eval_sampling_params.max_generate_length", 1, "token"),
    _at_least("generator.eval_sampling_params.temperature", 0, "(greedy)"),
    _share("generator.eval_sampling_params.top_p"),
    _at_least("generator.inference_engine.tensor_parallel_size", 1, "GPU"),
    _at_least("generator.inference_engine.pipeline_parallel_size", 1, "GPU"),
    _at_least("generator.inference_engine.data_parallel_size", 1, "GPU"),
    _at_least("generator.inference_engine.max_num_seqs", 1, "sequence"),
    _at_least("generator.inference_engine.max_num_batched_tokens", 1, "token"),
    _share("generator.inference_engine.gpu_memory_utilization"),
    _at_least("environment.skyrl_gym.max_env_workers", 0, "threads"),
    _at_least("trainer.train_batch_size", 1, "prompt"),
    _at_least("trainer.eval_batch_size", 1, "prompt"),
    _at_least("trainer.epochs", 1, "epoch"),
    _at_least("trainer.max_training_steps", 1, "update"),
    _interval("trainer.eval_interval"),
    _interval("trainer.ckpt_interval"),
    _interval("trainer.hf_save_interval"),
    _at_least("trainer.placement.policy_num_gpus_per_node", 1, "GPU"),
    _at_least("trainer.placement.policy_num_nodes", 1, "node"),
    _at_least("trainer.policy.model.lora.rank", 0, "(none)"),
    _at_least("trainer.policy.model.lora.alpha", 1, "(it is divided by the rank)"),
    _at_least("trainer.policy.optimizer_config.lr", 0, "(a step goes down the gradient)"),
    _at_least("trainer.policy.optimizer_config.weight_decay", 0, "(none)"),
    _at_least("trainer.policy.optimizer_config.max_grad_norm", 0, "(no clipping)"),
    _at_least("trainer.policy.optimizer_config.num_warmup_steps", 0, "updates"),
    Rule(
        "trainer.policy.optimizer_config.adam_betas",
        lambda got, cfg: len(got) == 2 and all(0 <= beta < 1 for beta in got),
        "AdamW takes two, each at least 0 and below 1",
        "Set it to [0.9,0.999], or leave it out",
    ),
    Rule(
        "trainer.policy.optimizer_config.scheduler",
        lambda got, cfg: got in SCHEDULERS,
        f"it is one of Transformers' schedules that need nothing else said: {', '.join(SCHEDULERS)}",
        "Take one of these",
    ),
    Rule(
        "trainer.max_prompt_length",
        lambda got, cfg: 1 <= got <= cfg.generator.max_input_length,
        "a prompt longer than generator.max_input_length ends its trajectory before the first turn, and none is empty",
        "Lower it, or raise generator.max_input_length",
    ),
)


def _targets(value: Any) -> set[str]:
    names = value if isinstance(value, list) else [value]
    return {str(name).rsplit(".", 1)[-1] for name in names}

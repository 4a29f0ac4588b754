"""The typed `thundersync.*` block of a run's configuration. Every option says what it is and what it costs."""

import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Optional

import yaml

if TYPE_CHECKING:
    from skyrl_thundersync.hosts.skyrl.config import TrainConfig

OBJECTIVES = {
    "opd": "skyrl_thundersync.objectives.opd:Opd",
    "grpo": "skyrl_thundersync.objectives.grpo:Grpo",
    "mixed": "skyrl_thundersync.objectives.mixed:Mixed",
    "top_k": "skyrl_thundersync.objectives.top_k:TopK",
}
OBJECTIVE_POINTS = "skyrl_thundersync.objectives"
"""The entry-point group in which packages offer objectives of their own."""
ADVANTAGE_LAWS = ("population", "sample", "dr_grpo", "rloo")


@dataclass
class LearnerConfig:
    """The learner ranks: one process each, the student replicated, optimizer state sharded by DeepSpeed ZeRO."""

    ranks: Optional[int] = None
    """Learner processes. Default: one per policy GPU (`trainer.placement.policy_num_gpus_per_node` x nodes)."""
    dtype: str = "bfloat16"
    """Student parameters and passes: "bfloat16" or "float32". Gradients accumulate and Adam steps in FP32 either way."""
    zero_stage: int = 1
    """DeepSpeed ZeRO stage, 1 or 2. Stage 3 shards parameters, which makes passes collective: refused."""
    offload_optimizer: bool = False
    """Keep Adam's masters and moments in host memory and step there. Frees device memory, slows the suffix."""
    block_tokens: int = 640
    """Turns wait for each other until this many new tokens are worth one forward pass."""
    retain_gib: float = 1.0
    """Budget in GiB per rank for autograd graphs kept from arrival to sweep. What finds no room waits for its sweep, which
    may take as much again while it runs."""
    graph_gib: Optional[float] = None
    """Largest autograd graph of one pass, in GiB. A segment with a larger one keeps the inputs of its layers alone, which run
    again in the backward: a third more work for it, in a small part of the memory. Default: no limit."""
    state_gib: Optional[float] = None
    """Budget in GiB per rank for cut states and adjoints of open trajectories. On a GPU what has waited longest moves to host
    memory beyond it, as much again; beyond that, and on a CPU at once, groups that have not started wait. Default: none."""
    accumulator: str = "fp32"
    """"fp32", or "exact": fixed-point int64 sums, bit-identical under any order and placement, twice the host memory."""
    threads: int = 1
    """CPU threads per rank (passes on CPU only)."""
    max_restarts: int = 0
    """How often in one update the ranks may start anew when one died, and do the batch's work so far again at the same
    weights. Costs a copy of the optimizer's shards on the run folder's disk (12 bytes a trained parameter) each update.
    0: a rank's death ends the run."""
    restart_gib: float = 2.0
    """Budget in GiB on the run folder's disk for the work of a running batch that such a restart does again, some 5 bytes a
    token. Beyond it a rank's death in that update ends the run."""


@dataclass
class TeacherConfig:
    """The frozen teacher of OPD. Leaf names as in SkyRL's own OPD proposal where they mean the same."""

    model: Optional[str] = None
    """Folder or hub name of the teacher. Its tokenizer must map the same ids to the same tokens as the student's."""
    backend: str = "vllm"
    """"vllm" (turn-wise prompt log-probs served from the prefix cache) or "transformers" (persistent K/V)."""
    replicas: int = 1
    """Teacher processes; a trajectory stays with the one that holds its cache."""
    dtype: str = "bfloat16"
    """"bfloat16" or "float32"."""
    tensor_parallel_size: int = 1
    """vLLM only: devices that one replica is split over."""
    max_num_batched_tokens: int = 2048
    """Tokens of one step at most; longer contexts are computed in parts. More of them cost memory, fewer leave a GPU idle."""
    engine_init_kwargs: dict[str, Any] = field(default_factory=dict)
    """vLLM only: further arguments of its engine, as `generator.inference_engine.engine_init_kwargs`."""
    prefix_cache: bool = True
    """vLLM only. False scores every turn over its whole context again: quadratic in the number of turns."""
    request_timeout_s: float = 600.0
    """A scoring request that takes longer counts as failed."""
    max_retries: int = 3
    """Tries after the first failure, with exponential backoff; then the run fails and names the request."""


@dataclass
class GrpoConfig:
    """Group-relative advantages, for objectives that weigh rewards so: grpo, which spreads a sample's weight evenly over its
    tokens, and mixed, where each token has it."""

    law: str = "population"
    """A_i from the group's rewards: "population": (r - mean) / (population std + epsilon), the paper's; "sample": the same
    with the sample std, SkyRL's own; "dr_grpo": r - mean; "rloo": r - mean of the others. No variance: exactly 0."""
    epsilon: float = 1e-6
    """Added to the standard deviation."""
    admission_cap: int = 1
    """Groups per rank that may be summed before their last reward is known. Each costs two FP32 copies of the trained
    parameters in host memory; further groups wait for their rewards. 0: none is, which costs overlap."""


@dataclass
class SandboxConfig:
    """Where the agent's commands run."""

    backend: str = "auto"
    """"docker", "bubblewrap", or "auto": Docker when an engine answers, else bubblewrap, else a refusal."""
    image: str = "local/bookworm-py:1"
    """Docker image of tasks that name none."""
    command_timeout_s: float = 10.0
    """A command that runs longer is killed with all its children; the agent reads that it was."""
    output_limit_bytes: int = 4096
    """Longer output is cut in the middle, head and tail kept."""
    warm: int = 4
    """Sandboxes started ahead, while others run. Each costs a few MiB until it is used; 0: every trajectory waits for its
    own."""
    latency_s: float = 0.0
    """Added to every tool call, to stand for slow tools in benchmarks."""


@dataclass
class OutcomesConfig:
    """What becomes of a training trajectory that did not come to its own end: "trained" (with the reward that grading gave),
    "zero" (reward 0), "masked" (GRPO only: no part in baseline or gradient), "retried", or "stop" (the run ends). What was
    released to the learner is not taken back, so only what fails before the first turn can be retried. Under OPD the reward
    is reported, not learned from: a trajectory may be swept before it is graded, and "zero" and "trained" give the same
    gradient."""

    start_failed: str = "retried"
    """Its sandbox did not start, or its files did not get there: "retried" or "stop"."""
    timeout: str = "trained"
    """The task's `agent_timeout_s` passed; it was graded as it was. "trained", "zero" or "masked"."""
    context_overflow: str = "zero"
    """The context was full before the agent was done; it was not graded. "zero" or "masked"."""
    sandbox_lost: str = "zero"
    """The agent made its own sandbox unusable. "zero" or "masked"."""
    verifier_failed: str = "zero"
    """The verifier gave no reward, which an agent can bring about. "zero" or "masked"."""
    crash: str = "stop"
    """The machinery failed during the episode. "stop", "zero" or "masked"."""
    retries: int = 2
    """How often a trajectory that did not start is tried again before the run stops."""


@dataclass
class PublishConfig:
    """The zero-staleness barrier after each step."""

    probe_tokens: int = 64
    """Length of the fixed text whose log-probs every replica must reproduce after loading new weights."""
    tolerance: float = 1e-3
    """Largest difference in nats allowed between a replica's probe log-probs and the learner's. Other weights are found by
    their bits; this is for what bits do not show. BF16 kernels may differ by some tenths on an unlikely token: 0.5 there."""


@dataclass
class ThunderSyncConfig:
    """Everything that is this plugin's own."""

    objective: str = "opd"
    """"opd": reverse KL to a frozen teacher on sampled tokens, one source a turn. "grpo": group-relative rewards. "mixed":
    both, A_t = β (log π_T − log π_θ) + γ Â_i with options `beta` and `gamma`, over the batch's tokens.
    "top_k": reverse KL over the teacher's k most probable tokens at each position, option `k`, and the sampled one where it
    is none of them. Or the name of an installed package's (entry points `skyrl_thundersync.objectives`), or a class of your
    own (docs/library.md)."""
    objective_options: dict[str, Any] = field(default_factory=dict)
    """Options of the objective: the fields of its class, checked as all options are. opd and grpo have none here; mixed has
    `beta` and `gamma`, both 1; top_k has `k`, 16."""
    schedule: str = "thundersync"
    """"thundersync": each source as soon as it is ready. "group": when its group's last trajectory closed. "sync": after the
    last rollout. The update is the same."""
    device: str = "auto"
    """"cpu", "cuda", or "auto": CUDA where torch sees a device."""
    ray_address: Optional[str] = None
    """The Ray cluster to run on: "auto" (the one of this machine), HOST:PORT of its head, or "local" for one of its own.
    Default: `RAY_ADDRESS` where that is set, else one of its own. See docs/cluster.md."""
    rollout: str = "auto"
    """Who samples. "servers": SkyRL's own inference servers, over HTTP. "replicas": vLLM in processes of this plugin. "auto":
    servers on GPUs, replicas without. Without GPUs there is one server, `generator.inference_engine.num_engines=1`."""
    run_dir: Optional[str] = None
    """Folder for the resolved config, metrics.jsonl, logs and published weights. Default: runs/<trainer.run_name>."""
    replace_run: bool = False
    """Remove what an earlier run wrote into the run folder, checkpoints and exported models included, where this one starts
    from the beginning (`trainer.resume_mode=none`), which is refused otherwise. Files of any other kind stay."""
    record: bool = False
    """Keep every logical batch (ids, masks, scores, rewards, arrival order) under `run_dir/record` for exact replay."""
    rollouts_mib: float = 64.0
    """Most that the readable training rollouts in `run_dir/rollouts` take, in MiB; the oldest updates' go first. 0: none."""
    hang_timeout_s: float = 120.0
    """An actor whose process shows no sign of life for so long ends the run with an error that names it; its stacks are in
    its log. A machine that does not answer for so long counts as gone, and the run ends."""
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    outcomes: OutcomesConfig = field(default_factory=OutcomesConfig)
    publish: PublishConfig = field(default_factory=PublishConfig)


@dataclass(frozen=True)
class LoraSettings:
    """A PEFT adapter without dropout; `target_modules`: "all-linear" or module names."""

    rank: int
    alpha: int
    target_modules: str | list[str] = "all-linear"


def lora_settings(cfg: "TrainConfig") -> LoraSettings | None:
    """The adapter that a run trains; None where it trains the whole student."""
    lora = cfg.trainer.policy.model.lora
    modules = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    return LoraSettings(lora.rank, lora.alpha, modules) if lora.rank else None


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW as SkyRL's `optimizer_config` names it. `num_training_steps`: for schedules that end, e.g. "cosine"."""

    lr: float = 1e-6
    adam_betas: tuple[float, ...] = (0.9, 0.999)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    num_warmup_steps: int = 0
    scheduler: str = "constant_with_warmup"
    num_training_steps: int | None = None


def optimizer_settings(cfg: "TrainConfig") -> OptimizerSettings:
    """Of a run, from SkyRL's options."""
    options = cfg.trainer.policy.optimizer_config
    return OptimizerSettings(
        lr=options.lr,
        adam_betas=tuple(options.adam_betas),
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
        num_warmup_steps=options.num_warmup_steps,
        scheduler=options.scheduler,
        num_training_steps=cfg.trainer.max_training_steps,
    )


def learner_ranks(cfg: "TrainConfig") -> int:
    """Learner processes: `thundersync.learner.ranks`, or one per policy GPU."""
    placement = cfg.trainer.placement
    return cfg.thundersync.learner.ranks or placement.policy_num_gpus_per_node * placement.policy_num_nodes


def ray_address(cfg: "TrainConfig") -> str:
    """The Ray cluster of a run: `thundersync.ray_address`, or `RAY_ADDRESS`; "local" for one of its own."""
    return cfg.thundersync.ray_address or os.environ.get("RAY_ADDRESS") or "local"


def uses_cuda(cfg: "TrainConfig") -> bool:
    """Whether this run works on CUDA devices: `thundersync.device`, or what torch sees where it is "auto"."""
    if cfg.thundersync.device != "auto":
        return cfg.thundersync.device == "cuda"
    import torch

    return torch.cuda.is_available()


def uses_servers(cfg: "TrainConfig") -> bool:
    """Whether SkyRL's own inference servers sample (`thundersync.rollout`)."""
    return cfg.thundersync.rollout == "servers" or (cfg.thundersync.rollout == "auto" and uses_cuda(cfg))


def as_yaml(cfg: "TrainConfig") -> str:
    """A whole configuration as YAML: what the run folder's config.yaml holds."""
    return yaml.dump(asdict(cfg))

"""SkyRL 0.4.0 as the host: what its train loop calls.

`RayPPOTrainer.train()` runs unmodified. It calls `generate`, where the update's rollouts and gradient work run side by
side; its passes over the finished batch have nothing left to do; `train_critic_and_policy` takes the one step; and
`save_weights_for_sampler` is the barrier at which every replica acknowledges the new weights.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.train.generators.base import TRAINING_PHASE_EVAL
from skyrl.train.generators.utils import get_metrics_from_generator_output
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.utils.callbacks import TrainingCallback

from skyrl_thundersync.hosts.skyrl.generator import GuardedGenerator
from skyrl_thundersync.objectives.contract import NONE, OWN
from skyrl_thundersync.objectives.registry import of
from skyrl_thundersync.options.schema import uses_cuda
from skyrl_thundersync.preflight.models import model_config
from skyrl_thundersync.process.heartbeat import doing
from skyrl_thundersync.process.memory import forget_peak
from skyrl_thundersync.rollout.hook import TurnHook
from skyrl_thundersync.rollout.log import RolloutLog, played
from skyrl_thundersync.rollout.outcomes import Outcomes
from skyrl_thundersync.runtime.cluster import Cluster
from skyrl_thundersync.runtime.resume import Checkpoints
from skyrl_thundersync.stream.release import WorkPolicy
from skyrl_thundersync.stream.sources import TrajectoryId
from skyrl_thundersync.telemetry import flops as mfu
from skyrl_thundersync.telemetry import timeline
from skyrl_thundersync.telemetry.display import Display
from skyrl_thundersync.telemetry.metrics import step_metrics, update_metrics
from skyrl_thundersync.telemetry.record import Recorder
from skyrl_thundersync.trainer import Update


class StreamingGenerator(GuardedGenerator):
    """SkyRL's generator that says when a training trajectory closed, with its reward and its count of scored tokens.

    Environments find `on_last_turn` among their extras, to call without arguments, from any thread, as soon as they know that
    the turn they were given is the last: before its command runs and before they grade.
    """

    on_closed: Callable[[TrajectoryId, float | None, int], None] | None = None
    on_last_turn: Callable[[TrajectoryId], None] | None = None

    def __init__(self, *args, outcomes: Outcomes, log: RolloutLog | None = None, **kwargs) -> None:
        super().__init__(*args, crash_stops=outcomes.stops("crash"), **kwargs)
        self._outcomes, self.log = outcomes, log

    def _setup_env_extras(self, env_class, env_extras, sampling_params, host_id):
        extras = super()._setup_env_extras(env_class, env_extras, sampling_params, host_id)
        if self.on_last_turn is None:
            return extras
        loop, say = asyncio.get_running_loop(), self.on_last_turn
        trajectory = TrajectoryId(host_id.instance_id, host_id.repetition_id)

        def on_last_turn() -> None:
            loop.call_soon_threadsafe(say, trajectory)

        return {**extras, "on_last_turn": on_last_turn}

    async def agent_loop(self, prompt, env_class, env_extras, *args, **kwargs):
        episode = partial(super().agent_loop, prompt, env_class, env_extras, *args, **kwargs)
        training = self.on_closed is not None and kwargs.get("training_phase") != TRAINING_PHASE_EVAL
        host_id = kwargs.get("trajectory_id")
        output = await (self._outcomes.play(str(host_id), episode) if training else episode())
        if training:
            reward = self._outcomes.reward(output.reward, output.env_metrics)
            output.reward = reward or 0.0
            self.on_closed(TrajectoryId(host_id.instance_id, host_id.repetition_id), reward, sum(output.loss_mask))
            if self.log is not None:
                self.log.add(played(self.tokenizer, host_id, env_class, env_extras, output, reward))
        return output


class LearnerDispatch:
    """What `train()` asks of SkyRL's `WorkerDispatch`, answered by the learner ranks and the publish barrier."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.publish_s = 0.0
        self.on_published: Callable[[float], None] | None = None

    def get_lcm_dp_size(self) -> int:
        return 1  # a rank may get any number of sources, so no sample is dropped for even shards

    def init_weight_sync_state(self, client) -> None:
        """Nothing to agree on beforehand: weights travel as files."""

    async def save_weights_for_sampler(self, model_id: str | None = None) -> None:
        """Publish θ of the current version; returns when every replica acknowledged it."""
        start = time.perf_counter()
        with doing("publishing", update=self._cluster.version):
            await self._cluster.publish()
        self.publish_s = time.perf_counter() - start
        timeline.add("update", "publish", start, start + self.publish_s, version=self._cluster.version)
        if self.on_published is not None:
            self.on_published(self.publish_s)

    def save_hf_model(self, model: str, folder: str, tokenizer) -> None:
        self._cluster.save_model(Path(folder))

    def get_timing_metrics(self) -> dict[str, float]:
        return {}

    def finalize_pending_saves(self, model: str) -> None:
        """Saves are complete when they return."""


class ThunderSyncTrainer(RayPPOTrainer):
    """`RayPPOTrainer` whose gradient work overlaps its rollouts."""

    def __init__(self, *args, cluster: Cluster, display: Display, recorder: Recorder | None, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._cluster, self._display, self._recorder = cluster, display, recorder
        self._update: Update | None = None
        self._warnings: list[str] = []
        self._began = 0.0
        self.add_callback(_StepStart())
        self._cost, self._peak = flop_cost(self.cfg, display), peak_flops(self.cfg)
        self.checkpoints = Checkpoints(self.cfg, cluster, display.say)

    def build_models(self, *_workers) -> None:
        self.dispatch = LearnerDispatch(self._cluster)
        self.dispatch.on_published = self._published

    async def generate(self, input_batch):
        """Rollouts and, beside them, the gradient work they release; returns when all of both is done."""
        self._cluster.require_room()
        forget_peak()
        trajectories = [TrajectoryId(t.instance_id, t.repetition_id) for t in input_batch["trajectory_ids"]]
        groups: dict[str, int] = {}
        for trajectory in trajectories:
            groups[trajectory.group] = groups.get(trajectory.group, 0) + 1
        update = Update(
            self._cluster.version,
            groups,
            self._cluster.ranks,
            self._cluster.teacher,
            WorkPolicy(
                self.cfg.thundersync.schedule,
                statistics_cap=statistics_cap(self.cfg),
                state_bytes=state_bytes(self.cfg),
            ),
            self._recorder.begin(self._cluster.version, groups) if self._recorder else None,
        )
        self._update = update
        hook: TurnHook = self.inference_engine_client
        self.generator.on_closed, self.generator.on_last_turn = update.on_trajectory_closed, update.on_last_turn
        try:
            with hook.armed(trajectories, update.on_turn), doing("rollouts", update=self.global_step):
                output = await update.run(super().generate(input_batch))
                await self._cluster.settle()
        finally:
            self.generator.on_closed = self.generator.on_last_turn = None
        if self._recorder:
            self._recorder.end()
        timeline.add_update(update)
        return output

    def postprocess_generator_output(self, generator_output, uids):
        """Reward metrics only: the gradient is computed already, no per-token rewards are needed."""
        metrics = get_metrics_from_generator_output(generator_output, uids)
        n = self.cfg.generator.n_samples_per_prompt
        self.all_metrics.update(
            {f"reward/avg_pass_at_{n}": metrics["pass_at_n"], "reward/avg_raw_reward": metrics["avg_score"]}
        )
        return generator_output, uids

    def convert_to_training_input(self, generator_output, uids) -> TrainingInputBatch:
        """An empty batch: every token of it has been learned from already."""
        batch = TrainingInputBatch({"rewards": torch.tensor(generator_output["rewards"], dtype=torch.float32)})
        batch.metadata = {"uids": uids}
        return batch

    def fwd_logprobs_values_reward(self, training_input: TrainingInputBatch) -> TrainingInputBatch:
        return training_input

    def compute_advantages_and_returns(self, data: TrainingInputBatch) -> TrainingInputBatch:
        return data

    def train_critic_and_policy(self, data: TrainingInputBatch) -> dict[str, float]:
        """Reduce over ranks, divide by N_k, clip, one optimizer step."""
        start = time.perf_counter()
        with doing("finish", update=self.global_step):
            finish = self._cluster.finish(self._update.ledger)
        timeline.add("update", "finish", start, time.perf_counter(), version=self._update.ledger.version)
        self.checkpoints.finished(self.global_step)
        status = update_metrics(
            self._update, finish, time.perf_counter() - start, self._cluster.teacher_counts(), self._cost
        )
        if self.generator.log is not None:
            earned, self._warnings = self.generator.log.end(self.global_step)
            status |= earned
        self.all_metrics.update(status)
        return status

    def save_checkpoints(self) -> str:
        """All of the run at this update's boundary, atomically (runtime/checkpoint.py)."""
        with doing("checkpoint", update=self.global_step):
            return str(self.checkpoints.save())

    def load_checkpoints(self) -> tuple[int, str | None]:
        """Take up the checkpoint that `trainer.resume_mode` names; `train()` publishes it before anything else."""
        step, path, self.train_dataloader = self.checkpoints.load(self.train_dataloader, self.total_training_steps)
        return step, path and str(path)

    def begin_step(self) -> None:
        """SkyRL's step begins here and ends with its publication."""
        self._began = time.perf_counter()
        name = f"{self.global_step}/{self.total_training_steps}"
        self._display.begin(name, lambda: self._update and self._update.ledger.progress)

    def _published(self, publish_s: float) -> None:
        step_s = time.perf_counter() - self._began
        if self._update is not None:  # None at the first publication, before any update
            ranks = len(self._cluster.ranks)
            self.all_metrics.update(step_metrics(self.all_metrics, publish_s, step_s, ranks, self._peak))
            self._display.update(self.global_step, self.total_training_steps, self.all_metrics)
            for warning in self._warnings:
                self._display.warn(f"update {self.global_step}: {warning}")
            self._warnings = []
            self._update = None


class _StepStart(TrainingCallback):
    def on_step_start(self, trainer: ThunderSyncTrainer, callback_input, control) -> None:
        trainer.begin_step()


def flop_cost(cfg, display: Display) -> mfu.Cost | None:
    """FLOPs of the student by formula; None, and said, where there is none for its family."""
    lora = cfg.trainer.policy.model.lora
    try:
        return mfu.cost(model_config(cfg.trainer.policy.model.path), lora.rank, lora.target_modules)
    except NotImplementedError as error:
        display.say(f"[dim]{error}[/dim]")
        return None


def peak_flops(cfg) -> float | None:
    """Dense BF16 peak of a learner's device; None without GPUs, or where the device is not known."""
    return mfu.peak_flops(torch.cuda.get_device_name()) if uses_cuda(cfg) and torch.cuda.is_available() else None


def statistics_cap(cfg) -> int | None:
    """Groups that may hold statistics on a rank: none under schedules that release a group when its rewards are known.

    None where no reward is waited for; no limit where each trajectory waits for its own alone.
    """
    ts, objective = cfg.thundersync, of(cfg.thundersync)
    if objective.rewards == NONE:
        return None
    if objective.rewards == OWN:
        return sys.maxsize
    return ts.grpo.admission_cap if ts.schedule == "thundersync" else 0


def state_bytes(cfg) -> int | None:
    """Bytes of cut states and adjoints from which on new groups wait: the budget, on a GPU with as much host memory."""
    gib = cfg.thundersync.learner.state_gib
    return None if gib is None else int(gib * 2**30) * (2 if uses_cuda(cfg) else 1)

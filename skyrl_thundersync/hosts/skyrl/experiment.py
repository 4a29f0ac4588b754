"""SkyRL's experiment, with this plugin's parts where SkyRL asks for its own."""

from __future__ import annotations

from pathlib import Path

from skyrl.backends.skyrl_train.inference_servers.utils import resolve_policy_model_name
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.utils.callbacks import TrainingCallback

from skyrl_thundersync.hosts.skyrl import cpu_servers
from skyrl_thundersync.hosts.skyrl.dataset import TaskDataset
from skyrl_thundersync.hosts.skyrl.loggers import Trackers, trackers
from skyrl_thundersync.hosts.skyrl.servers import EXTENSION
from skyrl_thundersync.hosts.skyrl.train_loop import StreamingGenerator, ThunderSyncTrainer
from skyrl_thundersync.options.schema import uses_cuda
from skyrl_thundersync.process.heartbeat import at
from skyrl_thundersync.rollout.hook import TurnHook
from skyrl_thundersync.rollout.log import RolloutLog
from skyrl_thundersync.rollout.outcomes import Outcomes
from skyrl_thundersync.runtime.cluster import Cluster
from skyrl_thundersync.sandbox.pool import SandboxPool
from skyrl_thundersync.tasks.plain_contents import PlainContents
from skyrl_thundersync.telemetry.display import Display
from skyrl_thundersync.telemetry.metrics import MetricsFile
from skyrl_thundersync.telemetry.record import Recorder


class ProgressCallback(TrainingCallback):
    """What SkyRL's tracker gets, also in metrics.jsonl; evaluations also on the screen."""

    def __init__(self, display: Display, metrics: MetricsFile) -> None:
        self._display, self._metrics = display, metrics
        self.evaluations: list[tuple[int, float]] = []

    def on_eval_start(self, trainer, callback_input, control) -> None:
        at("evaluation")
        self._display.say(f"[dim]evaluating on {len(trainer.eval_dataset)} held-out tasks[/dim]")
        self._display.begin("evaluation")

    def on_eval_end(self, trainer, callback_input, control) -> None:
        at("training")
        self._display.end()
        score = float(callback_input.metrics["eval/all/avg_score"])
        self.evaluations.append((callback_input.global_step, score))
        self._display.say(f"held-out success after {callback_input.global_step} updates: [bold]{score:.0%}[/bold]")

    def on_log(self, trainer, callback_input, control) -> None:
        self._metrics.write(callback_input.global_step, callback_input.logs)


class ThunderSyncExperiment(BasePPOExp):
    """SkyRL's experiment with this plugin's generator, trainer and, without GPUs, its rollout engine."""

    trainer_class = ThunderSyncTrainer

    def __init__(self, cfg, cluster: Cluster, display: Display, run_dir: Path, sandboxes: SandboxPool) -> None:
        self._cluster, self._display, self._run_dir = cluster, display, run_dir
        self._sandboxes = sandboxes
        super().__init__(cfg)

    def get_train_dataset(self) -> TaskDataset:
        return self._dataset(self.cfg.data.train_data)

    def get_eval_dataset(self) -> TaskDataset | None:
        if self.cfg.trainer.eval_interval > 0 and self.cfg.data.val_data:
            return self._dataset(self.cfg.data.val_data)
        return None

    def _dataset(self, files: list[str]) -> TaskDataset:
        cfg = self.cfg
        return TaskDataset(
            files, cfg.environment.env_class, PlainContents.of(self.tokenizer), cfg.trainer.max_prompt_length
        )

    def _setup_trainer(self) -> ThunderSyncTrainer:
        """As SkyRL's, without its FSDP or Megatron workers, whose import needs packages that only CUDA machines have."""
        Path(self.cfg.trainer.export_path).mkdir(parents=True, exist_ok=True)
        Path(self.cfg.trainer.ckpt_path).mkdir(parents=True, exist_ok=True)
        tracker = self.get_tracker()
        client = self.get_inference_client()
        trainer = self.get_trainer(
            cfg=self.cfg,
            tracker=tracker,
            tokenizer=self.tokenizer,
            train_dataset=self.train_dataset,
            eval_dataset=self.eval_dataset,
            inference_engine_client=client,
            generator=self.get_generator(self.cfg, self.tokenizer, client),
            colocate_pg=self.colocate_pg,
        )
        trainer.trajectory_logger = self.get_trajectory_logger()
        self.trainer = trainer
        trainer.build_models()
        return trainer

    def get_tracker(self) -> Trackers:
        return trackers(self.cfg)

    def get_inference_client(self) -> TurnHook:
        client = self._cluster.rollout_client(self._servers)
        return TurnHook(client, lambda: self._cluster.version, self.cfg.trainer.seed, self._cluster.served_version)

    def _servers(self):
        """SkyRL's own client over its own servers, which live as long as this experiment holds them."""
        self.cfg.generator.inference_engine.engine_init_kwargs["worker_extension_cls"] = EXTENSION
        if uses_cuda(self.cfg):
            return super().get_inference_client()
        client, self._server_groups = cpu_servers.start(self.cfg, self.tokenizer)
        return client

    def get_generator(self, cfg, tokenizer, inference_engine_client) -> StreamingGenerator:
        return StreamingGenerator(
            generator_cfg=cfg.generator,
            skyrl_gym_cfg=cfg.environment.skyrl_gym,
            inference_engine_client=inference_engine_client,
            tokenizer=tokenizer,
            policy_model_name=resolve_policy_model_name(cfg),
            outcomes=Outcomes(cfg.thundersync.outcomes),
            log=RolloutLog(self._run_dir, int(cfg.thundersync.rollouts_mib * 2**20)),
        )

    def get_trainer(
        self, cfg, tracker, tokenizer, train_dataset, eval_dataset, inference_engine_client, generator, colocate_pg
    ):
        recorder = Recorder(self._run_dir / "record") if cfg.thundersync.record else None
        return self.trainer_class(
            cfg=cfg,
            tracker=tracker,
            tokenizer=tokenizer,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            inference_engine_client=inference_engine_client,
            generator=generator,
            colocate_pg=colocate_pg,
            cluster=self._cluster,
            display=self._display,
            recorder=recorder,
        )

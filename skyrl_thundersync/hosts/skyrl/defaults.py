"""Where this plugin's defaults differ from SkyRL's: the one place that sets SkyRL options nobody asked for.

`HOST_DEFAULTS` is the lowest layer of every configuration, below the preset and the command line. SkyRL's defaults
describe PPO on colocated GPUs; left as they are, `hosts/skyrl/validate.py` would have to refuse them one by one.
`apply_host_defaults` runs last and sets what depends on the machine and means nothing to this plugin.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from skyrl_thundersync.options.schema import uses_cuda

if TYPE_CHECKING:
    from skyrl_thundersync.hosts.skyrl.config import TrainConfig

HOST_DEFAULTS = {
    # The objective is what `thundersync.objective` says, without a reference model.
    "trainer.algorithm.use_kl_loss": False,
    # Overlap needs learner, sampler and teacher on devices of their own.
    "trainer.placement.colocate_all": False,
    "trainer.placement.colocate_policy_ref": False,
    # The paper's optimizer has no weight decay.
    "trainer.policy.optimizer_config.weight_decay": 0.0,
    # SkyRL's default tracker asks for an account; this one writes files into the run folder.
    "trainer.logger": "tensorboard",
    # The screen shows one line per update; trajectories go to files.
    "trainer.print_example_interval": 0,
    # SkyRL scrapes its own inference servers through a Ray port; this plugin reports throughput itself.
    "generator.inference_engine.enable_ray_prometheus_stats": False,
    # Rollouts are text: the rest of a vision-language model would take memory for nothing.
    "generator.inference_engine.language_model_only": True,
    # Each worker process would import torch to hand out lists; the prompts are in memory already.
    "data.dataloader.num_workers": 0,
}


def apply_host_defaults(cfg: TrainConfig) -> None:
    """Set, in place, SkyRL options that follow from the machine and the run folder.

    - `thundersync.run_dir`: runs/<trainer.run_name> where it is not given; always absolute, since Ray actors have other
      working folders.
    - `trainer.ckpt_path`, `trainer.export_path`, `trainer.log_path`: inside the run folder where they are SkyRL's own.
    - without CUDA: `trainer.placement.*_num_gpus_per_node` = 1 (SkyRL's start-up waits three minutes for GPUs it counts,
      and `thundersync.learner.ranks` decides the number of learner processes) and `trainer.enable_ray_gpu_monitor` =
      false.
    """
    from skyrl.train.config.config import TrainerConfig

    ts, trainer = cfg.thundersync, cfg.trainer
    if ts.run_dir is None:
        ts.run_dir = str(Path("runs") / trainer.run_name)
    ts.run_dir = str(Path(ts.run_dir).absolute())
    stock = TrainerConfig()
    for option, folder in (("ckpt_path", "checkpoints"), ("export_path", "exports"), ("log_path", "logs")):
        if getattr(trainer, option) == getattr(stock, option):
            setattr(trainer, option, str(Path(ts.run_dir) / folder))
    if not uses_cuda(cfg):
        if ts.learner.ranks is None:
            ts.learner.ranks = trainer.placement.policy_num_gpus_per_node * trainer.placement.policy_num_nodes
        for role in ("policy", "critic", "ref"):
            setattr(trainer.placement, f"{role}_num_gpus_per_node", 1)
            if role != "policy":
                setattr(trainer.placement, f"{role}_num_nodes", 1)
        trainer.enable_ray_gpu_monitor = False

"""SkyRL's configuration with this plugin's block beside it."""

from dataclasses import dataclass, field

from skyrl.train.config.config import SkyRLTrainConfig

from skyrl_thundersync.options.schema import ThunderSyncConfig


@dataclass
class TrainConfig(SkyRLTrainConfig):
    """SkyRL's configuration with the `thundersync` block."""

    thundersync: ThunderSyncConfig = field(default_factory=ThunderSyncConfig)

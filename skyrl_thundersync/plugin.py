"""What the entry point `thundersync` of the group `skyrl.plugins` hands out. Light: heavy parts load on use."""

from skyrl_thundersync.plugins import Plugin
from skyrl_thundersync.presets import own_presets

PLUGIN = Plugin(
    name="thundersync",
    presets=own_presets(),
    entrypoint="skyrl_thundersync.entrypoint",
    config_class="skyrl_thundersync.config:TrainConfig",
    defaults="skyrl_thundersync.host_defaults:HOST_DEFAULTS",
    choices="skyrl_thundersync.options:CHOICES",
    check="skyrl_thundersync.validate:checked_config",
    dry_run="skyrl_thundersync.dryrun:run",
)

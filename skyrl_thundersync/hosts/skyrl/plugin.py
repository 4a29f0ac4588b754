"""What the entry point `thundersync` of the group `skyrl.plugins` hands out. Light: heavy parts load on use."""

from skyrl_thundersync.options.presets import own_presets
from skyrl_thundersync.options.registry import Plugin

PLUGIN = Plugin(
    name="thundersync",
    presets=own_presets(),
    entrypoint="skyrl_thundersync.hosts.skyrl.entrypoint",
    config_class="skyrl_thundersync.hosts.skyrl.config:TrainConfig",
    defaults="skyrl_thundersync.hosts.skyrl.defaults:HOST_DEFAULTS",
    choices="skyrl_thundersync.options.choices:CHOICES",
    check="skyrl_thundersync.hosts.skyrl.checks:checked_config",
    dry_run="skyrl_thundersync.hosts.skyrl.dry_run:run",
)

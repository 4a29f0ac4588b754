"""What SkyRL brings to the processes of a run (`runtime.cluster.Host`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from skyrl.train.utils.utils import prepare_runtime_environment

from skyrl_thundersync.hosts.skyrl import cpu_servers
from skyrl_thundersync.hosts.skyrl.client import LocalEngineClient
from skyrl_thundersync.hosts.skyrl.servers import ServerPublisher
from skyrl_thundersync.options.schema import uses_cuda, uses_servers
from skyrl_thundersync.preflight.memory import gpus_per_engine

if TYPE_CHECKING:
    from skyrl_thundersync.hosts.skyrl.config import TrainConfig


class SkyRLParts:
    """SkyRL as `runtime.cluster.Host`."""

    def environment(self, cfg: TrainConfig) -> dict[str, str]:
        return prepare_runtime_environment(cfg) if uses_cuda(cfg) else dict(cpu_servers.ENVIRONMENT)

    def devices(self, cfg: TrainConfig) -> int | None:
        return gpus_per_engine(cfg) if uses_servers(cfg) and not uses_cuda(cfg) else None

    def client(self, replicas: list[Any], tokenizer: Any, model: str, say: Callable[[str], None]) -> LocalEngineClient:
        return LocalEngineClient(replicas, tokenizer, model, say)

    def publisher(self, client: Any, lora: bool) -> ServerPublisher:
        return ServerPublisher(client, lora=lora)

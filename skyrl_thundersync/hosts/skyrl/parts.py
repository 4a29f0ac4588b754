"""What SkyRL brings to the processes of a run (`runtime.cluster.Host`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from skyrl.train.utils.utils import prepare_runtime_environment

from skyrl_thundersync.hosts.skyrl.client import LocalEngineClient
from skyrl_thundersync.hosts.skyrl.servers import ServerPublisher

if TYPE_CHECKING:
    from skyrl_thundersync.hosts.skyrl.config import TrainConfig


class SkyRLParts:
    """SkyRL as `runtime.cluster.Host`."""

    def environment(self, cfg: TrainConfig) -> dict[str, str]:
        return prepare_runtime_environment(cfg)

    def client(self, replicas: list[Any], tokenizer: Any, model: str, say: Callable[[str], None]) -> LocalEngineClient:
        return LocalEngineClient(replicas, tokenizer, model, say)

    def publisher(self, client: Any, lora: bool) -> ServerPublisher:
        return ServerPublisher(client, lora=lora)

"""One of SkyRL's inference servers without a GPU: the same actor and client, vLLM's CPU workers, no router.

SkyRL's router has no place in an environment without GPUs, so there is one server and the client talks to it. It may span
several workers (`generator.inference_engine.tensor_parallel_size`), processes of its own each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skyrl_thundersync.engines.thread import EngineSpec
from skyrl_thundersync.preflight.models import longest_sampled

if TYPE_CHECKING:
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
    from skyrl.backends.skyrl_train.inference_servers.server_group import ServerGroup

    from skyrl_thundersync.hosts.skyrl.config import TrainConfig

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles some helpers even where it is told to be eager
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


def start(cfg: TrainConfig, tokenizer: Any) -> tuple[RemoteInferenceClient, ServerGroup]:
    """Start the server and wait until it is up; SkyRL's client to it, and the server."""
    # Slow to import, and it patches vLLM: only where a server is started.
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
    from skyrl.backends.skyrl_train.inference_servers.server_group import ServerGroup
    from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args

    engine = cfg.generator.inference_engine
    arguments = build_vllm_cli_args(cfg)
    own = {
        "worker_cls": WORKER,
        "max_model_len": longest_sampled(cfg),
        "kv_cache_memory_bytes": int(EngineSpec.kv_cache_gib * 2**30),
        "block_size": EngineSpec.block_size,
        "enforce_eager": True,
    }
    for name, value in {**own, **engine.engine_init_kwargs}.items():
        setattr(arguments, name, value)
    server = ServerGroup(arguments, num_servers=1, distributed_executor_backend="mp", enable_ray_prometheus_stats=False)
    url = server.start()[0].url
    client = RemoteInferenceClient(
        proxy_url=url,
        server_urls=[url],
        data_parallel_size=1,
        model_name=engine.served_model_name or cfg.trainer.policy.model.path,
        uses_lora_weight_sync=cfg.trainer.policy.model.lora.rank > 0,
        tokenizer=tokenizer,
    )
    return client, server

"""Publication to SkyRL's own inference server, on vLLM's CPU build. Slow to start: THUNDERSYNC_SERVER_TESTS=1 runs it."""

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch
from models import forward_logps, random_ids, tiny_qwen3

from skyrl_thundersync.rollout.publication import StaleReplicaError, publish

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif("THUNDERSYNC_SERVER_TESTS" not in os.environ, reason="THUNDERSYNC_SERVER_TESTS is not set"),
]

PROBE = random_ids(0, 64)


@pytest.fixture
def server(checkpoints, tmp_path):
    """Starts a server of `untied0`; yields a function of its further arguments that returns its address."""
    started = []

    def start(*arguments: str) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "skyrl.backends.skyrl_train.inference_servers.vllm_server_actor", "--model",
                   checkpoints["untied0"].folder, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
                   "--max-model-len", "1024", "--enforce-eager", "--worker-cls",
                   "vllm.v1.worker.cpu_worker.CPUWorker", *arguments]  # fmt: skip
        cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
        with (tmp_path / "server.log").open("w") as log:
            process = subprocess.Popen(command, env={**os.environ, **cpu}, stdout=log, stderr=log)
        started.append(process)
        address = f"http://127.0.0.1:{port}"
        while True:
            assert process.poll() is None, (tmp_path / "server.log").read_text()[-2000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
            except (urllib.error.URLError, TimeoutError):
                time.sleep(1)
            else:
                return address

    yield start
    for process in started:
        process.terminate()
        process.wait(60)


def publisher(address, model, lora):
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

    from skyrl_thundersync.hosts.skyrl.servers import ServerPublisher

    return ServerPublisher(RemoteInferenceClient(address, [address], 1, model), lora)


def test_a_server_proves_the_checkpoint_it_serves(server, checkpoints):
    target = publisher(server(), checkpoints["untied0"].folder, lora=False)
    old, new = checkpoints["untied0"], checkpoints["untied1"]
    expected = forward_logps(new.model, PROBE)
    acknowledged = asyncio.run(publish(new.folder, 1, target, PROBE, expected, 1e-4))
    assert acknowledged[0].version == target.weight_version == target.client.weight_version == 1
    with pytest.raises(StaleReplicaError, match="serves version 2, but its log-prob"):
        asyncio.run(publish(old.folder, 2, target, PROBE, expected, 1e-4))
    with pytest.raises(FileNotFoundError, match="/no/such/folder"):
        asyncio.run(publish("/no/such/folder", 3, target, PROBE, expected, 1e-4))
    assert target.weight_version == 1


def test_a_server_proves_the_adapter_it_serves(server, checkpoints, tmp_path):
    from peft import LoraConfig, get_peft_model

    address = server("--enable-lora", "--max-lora-rank", "8")
    target = publisher(address, checkpoints["untied0"].folder, lora=True)
    for version in (1, 2):
        torch.manual_seed(version)
        base = tiny_qwen3(2, tied=False)
        adapted = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "up_proj"]))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        folder = tmp_path / str(version)
        adapted.save_pretrained(folder)
        asyncio.run(publish(str(folder), version, target, PROBE, forward_logps(adapted.eval(), PROBE), 1e-4))
        assert target.weight_version == version

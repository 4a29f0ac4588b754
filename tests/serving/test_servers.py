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
from families import save_family
from models import byte_tokenizer
from safetensors.torch import load_file, save_file

from skyrl_thundersync.hosts.skyrl.servers import EXTENSION
from skyrl_thundersync.learner.rank import LearnerRank, RankSpec
from skyrl_thundersync.options.schema import LearnerConfig, LoraSettings
from skyrl_thundersync.rollout.publication import (
    AdapterIgnoredError,
    Expected,
    StaleReplicaError,
    probe_ids,
    publish,
)

WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif("THUNDERSYNC_SERVER_TESTS" not in os.environ, reason="THUNDERSYNC_SERVER_TESTS is not set"),
]

PROBE = probe_ids(byte_tokenizer(), 64)


@pytest.fixture
def server(tmp_path):
    """Starts a server; yields a function of the model's folder and further arguments that returns its address."""
    started = []

    def start(folder: str, *arguments: str) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "skyrl.backends.skyrl_train.inference_servers.vllm_server_actor", "--model",
                   folder, "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "1024",
                   "--enforce-eager", "--language-model-only", "--worker-cls", WORKER, "--worker-extension-cls",
                   EXTENSION, "--distributed-executor-backend", "mp", *arguments]  # fmt: skip
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


def rank_of(folder, lora=None):
    return LearnerRank(
        RankSpec(folder, 0, 1, "127.0.0.1", 0, LearnerConfig(dtype="bfloat16", block_tokens=64), lora=lora)
    )


def stepped(rank):
    with torch.no_grad():
        for parameter in rank.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)


def push(target, rank, folder, version, written_by=None):
    (written_by or rank).save_weights(str(folder))
    expected = Expected(rank.weight_bits(), PROBE, rank.logps(PROBE), 0.5)
    return asyncio.run(publish(str(folder), version, target, expected))


FAMILIES = [("qwen3", 1), ("qwen3", 2), ("glm4_moe_lite", 2), ("qwen3_5", 2)]


def needs(family):
    if family == "qwen3_5":
        pytest.importorskip("torchvision", reason="vLLM's vision-language classes import it")


@pytest.mark.parametrize(("family", "split"), FAMILIES)
def test_a_server_proves_the_checkpoint_it_serves(server, tmp_path, family, split):
    """Split over workers, each of which answers for its part."""
    needs(family)
    folder = save_family(family, tmp_path / "model")
    target = publisher(server(folder, "--tensor-parallel-size", str(split)), folder, lora=False)
    old, rank = rank_of(folder), rank_of(folder)
    stepped(rank)
    acknowledged = push(target, rank, tmp_path / "1", 1)
    assert acknowledged[0].version == target.weight_version == target.client.weight_version == 1
    assert asyncio.run(target.served_version()) == 1
    with pytest.raises(StaleReplicaError, match=r"serves version 2, but \d+ of \d+ groups of its weights"):
        push(target, rank, tmp_path / "2", 2, written_by=old)
    with pytest.raises(FileNotFoundError, match="/no/such/folder"):
        asyncio.run(publish("/no/such/folder", 3, target, Expected({}, PROBE, [0.0] * (len(PROBE) - 1), 1.0)))
    assert target.weight_version == 1


@pytest.mark.parametrize(("family", "split"), [("qwen3", 1), ("qwen3", 2), ("qwen3_5", 2)])
def test_a_server_proves_the_adapter_it_serves(server, tmp_path, family, split):
    needs(family)
    folder = save_family(family, tmp_path / "model")
    lora = LoraSettings(8, 24, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    address = server(folder, "--enable-lora", "--max-lora-rank", "8", "--tensor-parallel-size", str(split))
    target = publisher(address, folder, lora=True)
    old, rank = rank_of(folder, lora), rank_of(folder, lora)
    for version in (0, 1):
        push(target, rank, tmp_path / str(version), version)
        assert target.weight_version == version
        stepped(rank)
    with pytest.raises(StaleReplicaError, match="groups of its weights are not, bit by bit"):
        push(target, rank, tmp_path / "old", 2, written_by=old)
    push(target, rank, tmp_path / "2", 2)
    file = tmp_path / "2" / "adapter_model.safetensors"
    save_file({name.replace("layers.1.", "layers.61."): t for name, t in load_file(file).items()}, file)
    expected = Expected(rank.weight_bits(), PROBE, rank.logps(PROBE), 0.5)
    with pytest.raises(AdapterIgnoredError, match="took nothing of the adapter's"):
        asyncio.run(publish(str(tmp_path / "2"), 3, target, expected))

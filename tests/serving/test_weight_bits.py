"""Bits prove what is served: whatever vLLM makes of a checkpoint keeps their sums, and nothing wrong in it does."""

import asyncio
import json
import random
from pathlib import Path

import pytest
import ray
import torch
from families import save_family
from models import byte_tokenizer
from safetensors.torch import load_file, save_file

from skyrl_thundersync.engines.weight_bits import MODULUS, added, sums, weight_bits
from skyrl_thundersync.hosts.skyrl.client import LocalEngineClient
from skyrl_thundersync.learner.rank import LearnerRank, RankSpec
from skyrl_thundersync.options.schema import LearnerConfig, LoraSettings
from skyrl_thundersync.rollout.publication import (
    AdapterIgnoredError,
    Expected,
    StaleReplicaError,
    probe_ids,
    publish,
)
from skyrl_thundersync.rollout.replica import EngineSpec, start_replicas

pytestmark = pytest.mark.timeout(480)

PROBE = probe_ids(byte_tokenizer(), 64)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TOLERANCE = 0.5  # nats, of tiny models with steep logits in BF16
VISION_LANGUAGE = pytest.param("qwen3_5", id="qwen3_5")
LATENT = pytest.param("glm4_moe_lite", id="glm4_moe_lite")
PLAIN = pytest.param("qwen3", id="qwen3")


def needs(family):
    if family == "qwen3_5":
        pytest.importorskip("torchvision", reason="vLLM's vision-language classes import it")


def test_sums_survive_what_an_engine_does_to_a_tensor():
    a = torch.randn(96, 40).bfloat16()
    q, k, v = a.split([64, 16, 16])
    whole = sums(a, torch.bfloat16)
    assert whole == sums(a.t(), torch.bfloat16) == sums(a.float(), torch.bfloat16)
    assert whole == sums(torch.cat([a, torch.zeros(7, 40).bfloat16()]), torch.bfloat16)
    assert whole == added(("g", sums(part.t().contiguous(), torch.bfloat16)) for part in (v, q, k))["g"]
    assert whole == added(("g", sums(part, torch.bfloat16)) for part in a.chunk(2, 1))["g"]
    words = [int(word) for word in a.view(torch.int16).flatten()]
    assert whole == (sum(words) % MODULUS, sum(word * word for word in words) % MODULUS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps_of_a_unit_in_the_last_place_that_cancel_are_seen(dtype):
    a = torch.randn(1000).to(dtype)
    rng, word = random.Random(0), {torch.bfloat16: torch.int16, torch.float32: torch.int32}[dtype]
    for _ in range(100):
        b = a.clone()
        up, down = rng.sample(range(1000), 2)
        b.view(word)[up] += 1
        b.view(word)[down] -= 1
        assert sums(a, dtype)[0] == sums(b, dtype)[0]
        assert sums(a, dtype) != sums(b, dtype) or torch.equal(a.sort().values, b.sort().values)


def rank_of(folder, lora=None, dtype="bfloat16"):
    return LearnerRank(RankSpec(folder, 0, 1, "127.0.0.1", 0, LearnerConfig(dtype=dtype, block_tokens=64), lora=lora))


def stepped(rank, scale):
    """Parameters moved as an update moves them, at random."""
    with torch.no_grad():
        for parameter in rank.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * scale)


def push(replica, rank, folder, version, written_by=None):
    """Publish what `written_by` wrote (default: the rank itself) where the rank's weights are expected."""
    (written_by or rank).save_weights(str(folder))
    expected = Expected(rank.weight_bits(), PROBE, rank.logps(PROBE), TOLERANCE)
    return load(replica, folder, version, expected), expected


def load(replica, folder, version, expected):
    client = LocalEngineClient([replica], byte_tokenizer(), "policy")
    return asyncio.run(publish(str(folder), version, client, expected))


@pytest.fixture(scope="module")
def served(cluster, tmp_path_factory):
    """served(family, lora) → (folder, replica). Each in a process of its own: vLLM has one kind of model a process."""
    made = {}

    def get(family, lora=0):
        needs(family)
        if (family, lora) not in made:
            folder = save_family(family, tmp_path_factory.mktemp(family))
            spec = EngineSpec(folder, "bfloat16", max_model_len=512, kv_cache_gib=0.125, lora_rank=lora)
            made[family, lora] = folder, start_replicas(spec, 1, tmp_path_factory.mktemp("logs"))[0]
        return made[family, lora]

    yield get
    for _, replica in made.values():
        ray.kill(replica)


@pytest.mark.parametrize("family", [PLAIN, LATENT, VISION_LANGUAGE])
def test_weights_of_each_presets_class_are_proven_and_wrong_ones_named(served, tmp_path, family):
    folder, replica = served(family)
    rank = rank_of(folder)
    stepped(rank, 0.05)
    push(replica, rank, tmp_path / "1", 1)

    old = rank_of(folder)
    old.model.load_state_dict(rank.model.state_dict())
    downs = ("layers.1.mlp.down_proj.weight", "layers.1.mlp.experts.down_proj")
    parameter = next(p for name, p in rank.model.named_parameters() if name.endswith(downs))
    with torch.no_grad():
        parameter.view(torch.int16).view(-1)[5] += 1  # the smallest step there is, of one element
    with pytest.raises(
        StaleReplicaError, match=r"version 2, but 1 of \d+ groups .* not, bit by bit, .*: layers\.1\.mlp\."
    ):
        push(replica, rank, tmp_path / "2", 2, written_by=old)
    _, expected = push(replica, rank, tmp_path / "3", 3)

    stepped(rank, 0.05)
    rank.save_weights(str(tmp_path / "4"))
    (file,) = (tmp_path / "4").glob("*.safetensors")
    tensors = load_file(file)
    gone = next(
        n
        for n in tensors
        if "layers.0." in n and n.endswith(("self_attn.o_proj.weight", "linear_attn.out_proj.weight"))
    )
    del tensors[gone]
    save_file(tensors, file, metadata={"format": "pt"})
    expected = Expected(rank.weight_bits(), PROBE, rank.logps(PROBE), TOLERANCE)
    with pytest.raises(
        StaleReplicaError, match=r"1 of \d+ groups .*: layers\.0\.(self|linear)_attn\. .* partly loaded"
    ):
        load(replica, tmp_path / "4", 4, expected)


@pytest.mark.parametrize("family", [PLAIN, LATENT, VISION_LANGUAGE])
def test_an_adapter_is_proven_and_one_under_wrong_names_named(served, tmp_path, family):
    if family == "glm4_moe_lite":
        pytest.skip("its attention's projections are fused otherwise")
    folder, replica = served(family, 8)
    rank = rank_of(folder, LoraSettings(8, 24, TARGETS))
    push(replica, rank, tmp_path / "0", 0)  # B is zero still
    stepped(rank, 0.1)
    push(replica, rank, tmp_path / "1", 1)

    old = rank_of(folder, LoraSettings(8, 24, TARGETS))
    with pytest.raises(StaleReplicaError, match="groups of its weights are not, bit by bit"):
        push(replica, rank, tmp_path / "2", 2, written_by=old)

    _, expected = push(replica, rank, tmp_path / "3", 3)
    file = tmp_path / "3" / "adapter_model.safetensors"
    misnamed = {name.replace("layers.1.", "layers.61."): tensor for name, tensor in load_file(file).items()}
    save_file(misnamed, file)
    with pytest.raises(AdapterIgnoredError, match="took nothing of the adapter's"):
        load(replica, tmp_path / "3", 4, expected)


def test_what_is_in_a_folder_is_what_its_bits_say(tmp_path):
    """The learner sums parameters, not files: both agree."""
    folder = save_family("qwen3", tmp_path / "m")
    rank = rank_of(folder)
    rank.save_weights(str(tmp_path / "w"))
    written = load_file(next((tmp_path / "w").glob("*.safetensors")))
    assert weight_bits(written.items(), torch.bfloat16) == rank.weight_bits()
    assert json.loads(Path(folder, "config.json").read_text())["model_type"] == "qwen3"

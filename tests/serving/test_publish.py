"""Publication: after it every replica serves the new weights, and no replica can only say so."""

import asyncio
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import ray
import torch
from host import Hosted
from models import forward_logps, random_ids, tiny_qwen3

from skyrl_thundersync.engines.weight_bits import adapter_folder_bits, weight_bits
from skyrl_thundersync.hosts.skyrl.client import LocalEngineClient
from skyrl_thundersync.rollout.publication import (
    AdapterIgnoredError,
    Expected,
    StaleReplicaError,
    probe_ids,
    publish,
    serve_adapter,
)
from skyrl_thundersync.rollout.replica import PublishingError, PublishRefusedError

pytestmark = pytest.mark.timeout(480)

PROBE = random_ids(0, 64)
LONG = {"max_tokens": 600, "ignore_eos": True}


def proof(model, tolerance=1e-4, dtype=torch.float32):
    """What a learner that holds `model` expects of a replica."""
    return Expected(weight_bits(model.state_dict().items(), dtype), PROBE, forward_logps(model, PROBE), tolerance)


def push(replicas, tokenizer, checkpoint, version, expected=None, tolerance=1e-4):
    """Publish `checkpoint`; the learner holds `expected` (default: the same)."""
    client = LocalEngineClient(replicas, tokenizer, "policy")
    expected = proof((expected or checkpoint).model, tolerance)
    return client, asyncio.run(publish(checkpoint.folder, version, client, expected))


@pytest.fixture
def restored(replicas, tokenizer, checkpoints):
    yield replicas
    push(replicas, tokenizer, checkpoints["tied0"], 0)


def test_every_replica_serves_what_was_published(restored, tokenizer, checkpoints):
    """Tied embeddings. Cached prefixes of the old version are gone, and answers carry the new version."""
    prompt = random_ids(3, 200)
    for replica in restored:
        assert ray.get(replica.generate.remote("s", prompt, {"max_tokens": 4})).policy_version == 0
    client, acknowledged = push(restored, tokenizer, checkpoints["tied1"], 7)
    assert [a.replica for a in acknowledged] == ["rollout-0", "rollout-1"]
    assert {a.version for a in acknowledged} == {client.weight_version} == {7}
    for replica in restored:
        sample = ray.get(replica.generate.remote("s", prompt, {"max_tokens": 8}))
        assert (sample.policy_version, sample.cached_tokens) == (7, 0)
        expected = forward_logps(checkpoints["tied1"].model, prompt + sample.ids)[-len(sample.ids) :]
        assert sample.logps == pytest.approx(expected, abs=2e-5)


@pytest.fixture(scope="module")
def untied(host, spec, checkpoints):
    return Hosted(host, "untied", "rollout", replace(spec, model=checkpoints["untied0"].folder)).wait()


def test_untied_embeddings_are_published_too(untied, tokenizer, checkpoints):
    for version, name in enumerate(("untied1", "untied0", "untied1"), start=1):
        push([untied], tokenizer, checkpoints[name], version)
        sample = ray.get(untied.generate.remote("s", PROBE, {"max_tokens": 8}))
        expected = forward_logps(checkpoints[name].model, PROBE + sample.ids)[-len(sample.ids) :]
        assert sample.logps == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(("name", "old", "new"), [("tied", "tied0", "tied1"), ("untied", "untied0", "untied1")])
def test_stale_weights_under_a_right_version_are_caught(name, old, new, restored, untied, tokenizer, checkpoints):
    """The replica loads the old folder and reports the new version; only its weights can give it away."""
    replicas = restored if name == "tied" else [untied]
    with pytest.raises(StaleReplicaError, match=r"version 5, but \d+ of \d+ groups of its weights are not, bit by bit"):
        push(replicas, tokenizer, checkpoints[old], 5, expected=checkpoints[new])
    assert ray.get(replicas[0].stats.remote())["version"] == 5  # so the number alone was right


def test_one_stale_tensor_is_caught(restored, tokenizer, checkpoints, tmp_path):
    """A single matrix of one layer left out of date, in an otherwise right publication."""
    stale = tiny_qwen3(1)
    stale.model.layers[1].mlp.down_proj.weight.data.copy_(
        checkpoints["tied0"].model.model.layers[1].mlp.down_proj.weight
    )
    stale.save_pretrained(tmp_path)
    client = LocalEngineClient(restored, tokenizer, "policy")
    with pytest.raises(StaleReplicaError, match=r"rollout-0 .* 1 of \d+ groups .*: layers\.1\.mlp\. "):
        asyncio.run(publish(str(tmp_path), 6, client, proof(checkpoints["tied1"].model)))
    assert client.weight_version == 0


class OtherAnswer:
    """A target whose replicas answer as told."""

    def __init__(self, **answer):
        self.answer, self.version = answer, None

    async def load_weights(self, path, version, probe_ids):
        good = {"replica": "rollout-3", "version": version, "probe_logps": [-1.0, -2.0], "prefix_cache_reset": True}
        good |= {"bits": {"norm": (1, 1)}, "empty": []}
        return [{**good, **self.answer}]

    def acknowledged(self, version):
        self.version = version


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"version": 3}, "rollout-3 serves version 3 after version 4"),
        ({"prefix_cache_reset": False}, "rollout-3 kept the prefix cache"),
        ({"bits": {}}, r"1 of 1 groups of its weights are not, bit by bit, those that the learner wrote: norm\."),
        ({"probe_logps": [-1.0]}, "scored 1 probe tokens of 2"),
        ({"probe_logps": [-1.0, math.nan]}, "probe token 2"),
        ({"probe_logps": [-1.3, -2.0]}, r"probe token 1 is -1\.300000 and the learner's -1\.000000"),
    ],
)
def test_an_acknowledgement_must_be_whole(answer, said):
    target = OtherAnswer(**answer)
    with pytest.raises(StaleReplicaError, match=said):
        asyncio.run(publish("folder", 4, target, Expected({"norm": (1, 1)}, [1, 2, 3], [-1.0, -2.0], 0.1)))
    assert target.version is None


def test_nothing_is_published_while_a_request_runs(restored, tokenizer, checkpoints):
    replica = restored[0]
    running = replica.generate.remote("s", [1, 2, 3], LONG)
    while not ray.get(replica.stats.remote())["running"]:
        pass
    with pytest.raises(PublishRefusedError, match="rollout-0: version 1 cannot be published while 1 requests run"):
        ray.get(replica.publish.remote(checkpoints["tied1"].folder, 1, PROBE))
    sample = ray.get(running)
    assert (len(sample.ids), sample.policy_version) == (600, 0)
    expected = forward_logps(checkpoints["tied0"].model, [1, 2, 3, *sample.ids])[-600:]
    assert sample.logps == pytest.approx(expected, abs=1e-4)


def test_a_request_that_comes_during_publication_is_refused(restored, checkpoints):
    replica = restored[0]
    publication = replica.publish.remote(checkpoints["tied1"].folder, 9, PROBE)
    early = replica.generate.remote("late-one", [1, 2, 3], {"max_tokens": 2})
    with pytest.raises(PublishingError, match="request late-one came while version 9 was being published"):
        ray.get(early)
    assert ray.get(publication)["version"] == 9
    assert ray.get(replica.generate.remote("s", [1, 2, 3], {"max_tokens": 2})).policy_version == 9


def test_a_cancelled_request_leaves_the_engine(restored, checkpoints):
    replica = restored[0]
    running = replica.generate.remote("s", [1, 2, 3], LONG)
    while not ray.get(replica.stats.remote())["running"]:
        pass
    ray.cancel(running)
    with pytest.raises(ray.exceptions.TaskCancelledError):
        ray.get(running)
    assert ray.get(replica.publish.remote(checkpoints["tied1"].folder, 2, PROBE))["version"] == 2


def test_a_folder_without_weights_is_named_and_the_old_version_goes_on(replicas, tmp_path):
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        ray.get(replicas[0].publish.remote(str(tmp_path), 3, PROBE))
    assert ray.get(replicas[0].generate.remote("s", [1, 2, 3], {"max_tokens": 2})).policy_version == 0


def test_adapters_are_published_by_version(host, spec, checkpoints, tokenizer, tmp_path):
    """Each version's adapter replaces the one before; what is served equals PEFT's own forward."""
    from peft import LoraConfig, get_peft_model

    lora = Hosted(host, "lora", "rollout", replace(spec, lora_rank=8)).wait()
    for version in (1, 2, 3):
        torch.manual_seed(version)
        base = tiny_qwen3(0)
        adapted = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj"]))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        folder = Path(tmp_path) / str(version)
        adapted.save_pretrained(folder)
        client = LocalEngineClient([lora], tokenizer, "policy")
        bits = adapter_folder_bits(str(folder), torch.float32)
        expected = Expected(bits, PROBE, forward_logps(adapted.eval(), PROBE), 1e-4)
        asyncio.run(publish(str(folder), version, client, expected))
        shutil.rmtree(folder)  # what is served needs the folder no more
        sample = ray.get(lora.generate.remote("s", PROBE, {"max_tokens": 8}))
        assert sample.policy_version == version
        expected = forward_logps(adapted, PROBE + sample.ids)[-len(sample.ids) :]
        assert sample.logps == pytest.approx(expected, abs=2e-5)
        assert max(abs(a - b) for a, b in zip(expected, forward_logps(tiny_qwen3(0), PROBE + sample.ids)[-8:])) > 0.01  # noqa: B905


class AdapterTarget:
    """Two replicas that compute as told, before and after an adapter."""

    def __init__(self, before, again, after, **answers):
        self.times, self.after, self.answers, self.version = [before, again], after, answers, None

    async def logps(self, probe_ids):
        return self.times.pop(0)

    async def load_weights(self, path, version, probe_ids):
        return [
            {
                "replica": f"rollout-{i}",
                "version": version,
                "probe_logps": logps,
                "prefix_cache_reset": True,
                "bits": {},
                "empty": [],
                **self.answers,
            }
            for i, logps in enumerate(self.after)
        ]

    def acknowledged(self, version):
        self.version = version


BASE, NOISY, OTHER = [-1.0, -2.0], [-1.0, -2.001], [-1.5, -2.0]


@pytest.mark.parametrize(
    ("again", "after", "error", "said"),
    [
        (
            [BASE, BASE],
            [BASE, BASE],
            AdapterIgnoredError,
            "rollout-0 was given the adapter DIR and computes the same",
        ),
        ([BASE, BASE], [OTHER, BASE], StaleReplicaError, "rollout-1"),
        (
            [NOISY, BASE],
            [NOISY, NOISY],
            AdapterIgnoredError,
            "changed by 1.0e-03 nats, 1.0e-03 from one time to the next",
        ),
        ([BASE, BASE], [[math.nan, -2.0]] * 2, StaleReplicaError, "rollout-0"),
    ],
)
def test_an_adapter_that_makes_no_difference_is_refused(again, after, error, said):
    target = AdapterTarget([BASE, BASE], again, after)
    with pytest.raises(error, match=said):
        asyncio.run(serve_adapter("DIR", 1, target, {}, [1, 2, 3], 1e-2))
    assert target.version is None


def test_an_adapter_that_makes_a_difference_everywhere_is_served():
    target = AdapterTarget([BASE, BASE], [NOISY, BASE], [OTHER, OTHER])
    asyncio.run(serve_adapter("DIR", 1, target, {}, [1, 2, 3], 1e-2))
    assert target.version == 1


def test_a_replica_that_ignores_an_adapter_is_found_out_by_what_it_computes(
    host, spec, checkpoints, tokenizer, tmp_path
):
    from peft import LoraConfig, get_peft_model

    lora = Hosted(host, "evaluated", "rollout", replace(spec, lora_rank=4)).wait()  # not one of vLLM's own sizes
    client = LocalEngineClient([lora], tokenizer, "policy")
    assert asyncio.run(client.logps(PROBE))[0] == pytest.approx(forward_logps(tiny_qwen3(0), PROBE), abs=1e-4)
    adapted = get_peft_model(tiny_qwen3(0), LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
    adapted.save_pretrained(tmp_path / "untrained")  # B is zero

    def serve(name, version):
        folder = str(tmp_path / name)
        bits = adapter_folder_bits(folder, torch.float32)
        asyncio.run(serve_adapter(folder, version, client, bits, PROBE, 1e-3))

    with pytest.raises(AdapterIgnoredError, match="never trained"):
        serve("untrained", 1)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(tmp_path / "trained")
    serve("trained", 2)
    assert client.weight_version == 2


def test_the_probe_is_text_where_a_tokenizer_has_words_for_it(tokenizer):
    ids = probe_ids(tokenizer, 64)
    assert len(ids) == 64 and tokenizer.decode(ids).startswith("You are working in a terminal")
    assert len(probe_ids(tokenizer, 5000)) == 5000

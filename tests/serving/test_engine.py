"""The rollout engine: what it samples, what it says about it, what it refuses, how it fails."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest
import ray
from host import Hosted
from models import forward_logps, random_ids
from ray.exceptions import RayActorError

from skyrl_thundersync.engines.thread import EngineFailedError, RefusedRequestError
from skyrl_thundersync.hosts.skyrl.client import LocalEngineClient
from skyrl_thundersync.rollout.replica import start_replicas

pytestmark = pytest.mark.timeout(480)

SAMPLING = {
    "max_tokens": 24,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "logprobs": 1,
    "min_tokens": 1,
    "stop": None,
}


def client_of(replicas, tokenizer):
    return LocalEngineClient(replicas, tokenizer, "policy")


def generate(client, prompts, sessions=None, **sampling):
    batch = {"prompt_token_ids": prompts, "session_ids": sessions, "sampling_params": {**SAMPLING, **sampling}}
    return asyncio.run(client.generate(batch, model="policy"))


def test_sampled_log_probs_are_those_of_a_plain_forward(replicas, tokenizer, checkpoints):
    prompts = [random_ids(seed, 5 + 7 * seed) for seed in range(16)]
    output = generate(client_of(replicas, tokenizer), prompts)
    for prompt, ids, logps in zip(prompts, output["response_ids"], output["response_logprobs"], strict=True):
        assert len(ids) == len(logps) > 0
        expected = forward_logps(checkpoints["tied0"].model, prompt + ids)[-len(ids) :]
        assert logps == pytest.approx(expected, abs=2e-5)


def test_log_probs_do_not_depend_on_sampling_temperature_or_nucleus(replicas, tokenizer, checkpoints):
    prompts = [random_ids(40, 30)]
    output = generate(client_of(replicas, tokenizer), prompts, temperature=0.5, top_p=0.9)
    ids = output["response_ids"][0]
    expected = forward_logps(checkpoints["tied0"].model, prompts[0] + ids)[-len(ids) :]
    assert output["response_logprobs"][0] == pytest.approx(expected, abs=2e-5)


def test_requests_that_overlap_share_steps(replicas, tokenizer):
    """64 requests of 16 tokens at once on one replica: batched, or its steps would add up to 64 × 16."""
    client = client_of(replicas[:1], tokenizer)
    prompts = [random_ids(seed, 20) for seed in range(64)]
    before = asyncio.run(client.stats())[0]
    output = generate(client, prompts, max_tokens=16, ignore_eos=True)
    after = asyncio.run(client.stats())[0]
    assert [len(ids) for ids in output["response_ids"]] == [16] * 64
    assert after["sampled_tokens"] - before["sampled_tokens"] == 64 * 16
    assert after["steps"] - before["steps"] <= 3 * 16


def test_a_turn_reads_its_prefix_from_the_cache(replicas, tokenizer):
    replica = replicas[0]
    ids = random_ids(77, 100)
    first = ray.get(replica.generate.remote("s", ids, SAMPLING))
    second = ray.get(replica.generate.remote("s", ids + first.ids + random_ids(78, 30), SAMPLING))
    assert second.cached_tokens >= 96


def test_the_same_seed_samples_the_same_tokens(replicas, tokenizer):
    client = client_of(replicas, tokenizer)
    prompt = [random_ids(5, 33)]
    again = [generate(client, prompt, seed=seed)["response_ids"] for seed in (1, 1, 2)]
    assert again[0] == again[1] != again[2]


def test_seeds_hold_where_prompts_are_prefilled_in_parts(replicas, tokenizer):
    """Together the prompts are more than a step takes, so some are split; alone none is."""
    client = client_of(replicas[:1], tokenizer)
    prompts = [random_ids(1000 + seed, 300) for seed in range(16)]
    together = generate(client, prompts, seed=9, max_tokens=6, ignore_eos=True)["response_ids"]
    fresh = client_of(replicas[1:], tokenizer)
    alone = [generate(fresh, [p], seed=9, max_tokens=6, ignore_eos=True)["response_ids"][0] for p in prompts]
    assert together == alone


def test_a_session_stays_with_its_replica_and_sessions_spread(replicas, tokenizer):
    client = client_of(replicas, tokenizer)
    sessions = [f"s{i}" for i in range(8)]

    def served():
        return [row["served"] for row in asyncio.run(client.stats())]

    start = served()
    generate(client, [random_ids(i, 10) for i in range(8)], sessions, max_tokens=2)
    spread = served()
    assert [b - a for a, b in zip(start, spread, strict=True)] == [4, 4]
    for _ in range(3):
        generate(client, [random_ids(9, 10)], ["s3"], max_tokens=2)
    assert sorted(b - a for a, b in zip(spread, served(), strict=True)) == [0, 3]
    for session in sessions:
        asyncio.run(client.finish_session(session))


@ray.remote(num_cpus=0)
class Dying:
    """A replica whose process ends when it is asked for anything but whether it is ready."""

    async def ready(self):
        return {}

    async def generate(self, *_args):
        os.kill(os.getpid(), signal.SIGKILL)

    publish = generate


def test_when_a_replica_dies_its_turns_are_sampled_by_another_as_they_would_have_been(replicas, tokenizer):
    """Same context, seed and version: the trajectory cannot tell. The dead one gets no session and no weights any more."""
    dying, told = Dying.remote(), []
    client = LocalEngineClient([dying, replicas[0]], tokenizer, "policy", told.append)
    prompts, sessions = [random_ids(i, 12) for i in range(4)], [f"d{i}" for i in range(4)]
    output = generate(client, prompts, sessions, seed=3)
    alone = generate(client_of(replicas[:1], tokenizer), prompts, seed=3)
    assert output["response_ids"] == alone["response_ids"]
    assert output["replicas"] == [1] * 4
    assert len(told) == 1 and "rollout-0 died; 1 rollout replicas go on" in told[0]
    assert len(asyncio.run(client.stats())) == 1


def test_with_the_last_replica_the_run_ends(cluster, tokenizer):
    with pytest.raises(RayActorError):
        generate(client_of([Dying.remote()], tokenizer), [random_ids(0, 12)])


def test_a_stop_string_leaves_ids_and_log_probs_equally_long(replicas, tokenizer, checkpoints):
    stops = ["a", "e", "0", "x"]
    prompts = [tokenizer.encode(f"word {seed}\n") for seed in range(24)]
    output = generate(
        client_of(replicas, tokenizer), prompts, stop=stops, include_stop_str_in_output=True, max_tokens=200
    )
    stopped = 0
    for prompt, ids, logps, text, reason in zip(
        prompts,
        output["response_ids"],
        output["response_logprobs"],
        output["responses"],
        output["stop_reasons"],
        strict=True,
    ):
        assert len(ids) == len(logps)
        assert text == tokenizer.decode(ids, skip_special_tokens=True)
        expected = forward_logps(checkpoints["tied0"].model, prompt + ids)[-len(ids) :]
        assert logps == pytest.approx(expected, abs=5e-5)
        if reason == "stop" and ids[-1] != tokenizer.eos_token_id:
            assert text.endswith(tuple(stops))
            stopped += 1
    assert stopped > 0


def test_an_answer_ends_at_the_end_token_or_at_its_limit(replicas, tokenizer):
    client = client_of(replicas, tokenizer)
    output = generate(client, [random_ids(seed, 12) for seed in range(32)], max_tokens=150)
    for ids, reason in zip(output["response_ids"], output["stop_reasons"], strict=True):
        assert (reason == "stop") == (ids[-1] == tokenizer.eos_token_id)
        assert reason == "stop" or (reason == "length" and len(ids) == 150)
    assert set(output["stop_reasons"]) == {"stop", "length"}


def test_an_answer_stops_at_the_context_limit(replicas, tokenizer):
    output = generate(client_of(replicas, tokenizer), [random_ids(1, 1020)], ignore_eos=True, max_tokens=50)
    assert len(output["response_ids"][0]) == 4
    assert output["stop_reasons"] == ["length"]


@pytest.mark.parametrize(
    ("prompt", "sampling", "said"),
    [
        ([], {}, "empty prompt"),
        ([1] * 1024, {}, "1024 prompt tokens and the context limit is 1024"),
        ([1, 2, 320], {}, "the vocabulary has 320"),
        ([1, 2], {"top_p": 3.0}, "top_p"),
        ([1, 2], {"no_such_parameter": 3.0}, "no_such_parameter"),
    ],
)
def test_what_cannot_be_served_is_refused_and_the_engine_goes_on(replicas, tokenizer, prompt, sampling, said):
    client = client_of(replicas[:1], tokenizer)
    with pytest.raises(RefusedRequestError, match=said):
        generate(client, [prompt], **sampling)
    assert generate(client, [[1, 2, 3]])["response_ids"][0]


def test_the_client_refuses_what_it_would_have_to_guess(replicas, tokenizer):
    client = client_of(replicas, tokenizer)
    with pytest.raises(ValueError, match="token ids"):
        asyncio.run(client.generate({"prompts": [[{"role": "user", "content": "x"}]], "sampling_params": SAMPLING}))
    with pytest.raises(ValueError, match="sampling_params"):
        asyncio.run(client.generate({"prompt_token_ids": [[1]], "sampling_params": None}))
    with pytest.raises(ValueError, match="no-such-model"):
        asyncio.run(client.generate({"prompt_token_ids": [[1]], "sampling_params": SAMPLING}, model="no-such-model"))
    with pytest.raises(NotImplementedError, match="chat_completion"):
        asyncio.run(client.chat_completion({}))


def test_a_missing_model_folder_is_named(cluster, spec):
    actor = start_replicas(replace(spec, model="/no/such/folder"), 1, cluster)[0]
    with pytest.raises(ray.exceptions.RayActorError, match="no model folder /no/such/folder"):
        ray.get(actor.ready.remote())


def test_an_exception_in_the_engine_reaches_waiting_and_later_calls(host, spec):
    """Whatever the stepping thread raises, nobody waits for ever, and everybody sees where it came from."""
    replica = Hosted(host, "doomed", "rollout", spec).wait()

    def fail_in_the_engine(_engine):
        raise ZeroDivisionError("deliberate fault")

    waiting = [replica.generate.remote(f"s{i}", random_ids(i, 8), {**SAMPLING, "max_tokens": 900, "ignore_eos": True})
               for i in range(4)]  # fmt: skip
    while ray.get(replica.stats.remote())["running"] < 4:
        pass
    host.on_thread.remote("doomed", fail_in_the_engine)
    later = replica.generate
    for reference in waiting:
        with pytest.raises(EngineFailedError, match=r"(?s)in fail_in_the_engine.*ZeroDivisionError: deliberate fault"):
            ray.get(reference, timeout=30)
    for call in (later.remote("s", [1, 2], SAMPLING), replica.publish.remote(spec.model, 1, [1, 2])):
        with pytest.raises(EngineFailedError, match="ZeroDivisionError: deliberate fault"):
            ray.get(call, timeout=30)

"""The teacher: its scores are those of a plain forward at every position, and each token is computed about once."""

import asyncio
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
from host import Hosted
from models import byte_tokenizer, forward_logps, random_ids, save, tiny_qwen3

from skyrl_thundersync.stream.sources import Scores, Source, TrajectoryId
from skyrl_thundersync.teacher.client import TeacherClient, TeacherError, start_teachers
from skyrl_thundersync.teacher.preflight import (
    PreflightError,
    check_context,
    check_scores,
    check_vocabularies,
    same_checkpoint,
)
from skyrl_thundersync.teacher.scores import NeedContext, TeacherScores, TeacherSpec

pytestmark = pytest.mark.timeout(480)

BACKENDS = ("vllm", "transformers")
SUPPORT = 24


@pytest.fixture(scope="module")
def teacher_spec(checkpoints):
    return TeacherSpec(
        checkpoints["untied0"].folder,
        dtype="float32",
        max_model_len=2048,
        cache_gib=0.125,
        max_num_batched_tokens=256,
        support=SUPPORT,
    )


@pytest.fixture(scope="module")
def teachers(cluster, host, teacher_spec):
    """One replica of each backend."""
    transformers = start_teachers(replace(teacher_spec, backend="transformers"), 1, cluster)[0]
    return {"vllm": Hosted(host, "teacher", "vllm teacher", teacher_spec).wait(), "transformers": transformers}


@pytest.fixture(scope="module")
def model(checkpoints):
    return checkpoints["untied0"].model


def turns(seed: int, lengths: list[tuple[int, int]], trajectory=None) -> list[Source]:
    """Sources of one trajectory: (new context tokens, action tokens) a turn, every turn extending the one before."""
    trajectory = trajectory or TrajectoryId(f"group{seed}", 0)
    made, total = [], 0
    for turn, (context, action) in enumerate(lengths):
        made.append(
            Source(
                trajectory=trajectory,
                turn=turn,
                prefix=total,
                context_ids=tuple(random_ids(1000 * seed + 2 * turn, context)),
                action_ids=tuple(random_ids(1000 * seed + 2 * turn + 1, action)),
                mask=(1,) * action,
                sampler_logps=(0.0,) * action,
                finish_reason="stop",
                policy_version=0,
            )
        )
        total += context + action
    return made


def realised(sources: list[Source]) -> list[int]:
    """The last source's whole context and action."""
    ids: list[int] = []
    for source in sources:
        ids = [*ids[: source.prefix], *source.context_ids, *source.action_ids]
    return ids


def brute_force(model, sources: list[Source]) -> list[tuple[float, ...]]:
    """Each turn by one whole forward of its own."""
    scores = []
    for turn in range(len(sources)):
        ids = realised(sources[: turn + 1])
        scores.append(tuple(forward_logps(model, ids)[len(ids) - 1 - len(sources[turn].action_ids) :]))
    return scores


async def score_all(client, sources):
    scores = [(await client.score(source)).logps for source in sources]
    await client.close(sources[0].trajectory)
    return scores


def close_to(got, expected):
    for row, want in zip(got, expected, strict=True):
        assert row == pytest.approx(want, abs=5e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_equal_a_brute_force_forward_at_every_position(backend, teachers, model):
    """Long and short turns, one-token actions, a one-token prompt, turns without new context, several chunks."""
    shapes = [
        [(400, 40), (300, 1), (1, 200), (30, 300)],
        [(1, 1), (1, 1), (0, 5), (63, 64)],
        [(31, 1), (31, 33), (700, 2)],
    ]
    cases = [turns(seed, shape) for seed, shape in enumerate(shapes)]
    client = TeacherClient([teachers[backend]], 60, 0)

    async def together():
        return await asyncio.gather(*(score_all(client, sources) for sources in cases))

    for sources, got in zip(cases, asyncio.run(together()), strict=True):
        close_to(got, brute_force(model, sources))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_support_is_the_most_probable_tokens_at_every_position(backend, teachers, model):
    """Of each turn, earlier ones out of the cache; ties may come in any order."""
    sources = turns(5, [(300, 20), (40, 1), (300, 30)])
    client = TeacherClient([teachers[backend]], 60, 0)

    async def supports():
        found = [(await client.score(source)).support for source in sources]
        await client.close(sources[0].trajectory)
        return found

    for turn, (source, support) in enumerate(zip(sources, asyncio.run(supports()), strict=True)):
        ids = realised(sources[: turn + 1])
        with torch.no_grad():
            logps_nV = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].float(), -1)[
                -len(source.action_ids) :
            ]
        best = logps_nV.topk(SUPPORT, -1).values.numpy()
        assert support.logps_nk == pytest.approx(best, abs=5e-5)
        assert support.logps_nk == pytest.approx(np.take_along_axis(logps_nV.numpy(), support.ids_nk, -1), abs=5e-5)
        assert all(len(set(row)) == SUPPORT for row in support.ids_nk.tolist())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_branch_is_scored_in_the_context_it_was_sampled_in(backend, teachers, model):
    """The second turn's context drops most of the first turn (as templates that forget thinking do); then it goes on."""
    first, second, third = turns(7, [(100, 60), (20, 30), (20, 30)])
    second = replace(second, prefix=90)
    third = replace(third, prefix=90 + 50)
    sources = [first, second, third]
    client = TeacherClient([teachers[backend]], 60, 0)
    close_to(asyncio.run(score_all(client, sources)), brute_force(model, sources))


@pytest.mark.parametrize("backend", BACKENDS)
def test_samples_that_begin_alike_do_not_read_each_others_scores(backend, teachers, model):
    """The same tokens in two trajectories, and the same request twice: never an answer out of the cache."""
    twins = [turns(11, [(64, 64)], TrajectoryId("twins", sample)) for sample in (0, 1)]
    client = TeacherClient([teachers[backend]], 60, 0)
    expected = brute_force(model, twins[0])
    for sources in twins:
        close_to([asyncio.run(client.score(sources[0])).logps], expected)
    ids = realised(twins[0])
    for _ in range(2):
        again = ray.get(teachers[backend].score.remote(str(twins[0][0].trajectory), 0, ids, 64))
        close_to([again.logps], expected)


def test_an_answer_out_of_the_cache_is_thrown_away_and_computed_again(teachers, model):
    """vLLM serves a repeated request wholly from its cache, and what it says of those positions is garbage."""
    teacher = teachers["vllm"]
    ids = random_ids(12, 160)
    before = ray.get(teacher.stats.remote())["rescored"]
    first, second = (ray.get(teacher.score.remote("garbage", 0, ids, 20)) for _ in range(2))
    assert ray.get(teacher.stats.remote())["rescored"] == before + 1
    assert second.logps == pytest.approx(first.logps, abs=1e-6)
    assert (first.computed_tokens, second.cached_tokens) == (160, 0)
    assert second.computed_tokens > 160  # both tries count


LENGTHS = [(200, 48), *[(60, 48)] * 9]


def ratio(replica) -> float:
    client = TeacherClient([replica], 60, 0)
    asyncio.run(score_all(client, turns(21, LENGTHS)))
    return client.take_counts().tokens_ratio


def test_each_token_is_computed_about_once(teachers):
    """Transformers: exactly (the last token is never an input). vLLM: half a 32-token block more a turn, on average."""
    assert ratio(teachers["transformers"]) <= 1.0
    assert ratio(teachers["vllm"]) <= 1 + 32 * 10 / 1220


def test_without_the_prefix_cache_every_turn_costs_its_whole_context(host, teacher_spec, model):
    teacher = Hosted(host, "uncached", "vllm teacher", replace(teacher_spec, prefix_cache=False)).wait()
    sources = turns(21, LENGTHS)
    client = TeacherClient([teacher], 60, 0)
    close_to(asyncio.run(score_all(client, sources)), brute_force(model, sources))
    counts = client.take_counts()
    assert counts.computed_tokens == sum(len(realised(sources[: n + 1])) for n in range(len(sources)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_replica_that_lost_the_trajectory_gets_it_whole(backend, teachers, model):
    teacher = teachers[backend]
    assert ray.get(teacher.score.remote("unheard-of", 5, [1, 2, 3], 6)) == NeedContext(0)
    sources = turns(31, [(50, 20), (30, 20), (10, 20)])
    client = TeacherClient([teacher], 60, 0)

    async def lose_after_the_first():
        scores = [(await client.score(sources[0])).logps]
        await teacher.close.remote(str(sources[0].trajectory))
        return scores + [(await client.score(source)).logps for source in sources[1:]]

    close_to(asyncio.run(lose_after_the_first()), brute_force(model, sources))


def test_a_small_budget_drops_caches_and_changes_no_score(host, teacher_spec, model):
    """2 KiB hold no trajectory: every turn is computed from its ids again."""
    teacher = Hosted(host, "small", "transformers teacher", replace(teacher_spec, cache_gib=2**-19)).wait()
    client = TeacherClient([teacher], 60, 0)
    sources = turns(41, [(50, 20), (30, 20), (10, 20)])

    async def scores():
        return [(await client.score(source)).logps for source in sources]

    close_to(asyncio.run(scores()), brute_force(model, sources))
    stats = ray.get(teacher.stats.remote())
    assert (stats["cache_bytes"], stats["evicted"]) == (0, 3)


def test_closing_frees_the_cache(teachers):
    teacher = teachers["transformers"]
    client = TeacherClient([teacher], 60, 0)
    sources = turns(51, [(50, 20)])
    before = ray.get(teacher.stats.remote())
    asyncio.run(client.score(sources[0]))
    # 69 inputs × 3 layers × K and V × 2 heads × 32 × 4 bytes
    assert ray.get(teacher.stats.remote())["cache_bytes"] - before["cache_bytes"] == 69 * 3 * 2 * 2 * 32 * 4
    asyncio.run(client.close(sources[0].trajectory))
    assert ray.get(teacher.stats.remote()) == before


def test_a_turn_of_no_tokens_needs_no_score_but_its_context_stays(teachers, model):
    sources = turns(61, [(50, 20), (30, 0), (10, 20)])
    client = TeacherClient([teachers["transformers"]], 60, 0)
    got = asyncio.run(score_all(client, sources))
    assert got[1] == ()
    close_to([got[2]], [brute_force(model, sources)[2]])


@ray.remote(num_cpus=0)
class Flaky:
    """A replica that fails `failures` times, in the given way, then answers with `logp` for every token."""

    def __init__(self, how, failures, logp=-1.0):
        self.how, self.failures, self.logp, self.asked = how, failures, logp, 0

    async def score(self, trajectory, start, new_ids, first):
        self.asked += 1
        if self.asked <= self.failures:
            if self.how == "hang":
                await asyncio.sleep(3600)
            if self.how == "die":
                ray.actor.exit_actor()
            raise OSError("connection reset by teacher")
        return TeacherScores((self.logp,) * (start + len(new_ids) - first), len(new_ids), start)

    async def close(self, trajectory):
        pass

    async def ready(self):
        return {"replica": "flaky", "max_len": 1000, "vocab_size": 320}

    async def count(self):
        return self.asked


def flaky_client(cluster, *args, timeout=30.0, retries=2):
    replica = Flaky.remote(*args)
    ray.get(replica.ready.remote())
    return replica, TeacherClient([replica], timeout, retries, backoff_s=0.01)


def test_a_failed_request_is_tried_again(cluster):
    _, client = flaky_client(cluster, "raise", 2)
    source = turns(1, [(5, 3)])[0]
    assert asyncio.run(client.score(source)) == Scores((-1.0,) * 3)
    assert client.take_counts().retries == 2


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", " in 3 tries: OSError: connection reset by teacher"),
        ("hang", r" in 3 tries: no answer within 0\.5 s"),
        ("die", ", the last replica, teacher-0, died: ActorDiedError: The actor .*"),
    ],
)
def test_after_the_last_try_the_request_and_its_own_error_are_told_on_one_line(cluster, how, said):
    """No traceback and no escape code of Ray's."""
    replica, client = flaky_client(cluster, how, 99, timeout=0.5 if how == "hang" else 30)
    source = turns(4, [(2000, 3)])[0]
    with pytest.raises(TeacherError) as raised:
        asyncio.run(client.score(source))
    assert re.fullmatch(rf"scoring 2,003 tokens of group4_0/turn0 failed{said}", str(raised.value))
    if how != "die":
        assert ray.get(replica.count.remote()) == 3


def test_when_a_replica_dies_another_goes_on(cluster, teachers, model):
    dying, told = Flaky.remote("die", 99), []
    client = TeacherClient([dying, teachers["transformers"]], 30, 1, backoff_s=0.01, say=told.append)
    sources = turns(71, [(50, 20), (30, 20)])
    close_to(asyncio.run(score_all(client, sources)), brute_force(model, sources))
    assert len(told) == 1 and "teacher-0 died; 1 teacher replicas go on" in told[0]


@pytest.mark.parametrize("logp", [math.nan, -math.inf])
def test_a_score_that_is_no_number_stops_at_once_and_names_the_source(cluster, logp):
    replica, client = flaky_client(cluster, "raise", 0, logp)
    source = turns(5, [(5, 3)])[0]
    with pytest.raises(TeacherError, match=rf"action token 0 \(id {source.action_ids[0]}\) of group5_0/turn0 is "):
        asyncio.run(client.score(source))
    assert ray.get(replica.count.remote()) == 1


def test_a_score_that_is_no_number_under_the_mask_harms_nobody(cluster):
    _, client = flaky_client(cluster, "raise", 0, math.nan)
    source = replace(turns(5, [(5, 3)])[0], mask=(0, 0, 0))
    assert len(asyncio.run(client.score(source)).logps) == 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("shape", "said"),
    [([(2040, 9)], "2049 tokens and the teacher's context limit is 2048"), ([(0, 5)], "context of at")],
)
def test_what_cannot_be_scored_is_not_tried_again(backend, shape, said, teachers):
    client = TeacherClient([teachers[backend]], 30, 5, backoff_s=60)
    with pytest.raises(
        TeacherError, match=rf"^scoring [\d,]+ tokens of group6_0/turn0 failed: ValueError: .*{said}.*$"
    ):
        asyncio.run(client.score(turns(6, shape)[0]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_longest_trajectory_is_scored(backend, teachers, model):
    sources = turns(6, [(2040, 8)])
    client = TeacherClient([teachers[backend]], 60, 0)
    close_to(asyncio.run(score_all(client, sources)), brute_force(model, sources))


def test_vocabularies_are_compared_id_by_id():
    student = byte_tokenizer()
    check_vocabularies(student, byte_tokenizer(), teacher_rows=259)
    check_vocabularies(student, byte_tokenizer(), teacher_rows=320)  # padded rows
    longer = byte_tokenizer()
    longer.add_tokens(["<|tool|>"])
    check_vocabularies(student, longer, teacher_rows=320)
    with pytest.raises(
        PreflightError, match=r"token id 259 is '<\|tool\|>' to the student and no token to the teacher"
    ):
        check_vocabularies(longer, student, teacher_rows=320)
    with pytest.raises(PreflightError, match=r"258 vocabulary rows .* token id 258"):
        check_vocabularies(student, byte_tokenizer(), teacher_rows=258)


def test_a_swapped_token_is_named(tmp_path):
    """Same size, same tokens, two ids exchanged: sizes say nothing."""
    import json

    from transformers import AutoTokenizer

    byte_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    file.write_text(json.dumps(content))
    swapped = AutoTokenizer.from_pretrained(tmp_path)
    first = min(vocab["A"], vocab["B"])
    with pytest.raises(PreflightError, match=f"token id {first} is 'A' to the student and 'B' to the teacher"):
        check_vocabularies(byte_tokenizer(), swapped, teacher_rows=320)


def test_preflight_agrees_with_itself_and_with_the_student_it_is(teachers, checkpoints):
    probe = random_ids(99, 200)
    same = forward_logps(checkpoints["untied0"].model, probe)
    other = forward_logps(checkpoints["untied1"].model, probe)
    replicas = list(teachers.values())
    assert asyncio.run(check_scores(replicas, probe, 1e-4, same)) < 1e-4
    with pytest.raises(PreflightError, match="from teacher.*from the student"):
        asyncio.run(check_scores(replicas, probe, 1e-4, other))


def test_preflight_catches_replicas_that_disagree(teachers, cluster):
    other = Flaky.remote("raise", 0)
    with pytest.raises(PreflightError, match="from flaky, request 1, .* from teacher-0, request 1"):
        asyncio.run(check_scores([teachers["transformers"], other], random_ids(1, 20), 1e-4))


def test_preflight_compares_context_limits(teachers):
    described = ray.get([teacher.ready.remote() for teacher in teachers.values()])
    check_context(described, 2048)
    with pytest.raises(PreflightError, match="takes 2048 tokens and a trajectory can have 2049"):
        check_context(described, 2049)


def test_one_checkpoint_under_two_paths_is_recognised(checkpoints, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(checkpoints["untied0"].folder)
    assert same_checkpoint(str(link), checkpoints["untied0"].folder)
    assert not same_checkpoint(checkpoints["untied1"].folder, checkpoints["untied0"].folder)


def test_a_recurrent_state_cannot_be_cut_and_is_computed_again(host, tmp_path):
    """Gated-delta hybrids: a branch starts from the ids, and the scores are still those of a plain forward."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_5_text", vocab_size=320, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=4,
        num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16, linear_conv_kernel_dim=4,
    )  # fmt: skip
    hybrid = AutoModelForCausalLM.from_config(config).float().eval()
    folder = save(hybrid, tmp_path)
    spec = TeacherSpec(folder, dtype="float32", max_model_len=512)
    teacher = Hosted(host, "hybrid", "transformers teacher", spec).wait()
    first, second, third = turns(81, [(60, 20), (20, 30), (20, 30)])
    sources = [first, second, replace(third, prefix=70)]
    client = TeacherClient([teacher], 60, 0)
    close_to(asyncio.run(score_all(client, sources)), brute_force(hybrid, sources))


def test_two_models_give_two_answers(model):
    """The tests above could not tell wrong from right if every model scored alike."""
    ids = random_ids(2, 50)
    assert (
        max(abs(a - b) for a, b in zip(forward_logps(model, ids), forward_logps(tiny_qwen3(9), ids), strict=True)) > 1
    )


def test_a_teacher_split_over_two_devices_gives_the_same_scores(cluster, teacher_spec, model):
    """Its workers are processes of their own. An engine argument reaches vLLM."""
    split = replace(teacher_spec, tensor_parallel_size=2, engine_options={"max_num_seqs": 3})
    teacher = start_teachers(split, 1, cluster)[0]
    cases = [turns(seed, [(40, 40), (30, 1), (1, 60)]) for seed in range(4)]
    client = TeacherClient([teacher], 120, 0)

    async def together():
        return await asyncio.gather(*(score_all(client, sources) for sources in cases))

    for sources, got in zip(cases, asyncio.run(together()), strict=True):
        close_to(got, brute_force(model, sources))
    ray.kill(teacher)

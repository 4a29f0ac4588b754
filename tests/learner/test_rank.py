"""A rank's life: LoRA, saving, aborted batches, finish's refusals, bad input, models without an exact cut."""

import dataclasses
import mmap
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants as hub
from plain import VOCAB, batch, distance, make_rank, plain_gradient, plain_model, settings, trajectory
from ranks import PROBE, full, in_processes, lora, niceness, still, works_of
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from skyrl_thundersync.data.byte_tokenizer import byte_tokenizer
from skyrl_thundersync.learner.actor import CPU_NICENESS
from skyrl_thundersync.learner.cut_state import layer_kinds
from skyrl_thundersync.learner.rank import LearnerRank, RankSpec
from skyrl_thundersync.learner.student import load_student, save_student
from skyrl_thundersync.options.schema import LoraSettings
from skyrl_thundersync.preflight.models import adapter_base
from skyrl_thundersync.stream.sources import Append, CloseGroup, CloseTrajectory, TrajectoryId

LOWEST = 19
T0 = TrajectoryId("g", 0)


def stock_logps(model, ids):
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


@pytest.mark.timeout(200)
def test_lora_trains_the_adapter_alone_and_saves_it_whole(folder_of, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    folder, out = folder_of("qwen3"), tmp_path / "adapter"
    (found,) = in_processes(lora, folder, str(out), world=1)
    assert not found["frozen_moved"]
    assert all("lora_" in name for name in found["gradient"])
    plain = get_peft_model(
        plain_model(folder, torch.float32),
        LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    ).eval()
    plain.load_state_dict(found["adapter"], strict=False)
    gradient, _ = plain_gradient("", works_of(1), torch.float32, model=plain)
    assert distance(found["gradient"], {k: g for k, g in gradient.items() if "lora_" in k}) <= 3e-6
    with safe_open(out / "adapter_model.safetensors", "pt") as file:
        saved = {name.replace(".lora_A.weight", "").replace(".lora_B.weight", "") for name in file.keys()}  # noqa: SIM118
    targets = {n for n, m in plain_model(folder, torch.float32).named_modules() if isinstance(m, torch.nn.Linear)}
    assert saved == {f"base_model.model.{n}" for n in targets if n != "lm_head"}
    again = PeftModel.from_pretrained(plain_model(folder, torch.float32), out).eval()
    assert stock_logps(again, PROBE) == pytest.approx(found["logps"], abs=1e-5)
    assert stock_logps(plain_model(folder, torch.float32), PROBE) != pytest.approx(found["logps"], abs=1e-4)


def test_an_adapter_is_saved_with_the_tokenizer_and_is_no_model(folder_of, tmp_path):
    folder, out = shutil.copytree(folder_of("qwen3"), tmp_path / "base"), tmp_path / "adapter"
    byte_tokenizer().save_pretrained(folder)
    spec = RankSpec(str(folder), 0, 1, "127.0.0.1", 0, settings(), lora=LoraSettings(4, 8, "all-linear"))
    save_student(load_student(spec)[0], spec, out)
    again = AutoTokenizer.from_pretrained(out)
    assert again.chat_template == byte_tokenizer().chat_template and again.get_vocab() == byte_tokenizer().get_vocab()
    assert adapter_base(out) == str(folder)
    assert not {"config.json", "generation_config.json", "model.safetensors"} & {file.name for file in out.iterdir()}


@pytest.mark.timeout(200)
def test_saved_weights_are_those_stepped_and_finish_refuses_what_is_wrong(folder_of, tmp_path):
    folder, out = folder_of("qwen3"), tmp_path / "weights"
    (found,) = in_processes(full, folder, str(out), world=1)
    assert not found["aborted_moved"] and found["last"].stepped
    open_batch, changed = found["errors"]
    assert "trajectory g0_0" in open_batch and "group g0" in open_batch
    assert "parameters changed" in changed
    assert stock_logps(plain_model(str(out), torch.float32), PROBE) == pytest.approx(found["logps"], abs=1e-5)
    assert [p.name for p in tmp_path.iterdir()] == ["weights"]
    missing = {p.name for p in Path(folder).iterdir()} - {p.name for p in out.iterdir()}
    assert missing == set()


@pytest.mark.timeout(200)
def test_without_learning_the_gap_stays_flat(folder_of):
    (found,) = in_processes(still, folder_of("qwen3"), world=1)
    assert found == [found[0]] * 5


def some(turns=({"action": 4}, {"context": 2, "action": 3})):
    rng = random.Random(0)
    return trajectory(rng, "g", 0, tuple(rng.randrange(VOCAB) for _ in range(5)), list(turns))


def changed(work: Append, **fields) -> Append:
    return Append(dataclasses.replace(work.source, **fields), work.scores)


@pytest.fixture
def rank(folder_of):
    return make_rank(folder_of("qwen3"))


def test_bad_sources_are_named(rank):
    first, second = some()
    with pytest.raises(ValueError, match=r"source g_0/turn0: token id 96 is outside the student's 96 embedding rows"):
        rank.run(changed(first, action_ids=(1, 2, 96, 3)))
    with pytest.raises(ValueError, match="source g_0/turn0: 4 teacher scores wanted, got none"):
        rank.run(Append(first.source, None))
    with pytest.raises(ValueError, match="source g_0/turn0: 4 teacher scores wanted, got 2"):
        rank.run(Append(first.source, (0.0, 0.0)))
    with pytest.raises(ValueError, match="source g_0/turn0: its context is empty"):
        rank.run(changed(first, context_ids=()))
    with pytest.raises(ValueError, match="source g_0/turn1: turn 0 of its trajectory was expected"):
        rank.run(second)
    rank.abort_batch()
    rank.run(first)
    with pytest.raises(ValueError, match="source g_0/turn1: repeats 99 tokens"):
        rank.run(changed(second, prefix=99))
    with pytest.raises(
        ValueError, match="source g_0/turn1: sampled under policy version 1, but this batch is of version 0"
    ):
        rank.run(changed(second, policy_version=1))
    with pytest.raises(ValueError, match="group g cannot close: open trajectories g_0"):
        rank.run(CloseGroup("g"))
    rank.run(CloseTrajectory(T0, 1.0))
    with pytest.raises(ValueError, match="g_0 is closed already"):
        rank.run(second)
    with pytest.raises(ValueError, match="g_0 is closed already"):
        rank.run(CloseTrajectory(T0, 1.0))


def test_each_item_tells_its_seconds_on_the_prompt_its_cpu_time_and_its_page_faults(rank):
    pages = 1000

    def touch(gradient):
        fresh = mmap.mmap(-1, pages * mmap.PAGESIZE)
        fresh.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(pages):
            fresh[page * mmap.PAGESIZE] = 1

    first, second = some()
    handle = next(rank.model.parameters()).register_hook(touch)
    done = [rank.run(work) for work in (first, second, CloseTrajectory(T0, 1.0), CloseGroup("g"))]
    handle.remove()
    assert [d.prompt_seconds > 0 for d in done] == [True, False, False, True]
    assert all(d.prompt_seconds < d.seconds for d in done)
    assert all(d.cpu_seconds > 0 for d in done)
    assert done[2].page_faults >= pages and done[3].page_faults >= pages, "each ran a backward"


def test_the_block_changes_between_batches_only(rank):
    first, second = some()
    rank.set_block_tokens(2**31)
    rank.run(first)
    with pytest.raises(RuntimeError, match="block_tokens cannot change with trajectory g_0, group g open"):
        rank.set_block_tokens(0)
    for work in (second, CloseTrajectory(T0, 1.0), CloseGroup("g")):
        rank.run(work)
    rank.set_block_tokens(0)


def test_a_trajectory_without_turns_closes(rank):
    assert rank.run(CloseTrajectory(T0, 0.0)).n_scored == 0
    assert rank.run(CloseGroup("g")).n_scored == 0
    assert rank.forest.open_names() == []


def test_a_non_finite_gradient_names_its_work_and_leaves_the_rank_usable(rank, folder_of):
    works = [*some(), CloseTrajectory(T0, 1.0), CloseGroup("g")]
    handle = next(rank.model.parameters()).register_hook(lambda g: g * float("nan"))
    rank.run(works[0])
    rank.run(works[1])
    with pytest.raises(FloatingPointError, match="trajectory g_0: its gradient is not finite"):
        rank.run(works[2])
    handle.remove()
    rank.abort_batch()
    for work in works:
        rank.run(work)
    plain, _ = plain_gradient(folder_of("qwen3"), works)
    assert distance(rank.gradient(), plain) <= 1e-12


def test_tied_parameters_have_one_place(folder_of):
    rank = make_rank(folder_of("qwen3"))
    names = [name for name, _, _ in rank.accumulator.layout.places]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert rank.accumulator.layout.size == sum(p.numel() for p in rank.model.parameters())


def test_no_gradient_stays_on_the_parameters(rank):
    for work in batch(seed=3):
        rank.run(work)
        assert all(p.grad is None for p in rank.model.parameters())


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("mistral", {"sliding_window": 16}, "sliding-window"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, "'sliding_attention'"),
        ("gemma2", {}, "sliding_attention"),
        ("gpt_oss", {}, "sliding_attention"),
        ("cohere", {"logit_scale": 0.25}, "logit_scale"),
        ("bamba", {}, "not gated-delta"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope type 'dynamic'",
        ),
    ],
)
def test_models_without_an_exact_cut_are_refused_by_name(family, fields, named):
    with pytest.raises(NotImplementedError, match=f"{family}.*{named}"):
        layer_kinds(AutoConfig.for_model(family, num_hidden_layers=4, **fields))


def test_what_cannot_run_is_refused_before_the_model_loads(tmp_path, folder_of):
    def build(path, objective="opd", **changes):
        return LearnerRank(RankSpec(str(path), 0, 1, "127.0.0.1", 0, settings(**changes), objective))

    with pytest.raises(FileNotFoundError, match=r"student model folder .* has no config.json"):
        build(tmp_path)
    with pytest.raises(ValueError, match="unknown objective 'ppo'"):
        build(folder_of("qwen3"), "ppo")
    with pytest.raises(ValueError, match="accumulator='fp8'"):
        build(folder_of("qwen3"), accumulator="fp8")
    with pytest.raises(ValueError, match="dtype='float16'"):
        build(folder_of("qwen3"), dtype="float16")


@pytest.mark.timeout(200)
def in_the_hub_cache(monkeypatch, cache, name: str, folder: str) -> str:
    """Put a model's files where a download of `name` would, and cut the hub off."""
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    home = cache / f"models--{name.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("0" * 40)
    shutil.copytree(folder, home / "snapshots" / ("0" * 40))
    return name


def test_a_student_is_loaded_by_its_name_on_the_hub(monkeypatch, tmp_path, folder_of):
    name = in_the_hub_cache(monkeypatch, tmp_path / "hub", "org/tiny", folder_of("qwen3"))
    mine, theirs = make_rank(name).model.state_dict(), make_rank(folder_of("qwen3")).model.state_dict()
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    with pytest.raises(FileNotFoundError, match="org/absent: there is no such folder, and the hub gave no such model"):
        make_rank("org/absent")


def test_an_actor_gives_way_only_where_it_leaves_no_core(folder_of):
    cores = len(os.sched_getaffinity(0))
    for threads, wanted in ((cores, min(CPU_NICENESS, LOWEST - os.nice(0))), (cores - 1, 0)):
        if threads:
            assert in_processes(niceness, folder_of("qwen3"), threads, world=1) == [wanted]

"""Checkpoint folders under real crashes: all of a checkpoint or nothing, and nothing resumed that is not what was saved."""

import json
import multiprocessing
import random
import resource
import shutil
import time
from pathlib import Path

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from skyrl_thundersync.learner.answers import Shards, Written
from skyrl_thundersync.process.durable import NotWrittenError, seal
from skyrl_thundersync.runtime.checkpoint import (
    MANIFEST,
    POINTER,
    CheckpointError,
    choose,
    read,
    save,
    steps,
)
from skyrl_thundersync.runtime.driver_state import Continued, driver_random_state, restore_driver_random_state
from skyrl_thundersync.runtime.ranks import require_kept
from skyrl_thundersync.runtime.resume import files_of
from skyrl_thundersync.runtime.same_run import changes, check_run, identity, resume_problems, run_facts

SIZE = 1 << 20
BETAS = "trainer.policy.optimizer_config.adam_betas"


def writer(step: int, run: dict | None = None, size: int = SIZE):
    def write(folder: Path):
        (folder / "optimizer").mkdir()
        (folder / "optimizer" / "a.bin").write_bytes(bytes([step % 256]) * size)
        (folder / "b.json").write_text(json.dumps(step))
        return {"policy_version": step, "run": run or {}}, {}

    return write


def put(folder: Path, *ks: int, **more) -> None:
    for k in ks:
        save(folder, k, SIZE, writer(k, more.get("run")), more.get("keep", -1))


def save_forever(folder: str, start: int) -> None:
    for step in range(start, start + 10_000):
        save(Path(folder), step, SIZE, writer(step), keep=2)


def test_kill_9_at_any_moment_leaves_a_whole_newest_checkpoint(tmp_path):
    context, rng = multiprocessing.get_context("fork"), random.Random(0)
    put(tmp_path, 1)
    newest, cut = 1, 0
    for _ in range(20):
        child = context.Process(target=save_forever, args=(str(tmp_path), newest))  # it comes by `newest` again
        child.start()
        time.sleep(rng.uniform(0.02, 0.4))
        child.kill()
        child.join()
        cut += any(path.suffix in (".part", ".old") for path in tmp_path.iterdir())
        path = choose(tmp_path, "latest", None)
        manifest = read(path, hashes=True)
        assert manifest["global_step"] == manifest["policy_version"] >= newest
        assert (path / "optimizer" / "a.bin").read_bytes() == bytes([manifest["global_step"] % 256]) * SIZE
        newest = manifest["global_step"]
    assert newest > 1 and cut > 1  # it got on, and some kills met a checkpoint half written
    put(tmp_path, newest + 1, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [f"global_step_{newest}", f"global_step_{newest + 1}", POINTER]
    )


def truncate(path):
    with (path / "optimizer" / "a.bin").open("r+b") as file:
        file.truncate(SIZE - 1)


def flip(path):
    with (path / "optimizer" / "a.bin").open("r+b") as file:
        file.seek(SIZE // 2)
        file.write(b"\xff")


def shorten_manifest(path):
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(text[: len(text) // 2])


def edit_manifest(path, **fields):
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**manifest, **fields}))


DAMAGE = {
    "truncated": (truncate, f"torn: optimizer/a.bin has {SIZE - 1} bytes, {SIZE} were written"),
    "missing": (lambda path: (path / "b.json").unlink(), "torn: b.json is missing"),
    "flipped": (flip, "torn: the bytes of optimizer/a.bin are not those written"),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), "torn: it has no manifest.json"),
    "half a manifest": (shorten_manifest, "torn: manifest.json is not whole"),
    "edited": (lambda path: edit_manifest(path, policy_version=7), "torn: manifest.json does not match its own digest"),
    "newer": (lambda path: edit_manifest(path, format_version=2), "has format 2"),
    "foreign": (lambda path: edit_manifest(path, format="x"), "foreign: manifest.json is not of format"),
    "gone": (shutil.rmtree, "there is no checkpoint folder"),
    "SkyRL's": (
        lambda path: [(path / MANIFEST).unlink(), (path / "trainer_state.pt").touch()],
        "written by SkyRL's own trainer",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_it_offered(tmp_path, damage):
    put(tmp_path, 2, 4, 6, 8)
    hurt, message = DAMAGE[damage]
    hurt(tmp_path / "global_step_8")
    flip(tmp_path / "global_step_6")
    path = choose(tmp_path, "latest", None)
    with pytest.raises(CheckpointError) as refused:
        read(path, hashes=True)
    assert str(tmp_path / "global_step_8") in str(refused.value) and message in str(refused.value)
    offered = f"set trainer.resume_mode=from_path trainer.resume_path={tmp_path}/global_step_4"
    assert str(refused.value).endswith(offered)
    assert read(choose(tmp_path, "from_path", f"{tmp_path}/global_step_4"), hashes=True)["global_step"] == 4


def test_without_a_whole_one_before_it_a_new_start_is_offered(tmp_path):
    put(tmp_path, 2)
    truncate(tmp_path / "global_step_2")
    with pytest.raises(CheckpointError, match="start again with trainer.resume_mode=none"):
        read(choose(tmp_path, "latest", None), hashes=False)


def test_what_resume_mode_means(tmp_path):
    assert choose(tmp_path, "latest", None) is None and choose(tmp_path, "none", None) is None
    put(tmp_path, 2, 4)
    assert choose(tmp_path, "none", None) is None
    assert choose(tmp_path, "latest", None) == tmp_path / "global_step_4"
    (tmp_path / POINTER).unlink()  # a crash just before the first pointer
    flip(tmp_path / "global_step_4")
    assert choose(tmp_path, "latest", None) == tmp_path / "global_step_2"
    with pytest.raises(CheckpointError, match="resume_path"):
        choose(tmp_path, "from_path", None)
    with pytest.raises(CheckpointError, match="named global_step_k"):
        choose(tmp_path, "from_path", str(tmp_path))
    (tmp_path / POINTER).write_text("")
    with pytest.raises(CheckpointError, match="no update's number"):
        choose(tmp_path, "latest", None)


def test_a_renamed_checkpoint_is_not_taken_for_another_update(tmp_path):
    put(tmp_path, 2)
    (tmp_path / "global_step_2").rename(tmp_path / "global_step_3")
    with pytest.raises(CheckpointError, match="that of update 2, renamed"):
        read(tmp_path / "global_step_3", hashes=True)


def test_the_oldest_go_and_those_of_a_later_run_neither_count_nor_go(tmp_path):
    put(tmp_path, 2, 4, 6, 8)
    put(tmp_path, 3, keep=2)  # resumed from 2
    assert steps(tmp_path) == [2, 3, 4, 6, 8]
    put(tmp_path, 4, keep=2)
    assert steps(tmp_path) == [3, 4, 6, 8] and choose(tmp_path, "latest", None).name == "global_step_4"
    assert read(tmp_path / "global_step_4", hashes=True)["policy_version"] == 4


def test_a_replacement_cut_in_two_keeps_the_old_one(tmp_path):
    put(tmp_path, 2)
    (tmp_path / "global_step_2").rename(tmp_path / ".global_step_2.old")
    assert read(choose(tmp_path, "latest", None), hashes=True)["global_step"] == 2


def save_with_little_room(folder: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, SIZE // 2))
    try:
        put(Path(folder), 4)
    except OSError:
        return
    raise SystemExit("it was written")


def test_a_write_that_fails_or_cannot_fit_leaves_the_checkpoints_before_it(tmp_path):
    put(tmp_path, 2)
    child = multiprocessing.get_context("fork").Process(target=save_with_little_room, args=(str(tmp_path),))
    child.start()
    child.join()
    assert child.exitcode == 0
    with pytest.raises(CheckpointError, match=r"leaves 64 free; .* Nothing was written(.|\n)*global_step_2"):
        save(tmp_path, 4, 1 << 60, writer(4))
    with pytest.raises(CheckpointError, match=r"MiB; .* Nothing was written"):
        save(tmp_path, 4, 1 << 60, writer(4), margin=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_2", POINTER]
    assert read(choose(tmp_path, "latest", None), hashes=True)["global_step"] == 2


LIES = {
    "absent": (lambda part, name: (part / name).unlink(), "is not in"),
    "short": (lambda part, name: truncate(part), f"has {SIZE - 1} bytes in"),
    "other bytes": (lambda part, name: flip(part), "holds other bytes than were written"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_a_rank_says_to_have_written_must_be_there_before_anything_older_goes(tmp_path, lie):
    """As when a rank's disk is another one than the driver's, or loses what it took."""
    put(tmp_path, 2, 4)
    hurt, message = LIES[lie]
    name = "optimizer/a.bin"

    def write(folder: Path):
        facts, _ = writer(6)(folder)
        claimed = {name: seal(folder / name)}
        hurt(folder, name)
        return facts, claimed

    for step in (6, 8, 10):
        with pytest.raises(
            CheckpointError, match=f"update {step} is not whole: {name} (.*){message}(.|\n)*global_step_4"
        ):
            save(tmp_path, step, SIZE, write, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_2", "global_step_4", POINTER]
    assert read(choose(tmp_path, "latest", None), hashes=True)["global_step"] == 4


def test_a_shard_that_no_rank_lists_is_missed():
    shards = Shards(0, [], 1, 2)
    ranks = [
        Written(shards, "", 1, {"optimizer/rank-0-of-2.safetensors": (1, "x"), "student/config.json": (1, "y")}),
        Written(shards, "", 1, {}),
    ]
    with pytest.raises(CheckpointError, match="no rank wrote optimizer/rank-1-of-2.safetensors"):
        files_of(ranks)
    ranks[1].files["optimizer/rank-1-of-2.safetensors"] = (2, "z")
    assert len(files_of(ranks)) == 3


def test_a_copy_for_a_restart_that_is_not_there_is_not_relied_on(tmp_path):
    (tmp_path / "optimizer").mkdir()
    shards = [Written(Shards(0, [], 1, 2), f"optimizer/{rank}", 3, {}) for rank in range(2)]
    (tmp_path / "optimizer" / "0").write_bytes(b"abc")
    with pytest.raises(NotWrittenError, match="optimizer/1 is not there"):
        require_kept(tmp_path, shards)
    (tmp_path / "optimizer" / "1").write_bytes(b"ab")
    with pytest.raises(NotWrittenError, match="optimizer/1 has 2 bytes, 3 were written"):
        require_kept(tmp_path, shards)
    (tmp_path / "optimizer" / "1").write_bytes(b"abc")
    require_kept(tmp_path, shards)


@pytest.fixture(scope="module")
def config():
    from skyrl_thundersync.hosts.skyrl.compose import build_config
    from skyrl_thundersync.hosts.skyrl.defaults import apply_host_defaults

    def make(*overrides):
        cfg = build_config(["+config=opd/quickstart", *overrides])
        apply_host_defaults(cfg)
        return cfg

    return make


def test_a_resume_under_other_options_is_refused_before_anything_loads(config, tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("{}\n")
    common = (f"trainer.ckpt_path={tmp_path}/c", f"data.train_data=[{tasks}]", "trainer.resume_mode=latest")
    cfg = config(*common)
    assert resume_problems(cfg) == []  # nothing there yet: from the beginning
    put(tmp_path / "c", 2, run=run_facts(cfg))
    assert resume_problems(cfg) == []
    assert resume_problems(config(*common, "trainer.max_training_steps=99", "thundersync.learner.ranks=1")) == []
    for change, message in {
        "thundersync.objective=grpo": 'thundersync.objective was "opd" and is "grpo"',
        "trainer.train_batch_size=4": "trainer.train_batch_size was 8 and is 4",
        "trainer.seed=1": "trainer.seed was 42 and is 1",
        "trainer.policy.model.lora.rank=8": "trainer.policy.model.lora was null and is [8",
        f"{BETAS}=[0.9,0.95]": f"{BETAS} was [0.9, 0.999] and is [0.9, 0.95]",
    }.items():
        (problem,) = resume_problems(config(*common, change))
        assert f"{tmp_path}/c/global_step_2 is of another run: {message}" in problem and "/student" in problem
    tasks.write_text("{}\n{}\n")
    assert "data.train_data was" in resume_problems(cfg)[0]
    truncate(tmp_path / "c" / "global_step_2")
    assert "torn" in resume_problems(cfg)[0]


def test_a_resume_with_another_teacher_is_refused_and_the_same_one_elsewhere_is_not(config, tmp_path):
    common = (f"trainer.ckpt_path={tmp_path}/c", "trainer.resume_mode=latest")
    cfg = config(*common)
    put(tmp_path / "c", 2, run=run_facts(cfg))
    copy = shutil.copytree(cfg.thundersync.teacher.model, tmp_path / "copy")
    moved = config(*common, f"thundersync.teacher.model={copy}")
    assert resume_problems(moved) == []
    with (copy / "model.safetensors").open("r+b") as weights:  # the same header, other numbers, as of another training
        weights.seek(-100_000, 2)
        weights.write(random.Random(0).randbytes(100_000))
    (problem,) = resume_problems(moved)
    assert f"thundersync.teacher.model was {cfg.thundersync.teacher.model} (of content " in problem
    assert f" and is {copy} (of content " in problem


def test_a_resume_under_another_advantage_law_is_refused(config, tmp_path):
    common = (f"trainer.ckpt_path={tmp_path}/c", "trainer.resume_mode=latest", "thundersync.objective=grpo")
    put(tmp_path / "c", 2, run=run_facts(config(*common)))
    assert resume_problems(config(*common, "thundersync.teacher.model=null")) == []
    for change, message in {
        "thundersync.grpo.law=rloo": 'thundersync.grpo.law was "population" and is "rloo"',
        "thundersync.grpo.epsilon=0.1": "thundersync.grpo.epsilon was 1e-06 and is 0.1",
    }.items():
        assert message in resume_problems(config(*common, change))[0]


def test_a_model_that_is_not_here_yet_is_known_by_its_name(tmp_path):
    saved = {"run": {"thundersync.teacher.model": {"model": "org/teacher", "content": "abc"}}}
    check_run(tmp_path, saved, {"thundersync.teacher.model": identity("org/teacher")})
    with pytest.raises(CheckpointError, match="org/other"):
        check_run(tmp_path, saved, {"thundersync.teacher.model": identity("org/other")})


def test_what_may_change_is_said(config, tmp_path):
    from skyrl_thundersync.options.schema import as_yaml

    (tmp_path / "config.yaml").write_text(as_yaml(config()), encoding="utf-8")
    assert changes(tmp_path, config(f"thundersync.run_dir={tmp_path}", "trainer.resume_mode=latest")) == []
    now = config("trainer.policy.optimizer_config.lr=2.0e-4", "generator.n_samples_per_prompt=8")
    assert sorted(changes(tmp_path, now)) == [
        "generator.n_samples_per_prompt: 4 → 8",
        "trainer.policy.optimizer_config.lr: 0.001 → 0.0002",
    ]


def test_another_models_checkpoint_is_refused_by_its_parameters():
    now = {"parameters": [["a", [2, 3]], ["c", [4]]], "frozen": "x"}
    saved = {"run": {"parameters": [["a", [2, 2]], ["b", [1]]], "frozen": None}}
    with pytest.raises(CheckpointError) as refused:
        check_run(Path("/c/global_step_2"), saved, now)
    for part in (
        "parameter a was (2, 2) and is (2, 3)",
        "parameter b was (1,) and is absent",
        "parameter c was absent and is (4,)",
        'frozen was null and is "x"',
    ):
        assert part in str(refused.value)


class Tasks:
    def __len__(self):
        return 7

    def __getitem__(self, i):
        return i


def loader():
    """Three batches an epoch, one task of seven left out of each."""
    generator = torch.Generator().manual_seed(3)
    return StatefulDataLoader(Tasks(), batch_size=2, shuffle=True, drop_last=True, collate_fn=list, generator=generator)


def go_through(batches, start: int, stop: int) -> list:
    """As SkyRL's train loop does."""
    seen = []
    for _ in range(start // len(batches), 10):
        for batch in batches:
            seen.append(batch)
            if start + len(seen) == stop:
                return seen
    return seen


@pytest.mark.parametrize("taken", range(13))
def test_the_data_goes_on_where_it_was_at_an_epochs_boundary_too_and_twice_in_a_row(taken):
    straight = go_through(loader(), 0, 24)
    assert len(straight) == 24
    assert go_through(Continued(loader(), taken), taken, taken + 2) == straight[taken : taken + 2]
    assert go_through(Continued(loader(), taken + 2), taken + 2, 24) == straight[taken + 2 :]


def test_the_drivers_generators_go_on_where_they_were():
    import numpy

    state = json.loads(json.dumps(driver_random_state()))
    first = random.random(), numpy.random.rand(), torch.rand(1).item()
    restore_driver_random_state(state)
    assert (random.random(), numpy.random.rand(), torch.rand(1).item()) == first

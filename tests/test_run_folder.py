"""A run folder belongs to one run at a time, and holds one run's figures."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from skyrl_thundersync.errors import ConfigError
from skyrl_thundersync.runtime import checkpoint
from skyrl_thundersync.runtime.run_folder import LOCK, in_use, owned, problems
from skyrl_thundersync.telemetry.rundata import read_metrics

HOLD = """
import sys, time
from types import SimpleNamespace
from skyrl_thundersync.runtime.run_folder import owned

run, checkpoints, act = sys.argv[1:]
cfg = SimpleNamespace(
    thundersync=SimpleNamespace(run_dir=run, replace_run=False),
    trainer=SimpleNamespace(ckpt_path=checkpoints, export_path=run, resume_mode="none", resume_path=None),
)
with owned(cfg):
    print("held", flush=True)
    if act == "hold":
        time.sleep(600)
    if act == "crash":
        sys.exit("its own end")
"""


def config(folder: Path, mode="none", replace=False, **places):
    run = folder / "run"
    trainer = {"ckpt_path": str(run / "checkpoints"), "export_path": str(run / "exports")} | places
    return SimpleNamespace(
        thundersync=SimpleNamespace(run_dir=str(run), replace_run=replace),
        trainer=SimpleNamespace(resume_mode=mode, resume_path=None, **trainer),
    )


def holder(cfg, act="hold") -> subprocess.Popen:
    command = [sys.executable, "-c", HOLD, cfg.thundersync.run_dir, cfg.trainer.ckpt_path, act]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def first(tmp_path):
    process = holder(config(tmp_path))
    yield process
    process.kill()
    process.wait()


def test_a_second_run_is_refused_and_told_of_the_first(tmp_path, first):
    folder = tmp_path / "run"
    alive = folder / "logs" / "learner-0.alive"
    part = folder / "checkpoints" / ".global_step_3.part"
    alive.parent.mkdir()
    part.mkdir(parents=True)
    alive.write_text("1 host\nforward")
    for replace in (False, True):
        with pytest.raises(ConfigError) as refused, owned(config(tmp_path, replace=replace)):
            pass
        for part_of in ("thundersync.run_dir", str(folder), "in use", f"process {first.pid} on ", "started 20"):
            assert part_of in str(refused.value)
    assert alive.exists() and part.exists()  # whatever deletes does so under the lock
    assert f"process {first.pid} on " in problems(config(tmp_path))[0]  # as a dry run says it
    assert f"process {first.pid} on " in in_use(folder)


def test_a_dead_owner_bars_nobody(tmp_path, first):
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert str(first.pid) in (tmp_path / "run" / LOCK).read_text()
    assert problems(config(tmp_path)) == []
    with owned(config(tmp_path)) as remarks:
        assert remarks == [] and in_use(tmp_path / "run")
    assert in_use(tmp_path / "run") is None
    assert (tmp_path / "run" / LOCK).read_text() == ""


def test_a_run_that_ends_with_an_error_takes_its_name_back(tmp_path):
    crashed = holder(config(tmp_path), "crash")
    assert crashed.wait(60) == 1
    assert (tmp_path / "run" / LOCK).read_text() == ""


def test_what_an_owner_left_on_another_machine_is_said(tmp_path, first):
    first.kill()
    first.wait()
    lock = tmp_path / "run" / LOCK
    lock.write_text(json.dumps(json.loads(lock.read_text()) | {"host": "elsewhere", "boot": "another"}))
    with owned(config(tmp_path)) as (remark,):
        assert f"process {first.pid} on elsewhere" in remark and "did not end by itself" in remark


def test_two_names_of_a_folder_are_one_and_checkpoints_elsewhere_are_held_too(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    shared = str(tmp_path / "shared")
    one = config(tmp_path, ckpt_path=shared)
    with owned(one):
        other = config(tmp_path / "b", ckpt_path=shared)
        with pytest.raises(ConfigError, match="trainer.ckpt_path: .*shared is in use"), owned(other):
            pass
        linked = config(tmp_path)
        linked.thundersync.run_dir = str(tmp_path / "link")
        with pytest.raises(ConfigError, match="thundersync.run_dir: .*/run is in use"), owned(linked):
            pass
    with owned(other):  # nothing is held of a run that was refused
        pass


def save(folder: Path, step: int) -> None:
    def write(part: Path):
        (part / "optimizer").mkdir()
        (part / "optimizer" / "a.bin").write_bytes(b"a")
        return {"policy_version": step, "run": {}}, {}

    checkpoint.save(folder, step, 1, write, margin=0)


def used(folder: Path, steps=(1, 2, 3)) -> Path:
    """A run folder after some updates, with a file of the user's in every folder."""
    run = folder / "run"
    for name in ("logs/driver.log", "trace/events.jsonl", "config.yaml", "exports/global_step_3/policy/config.json"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("x")
    (run / "record").mkdir()
    for k in steps:
        (run / "record" / f"batch_{k - 1:06d}.jsonl.gz").write_bytes(b"x")
        save(run / "checkpoints", k)
    rows = [{"step": 0, "eval/all/avg_score": 0.1}, *({"step": k, "timing/update": 1.0} for k in steps)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_a_used_folder_is_refused_from_the_beginning_unless_it_is_to_be_replaced(tmp_path):
    run = used(tmp_path)
    (problem,) = problems(config(tmp_path))
    for part in ("metrics of 3 updates", "3 recorded batches", "checkpoints of updates 1, 2, 3", "1 exported models"):
        assert part in problem
    assert "thundersync.replace_run=true" in problem and "trainer.resume_mode=latest" in problem
    before = sorted(run.rglob("*"))
    with pytest.raises(ConfigError, match="holds an earlier run"), owned(config(tmp_path)):
        pass
    assert [path for path in sorted(run.rglob("*")) if path.name != LOCK] == before

    own = [run / name for name in ("notes.txt", "logs/notes.txt", "checkpoints/mine/a.bin", "exports/best/config.json")]
    for path in own:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    assert problems(config(tmp_path, replace=True)) == []
    with owned(config(tmp_path, replace=True)) as (said,):
        assert "removed" in said
    assert sorted(path for path in run.rglob("*") if path.is_file()) == sorted([*own, run / LOCK])
    assert problems(config(tmp_path)) == []


def test_a_folder_in_which_no_update_was_finished_is_not_a_used_one(tmp_path):
    run = used(tmp_path, steps=())
    (run / "exports" / "global_step_3").rename(run / "elsewhere")
    assert problems(config(tmp_path)) == []


def test_checkpoints_of_another_program_are_not_replaced(tmp_path):
    foreign = tmp_path / "run" / "checkpoints" / "global_step_5"
    foreign.mkdir(parents=True)
    (foreign / "trainer_state.pt").touch()
    refused = pytest.raises(ConfigError, match="global_step_5 is no checkpoint of this plugin's")
    with refused, owned(config(tmp_path, replace=True)):
        pass
    assert (foreign / "trainer_state.pt").exists()


def test_a_run_that_goes_on_finds_nothing_of_the_course_that_was_left(tmp_path):
    run = used(tmp_path)
    (run / "checkpoints" / checkpoint.POINTER).write_text("1")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "timing/up')  # a crash's
    cfg = config(tmp_path, mode="latest", replace=True)
    assert problems(cfg) == []
    with owned(cfg) as (said,):
        assert "updates after 1" in said and "3 rows" in said and "2 recorded batches" in said
    assert [row["step"] for row in read_metrics(run)] == [0, 1]
    assert [path.name for path in (run / "record").iterdir()] == ["batch_000000.jsonl.gz"]
    assert checkpoint.steps(run / "checkpoints") == [1, 2, 3]  # replaced as the run comes by them
    with owned(cfg) as said:
        assert said == []


def test_of_two_rows_of_a_step_the_later_one_counts(tmp_path):
    rows = [(1, 1.0), (2, 2.0), (3, 3.0), (1, 10.0)]
    lines = [json.dumps({"step": step, "timing/update": took}) for step, took in rows]
    lines.insert(1, json.dumps({"step": 1, "eval/all/avg_score": 0.5}))  # as a resumed run evaluates first
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "tim')
    assert [(row["step"], row.get("timing/update")) for row in read_metrics(tmp_path)] == [
        (1, None),
        (1, 10.0),
        (2, 2.0),
        (3, 3.0),
    ]


def test_looking_for_a_checkpoint_changes_nothing_where_another_run_may_be_at_work(tmp_path):
    save(tmp_path, 2)
    (tmp_path / "global_step_2").rename(tmp_path / ".global_step_2.old")
    for mode, path in (("latest", None), ("from_path", str(tmp_path / "global_step_2"))):
        found = checkpoint.choose(tmp_path, mode, path)
        assert checkpoint.read(found, hashes=True)["global_step"] == 2
    assert not (tmp_path / "global_step_2").exists()
    save(tmp_path, 4)
    assert checkpoint.steps(tmp_path) == [2, 4] and (tmp_path / "global_step_2").is_dir()

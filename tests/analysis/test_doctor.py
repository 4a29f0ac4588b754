"""`doctor`: each problem is found on a machine that has it, with a fix; the memory estimate is what the parts need."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from skyrl_thundersync.cli.app import app
from skyrl_thundersync.preflight import memory as split
from skyrl_thundersync.preflight import models as inputs
from skyrl_thundersync.process import limits as machine_limits
from tests.learner.plain import save_model


def test_a_machine_that_trains_is_well():
    done = CliRunner().invoke(app, ["doctor", "--json"])
    said = json.loads(done.stdout)
    assert (done.exit_code, said["ok"]) == (0, True), said


def test_each_limit_names_the_fix(tmp_path):
    assert machine_limits.shared_memory(tmp_path, least=0).problems == ()
    assert "--shm-size" in machine_limits.shared_memory(tmp_path, least=2**60).problems[0]
    assert "Mount a tmpfs" in machine_limits.shared_memory(tmp_path / "none").problems[0]
    assert "--ulimit nofile=4096" in machine_limits.open_files(256).problems[0]
    assert machine_limits.open_files(-1).problems == machine_limits.open_files(4096).problems == ()
    assert machine_limits.update_disk(tmp_path, 0).problems == ()
    assert "Free some space" in machine_limits.update_disk(tmp_path, 2**60).problems[0]
    assert machine_limits.update_memory(2**29).problems == ()
    assert "500 MiB of host memory are left" in machine_limits.update_memory(500 * 2**20).problems[0]


def test_what_a_control_group_allows_is_counted_over_all_above_it(tmp_path, monkeypatch):
    """Files as a kernel writes them, of both versions; the tightest group decides."""
    (tmp_path / "self").write_text("8:pids:/box\n4:memory:/gone\n0::/pod/box\n")
    monkeypatch.setattr(machine_limits, "CGROUPS", tmp_path / "cgroups")
    monkeypatch.setattr(machine_limits, "OWN_GROUPS", tmp_path / "self")

    def group(path, **files):
        folder = tmp_path / "cgroups" / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(f"{text}\n")

    def pids():
        return machine_limits.room_in_group(*machine_limits.PIDS)

    def memory():
        return machine_limits.room_in_group(*machine_limits.MEMORY)

    assert pids() is None
    group("pids/box", pids__max="max", pids__current=7)
    assert pids() is None
    group("pids", pids__max=400, pids__current=150)
    assert pids() == 250
    assert "--pids-limit" in machine_limits.processes(pids()).problems[0]
    assert machine_limits.processes(None).problems == machine_limits.processes(5000).problems == ()
    group("memory", memory__limit_in_bytes=2**40, memory__usage_in_bytes=2**39)
    assert memory() == 2**39
    group("memory", memory__stat="inactive_file 1\ntotal_inactive_file 2048\ntotal_active_file 1024")
    assert memory() == 2**39 + 3072
    group("pod/box", memory__max=2**33, memory__current=2**32)
    group("pod", memory__max=2**33, memory__current=2**34)
    assert memory() == 0
    group("pod", memory__stat=f"anon 9\ninactive_file {2**33}\nactive_file 4096")
    assert memory() == 4096


def test_a_run_raises_its_own_soft_limit():
    """Refused only where the hard one is too low."""
    script = (
        "import resource\n"
        "from skyrl_thundersync.process.limits import cheap_checks, raise_own_limits\n"
        "raise_own_limits()\n"
        "found = {check.name: check for check in cheap_checks()}\n"
        "print(len(found['open files'].problems), *resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )

    def limited(soft: int, hard: int) -> list[int]:
        command = ["prlimit", f"--nofile={soft}:{hard}", sys.executable, "-c", script]
        return [
            int(word) for word in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        ]

    assert limited(1024, 8000) == [0, 8000, 8000]
    assert limited(1024, 2000) == [1, 2000, 2000]


def test_a_user_has_the_threads_that_the_hard_limit_leaves(monkeypatch):
    assert machine_limits.room_for_user(-1) is None
    assert machine_limits.room_for_user(10) is None or os.geteuid() != 0
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    threads = 10**6 - machine_limits.room_for_user(10**6)
    assert threads >= len(os.listdir("/proc/self/task"))
    assert machine_limits.room_for_user(1) == 0


def test_a_full_disk_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_limits, "FULL", 0.0)
    assert "RAY_TMPDIR" in machine_limits.session_disk(tmp_path).problems[0]


def test_parameters_are_counted_from_file_headers(tmp_path):
    folder = save_model(tmp_path / "m", "qwen3")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert inputs.model_parameters(folder) == sum(p.numel() for p in model.parameters())
    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    assert inputs.model_parameters(str(tmp_path / "half")) == inputs.model_parameters(folder)
    assert inputs.model_parameters("org/name") is None


def config(student, teacher, **learner):
    block = {"dtype": "bfloat16", "offload_optimizer": False, "accumulator": "fp32", "ranks": 4} | learner
    engine = SimpleNamespace(model_dtype="bfloat16", num_engines=2, engine_init_kwargs={})
    return SimpleNamespace(
        thundersync=SimpleNamespace(
            objective="opd" if teacher else "grpo",
            objective_options={},
            device="cpu",
            learner=SimpleNamespace(**block),
            teacher=SimpleNamespace(model=teacher, dtype="float32", replicas=1),
            grpo=SimpleNamespace(admission_cap=3),
        ),
        trainer=SimpleNamespace(
            policy=SimpleNamespace(
                model=SimpleNamespace(path=student, lora=SimpleNamespace(rank=0, target_modules="all-linear"))
            ),
            placement=SimpleNamespace(policy_num_gpus_per_node=1, policy_num_nodes=1),
        ),
        generator=SimpleNamespace(inference_engine=engine),
    )


def test_a_quantised_teacher_counts_as_it_is_stored(tmp_path):
    student, teacher = save_model(tmp_path / "s", "qwen3"), save_model(tmp_path / "t", "qwen3")
    described = json.loads((tmp_path / "t" / "config.json").read_text())
    (tmp_path / "t" / "config.json").write_text(
        json.dumps(described | {"quantization_config": {"quant_method": "fp8"}})
    )
    n, stored = inputs.model_parameters(teacher), (tmp_path / "t" / "model.safetensors").stat().st_size
    assert split.split_memory(config(student, teacher), 4)[3] == stored
    assert inputs.served_bytes(student, 2) == 2 * n


def test_memory_of_a_split(tmp_path, monkeypatch):
    """BF16 weights, FP32 gradient on the host, 12 bytes of optimizer state shared by four ranks."""
    student, teacher = save_model(tmp_path / "s", "qwen3"), save_model(tmp_path / "t", "llama")
    n, t = inputs.model_parameters(student), inputs.model_parameters(teacher)
    assert split.split_memory(config(student, teacher), 4) == (2 * n + 3 * n, 4 * n, 2 * n, 4 * t)
    offloaded = config(student, teacher, offload_optimizer=True, accumulator="exact")
    assert split.split_memory(offloaded, 4) == (2 * n, 8 * n + 3 * n + n, 2 * n, 4 * t)
    # Three groups with statistics, two FP32 sums each, beside the gradient.
    assert split.split_memory(config(student, None), 4) == (5 * n, 4 * n * 7, 2 * n, 0)
    monkeypatch.setattr(split, "available_memory", lambda: 64 * 2**30)
    # Eight processes of 1 GiB and three K/V caches, a small model beside them.
    assert "host 11.0 GiB of" in split.memory(config(student, teacher)).seen
    larger = config(student, teacher)
    larger.generator.inference_engine.engine_init_kwargs["kv_cache_memory_bytes"] = 2 * 2**30
    assert "host 13.0 GiB of" in split.memory(larger).seen
    assert split.memory(config(student, teacher)).problems == ()
    monkeypatch.setattr(split, "available_memory", lambda: 7 * 2**30)
    assert "Use fewer ranks" in split.memory(config(student, teacher)).problems[0]
    assert split.memory(config("org/elsewhere", teacher)).problems == ()


@pytest.mark.parametrize("word", ["verify", "timeline", "report", "doctor"])
def test_help_of_each_command(word):
    done = CliRunner().invoke(app, [word, "--help"])
    assert done.exit_code == 0
    assert "--json" in done.stdout


def test_train_refuses_a_run_whose_processes_do_not_fit_into_memory(tmp_path, monkeypatch, capsys):
    from skyrl_thundersync.hosts.skyrl import entrypoint

    monkeypatch.setattr(sys, "argv", ["train", "+config=opd/quickstart", f"thundersync.run_dir={tmp_path / 'run'}"])
    monkeypatch.setattr(split, "available_memory", lambda: 2**30)
    with pytest.raises(SystemExit, match="2"):
        entrypoint.main()
    assert "of host memory together, 1.0 GiB are available" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()

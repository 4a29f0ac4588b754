"""Harbor as a process: its trials end in time, its output stays small, and nothing of it is left, however it behaves."""

import asyncio
import contextlib
import shutil
import subprocess
import sys
import time
from pathlib import Path

import docker
import pytest
from test_harbor_trials import MINI, Served, harbor  # noqa: F401 - a fixture

from skyrl_thundersync.harbor import process as harbor_process
from skyrl_thundersync.harbor.process import PROJECT, time_allowed
from skyrl_thundersync.harbor.trials import HarborTrials, chat_agent
from skyrl_thundersync.options.schema import OutcomesConfig
from skyrl_thundersync.rollout.outcomes import Outcomes
from skyrl_thundersync.sandbox import docker_engine
from skyrl_thundersync.sandbox.base import StartError

ARGUMENTS = """#!/bin/bash
while [ $# -gt 0 ]; do case $1 in -o) out=$2;; --job-name) job=$2;; esac; shift; done
mkdir -p "$out/$job/trial__x"
"""
DEAF = ARGUMENTS + "trap '' INT TERM\nsleep 4250 & touch \"$out/up\"\nwhile :; do sleep 4250; done\n"


def trials_of(tmp_path, script, sampled=7, environment="none", **options):
    """Trials run by a `harbor` that is `script`."""
    command = tmp_path / "harbor"
    command.write_text(script)
    command.chmod(0o755)
    table = Outcomes(OutcomesConfig())
    agent = chat_agent("terminus-2", "m")
    return HarborTrials(Served(sampled), agent, table, tmp_path, 1, (str(command),), environment, **options)


def processes(marker):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if marker in (folder / "cmdline").read_bytes().decode().split("\0"):
                found.append(folder.name)
    return found


async def until(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "still not so"
        await asyncio.sleep(0.02)


@pytest.mark.timeout(60)
def test_one_deadline_ends_a_harbor_that_heeds_no_interrupt_with_all_its_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(harbor_process, "INTERRUPT_GRACE_S", 0.2)
    trials = trials_of(tmp_path, DEAF, deadline_s=1.0)
    trial = asyncio.run(trials._run("task_0", MINI / "sum-numbers"))
    assert trial.outcome == "timeout" and "boot, agent and verifier together" in trial.detail
    assert not processes("4250")


@pytest.mark.timeout(60)
def test_a_trial_that_never_gets_to_its_first_turn_did_not_start(tmp_path, monkeypatch):
    monkeypatch.setattr(harbor_process, "INTERRUPT_GRACE_S", 0.2)
    trials = trials_of(tmp_path, DEAF, sampled=0, deadline_s=0.5)
    with pytest.raises(StartError, match="not over after 0.5 s"):
        asyncio.run(trials._try("task_0", MINI / "sum-numbers"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
def test_a_cancelled_trial_leaves_no_process(tmp_path, monkeypatch, again):
    monkeypatch.setattr(harbor_process, "INTERRUPT_GRACE_S", 0.5)

    async def run():
        trial = asyncio.create_task(trials_of(tmp_path, DEAF)._run("task_0", MINI / "sum-numbers"))
        await until((tmp_path / "up").exists)
        trial.cancel()
        if again:
            await asyncio.sleep(0.1)
            trial.cancel()
        with pytest.raises(asyncio.CancelledError):
            await trial

    asyncio.run(run())
    assert not processes("4250")


@pytest.mark.timeout(60)
def test_a_harbor_that_heeds_the_interrupt_has_its_time(tmp_path):
    script = (
        ARGUMENTS
        + 'trap \'sleep 0.3; touch "$out/cleaned"; exit 130\' INT\ntouch "$out/up"\nwhile :; do sleep 0.1; done\n'
    )
    trial = asyncio.run(trials_of(tmp_path, script, deadline_s=1.0)._run("task_0", MINI / "sum-numbers"))
    assert trial.outcome == "timeout" and (tmp_path / "cleaned").exists()


FLOOD = """
import asyncio
from pathlib import Path
from types import SimpleNamespace
from skyrl_thundersync.harbor.trials import HarborTrials, chat_agent

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

async def run():
    server = SimpleNamespace(url=lambda name: "http://127.0.0.1:1")
    trials = HarborTrials(server, chat_agent("terminus-2", "m"), None, Path({folder!r}), 1, ({harbor!r},), "none")
    before = peak()
    trial = await trials._run("task_0", Path({task!r}))
    print(peak() - before)
    print(trial.detail)

asyncio.run(run())
"""


@pytest.mark.timeout(120)
def test_what_harbor_prints_costs_no_memory_and_its_end_is_told(tmp_path):
    script = ARGUMENTS + "head -c 300000000 /dev/zero | tr '\\0' x; echo harbor broke; exit 1\n"
    trials_of(tmp_path, script)
    code = FLOOD.format(folder=str(tmp_path), harbor=str(tmp_path / "harbor"), task=str(MINI / "sum-numbers"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    grown, detail = done.stdout.split("\n", 1)
    assert int(grown) < 64 * 1024, "KiB, for 300 MB"
    assert detail.startswith("harbor ended with 1: ") and detail.endswith("harbor broke\n") and len(detail) < 1000


@pytest.fixture
def engine():
    if reason := docker_engine.reason_unavailable():
        pytest.skip(f"Docker: {reason}")
    with contextlib.closing(docker.from_env()) as client:
        yield client


def left(engine, prefix=""):
    filters = {"label": PROJECT}
    things = [*engine.containers.list(all=True, filters=filters), *engine.volumes.list(filters=filters)]
    return [t for t in things if (getattr(t, "labels", None) or t.attrs["Labels"])[PROJECT].startswith(prefix)]


@pytest.mark.timeout(120)
def test_what_a_killed_harbor_had_in_the_engine_is_removed_and_nothing_else(tmp_path, monkeypatch, engine):
    monkeypatch.setattr(harbor_process, "INTERRUPT_GRACE_S", 0.2)
    start = (
        f"for p in ours-1__abc__env ours-1__abcdef__env; do docker volume create --label {PROJECT}=$p $p >/dev/null\n"
        f"docker run -d --network none --label {PROJECT}=$p -v $p:/data local/bookworm-py:1 sleep 4251 >/dev/null; done\n"
    )
    deaf = DEAF.replace("trial__x", "Ours.1__ABC").replace("sleep 4250 &", f"{start}sleep 4250 &")
    try:
        trial = asyncio.run(
            trials_of(tmp_path, deaf, environment="docker", deadline_s=15.0)._run("t_0", MINI / "sum-numbers")
        )
        assert trial.outcome == "timeout" and (tmp_path / "up").exists()
        assert not left(engine, "ours-1__abc__"), "by the project's name, as Compose writes it"
        assert len(left(engine, "ours-1__abcdef__")) == 2, "another trial's"
    finally:
        harbor_process.remove_projects(["ours-1__abc", "ours-1__abcdef"])
    assert not left(engine, "ours-1__")


@pytest.mark.timeout(300)
def test_harbor_itself_killed_in_the_middle_of_a_trial_leaves_no_container(tmp_path, monkeypatch, engine, harbor):  # noqa: F811
    monkeypatch.setattr(harbor_process, "INTERRUPT_GRACE_S", 0.0)
    task = tmp_path / "sum-numbers"
    shutil.copytree(MINI / "sum-numbers", task)
    (task / "solution" / "solve.sh").write_text("#!/bin/bash\nsleep 4252\n")
    before = {thing.id for thing in left(engine)}

    async def run():
        trials = HarborTrials(
            Served(7), lambda url: ["-a", "oracle"], Outcomes(OutcomesConfig()), tmp_path / "jobs", 1, (harbor,)
        )
        trial = asyncio.create_task(trials._run("task_0", task))
        await until(lambda: processes("4252") or trial.done(), 200.0)
        assert not trial.done(), trial.result()
        trial.cancel()
        with pytest.raises(asyncio.CancelledError):
            await trial

    asyncio.run(run())
    assert {thing.id for thing in left(engine)} == before and not processes("4252")


def test_the_time_allowed_is_what_the_task_allows_all_phases(tmp_path):
    assert time_allowed(MINI / "sum-numbers") == 600 + 360 + 120 + 120
    (tmp_path / "task.toml").write_text(
        "[environment]\nbuild_timeout_sec = 10\n[agent]\ntimeout_sec = 20\n[verifier]\ntimeout_sec = 30\n"
        '[[steps]]\nname = "a"\n[[steps]]\nname = "b"\nagent = {timeout_sec = 1}\n'
    )
    assert time_allowed(tmp_path) == 10 + 360 + (20 + 30) + (1 + 30)

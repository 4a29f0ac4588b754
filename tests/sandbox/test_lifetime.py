"""Nothing is left behind: after close, exceptions, interpreter exit, SIGKILL of the owner; and only one's own is touched."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import docker as docker_sdk
import pytest

from skyrl_thundersync.sandbox import cgroup, docker_engine
from skyrl_thundersync.sandbox.base import Owner, SandboxLost
from skyrl_thundersync.sandbox.pool import SandboxPool
from tests.job import hear_all

OWNER = """
import sys, time
from types import SimpleNamespace
from skyrl_thundersync.sandbox.pool import SandboxPool
options = dict(image="local/bookworm-py:1", command_timeout_s=5.0, output_limit_bytes=4096, warm={warm})
pool = SandboxPool(SimpleNamespace(backend={backend!r}, **options), "victim")
boxes = [pool.create() for _ in range(2)]
for box in boxes:
    box.run("sleep {marker} & echo x >file", 5.0)
while pool.ready_count < {warm}:
    time.sleep(0.02)
print("ready", flush=True)
{then}
"""


def processes(marker):
    """Command lines of living processes that hold `marker`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if marker in line and "-c" not in line.split():
            found.append(line)
    return found


def containers(**labels):
    client = docker_sdk.from_env()
    try:
        wanted = [f"{docker_engine.LABEL}{key}={value}" for key, value in labels.items()]
        return client.api.containers(all=True, filters={"label": wanted})
    finally:
        client.close()


def groups(pid):
    return list(cgroup.ROOT.glob(f"**/{cgroup.PREFIX}{pid}-*"))


def wait_until(condition, seconds=15.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "still not so"
        time.sleep(0.05)


WARM = 2


def start_owner(backend, marker, then):
    """A process with two sandboxes in use and `WARM` started ahead."""
    code = OWNER.format(backend=backend, marker=marker, then=then, warm=WARM)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_all,
    )
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    return process


@pytest.mark.attack("survive the owner's end")
@pytest.mark.parametrize(
    ("then", "code"), [("raise ValueError('mid-run')", 1), ("sys.exit(3)", 3), ("pool.close_all()", 0), ("del pool", 0)]
)
def test_nothing_is_left_when_the_owner_ends(backend, then, code):
    marker = "4243"
    owner = start_owner(backend, marker, then)
    _, errors = owner.communicate(timeout=60)
    assert owner.returncode == code, errors
    assert ("Traceback" in errors) == (code == 1), errors
    wait_until(lambda: not processes(marker))
    assert not groups(owner.pid)
    if backend == "docker":
        assert not containers(pid=owner.pid)


def test_ctrl_c_in_the_middle_of_a_command_leaves_nothing(backend):
    marker = "4244"
    owner = start_owner(backend, marker, "boxes[0].run('sleep 4244', 60.0)")
    time.sleep(0.5)
    owner.send_signal(signal.SIGINT)
    _, errors = owner.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    wait_until(lambda: not processes(marker))
    assert not groups(owner.pid)
    if backend == "docker":
        assert not containers(pid=owner.pid)


@pytest.mark.attack("survive the owner's SIGKILL")
def test_after_sigkill_of_the_owner_only_its_own_is_swept(backend, config, pool):
    marker = "4245"
    living = pool.create()
    living.run("echo mine >file", 5.0)
    owner = start_owner(backend, marker, "time.sleep(600)")
    wait_until(lambda: len(processes(marker)) == 2)
    SandboxPool(config, "other").close_all()  # a sweep while the owner lives
    assert len(processes(marker)) == 2
    owner.kill()
    owner.communicate(timeout=60)
    if backend == "bubblewrap":  # nothing survives, even before anybody sweeps
        wait_until(lambda: not processes(marker))
    else:
        assert len(containers(pid=owner.pid)) == 2 + WARM
    with SandboxPool(config, "next"):
        wait_until(lambda: not processes(marker))
        assert not groups(owner.pid)
        assert backend != "docker" or not containers(pid=owner.pid)
        assert living.run("cat file", 5.0).output == "mine\n"


def test_a_container_past_its_deadline_is_swept(backend, config, monkeypatch):
    if backend != "docker":
        pytest.skip("bubblewrap sandboxes cannot outlive their owner")
    monkeypatch.setattr(docker_engine, "LIFETIME_S", -1.0)
    with SandboxPool(replace(config, warm=0), "test") as pool:
        box = pool.create()
        assert pool.sweep() == 1
        with pytest.raises(SandboxLost):
            box.run("true", 5.0)


@pytest.mark.timeout(120)
def test_32_sandboxes_at_once_keep_apart(pool):
    def episode(index):
        box = pool.create()
        box.write_files({"index": str(index)})
        for _ in range(5):
            assert box.run("cat index", 20.0).output == str(index)
        return box

    with ThreadPoolExecutor(32) as threads:
        boxes = list(threads.map(episode, range(32)))
    assert pool.open_count == 32 and len({box.name for box in boxes}) == 32
    with ThreadPoolExecutor(32) as threads:
        list(threads.map(lambda box: box.close(), boxes))
    assert pool.open_count == 0


def test_sandboxes_outlive_the_thread_that_made_them(pool):
    made = []
    thread = threading.Thread(target=lambda: made.append(pool.create()))
    thread.start()
    thread.join()
    time.sleep(0.3)
    assert made[0].run("echo alive", 5.0).output == "alive\n"


def test_closing_ends_a_command_in_another_thread(pool):
    box = pool.create()
    seen = []

    def work():
        try:
            seen.append(box.run("sleep 60", 60.0))
        except SandboxLost as error:
            seen.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.3)
    pool.close_all()
    thread.join(20)
    assert not thread.is_alive() and isinstance(seen[0], SandboxLost) and "closed" in str(seen[0])
    assert pool.open_count == 0
    with pytest.raises(SandboxLost, match="pool of run test is closed"):
        pool.create()
    box.close()


def test_descriptors_and_control_groups_are_given_back(config):
    with SandboxPool(replace(config, warm=0), "test") as pool:
        _cycle_many(pool)
    assert not groups(Owner.current().pid)


def _cycle_many(pool):
    def cycle():
        box = pool.create()
        box.run("exit 1", 5.0)
        box.run("sleep 5", 0.2)
        box.check("true", 5.0)
        box.close()

    for _ in range(3):  # the engine's client keeps as many connections as were ever needed at once
        cycle()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        cycle()
    assert len(os.listdir("/proc/self/fd")) < before + 5


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run without root already")
def test_bubblewrap_without_root_holds_fork_and_memory_bombs_by_process_limits(tmp_path):
    python = Path("/usr/bin/python3")
    if (
        not python.exists()
        or subprocess.run([python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]).returncode
    ):
        pytest.skip("no /usr/bin/python3 of version 3.11 or later that another user can run")
    code = """
from skyrl_thundersync.sandbox.base import Limits
from skyrl_thundersync.sandbox.bubblewrap import BubblewrapSandbox
box = BubblewrapSandbox("plain-user", Limits(memory_bytes=128 << 20, processes=64), 4096)
print(box.run("echo kept >file; id -u", 5.0).output.strip())
print("MemoryError" in box.run("python3 -c 'bytearray(1 << 29)'", 20.0).output)
print(box.run("b() { b | b & }; b; while :; do :; done", 2.0).timed_out)
print(box.run("cat file; ls -d /proc/[0-9]* | wc -l", 5.0).output.split())
box.close()
"""
    root = str(Path(__file__).resolve().parents[2])
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", python, "-B", "-c", code]
    done = subprocess.run(
        command, cwd="/", env={"PYTHONPATH": root, "PATH": os.environ["PATH"]}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    uid, memory_error, timed_out, after = done.stdout.splitlines()
    assert (uid, memory_error, timed_out) == ("1000", "True", "True")
    assert after.startswith("['kept'") and int(after.split("'")[3]) < 12

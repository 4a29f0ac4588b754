"""A process that hangs is named within the deadline, with its stacks in its log; one that works is left alone."""

import os
import signal
import subprocess
import sys
import time

import pytest

from skyrl_thundersync.process.heartbeat import HungActorError, Watch, gone, status

DEADLINE_S = 6.0
WORK = {
    "says": "at('waiting')\n    with doing('sweep', 'of g_0'):\n        with doing('more'): pass\n        time.sleep(600)",
    "works": "while True: sum(i * i for i in range(10**5))",
    "waits": "threading.Event().wait()",
    "hangs": "while True: ctypes.PyDLL(None).sleep(600)",  # in C, with the interpreter's lock
}


def start(folder, name: str) -> subprocess.Popen:
    code = (
        "import ctypes, sys, threading, time\nfrom skyrl_thundersync.process.heartbeat import at, doing\n"
        "from skyrl_thundersync.process.logs import redirect\nredirect(sys.argv[1])\n"
        f"def the_work():\n    {WORK[name]}\nthe_work()\n"
    )
    return subprocess.Popen([sys.executable, "-c", code, str(folder / f"{name}.log")])


def until(condition, timeout: float = 60.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def actors(tmp_path):
    started = {}
    yield lambda name: started.setdefault(name, start(tmp_path, name))
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("hang", ["stopped", "hangs"])
def test_a_hang_is_named_with_its_stacks_and_all_others_live(tmp_path, actors, hang):
    name = "waits" if hang == "stopped" else "hangs"
    with pytest.raises(HungActorError) as caught, Watch(tmp_path, DEADLINE_S) as watch:
        healthy = actors("works")
        victim = actors(name)
        until(lambda: (tmp_path / f"{name}.alive").is_file() and (tmp_path / "works.alive").is_file())
        time.sleep(1.5)
        if hang == "stopped":
            os.kill(victim.pid, signal.SIGSTOP)
        until(lambda: watch.error is not None)
        # Python may also crash as it writes the stacks of threads that run meanwhile
        assert victim.wait(30) in (-signal.SIGKILL, -signal.SIGSEGV)
        raise ConnectionError("what waited for it fails")
    message = str(caught.value)
    assert f"{name} (process {victim.pid}) gave no sign of life" in message and f"{name}.log" in message
    assert ("stopped by a signal" in message) == (hang == "stopped")
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert "in the_work" in (tmp_path / f"{name}.log").read_text()
    assert healthy.poll() is None


def test_a_process_that_ended_is_no_hang(tmp_path, actors):
    with Watch(tmp_path, 1.0):
        victim = actors("waits")
        until(lambda: (tmp_path / "waits.alive").is_file())
        victim.kill()
        victim.wait()
        until(lambda: not (tmp_path / "waits.alive").exists())


def test_a_process_says_what_it_is_at_and_the_file_still_says_so_when_it_is_gone(tmp_path, actors):
    victim = actors("says")
    file = tmp_path / "says.alive"
    until(lambda: file.is_file() and str(status(file).doing) == "sweep of g_0")
    assert gone(tmp_path) == []
    victim.kill()
    victim.wait()
    (said,) = gone(tmp_path)
    assert said.startswith(f"says (process {victim.pid}) died, at: sweep of g_0. Its log: ")


def test_an_error_in_an_actor_is_told_as_its_own_with_the_process_and_what_is_free(tmp_path, actors):
    from ray.exceptions import RayTaskError

    from skyrl_thundersync.hosts.skyrl.entrypoint import _in_words

    victim = actors("waits")
    until(lambda: (tmp_path / "waits.alive").is_file())
    raised = OSError(28, "No space left on device")
    text = f"ray::LearnerActor.save_weights() (pid={victim.pid}, ip=127.0.0.1)\n  File x, line 1\n"
    said = _in_words(RayTaskError("save_weights", text, raised).as_instanceof_cause(), tmp_path, ["/proc", "/none"])
    assert said.splitlines() == [
        "OSError: [Errno 28] No space left on device",
        f"In waits (process {victim.pid}), its log: {tmp_path / 'waits.log'}",
        "Free now: 0 MiB in /proc",
    ]
    assert _in_words(ValueError("no"), tmp_path, []) == "ValueError: no"


def test_a_hang_that_the_run_got_over_is_no_error(tmp_path, actors):
    with Watch(tmp_path, 1.0) as watch:
        victim = actors("waits")
        until(lambda: (tmp_path / "waits.alive").is_file())
        os.kill(victim.pid, signal.SIGSTOP)
        until(lambda: watch.error is not None)
        # Python may also crash as it writes the stacks of threads that run meanwhile
        assert victim.wait(30) in (-signal.SIGKILL, -signal.SIGSEGV)

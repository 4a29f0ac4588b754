import os
import signal
import subprocess
import sys
import time

import pytest

from skyrl_thundersync.process.interrupts import LOOK_AFTER_S, PREEMPTING, KeptInterrupts, Preempted
from skyrl_thundersync.telemetry.display import Display
from tests.job import hear_all

LOST = """
import os, signal, sys, time
from skyrl_thundersync.process.interrupts import KeptInterrupts
with KeptInterrupts():
    struck = []
    def hook():
        if not struck:
            struck.append(True)
            signal.raise_signal(int(sys.argv[1]))
    os.register_at_fork(after_in_parent=hook)
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    print("lost", flush=True)
    time.sleep(20)
    print("never told", flush=True)
"""


@pytest.fixture(autouse=True)
def heard():
    """As in a terminal's foreground, whichever way the tests were started."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *PREEMPTING)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in PREEMPTING:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_signal_lost_in_a_fork_hook_is_sent_again(number):
    command = [sys.executable, "-c", LOST, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=hear_all)
    assert done.stdout == "lost\n"
    last = (
        "KeyboardInterrupt"
        if number == signal.SIGINT
        else "skyrl_thundersync.process.interrupts.Preempted: No update was running"
    )
    assert done.stderr.rstrip().endswith(last)
    assert "Exception ignored in" in done.stderr


def test_a_ctrl_c_that_is_on_its_way_out_is_not_sent_again():
    ways_out = []
    with pytest.raises(ValueError, match="while tidying up"), KeptInterrupts():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            time.sleep(2 * LOOK_AFTER_S)
            ways_out.append("first")
            try:
                raise ValueError("while tidying up")
            finally:
                time.sleep(2 * LOOK_AFTER_S)
                ways_out.append("second")
    assert ways_out == ["first", "second"]


def test_afterwards_ctrl_c_is_as_it_was():
    before = signal.getsignal(signal.SIGINT)
    with KeptInterrupts() as kept:
        assert signal.getsignal(signal.SIGINT) != before
        kept.end()
        assert signal.getsignal(signal.SIGINT) == before
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize("number", PREEMPTING, ids=lambda number: number.name)
def test_each_signal_of_a_scheduler_is_told_once(number):
    with pytest.raises(Preempted) as told, KeptInterrupts():
        try:
            signal.raise_signal(number)
        finally:
            for other in PREEMPTING:
                signal.raise_signal(other)
    assert told.value.number == number and told.value.status == 128 + number
    assert all(signal.getsignal(other) is signal.SIG_DFL for other in PREEMPTING)


def test_what_was_ignored_at_the_start_stays_ignored():
    """A script's background jobs ignore SIGINT, a job under nohup SIGHUP: from the start-up to the end."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with KeptInterrupts() as kept:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.raise_signal(number)
        assert signal.SIGHUP not in kept.heard and signal.SIGTERM in kept.heard
        kept.again()
        kept.end()
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.raise_signal(number)
    assert signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


APART = """
import signal, subprocess, sys, time
from skyrl_thundersync.process.interrupts import apart
asleep = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
def start(**how):
    child = subprocess.Popen(asleep, stdout=subprocess.PIPE, **how)
    child.stdout.readline()
    return child
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda *_: None)
with apart():
    needed = start(preexec_fn=lambda: None)  # as Ray starts its processes
other = start(preexec_fn=lambda: None)
print(needed.pid, other.pid, flush=True)
print(other.wait(), needed.poll(), flush=True)
for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    needed.send_signal(number)
time.sleep(0.5)
print(needed.poll(), flush=True)
needed.terminate()
print(needed.wait(), flush=True)
"""


def test_a_signal_to_the_group_passes_by_what_the_end_needs():
    command = [sys.executable, "-c", APART]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=hear_all)
    try:
        needed, other = map(int, run.stdout.readline().split())
        assert os.getpgid(needed) == needed != os.getpgid(other) == run.pid
        os.killpg(run.pid, signal.SIGTERM)
        said, _ = run.communicate(timeout=60)
        assert said.splitlines() == [f"{-signal.SIGTERM} None", "None", str(-signal.SIGTERM)]
    finally:
        run.kill()


def test_a_run_outlives_the_reader_of_its_screen(capfd):
    """`skyrl train | tee log`: what a signal to the group leaves of the pipe."""
    read, write = os.pipe()
    display = Display(write)
    display.say("read")
    assert os.read(read, 100) == b"read\n"
    os.close(read)
    display.say("not read")
    display.error("nor this")
    assert capfd.readouterr().out == "not read\nnor this\n"

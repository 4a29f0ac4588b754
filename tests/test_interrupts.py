import os
import signal
import subprocess
import sys
import time

import pytest

from skyrl_thundersync.interrupts import LOOK_AFTER_S, KeptInterrupts

LOST = """
import os, signal, time
from skyrl_thundersync.interrupts import KeptInterrupts
with KeptInterrupts():
    struck = []
    def hook():
        if not struck:
            struck.append(True)
            signal.raise_signal(signal.SIGINT)
    os.register_at_fork(after_in_parent=hook)
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    print("lost", flush=True)
    time.sleep(20)
    print("never told", flush=True)
"""


def test_a_ctrl_c_lost_in_a_fork_hook_is_sent_again():
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=60)
    assert time.monotonic() - begin < 20
    assert done.stdout == "lost\n"
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
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

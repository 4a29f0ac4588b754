"""Commands whose output is bounded where they run: what they print, how they end, what they leave running."""

import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from skyrl_thundersync.harbor.bounded_command import bounded, without_halves


def run(script, limit=100, **options):
    return subprocess.run(
        ["bash", "-c", bounded(f"bash -c {shlex.quote(script)}", limit)], capture_output=True, timeout=60, **options
    )


@pytest.mark.parametrize("size", [0, 1, 49, 50, 51, 99, 100, 101, 102, 150, 4096, 100_000])
@pytest.mark.parametrize("limit", [100, 101])
def test_head_and_tail_and_how_much_lies_between(size, limit):
    whole = (b"0123456789abcdef\n" * (size // 17 + 1))[:size]
    done = run(f"head -c {size} <(yes 0123456789abcdef)", limit)
    head, tail = limit - limit // 2, limit // 2
    if size > limit:
        assert done.stdout == whole[:head] + b"\n[%d bytes cut]\n" % (size - limit) + whole[-tail:]
    else:
        assert done.stdout == whole


def test_the_order_of_both_streams_the_exit_code_and_the_folder_are_the_commands(tmp_path):
    done = run("echo out; echo err >&2; echo out; pwd; cat; exit 3", 1000, cwd=tmp_path, input=b"not for it")
    assert (done.stdout.decode(), done.stderr, done.returncode) == (f"out\nerr\nout\n{tmp_path}\n", b"", 3)
    assert run("echo x; kill -9 $$").stdout == b"x\n" and run("kill -9 $$").returncode == 137


def test_the_same_each_time_with_both_cores_busy():
    with ThreadPoolExecutor(8) as threads:
        assert {done.stdout for done in threads.map(lambda _: run("seq 20", 1000), range(64))} == {
            b"".join(b"%d\n" % number for number in range(1, 21))
        }


# A process of its own: what a child of this one took counts the copy of this one that it began as.
WEIGH = """
import resource, subprocess, sys
subprocess.run(["bash", "-c", sys.argv[1]])
print("peak", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def test_300_megabytes_of_output_cost_no_memory():
    script = bounded("bash -c \"head -c 300000000 /dev/zero | tr '\\\\0' x; echo end\"", 16384)
    done = subprocess.run([sys.executable, "-c", WEIGH, script], capture_output=True, timeout=100)
    printed, _, peak = done.stdout.rpartition(b"peak ")
    assert b"x\n[299983620 bytes cut]\nx" in printed and printed.endswith(b"xend\n") and len(printed) < 16384 + 40
    assert int(peak) < 64 * 1024, "KiB, of any process in it"


def test_a_child_in_the_background_delays_nothing_and_lives_on(tmp_path):
    loop = f"for i in $(seq 200); do echo $i; sleep 0.05; [ -f {tmp_path}/go ] && break; done; echo >{tmp_path}/alive"
    done = run(f"({loop}) & echo up")
    assert done.stdout.startswith(b"up\n") or b"\nup\n" in done.stdout
    (tmp_path / "go").touch()
    deadline = time.monotonic() + 30
    while not (tmp_path / "alive").exists():
        assert time.monotonic() < deadline, "the child died when it printed after the command's end"
        time.sleep(0.05)


def test_without_room_for_files_the_tail_is_printed(tmp_path):
    done = run("seq 100000; exit 4", env={"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path / "none")})
    assert done.stdout.endswith(b"\n99999\n100000\n") and len(done.stdout) <= 100 and done.returncode == 4


def test_halves_of_characters_are_taken_off():
    text = ("é" * 100).encode()
    done = run(f"echo -n {'é' * 100}", 50)
    assert without_halves(done.stdout.decode(errors="replace")) == f"{'é' * 12}\n[150 bytes cut]\n{'é' * 12}"
    assert without_halves("\ufffd stays") == "\ufffd stays" and len(text) == 200

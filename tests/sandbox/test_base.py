"""The backend-free parts: truncation, file names, owners."""

import random
import subprocess

import pytest

from skyrl_thundersync.options.schema import SandboxConfig
from skyrl_thundersync.sandbox.base import HeadTailBuffer, Limits, Owner, SandboxError, checked_files
from skyrl_thundersync.sandbox.select import choose_backend


def test_short_output_is_kept_whole_however_it_arrives():
    rng = random.Random(0)
    text = "grün 日本 🙂 " * 50
    data = text.encode()
    for _ in range(20):
        buffer = HeadTailBuffer(len(data))
        at = 0
        while at < len(data):
            step = rng.randint(1, 40)
            buffer.add(data[at : at + step])
            at += step
        assert buffer.text() == text and not buffer.truncated


@pytest.mark.parametrize("limit", range(10, 40))
def test_long_output_keeps_head_and_tail_without_half_characters(limit):
    text = "".join(f"é{i}🙂日" for i in range(200))
    buffer = HeadTailBuffer(limit)
    for byte in text.encode():
        buffer.add(bytes([byte]))
    head, note, tail = buffer.text().split("\n")
    assert text.startswith(head) and text.endswith(tail)
    assert note == f"[{len(text.encode()) - len((head + tail).encode())} bytes cut]"
    assert limit - 6 <= len((head + tail).encode()) <= limit


@pytest.mark.attack("paths of task files that leave the folder")
@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "a/../../x", "a/..", "", ".", "./", "a\0b", "/", "..", 7], ids=repr
)
def test_paths_that_leave_the_folder_are_refused(path):
    with pytest.raises(ValueError, match="file path"):
        checked_files({path: "x"}, Limits())


def test_conflicting_and_oversized_files_are_refused():
    with pytest.raises(ValueError, match="also the folder"):
        checked_files({"a": "x", "a/b": "y"}, Limits())
    with pytest.raises(ValueError, match="twice"):
        checked_files({"a/b": "x", "a//b": "y"}, Limits())
    with pytest.raises(ValueError, match="takes half"):
        checked_files({"a": "x" * 1000}, Limits(disk_bytes=1000))
    with pytest.raises(ValueError, match="must hold text"):
        checked_files({"a": 3}, Limits())
    assert checked_files({"./a//b": "x"}, Limits()) == {"a/b": "x"}


def test_only_what_can_be_known_to_be_dead_is_dead():
    me = Owner.current()
    child = subprocess.Popen(["true"])
    child.wait()
    fields = dict(host=me.host, boot=me.boot, pid_namespace=me.pid_namespace, pid=me.pid, started=me.started)
    assert not me.is_dead()
    assert Owner(**fields | {"pid": child.pid}).is_dead()
    assert Owner(**fields | {"started": me.started - 1}).is_dead(), "another process under the same pid"
    assert Owner(**fields | {"boot": "earlier"}).is_dead()
    assert not Owner(**fields | {"host": "elsewhere", "pid": child.pid}).is_dead()
    assert not Owner(**fields | {"pid_namespace": "1", "pid": child.pid}).is_dead()


def test_refusals_name_the_option_and_the_way_out(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="auto, docker, bubblewrap"):
        choose_backend("podman")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    with pytest.raises(SandboxError, match="install bubblewrap") as error:
        choose_backend("auto")
    assert "DOCKER_HOST" in str(error.value) and "backend=auto" in str(error.value)


def test_auto_takes_bubblewrap_where_no_engine_answers(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    assert choose_backend("auto") == "bubblewrap"


def test_a_pool_refuses_options_it_cannot_use():
    from skyrl_thundersync.sandbox.pool import SandboxPool

    for options in ({"output_limit_bytes": 1}, {"command_timeout_s": 0.0}):
        with pytest.raises(ValueError, match=f"thundersync.sandbox.{next(iter(options))}"):
            SandboxPool(SandboxConfig(**options), "test")
